"""The primitives of a step as plain data: products, attention, memory traffic, updates, with their sizes. No torch.

`layer_work` says which ones a layer's operations come down to; `Speeds` knows their seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from danlu.planning.machine_profile import Result, Streamed
from danlu.planning.measured_table import Seconds
from danlu.planning.speeds import Speeds

_FLOAT32 = 4


class Product(NamedTuple):
    """Products [rows, outputs] that sum over inputs."""

    rows: float
    outputs: float
    inputs: float
    precision: str
    times: float = 1
    """The number of such products; a fraction where several operations share one."""
    is_model: bool = True
    """Whether MFU counts it: neither adapters nor work that only a kernel's order of sums needs."""
    result: Result = "output"

    @property
    def flops(self) -> float:
        """A multiply-add is two."""
        return 2 * self.times * self.rows * self.outputs * self.inputs

    def seconds(self, speeds: Speeds) -> Seconds:
        """Its seconds."""
        seconds = speeds.product(self.rows, self.outputs, self.inputs, self.precision, self.result)
        return Seconds(self.times * seconds, seconds.extrapolated)


class Grouped(NamedTuple):
    """Products [rows, outputs] of groups, each of which sums over inputs."""

    groups: float
    rows: float
    outputs: float
    inputs: float
    precision: str
    is_model: bool = True
    result: Result = "output"

    @property
    def flops(self) -> float:
        """A multiply-add is two."""
        return 2 * self.groups * self.rows * self.outputs * self.inputs

    def seconds(self, speeds: Speeds) -> Seconds:
        """Its seconds."""
        return speeds.grouped(self.groups, self.rows, self.outputs, self.inputs, self.precision, self.result)


class Attention(NamedTuple):
    """Causal attention in documents of one length, forward or backward."""

    documents: int
    length: int
    """Tokens of the document that is taken for each: at most twice a window."""
    pairs: float
    """Pairs of a query and a key of one head in one of the documents; of context ranks the mean of all."""
    heads: int
    width: int
    """The width of a head, as the kernel computes it."""
    flops_of_pair: int
    """Operations of one head in the forward pass: scores and the sum of values."""
    precision: str
    backward: bool = False
    at_once: bool = False
    """Whether one call takes all documents."""
    is_model: bool = True

    @property
    def flops(self) -> float:
        """Operations that are needed: two products forward, four backward."""
        return self.documents * self.pairs * self.heads * self.flops_of_pair * (2 if self.backward else 1)

    def seconds(self, speeds: Speeds) -> Seconds:
        """Its seconds: those of whole documents, by the share of their pairs."""
        heads = self.heads * (self.documents if self.at_once else 1)
        whole = speeds.attention(self.length, heads, self.width, self.precision, backward=self.backward)
        share = self.pairs / (self.length * (self.length + 1) / 2) * (1 if self.at_once else self.documents)
        return Seconds(whole * share, whole.extrapolated)


class Moved(NamedTuple):
    """Passes over tensors, each of which reads and writes so many bytes."""

    bytes: float
    kind: Streamed = "copy"
    precision: str = "fp32"
    passes: float = 1

    def seconds(self, speeds: Speeds) -> Seconds:
        """Its seconds."""
        seconds = speeds.moved(self.bytes, self.kind, self.precision)
        return Seconds(self.passes * seconds, seconds.extrapolated)


class Dequantized(NamedTuple):
    """Matrices of few bits that become dense."""

    elements: float

    def seconds(self, speeds: Speeds) -> Seconds:
        """Its seconds."""
        return speeds.dequantize(self.elements)


class Updated(NamedTuple):
    """Weights that AdamW updates."""

    elements: float

    def seconds(self, speeds: Speeds) -> Seconds:
        """Its seconds."""
        return speeds.update(self.elements)


Primitive = Product | Grouped | Attention | Moved | Dequantized | Updated


def _moved_bytes(primitive: Primitive) -> float:
    """Bytes of what a primitive reads and writes, each tensor once: what it takes of the caches."""
    match primitive:
        case Product(rows, outputs, inputs, precision, times):
            of_one = rows * inputs + outputs * inputs + rows * outputs
            return min(1.0, times) * of_one * _element_bytes(precision)
        case Grouped(groups, rows, outputs, inputs, precision):
            return groups * (rows * inputs + outputs * inputs + rows * outputs) * _element_bytes(precision)
        case Attention():
            tensors = 8 if primitive.backward else 4
            tokens = primitive.documents * primitive.length
            return tensors * tokens * primitive.heads * primitive.width * _element_bytes(primitive.precision)
        case Moved():
            return primitive.passes * primitive.bytes
    return _FLOAT32 * primitive.elements


