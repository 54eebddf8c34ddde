"""The arithmetic of matrix products in 8 bits."""

from __future__ import annotations

from typing import Literal

from danlu.recipe.sections.base import VariantSection

Activations = Literal["auto", "fp32", "bf16", "fp16"]

Fp8Recipe = Literal["tile", "row", "row-with-bf16-weight-gradient", "tensor", "mxfp8"]


class Fp8(VariantSection):
    """Matrix products of linear layers and experts in 8-bit floating-point numbers, which blocks of numbers share a
    scale of. Embedding, head, norms, routers and attention itself keep the type of activations; trained weights and
    gradients of weights are float32.
    """

    kind: Literal["fp8"] = "fp8"
    recipe: Fp8Recipe = "tile"
    """The blocks that share a scale. tile: 1 x 128 of activations and gradients, 128 x 128 of weights, in E4M3, with
    inputs kept in 8 bits for the backward pass (DeepSeek-V3, arXiv:2412.19437, section 3.3); row: a token's features,
    or a row of a weight, as torchao's rowwise; row-with-bf16-weight-gradient: the same, with the gradient of weights by
    a product in the type of activations; tensor: a whole tensor, with gradients in E5M2, as torchao's tensorwise;
    mxfp8: 32 numbers, with scales that are powers of two (OCP Microscaling formats 1.0).
    """
    activations: Literal["bf16", "fp32"] = "bf16"
    """The type of activations, and of the products that are not in 8 bits."""
