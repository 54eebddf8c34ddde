"""Quantization-aware training: products with weights as `danlu quantize` will round them, and float32 masters.

The forward pass and the gradient of the input multiply with decode(encode(weight)); the gradient of that matrix is
taken as the gradient of the master weight (straight-through estimator, arXiv:1308.3432; for weights arXiv:1712.05877,
of language models arXiv:2402.11960). Scales follow the weights and are constants for the gradient, as in torchao's
`FakeQuantizedLinear`. Numbers past the last code have a gradient too, which torchao's masks: scales are made of
the largest magnitude of a block, so such numbers are no further from their code than half a step, as any other; masked,
the largest weight of a block could never move.

T tokens · O, I outputs and inputs of a layer · r rank · G groups of rows, those of experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.assembly.frozen_base import format_of
from danlu.assembly.layerwise_quantizing import quantized_sites
from danlu.core.layer_types import LowRankSum
from danlu.models.decoder import Decoder
from danlu.models.grouped_mm import grouped_mm, grouped_weight_gradient
from danlu.models.modules import GroupedLinear, Linear
from danlu.numerics.format import FP8_BLOCKS, Format, encode
from danlu.numerics.quantized_weight import StackedWeight
from danlu.numerics.scaled_weight import ScaledWeight
from danlu.recipe import sections


def trained_format(section: Any) -> Format:
    """Returns the format that a section trains: the one in which `danlu quantize` writes the same kind."""
    match section:
        case sections.Int8() | sections.Int4() | sections.Int3() | sections.Int2():
            zero = "none" if section.symmetric else "integer"
            return Format(section.kind, (1, section.group), section.scale, zero)  # type: ignore[arg-type]
        case sections.Fp8():
            return FP8_BLOCKS
    return format_of(section)  # mxfp8, mxfp4 and nvfp4, which have one form


@dataclass(frozen=True)
class _Encoded:
    """The packed codes of a weight, with what they were made of: its memory is not given to other tensors meanwhile."""

    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]
    packed: ScaledWeight | StackedWeight


class EncodedWeights:
    """Codes of weights, encoded once an update.

    Weights are known by their memory, for saved tensors may be other objects, and by torch's count of changes, which
    misses those of torch's fused optimizers: `weights_changed` is called after each update. Where weights are gathered
    into the same memory again and again `keeps` is False, and codes are made for each product.
    """

    def __init__(self, form: Format, *, keeps: bool) -> None:
        self.form = form
        self._keeps = keeps
        self._encoded: dict[tuple[int, ...], _Encoded] = {}

    @property
    def stored_bytes(self) -> int:
        """Bytes of the codes, scales and zeros that are kept."""
        return sum(each.packed.stored_bytes() for each in self._encoded.values())

    def weights_changed(self) -> None:
        """Forgets all codes."""
        self._encoded.clear()

    @contextmanager
    def in_workspace(
        self, sources: Sequence[Tensor], value: Callable[[], Tensor], dtype: torch.dtype
    ) -> Iterator[Tensor]:
        """The rounded numbers of the matrices [.., O, I] that `value` makes of `sources`: valid until the block
        ends."""
        if not self._keeps:
            with _outside_inference():
                numbers = encode(value(), self.form).decode(dtype)
            yield numbers
            return
        with self._kept(sources, value).in_workspace(dtype) as matrix:
            yield matrix

    def numbers(self, sources: Sequence[Tensor], value: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        """`in_workspace` as a new tensor."""
        if not self._keeps:
            return encode(value().detach(), self.form).decode(dtype)
        return self._kept(sources, value).dense(dtype)

    def _kept(self, sources: Sequence[Tensor], value: Callable[[], Tensor]) -> ScaledWeight | StackedWeight:
        key = tuple(source.data_ptr() for source in sources)
        versions = tuple(source._version for source in sources)
        kept = self._encoded.get(key)
        if kept is None or kept.versions != versions:
            self._encoded.pop(key, None)  # its memory is free for the next one
            with _outside_inference():
                packed = _packed(value().detach(), self.form)
            kept = self._encoded[key] = _Encoded(tuple(source.detach() for source in sources), versions, packed)
        return kept.packed


@contextmanager
def _outside_inference() -> Iterator[None]:
    """Tensors that are made inside may take part in training, whoever asks for them first."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _packed(weight: Tensor, form: Format) -> ScaledWeight | StackedWeight:
    """Packs the codes of a matrix [O, I], or of matrices [E, O, I]."""
    if weight.ndim == 2:
        return ScaledWeight.rounded(weight, form)
    return StackedWeight([ScaledWeight.rounded(matrix, form) for matrix in weight])