def _element_bytes(precision: str) -> int:
    return _FLOAT32 if precision in ("fp32", "tf32") else _FLOAT32 // 2


@dataclass(frozen=True)
class OperationWork:
    """The primitives of one operation in each pass of a micro-batch."""

    name: str
    kind: str
    """That of `models.operations.Operation`; embedding, loss, clip and update of what is outside of layers."""
    forward: tuple[Primitive, ...] = ()
    backward_input: tuple[Primitive, ...] = ()
    """The gradients of what it reads, and those of weights that are computed together with them."""
    backward_weight: tuple[Primitive, ...] = ()
    """The gradients of weights that a pipeline may put off."""
    accumulation: tuple[Primitive, ...] = ()
    """The sums with the gradients of the micro-batches before."""
    recomputed: bool = False
    """Whether its forward pass runs once more in the backward pass."""


class OperationSeconds(NamedTuple):
    """The seconds of one operation in each pass of a micro-batch; None of a pass in which it does nothing."""

    kind: str
    forward: float | None
    backward_input: float | None
    backward_weight: float | None
    accumulation: float | None
    recomputed: bool
    extrapolated: bool

    @classmethod
    def of(cls, work: OperationWork, speeds: Speeds) -> OperationSeconds:
        """The seconds of an operation's primitives, one after the other."""
        is_outside, is_fused = False, work.kind == "update"  # of which one call takes all parameters

        def total(primitives: Sequence[Primitive]) -> float | None:
            nonlocal is_outside
            if not primitives:
                return None
            each = [primitive.seconds(speeds) for primitive in primitives]
            is_outside |= any(seconds.extrapolated for seconds in each)
            moved = sum(map(_moved_bytes, primitives))
            return sum(each) + speeds.host(1 if is_fused else len(each), moved)

        return cls(
            work.kind,
            total(work.forward),
            total(work.backward_input),
            total(work.backward_weight),
            total(work.accumulation),
            work.recomputed,
            is_outside,
        )


@dataclass(frozen=True)
class PassSeconds:
    """The seconds of the passes of one micro-batch through a part of a model, or several of them together."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    recompute: float = 0.0
    """Seconds of the operations that run once more, at the beginning of the backward pass."""
    accumulation: float = 0.0
    """Seconds more in each micro-batch of a step but the first: the sums of gradients."""
    by_kind: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Kind of operation -> its seconds in all passes of the first micro-batch."""
    extrapolated: bool = False
    """Whether some sizes lie outside of those that were measured."""

    @property
    def backward(self) -> float:
        """Seconds of the whole backward pass."""
        return self.recompute + self.backward_input + self.backward_weight

    @property
    def total(self) -> float:
        """Seconds of both passes of the first micro-batch."""
        return self.forward + self.backward

    def __add__(self, other: PassSeconds) -> PassSeconds:
        """The seconds of both."""
        return sum_of((self, other))

    @classmethod
    def of(cls, work: Iterable[OperationWork], speeds: Speeds) -> PassSeconds:
        """The seconds of some operations, one after the other."""
        return cls.of_operations(OperationSeconds.of(each, speeds) for each in work)

    @classmethod
    def of_operations(cls, operations: Iterable[OperationSeconds]) -> PassSeconds:
        """The same of operations with known seconds."""
        passes = dict.fromkeys(("forward", "backward_input", "backward_weight", "recompute", "accumulation"), 0.0)
        by_kind: dict[str, float] = {}
        is_outside = False
        for kind, forward, backward_input, backward_weight, accumulation, recomputed, extrapolated in operations:
            again = forward if recomputed else None
            is_outside |= extrapolated
            for name, seconds in zip(
                passes, (forward, backward_input, backward_weight, again, accumulation), strict=True
            ):
                if seconds is not None:
                    passes[name] += seconds
                    if name != "accumulation":
                        by_kind[kind] = by_kind.get(kind, 0.0) + seconds
        return cls(**passes, by_kind=MappingProxyType(by_kind), extrapolated=is_outside)


def sum_of(parts: Iterable[PassSeconds]) -> PassSeconds:
    """The seconds of parts that run one after the other."""
    total = dict.fromkeys(("forward", "backward_input", "backward_weight", "recompute", "accumulation"), 0.0)
    by_kind: dict[str, float] = {}
    is_outside = False
    for part in parts:
        for name in total:
            total[name] += getattr(part, name)
        for kind, seconds in part.by_kind.items():
            by_kind[kind] = by_kind.get(kind, 0.0) + seconds
        is_outside |= part.extrapolated
    return PassSeconds(**total, by_kind=MappingProxyType(by_kind), extrapolated=is_outside)
