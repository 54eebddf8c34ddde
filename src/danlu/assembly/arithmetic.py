"""Puts the arithmetic of a recipe's `precision` into the linear layers of a decoder."""

from __future__ import annotations

from danlu.models.decoder import Decoder, Layer
from danlu.models.modules import GroupedLinear, Linear
from danlu.numerics.arithmetic import Fp8Arithmetic
from danlu.recipe.sections import Fp8Products

_GATES = ("shared_gate", "a_proj", "b_proj")
"""Layers with a number for each token or head, that others are multiplied with: they are left as routers are."""
_BEHIND_ATTENTION = "o_proj"


def set_arithmetic(model: Decoder, section: Fp8Products) -> None:
    """Gives the linear layers of attention, feed-forward networks and experts the products of a section.

    Embedding, head, norms, routers and gates keep those of the type of activations, and so does attention itself.
    """
    usual = Fp8Arithmetic(section.recipe)
    behind_attention = Fp8Arithmetic(section.recipe, behind_attention=True)
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        for sublayer in layer.sublayers.values():
            for name, module in sublayer.named_modules():  # type: ignore[attr-defined]
                if isinstance(module, Linear | GroupedLinear) and name.rpartition(".")[2] not in _GATES:
                    is_behind = sublayer is layer.attention and name == _BEHIND_ATTENTION
                    module.arithmetic = behind_attention if is_behind else usual
