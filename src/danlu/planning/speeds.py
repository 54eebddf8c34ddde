"""Seconds of the primitives of a step: from a measured profile of a machine, or by a roofline over a card. No torch.

A roofline (Williams et al., 2009, "Roofline: an insightful visual performance model") takes the longer of the time of
the arithmetic and the time of the memory traffic; constants say which share of both peaks real kernels reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from danlu.planning.cards import Card
from danlu.planning.machine_profile import BYTES_BEFORE, MachineProfile, Result, Streamed
from danlu.planning.measured_table import Seconds

_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_ADAMW_BYTES = 28
"""Bytes of an element that an AdamW step in float32 reads and writes: weight, gradient and both moments."""
_NF4_BYTES = 2.5
"""Bytes of an element that is read in four bits and written in half precision."""
_BACKWARD_PRODUCTS = 5 / 2
"""Products of the backward pass of a flash kernel over those of its forward pass (arXiv:2205.14135, algorithm 4)."""
_REACHED = {
    "A100": {"bf16": 271.2 / 312},
    "A800": {"bf16": 271.2 / 312},
    "H100": {"bf16": 794.5 / 989, "fp8": 1402.6 / 1979},
    "H800": {"bf16": 794.5 / 989, "fp8": 1402.6 / 1979},
    "H200": {"bf16": 794.5 / 989, "fp8": 1402.6 / 1979},
    "MI300X": {"bf16": 668.4 / 1300},
    "MI250X": {"bf16": 147 / 191.5},
}
"""The share of its peak that the fastest measured product of a card reaches, by the first part of the card's name and
the operands' type: stas00/ml-engineering compute/accelerator/README.md@b9e29720 (maximum achievable matmul FLOPS). An
H800 and an H200 multiply as an H100 does, an A800 as an A100; fp16 is as fast as bf16."""
_REACHED_BY_OTHERS = 0.8


class Speeds(Protocol):
    """The seconds of each primitive that a step is made of."""

    def product(self, m: float, n: float, k: float, precision: str, result: Result = "output") -> Seconds:
        """A product [m, n] that sums over k, as a linear layer makes it for a result."""

    def grouped(
        self, groups: float, rows: float, n: float, k: float, precision: str, result: Result = "output"
    ) -> Seconds:
        """The products [rows, n] of some groups, each of which sums over k."""

    def attention(
        self, length: float, heads: float, width: float, precision: str, *, backward: bool = False
    ) -> Seconds:
        """Causal attention in one document."""

    def moved(self, count: float, kind: Streamed = "copy", precision: str = "fp32") -> Seconds:
        """An operation that reads and writes `count` bytes together, each tensor once."""

    def update(self, elements: float) -> Seconds:
        """AdamW's update of float32 weights with both moments."""

    def dequantize(self, elements: float) -> Seconds:
        """An NF4 matrix that becomes a dense one."""

    def call(self) -> Seconds:
        """An operation on next to nothing."""

    def host(self, calls: int, moved_bytes: float) -> Seconds:
        """The time that Python and autograd add to an operation of a pass that makes some calls, where no device
        computes meanwhile. moved_bytes: what it reads and writes, by which it takes the caches from them.
        """


@dataclass(frozen=True)
class ProfileSpeeds:
    """Speeds of a machine that was measured."""

    profile: MachineProfile

    def product(self, m: float, n: float, k: float, precision: str, result: Result = "output") -> Seconds:
        """A product [m, n] that sums over k, as a linear layer makes it for a result."""
        return self.profile.product_seconds(m, n, k, precision, result)

    def grouped(
        self, groups: float, rows: float, n: float, k: float, precision: str, result: Result = "output"
    ) -> Seconds:
        """The products [rows, n] of some groups, each of which sums over k."""
        return self.profile.grouped_seconds(groups, rows, n, k, precision, result)

    def attention(
        self, length: float, heads: float, width: float, precision: str, *, backward: bool = False
    ) -> Seconds:
        """Causal attention in one document."""
        return self.profile.attention_seconds(length, heads, width, precision, backward=backward)

    def moved(self, count: float, kind: Streamed = "copy", precision: str = "fp32") -> Seconds:
        """An operation that reads and writes `count` bytes together, each tensor once."""
        return self.profile.bytes_seconds(count, kind, precision)

    def update(self, elements: float) -> Seconds:
        """AdamW's update of float32 weights with both moments."""
        return self.profile.update_seconds(elements)

    def dequantize(self, elements: float) -> Seconds:
        """An NF4 matrix that becomes a dense one."""
        return self.profile.dequantize_seconds(elements)

    def call(self) -> Seconds:
        """An operation on next to nothing."""
        return self.profile.call_seconds()

    def host(self, calls: int, moved_bytes: float) -> Seconds:
        """The time that Python and autograd add to an operation of a pass that makes some calls, where no device
        computes meanwhile. moved_bytes: what it reads and writes, by which it takes the caches from them.
        """
        if self.profile.machine.device != "cpu":
            return Seconds(0.0)
        warm, cold = self.profile.call_seconds(), self.profile.call_seconds(behind_products=True)
        all_cold = self.profile.call_seconds(trained=True) / 2 + (calls - 1) * cold
        share = min(1.0, moved_bytes / BYTES_BEFORE)
        return Seconds(calls * warm + share * max(0.0, all_cold - calls * warm))


