"""Rules about quantization-aware training and QA-LoRA: which formats go with them, and what does not."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.recipe.rules.refusals import refusals
from danlu.recipe.sections import (
    TRAINABLE,
    Fp8,
    Frozen,
    Int2,
    Int3,
    Int4,
    Int8,
    LowRank,
    Nvfp4,
    QaLora,
    QuantizationSection,
    Recipe,
)
from danlu.recipe.yaml_tree import Problem

_BLOCK = 128
_STARTS = ("default", "gaussian")
"""The starts of LoRA that leave the base as it is."""


def format_can_be_trained(recipe: Recipe) -> Iterator[Problem]:
    """Weights are trained for a format that `danlu quantize` writes; frozen models have none that is trained."""
    for key, section in _frozen(recipe):
        if section is not None and section.trained:
            yield Problem(f"{key}.trained", "this model is frozen: nothing of it is trained. Leave it out")
    section = recipe.trained_quantization
    if section is None:
        return
    if not isinstance(section, TRAINABLE):
        kinds = ", ".join(each.model_fields["kind"].default for each in TRAINABLE)
        reason = f"{section.kind} has scales that are quantized together, of a whole matrix, as a frozen base has it"
        yield Problem("quantization.trained", f"{reason}. Train for one of {kinds}", reads=("quantization.kind",))
        return
    if isinstance(section, Fp8) and section.group != _BLOCK:
        message = f"fp8 is trained in the blocks of 128 x 128 that export: fp8 has. Leave it out (group: {_BLOCK})"
        yield Problem("quantization.group", message, reads=("quantization.trained",))
    yield from refusals(_not_trained(recipe), "leave quantization.trained out", "quantization.trained")


def zeros_take_the_adapter(recipe: Recipe) -> Iterator[Problem]:
    """QA-LoRA averages whole groups of a base of integers, into the zeros of which it merges."""
    adapter, section = recipe.adapter, recipe.base_quantization
    if not isinstance(adapter, QaLora):
        return
    if adapter.init not in _STARTS:
        message = f"{adapter.init} takes its start out of single weights, and qa-lora has groups. Use default"
        yield Problem("adapter.init", message, reads=("adapter.kind",))
    if section is None:
        return
    if not isinstance(section, Int8 | Int4 | Int3 | Int2):
        message = (
            f"{section.kind} has no zero that qa-lora could merge into. Use int8, int4, int3 or int2, or adapter: lora"
        )
        yield Problem("quantization.kind", message, reads=("adapter.kind",))
    elif adapter.group % section.group:
        message = (
            f"{adapter.group} inputs share a column of A, and {section.group} a scale and a zero: one zero would have "
            f"to hold two changes. Use a multiple of {section.group}"
        )
        yield Problem("adapter.group", message, reads=("quantization.group",))


def _frozen(recipe: Recipe) -> Iterator[tuple[str, QuantizationSection | None]]:
    """The formats of frozen models, by their keys."""
    if isinstance(recipe.reference, Frozen):
        yield "reference.quantization", recipe.reference.quantization
    for number, teacher in enumerate(recipe.teacher or ()):
        yield f"teacher.{number}.quantization", teacher.quantization


def _not_trained(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields (key, reason, remedy) of settings that weights are not rounded with."""
    adapter, parallel = recipe.adapter, recipe.parallel
    if recipe.fp8 is not None:
        yield "precision.kind", "products in 8 bits round weights to blocks of their own", "Use precision: bf16"
    if recipe.numerics == "exact":
        reason = "the products of rounded weights are not those that give a token the same bits everywhere"
        yield "numerics", reason, "Use numerics: fast"
    if recipe.compile:
        yield "compile", "torch.compile does not trace the rounding of weights", "Leave it out"
    if recipe.value is not None:
        yield "value", "a model of values is not rounded, and would share a base that is", "Use objective: grpo"
    if adapter is not None and not isinstance(adapter, LowRank):
        reason = f"the sum of base and adapter is rounded, as after a merge, and {adapter.kind} is no sum"
        yield "adapter.kind", reason, "Use lora, or none"
    if isinstance(adapter, LowRank):
        if adapter.kind == "qa-lora":
            yield "adapter.kind", "qa-lora merges into the zeros of a base that stays as it is", "Use lora"
        if adapter.kind == "dora":
            yield "adapter.kind", "dora scales the sum that would be rounded by its norm", "Use lora"
        if adapter.dropout:
            reason = (
                "base and adapter are one matrix when they are rounded, so inputs of the adapter alone do not exist"
            )
            yield "adapter.dropout", reason, "Leave it out"
        if adapter.init not in _STARTS:
            reason = f"{adapter.init} starts from another base, and merging rounds the sum once more"
            yield "adapter.init", reason, "Use default"
        if recipe.model.adapters:
            yield "model.adapters", "one adapter is rounded with its base, not several", "Merge these first"
    if isinstance(recipe.quantization, Nvfp4) and parallel.tensor > 1:
        reason = "nvfp4 has one scale of each whole matrix, of which tensor ranks have a part"
        yield "parallel.tensor", reason, "Use mxfp4 or int4"
    answers = recipe.stage == "rl" or bool(recipe.on_policy)
    if answers and recipe.rollout.engine != "embedded":
        reason = f"{recipe.rollout.engine} would be handed weights that are not rounded, and answer as another policy"
        yield "rollout.engine", reason, "Use embedded"
    if recipe.rollout.precision != "auto":
        reason = f"{recipe.rollout.precision} would round weights once more, after the format that they are trained for"
        yield "rollout.precision", reason, "Use auto"
    is_shared = parallel.shard != "none" or parallel.expert > 1
    if is_shared and recipe.activations != "fp32" and (answers or recipe.evaluation.samples is not None):
        key = "parallel.shard" if parallel.shard != "none" else "parallel.expert"
        reason = "rollouts and samples gather weights in the type of activations, which rounds them before their format"
        yield key, reason, "Use precision: fp32"
