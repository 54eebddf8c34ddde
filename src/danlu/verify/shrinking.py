"""A recipe made small: every size of its model shrunk, and everything that decides how a layout cuts it kept.

Kept are the family with its norms, biases, ties, windows and caps, whether and how often each size divides by the
layout's degrees, the kind of adapter, packing, objective and optimizer. What is left runs in seconds on a laptop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from danlu.errors import ModelError, RecipeError
from danlu.models.config import ModelConfig
from danlu.models.folder import CONFIG, read_json
from danlu.models.initialize import initialize, named_generator
from danlu.models.loading import build
from danlu.models.saving import save
from danlu.numerics.bitsandbytes_config import read_config as read_quantization
from danlu.parallel.layout import Layout
from danlu.recipe import Recipe, sections

LONGEST = 128  # tokens of a pack
WINDOW = 24  # tokens, of sliding attention
VOCABULARY = 256
RANK = 4
BLOCK, GROUP = 32, 16  # of quantized weights: the smallest in 4 bits, and of integers
EPS = 1e-4
"""Of Adam, whose step is gradient / (size + eps): with the usual 1e-8, a gradient that is zero but for rounding moves
its weight by a whole learning rate, this way in one layout and that way in another. Clipped ones are about 5e-3."""
_STIRRED = 0.1  # standard deviation that is put on norms and biases, which otherwise are all alike


@dataclass(frozen=True)
class Small:
    """What is verified in place of the recipe."""

    recipe: Recipe
    config: ModelConfig
    notes: tuple[str, ...] = ()  # what is not as the recipe says, beside sizes


def small_config(config: ModelConfig, layout: Layout, *, quantized: bool = False, deep: bool = False) -> ModelConfig:
    """The config with small sizes; what of it divides by the layout's degrees does so still, and the rest does not.

    quantized: widths stay multiples of a block. deep: four layers, for what works on segments of them.
    """
    tensor = layout.tensor
    several = 2 if tensor <= 2 else 1
    kv_heads = config.kv_heads if config.kv_heads <= tensor else tensor * min(several, config.kv_heads // tensor)
    shared = _queries_per_key(config.heads // config.kv_heads, kv_heads, tensor)
    head_dim = next(
        size
        for size in (8, 16, 32, 64, 128, 256)
        if (turned := int(size * config.partial_rotary_factor)) and turned % 2 == 0
        if size >= (16 if quantized else 8)
    )
    attention = kv_heads * shared * head_dim
    unit = BLOCK * tensor if quantized else 8
    hidden = _near(attention * config.hidden_size / (config.heads * config.head_dim), unit)
    intermediate = _near(hidden * config.intermediate_size / config.hidden_size, unit if quantized else 4 * tensor)
    windows = _few(config.windows, 4 if deep or len(set(config.windows)) > 1 else 2)
    scalar, multiplier = config.query_pre_attn_scalar, config.embedding_multiplier
    return replace(
        config,
        vocab_size=_as_uneven(config.vocab_size, VOCABULARY, layout.tensor * layout.data),
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=len(windows),
        heads=kv_heads * shared,
        kv_heads=kv_heads,
        head_dim=head_dim,
        windows=tuple(None if one is None else WINDOW for one in windows),
        query_pre_attn_scalar=None if scalar is None else scalar * head_dim / config.head_dim,
        embedding_multiplier=math.sqrt(hidden) if multiplier == math.sqrt(config.hidden_size) else multiplier,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=None,
    )


def _queries_per_key(shared: int, kv_heads: int, tensor: int) -> int:
    """Query heads for each key/value head: the fewest that can be cut, but several where there were."""
    fit = [one for one in range(1, shared + 1) if shared % one == 0 and kv_heads * one % tensor == 0]
    return min([one for one in fit if one > 1] or fit, default=shared)


def _near(size: float, unit: int) -> int:
    return max(1, round(size / unit)) * unit


def _as_uneven(size: int, small: int, degree: int) -> int:
    """About `small`, with what remains of `size` when it is divided by `degree`."""
    if size <= small:
        return size
    return max(degree, small // degree * degree) + size % degree


def _few(windows: tuple[int | None, ...], count: int) -> tuple[int | None, ...]:
    """The first layers; some from all over where the first ones are all of one kind and others are not."""
    count = min(count, len(windows))
    first = windows[:count]
    if len(set(first)) == len(set(windows)):
        return first
    return tuple(windows[place * (len(windows) - 1) // max(1, count - 1)] for place in range(count))


def small_recipe(recipe: Recipe, config: ModelConfig, layout: Layout, folder: Path) -> Small:
    """The recipe with a small model; where it starts from a folder, one is written into `folder`.

    Raises RecipeError for what cannot be made small, and names --full.
    """
    if recipe.model.adapters:
        raise RecipeError(
            "model.adapters: adapters of the full model do not fit a small one. Verify the recipe with --full, or "
            "without them: model.adapters=[]"
        )
    notes = []
    optimizer = _small_optimizer(recipe.optimizer)
    if (eps := getattr(optimizer, "eps", None)) != getattr(recipe.optimizer, "eps", None):
        notes.append(f"optimizer.eps {eps:g}, so that rounding alone turns no update round")
    section, stored = recipe.quantization, None
    if recipe.model.path is not None:
        stored = _stored_in_bits(recipe.model.path)
        if stored is not None:
            section = stored
            notes.append(f"the base is stored in {stored.kind}: a small one is packed when it is loaded")
    deep = recipe.memory.recompute.kind in ("every", "planned")
    small = small_config(config, layout, quantized=section is not None, deep=deep)
    changes: dict[str, object] = {
        "adapter": _small_adapter(recipe.adapter),
        "quantization": _small_blocks(section),
        "optimizer": optimizer,
        "data": recipe.data.model_copy(update={"max_length": min(recipe.data.max_length, LONGEST)}),
    }
    if recipe.model.path is not None:
        model = build(small)
        initialize(model, recipe.seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    noise = torch.empty_like(parameter).normal_(
                        generator=named_generator(recipe.seed, f"{name} stirred")
                    )
                    parameter.add_(noise, alpha=_STIRRED)
        save(model, folder / "model")
        changes["model"] = recipe.model.model_copy(update={"path": str(folder / "model")})
    return Small(recipe.model_copy(update=changes), small, tuple(notes))


def _stored_in_bits(path: str) -> sections.QuantizationSection | None:
    file = Path(path).expanduser() / CONFIG
    if not file.is_file():
        return None
    stored = read_quantization(read_json(file), str(file))
    if stored is None:
        return None
    kinds = {"nf4": sections.Nf4, "fp4": sections.Fp4}
    if stored.kind not in kinds:
        raise ModelError(f"{file}: weights stored as {stored.kind} have no small likeness. Use --full")
    return kinds[stored.kind](double=stored.double)


def _small_adapter(section: sections.AdapterSection | None) -> sections.AdapterSection | None:
    match section:
        case sections.LowRank():
            patterns = {name: min(rank, RANK + 2) for name, rank in section.rank_pattern.items()}
            return section.model_copy(update={"rank": min(section.rank, RANK), "rank_pattern": patterns})
        case sections.Vera() | sections.Mora():
            return section.model_copy(update={"rank": min(section.rank, RANK)})
        case sections.Bottleneck():
            return section.model_copy(update={"width": min(section.width, 8)})
        case sections.Prefix():
            projection = None if section.projection is None else min(section.projection, 8)
            return section.model_copy(update={"tokens": min(section.tokens, 3), "projection": projection})
        case sections.Prompt():
            return section.model_copy(update={"tokens": min(section.tokens, 3)})
    return section


def _small_blocks(section: sections.QuantizationSection | None) -> sections.QuantizationSection | None:
    match section:
        case sections.Nf4() | sections.Fp4():
            return section.model_copy(update={"block": BLOCK})
        case sections.Int8() | sections.Int4():
            return section.model_copy(update={"group": min(section.group, GROUP)})
    return section


def _small_optimizer(section: sections.Optimizer) -> sections.Optimizer:
    """Blocks and ranks that fit small matrices, and `eps` above what rounding makes of gradients that are zero."""
    match section:
        case sections.AdamW8bit():
            section = section.model_copy(update={"block": 32, "smallest": min(section.smallest, 256)})
        case sections.GaLore():
            section = section.model_copy(update={"rank": min(section.rank, RANK), "update_every": 2})
    if "eps" in type(section).model_fields:
        section = section.model_copy(update={"eps": max(EPS, getattr(section, "eps", 0.0))})
    return section
