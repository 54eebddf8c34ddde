"""Rules about products in 8 bits: what they do not go together with, and why."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.recipe.rules.refusals import refusals
from danlu.recipe.sections import Fp8, Recipe
from danlu.recipe.yaml_tree import Problem

_BLOCKS = ("tile", "mxfp8")
"""Recipes with scales of few numbers, which ranks that have some of the features compute alike."""


def fp8_is_possible(fp8: Fp8, recipe: Recipe) -> Iterator[Problem]:
    """Products in 8 bits go together with the stage, the base, the layout and what runs the model."""
    yield from refusals(_not_in_8_bits(fp8, recipe), "precision: bf16", "precision.kind")


def _not_in_8_bits(fp8: Fp8, recipe: Recipe) -> Iterator[tuple[str, str, str]]:
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
    parallel, is_wide = recipe.parallel, fp8.recipe not in _BLOCKS
    if is_wide and parallel.tensor > 1:
        reason = f"recipe {fp8.recipe} has scales of all features, of which tensor ranks have a part"
        yield "parallel.tensor", reason, "Use recipe: tile"
    if is_wide and parallel.context.size > 1:
        reason = f"recipe {fp8.recipe} has scales of all tokens, of which context ranks have a part"
        yield "parallel.context.size", reason, "Use recipe: tile"
    if parallel.expert > 1 and fp8.recipe == "tensor":
        reason = "recipe tensor has a scale of all rows of experts, of which expert ranks have a part"
        yield "parallel.expert", reason, "Use recipe: tile"
