"""The sections of a recipe: frozen, strict pydantic models; each field's docstring is what `danlu explain` prints.

Variants are told apart by `kind`. A section that has a short form says so in its `short` class variable: the field
that a bare value fills (`model: folder` means `model: {path: folder}`). Where a field takes a list, a bare value is a
list of one. Rules that concern more than one field are in `rules/`.
"""

from __future__ import annotations

from danlu.recipe.sections.adapters import (
    Adapter,
    AdapterSection,
    Bottleneck,
    Continue,
    Dora,
    Ia3,
    Loftq,
    Lora,
    LoraFa,
    LoraPlus,
    LowRank,
    Mora,
    Olora,
    Pissa,
    Prefix,
    Prompt,
    RsLora,
    Vera,
)
from danlu.recipe.sections.base import Beta, NonNegative, PositiveInt, Section, Share, Steps
from danlu.recipe.sections.checkpoint import Checkpoint
from danlu.recipe.sections.data import Data, Packing, Source
from danlu.recipe.sections.log import Log
from danlu.recipe.sections.memory import Memory, Recompute
from danlu.recipe.sections.model import Model
from danlu.recipe.sections.optimizers import (
    SGD,
    Adafactor,
    AdamW,
    AdamW8bit,
    Decay,
    GaLore,
    Lion,
    Muon,
    Optimizer,
    PagedAdamW,
)
from danlu.recipe.sections.parallel import Parallel
from danlu.recipe.sections.quantization import Fp4, Int4, Int8, Nf4, Quantization, QuantizationSection
from danlu.recipe.sections.recipe import Recipe
from danlu.recipe.sections.training import BatchSize, EarlyStop, Ema, Evaluation, LossOptions, Samples, Schedule, Watch

__all__ = [
    "SGD",
    "Adafactor",
    "AdamW",
    "AdamW8bit",
    "Adapter",
    "AdapterSection",
    "BatchSize",
    "Beta",
    "Bottleneck",
    "Checkpoint",
    "Continue",
    "Data",
    "Decay",
    "Dora",
    "EarlyStop",
    "Ema",
    "Evaluation",
    "Fp4",
    "GaLore",
    "Ia3",
    "Int4",
    "Int8",
    "Lion",
    "Loftq",
    "Log",
    "Lora",
    "LoraFa",
    "LoraPlus",
    "LossOptions",
    "LowRank",
    "Memory",
    "Model",
    "Mora",
    "Muon",
    "Nf4",
    "NonNegative",
    "Olora",
    "Optimizer",
    "Packing",
    "PagedAdamW",
    "Parallel",
    "Pissa",
    "PositiveInt",
    "Prefix",
    "Prompt",
    "Quantization",
    "QuantizationSection",
    "Recipe",
    "Recompute",
    "RsLora",
    "Samples",
    "Schedule",
    "Section",
    "Share",
    "Source",
    "Steps",
    "Vera",
    "Watch",
]
