"""Puts the arithmetic of a recipe's `precision` into the linear layers of a decoder, and that of its rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from danlu.core.layer_types import ReduceGroup
from danlu.models.decoder import Decoder, Layer
from danlu.models.modules import GroupedLinear, Linear
from danlu.models.operations import is_gate
from danlu.models.tensor_cut import LinearCut
from danlu.numerics.arithmetic import Fp8Arithmetic, Sharing, real_rows
from danlu.recipe.sections import Fp8Products

_BEHIND_ATTENTION = "o_proj"
_EXPANDS_LATENTS = "kv_b_proj"


def set_arithmetic(
    model: Decoder,
    section: Fp8Products,
    linears: Mapping[Linear | GroupedLinear, LinearCut] = MappingProxyType({}),
    group: ReduceGroup | None = None,
    context: tuple[ReduceGroup, ...] = (),
) -> None:
    """Gives the linear layers of attention, feed-forward networks and experts the products of a section.

    Embedding, head, norms, routers and gates keep those of the type of activations, and so does attention itself.

    linears: the layers that the tensor ranks of `group` have parts of. Those cut by outputs have whole inputs and a
    part of the gradients, and the others the reverse. context: groups of ranks that have parts of the tokens.
    """
    cut_by = () if group is None else (group,)
    sharing = {
        None: Sharing(context, (), context),
        "outputs": Sharing(context, cut_by, (*context, *cut_by)),
        "inputs": Sharing((*context, *cut_by), cut_by, context),
    }
    by_kind: dict[tuple[Sharing, bool], Fp8Arithmetic] = {}  # layers that share an input encode it once: by identity
    for _, module, is_behind in _layers_of_products(model):
        cut = linears.get(module)
        shared = sharing[None if cut is None else cut.axis]
        if (shared, is_behind) not in by_kind:
            arithmetic = Fp8Arithmetic(section.recipe, behind_attention=is_behind, sharing=shared)
            by_kind[shared, is_behind] = arithmetic
        module.arithmetic = by_kind[shared, is_behind]
    model.real_rows = real_rows if section.recipe == "tensor" else None


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
                if isinstance(module, Linear | GroupedLinear) and not is_gate(name):
                    yield name, module, sublayer is layer.attention and name == _BEHIND_ATTENTION
