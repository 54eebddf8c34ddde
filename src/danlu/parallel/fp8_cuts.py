"""The linear layers that tensor ranks may share when their products are in 8 bits. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.models.config import ModelConfig
from danlu.models.mixer_spec import Heads
from danlu.models.operations import is_gate
from danlu.models.tensor_cut import linear_cuts
from danlu.recipe.sections import Fp8Products

BLOCKS = {"mxfp8": 32}
"""Recipe -> features that tensor ranks must not cut apart: those of a block where other blocks move numbers by more
than `numerics.arithmetic.OTHER_BLOCKS`; 1 of other recipes."""


def fp8_problems(section: Fp8Products | None, config: ModelConfig, degree: int, context: int = 1) -> Iterator[str]:
    """Why products in 8 bits do not go together with so many tensor and context ranks of a model. section: None: they
    are not.

    Tensor ranks would round other numbers than one process does, beyond the bound that `numerics.arithmetic` states. A
    cut within a block of a power-of-two scale that is rounded up keeps that bound; MXFP8's scales are rounded down, so
    that its largest numbers saturate. A gradient that is a sum over ranks would be rounded before it is added up.
    Context ranks take the maximum of recipe tensor in products of their own tokens.
    """
    if section is None:
        return
    others = [type(spec.mixer).__name__ for spec in config.layers if not isinstance(spec.mixer, Heads)]
    if context > 1 and section.recipe == "tensor" and others:
        yield (
            f"parallel.context.size: attention of kind {others[0].lower()} multiplies tokens of other ranks, or in "
            "another order, and recipe tensor has one scale of all tokens. Use recipe: tile or row"
        )
    if degree == 1:
        return
    block = BLOCKS.get(section.recipe, 1)
    for cut in linear_cuts(config, degree):
        if is_gate(cut.name):
            continue
        if cut.axis is None or cut.replicas > 1:
            reason = "every rank has it whole" if cut.axis is None else f"{cut.replicas} ranks share a key/value head"
            yield (
                f"parallel.tensor: {cut.name}: {reason}, and its output's gradient is a sum over these, which products "
                "in 8 bits would round term by term. Use a parallel.tensor that divides the number of key/value heads, "
                "in models without latents, or precision: bf16"
            )
            return
        if cut.local_features % block:
            yield (
                f"parallel.tensor: a rank has {cut.local_features} of the {cut.features} features of {cut.name}, and "
                f"{section.recipe} scales blocks of {block}. Use a degree that leaves each rank a multiple of {block}, "
                "or recipe: tile"
            )
            return
