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
    if recipe.base_quantization is not None:
        reason = "a quantized base is dequantized for products in the type of activations"
        yield "quantization", reason, "Leave it out"
    if recipe.numerics == "exact":
        yield from _not_exact(recipe)
    elif recipe.policy_gradient is not None and recipe.policy_gradient.importance is None:
        reason = "rollouts multiply in the type of activations, and nothing corrects their difference from training"
        yield "objective.0.importance", reason, "Use importance: token, or numerics: exact"
    if recipe.compile:
        yield "compile", "torch.compile does not trace products in 8 bits", "Leave it out"
    yield from _not_cut(recipe)


def _not_cut(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields (key, reason, remedy) of layouts that round other numbers than one process, beyond a bound.

    tile and row have none: their scales are powers of two that are rounded up (`numerics.arithmetic.OTHER_BLOCKS`).
    Tensor and context ranks take the maximum of recipe tensor. An expert's rows are those of several micro-batches,
    each with a scale of its own.
    """
    assert recipe.fp8 is not None
    parallel, kind = recipe.parallel, recipe.fp8.recipe
    for key, degree, part in (
        ("parallel.context.size", parallel.context.size, "tokens"),
        ("parallel.expert", parallel.expert, "rows of experts"),
    ):
        if degree > 1 and kind == "tensor" and key == "parallel.expert":
            reason = "an expert's rows are of several micro-batches, each of which has one scale with recipe tensor"
            yield key, reason, "Use recipe: tile or row"
        elif degree > 1 and kind == "mxfp8":
            reason = f"a rank has a part of the {part}, other 32 of which share a scale that the largest exceeds"
            yield key, reason, "Use recipe: tile or row"


def _not_exact(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields (key, reason, remedy) of what gives a token other bits in a rollout than in training."""
    assert recipe.fp8 is not None
    if recipe.fp8.recipe == "tensor":
        reason = "one scale of a whole tensor changes with the other tokens of a pass, and with it each token's numbers"
        yield "precision.recipe", reason, "Use tile, row or mxfp8, or numerics: fast"
    if recipe.rollout.engine != "embedded":
        reason = "a server multiplies in the type of activations, and numerics: exact asks for the trainer's products"
        yield "rollout.engine", reason, "Use engine: embedded, or numerics: fast"
