"""Rules about products in 8 bits: what they do not go together with, and why."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.recipe.rules.refusals import refusals
from danlu.recipe.sections import Recipe
from danlu.recipe.yaml_tree import Problem


def fp8_is_possible(recipe: Recipe) -> Iterator[Problem]:
    """Products in 8 bits go together with the stage, the base, the layout and what runs the model."""
    yield from refusals(_not_in_8_bits(recipe), "precision: bf16", "precision.kind")


def _not_in_8_bits(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields (key, reason, remedy) of settings that products in 8 bits do not have."""
    if recipe.stage == "classify":
        yield "stage", "stage classify trains convolutions, and 8-bit products are those of a decoder", "Use pretrain"
    if recipe.stage == "rl" or recipe.on_policy:
        key = "stage" if recipe.stage == "rl" else "on_policy"
        reason = "the engine multiplies in the type of activations, so answers would be drawn from another policy"
        yield key, reason, "Use stage sft or preference"
    if recipe.quantization is not None:
        reason = "a quantized base is dequantized for products in the type of activations"
        yield "quantization", reason, "Leave it out"
    if recipe.numerics == "exact":
        reason = "blocks along tokens share a scale, so a token's neighbours change its gradients"
        yield "numerics", reason, "Use numerics: fast"
    if recipe.compile:
        yield "compile", "torch.compile does not trace products in 8 bits", "Leave it out"
    parallel = recipe.parallel
    for key, degree, cut in (
        ("parallel.tensor", parallel.tensor, "features, which tensor ranks have a part of"),
        ("parallel.context.size", parallel.context.size, "tokens, which context ranks have a part of"),
        ("parallel.expert", parallel.expert, "rows of an expert, which expert ranks exchange"),
    ):
        if degree > 1:
            reason = f"scales are of blocks of {cut}, and this layout is not compared with one process yet"
            yield key, reason, "Use parallel.data, shard or pipeline"