class RoundedWeights:
    """`core.layer_types.LinearArithmetic` with weights of few bits, and all else in the type of activations.

    Weights are rounded as they are stored, in float32, and decoded into the type of activations with one rounding.
    """

    keeps_codes = False
    row_codes = None

    def __init__(self, form: Format, *, keeps: bool) -> None:
        self.encoded = EncodedWeights(form, keeps=keeps)

    @property
    def rounding(self) -> RoundedWeights:
        """This: rollouts multiply with the same weights."""
        return self

    def rows_of_tokens(self, tokens: Tensor) -> AbstractContextManager[None]:
        """Does nothing: rows have no scale."""
        return nullcontext()

    def weights_changed(self) -> None:
        """Called when weights were updated."""
        self.encoded.weights_changed()

    def in_workspace(
        self, weight: Tensor, dtype: torch.dtype, added: LowRankSum | None = None
    ) -> AbstractContextManager[Tensor]:
        """The rounded numbers of weight [.., O, I], or of its sum with a low-rank product, as merging makes it; valid
        until the block ends."""
        return self.encoded.in_workspace(*_sources(weight, added), dtype)

    def numbers(self, weight: Tensor, dtype: torch.dtype, added: LowRankSum | None = None) -> Tensor:
        """`in_workspace` as a new tensor, without gradient."""
        return self.encoded.numbers(*_sources(weight, added), dtype)

    def keep(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns x."""
        return (x,)

    def kept_values(self, kept: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Returns what was kept, x."""
        return kept[0].to(dtype)

    def forward(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns x [T, I] times each of the weights [O, I], [T, O] in x's dtype, and x."""
        return tuple(self._product(x, weight) for weight in weights), (x,)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad [T, O] times weight [O, I] -> [T, I] in grad's dtype."""
        with self.in_workspace(weight, grad.dtype) as matrix:
            return grad @ matrix

    def weight_gradient(self, grad: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """grad [T, O], transposed, times x [T, I] -> [O, I], in float32 or wider."""
        product = grad.t() @ kept[0].to(grad.dtype)
        return product.to(torch.promote_types(product.dtype, torch.float32))

    def grouped_forward(
        self, x: Tensor, weights: Sequence[Tensor], counts: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Rows x [N, I], those of each layer together, times each of the weights [G, O, I] -> [N, O] in x's dtype, and
        x. counts [G]: rows of each layer."""
        outputs = []
        for weight in weights:
            with self.in_workspace(weight, x.dtype) as matrices:
                outputs.append(grouped_mm(x, matrices.transpose(1, 2), counts))
        return tuple(outputs), (x,)

    def grouped_input_gradient(self, grad: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Rows grad [N, O] times weight [G, O, I] by groups -> [N, I] in grad's dtype."""
        with self.in_workspace(weight, grad.dtype) as matrices:
            return grouped_mm(grad.contiguous(), matrices, counts)

    def grouped_weight_gradient(self, grad: Tensor, kept: Sequence[Tensor], counts: Tensor) -> Tensor:
        """Rows grad [N, O], transposed, times x [N, I], by groups -> [G, O, I], in float32 or wider; zero for a group
        without rows."""
        dtype = torch.promote_types(grad.dtype, torch.float32)
        return grouped_weight_gradient(grad.contiguous(), kept[0], counts, dtype)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        with self.in_workspace(weight, x.dtype) as matrix:
            return F.linear(x, matrix)


def _sources(weight: Tensor, added: LowRankSum | None) -> tuple[tuple[Tensor, ...], Callable[[], Tensor]]:
    """The tensors that a matrix is made of, and the function that makes it."""
    if added is None:
        return (weight,), lambda: weight
    a, b = added.a, added.b
    return (weight, a, b), lambda: weight.float().addmm(b.float(), a.float(), alpha=added.scale)


def set_trained_quantization(model: Decoder, section: Any, *, keeps: bool) -> None:
    """Gives the layers that `danlu quantize` rounds weights of a section's format, those of experts too.

    keeps: whether codes are kept between products, which takes weights that stay where they are.
    """
    arithmetic = RoundedWeights(trained_format(section), keeps=keeps)
    for name, layer in model.layers.items():
        for site in quantized_sites(model.config, int(name), experts=True):
            linear = layer.get_submodule(site)
            assert isinstance(linear, Linear | GroupedLinear)
            linear.arithmetic = arithmetic
    model.rounding = arithmetic


def kept_code_bytes(model: Decoder) -> int:
    """Bytes of the codes that a model's layers keep of their weights between updates."""
    return model.rounding.encoded.stored_bytes if isinstance(model.rounding, RoundedWeights) else 0