EAGER_PASSES: Mapping[tuple[Streamed, bool], float] = MappingProxyType(
    {
        ("activation", False): 5 / 3,
        ("activation", True): 5 / 3,
        ("activation_backward", False): 11 / 5,
        ("activation_backward", True): 11 / 5,
        # Half precision is widened to float32 before, and narrowed behind.
        ("norm", False): 28 / 8,
        ("norm", True): 40 / 4,
        ("norm_backward", False): 56 / 12,
        ("norm_backward", True): 74 / 6,
    }
)
"""Bytes that danlu's operators read and write one after the other, over those of one pass that reads and writes each
tensor once: by operation and whether it is of half precision. Counted from `models.ops`."""
COMPILED_PASSES: Mapping[tuple[Streamed, bool], float] = MappingProxyType({})
"""The same of compiled operators: one pass."""


@dataclass(frozen=True)
class Efficiency:
    """The shares of a card's peaks that kernels reach, and the fixed costs.

    The defaults are danlu's without a compiler. They were set by its runs on an H100 and an H200 in
    benchmarks/RESULTS.md, and are within 20 % of them but for a model of 58M, which waits for its host.
    """

    product: float = 0.87
    """The speed of large products over that of the card's fastest one (`reached_peak`)."""
    narrow: float = 200.0
    """The length of a product's shortest side at which it takes twice as long as a large one for its work."""
    attention: float = 0.35
    """The same of attention."""
    memory: float = 0.75
    """The share of the bandwidth that passes over memory reach."""
    call_s: float = 2e-5
    """Seconds that the host takes for an operator, which no kernel is shorter than."""
    passes: Mapping[tuple[Streamed, bool], float] = field(default_factory=lambda: EAGER_PASSES, compare=False)


def reached_peak(card: Card, precision: str) -> float:
    """FLOP/s of the fastest product on a card. Raises RecipeError where the card's peak is not known."""
    reached = _REACHED.get(card.name.partition("-")[0], {})
    return card.peak(precision) * reached.get("bf16" if precision == "fp16" else precision, _REACHED_BY_OTHERS)


@dataclass(frozen=True)
class CardSpeeds:
    """Speeds of a card by a roofline over its published figures."""

    card: Card
    efficiency: Efficiency = Efficiency()

    def product(self, m: float, n: float, k: float, precision: str, result: Result = "output") -> Seconds:
        """A product [m, n] that sums over k, as a linear layer makes it for a result."""
        return self._products(1, m, n, k, precision)

    def grouped(
        self, groups: float, rows: float, n: float, k: float, precision: str, result: Result = "output"
    ) -> Seconds:
        """The products [rows, n] of some groups, each of which sums over k."""
        return self._products(groups, rows, n, k, precision)

    def attention(
        self, length: float, heads: float, width: float, precision: str, *, backward: bool = False
    ) -> Seconds:
        """Causal attention in one document."""
        products = 4 * heads * width * length * (length + 1) / 2 * (_BACKWARD_PRODUCTS if backward else 1)
        moved = (8 if backward else 4) * heads * width * length * _BYTES[precision]
        arithmetic = products / (reached_peak(self.card, precision) * self.efficiency.attention)
        return Seconds(max(arithmetic, moved / self._bandwidth, self.efficiency.call_s))

    def moved(self, count: float, kind: Streamed = "copy", precision: str = "fp32") -> Seconds:
        """An operation that reads and writes `count` bytes together, each tensor once."""
        passes = self.efficiency.passes.get((kind, _BYTES[precision] < 4), 1.0)
        return Seconds(max(passes * count / self._bandwidth, passes * self.efficiency.call_s))

    def update(self, elements: float) -> Seconds:
        """AdamW's update of float32 weights with both moments."""
        return self.moved(_ADAMW_BYTES * elements)

    def dequantize(self, elements: float) -> Seconds:
        """An NF4 matrix that becomes a dense one."""
        return self.moved(_NF4_BYTES * elements)

    def call(self) -> Seconds:
        """An operation on next to nothing."""
        return Seconds(self.efficiency.call_s)

    def host(self, calls: int, moved_bytes: float) -> Seconds:
        """Nothing: no kernel is shorter than the host's time for it."""
        return Seconds(0.0)

    def _products(self, count: float, m: float, n: float, k: float, precision: str) -> Seconds:
        shortest = max(1.0, min(m, n, k))
        slower = 1 + self.efficiency.narrow / shortest
        arithmetic = 2 * count * m * n * k * slower / (reached_peak(self.card, precision) * self.efficiency.product)
        moved = count * (m * k + n * k + m * n) * _BYTES[precision]
        return Seconds(max(arithmetic, moved / self._bandwidth, self.efficiency.call_s))

    @property
    def _bandwidth(self) -> float:
        assert self.card.bandwidth is not None, "a card without a bandwidth is a CPU that was not measured"
        return self.card.bandwidth * self.efficiency.memory
