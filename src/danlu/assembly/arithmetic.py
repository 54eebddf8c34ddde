"""Puts the arithmetic of a recipe's `precision` into the linear layers of a decoder, and that of its rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from danlu.core.errors import RecipeError
from danlu.core.layer_types import ReduceGroup
from danlu.models.decoder import Decoder, Layer
from danlu.models.modules import GroupedLinear, Linear
from danlu.numerics.arithmetic import Fp8Arithmetic, Sharing, block_of_features
from danlu.recipe.sections import Fp8Products

if TYPE_CHECKING:
    from danlu.parallel.tensor import LinearCut

_GATES = ("shared_gate", "a_proj", "b_proj")
"""Layers with a number for each token or head, that others are multiplied with: they are left as routers are."""
_BEHIND_ATTENTION = "o_proj"
_EXPANDS_LATENTS = "kv_b_proj"


def set_arithmetic(
    model: Decoder,
    section: Fp8Products,
    linears: Mapping[Linear | GroupedLinear, LinearCut] = MappingProxyType({}),
    group: ReduceGroup | None = None,
) -> None:
    """Gives the linear layers of attention, feed-forward networks and experts the products of a section.

    Embedding, head, norms, routers and gates keep those of the type of activations, and so does attention itself.

    linears: the layers that the tensor ranks of `group` have parts of. Those cut by outputs have whole inputs and a
    part of the gradients, and the others the reverse.
    """
    sharing = {"outputs": Sharing(weight=group, grad=group), "inputs": Sharing(x=group, weight=group)}
    by_kind: dict[tuple[Sharing, bool], Fp8Arithmetic] = {}  # layers that share an input encode it once: by identity
    for _, module, is_behind in _layers_of_products(model):
        cut = linears.get(module)
        shared = Sharing() if cut is None or cut.axis is None else sharing[cut.axis]
        if (shared, is_behind) not in by_kind:
            arithmetic = Fp8Arithmetic(section.recipe, behind_attention=is_behind, sharing=shared)
            by_kind[shared, is_behind] = arithmetic
        module.arithmetic = by_kind[shared, is_behind]


def encoded_in_rollouts(model: Decoder) -> Iterator[Linear | GroupedLinear]:
    """The layers of which rollouts may multiply encoded weights: those that `set_arithmetic` takes, but for the one
    that latent attention expands latents with, or multiplies queries and outputs with in its place."""
    return (module for name, module, _ in _layers_of_products(model) if name != _EXPANDS_LATENTS)


def _layers_of_products(model: Decoder) -> Iterator[tuple[str, Linear | GroupedLinear, bool]]:
    """The linear layers of attention, feed-forward networks and experts: their names in the sublayer, and whether their
    input is attention's output."""
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        for sublayer in layer.sublayers.values():
            for name, module in sublayer.named_modules():  # type: ignore[attr-defined]
                if isinstance(module, Linear | GroupedLinear) and not _is_gate(name):
                    yield name, module, sublayer is layer.attention and name == _BEHIND_ATTENTION


def check_cuts(section: Fp8Products, linears: Iterable[tuple[Linear | GroupedLinear, LinearCut]]) -> None:
    """Raises RecipeError where tensor ranks would round other numbers than one process does, beyond the bound that
    `numerics.arithmetic` states.

    A cut within a block of a power-of-two scale that is rounded up keeps that bound; MXFP8's scales are rounded down,
    so that its largest numbers saturate. A gradient that is a sum over ranks would be rounded before it is added up.
    """
    block = block_of_features(section.recipe)
    for _, cut in linears:
        if _is_gate(cut.name):
            continue
        if cut.axis is None or cut.replicas > 1:
            reason = "every rank has it whole" if cut.axis is None else f"{cut.replicas} ranks share a key/value head"
            raise RecipeError(
                f"parallel.tensor: {cut.name}: {reason}, and its output's gradient is a sum over these, which products "
                "in 8 bits would round term by term. Use a parallel.tensor that divides the number of key/value heads, "
                "in models without latents, or precision: bf16"
            )
        if cut.local_features % block:
            raise RecipeError(
                f"parallel.tensor: a rank has {cut.local_features} of the {cut.features} features of {cut.name}, and "
                f"{section.recipe} scales blocks of {block}. Use a degree that leaves each rank a multiple of {block}, "
                "or recipe: tile"
            )


def _is_gate(name: str) -> bool:
    return name.rpartition(".")[2] in _GATES
