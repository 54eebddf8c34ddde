"""Bytes that a process sends, by axis of the layout and collective: counted (`traffic_counter`) or computed
(`planning.traffic`).

Bytes are those of ring algorithms, the fewest there can be, whatever algorithm the library picks: written out step by
step in `tests/builders/ring_collectives.py`. Imports no torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from danlu.parallel.layout import AXES, Layout

Kind = Literal[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "point-to-point",
]

BUCKET_BYTES = 25 * 2**20
"""The most bytes of gradients that one sum of whole models takes, unless a gradient is larger."""
SINGLE_NUMBERS_BYTES = 1024
"""A step also sums single numbers: weights, norms, whether all is finite. No formula has them; they are less."""


class GroupShape(NamedTuple):
    """Ranks that are equally far from each other."""

    size: int
    stride: int = 1
    """Distance of two neighbours in the world."""


@dataclass(frozen=True)
class CollectiveTraffic:
    """Bytes that one process sends along an axis by one kind of collective."""

    axis: str  # "shard", or several: "replicate x shard"
    kind: Kind
    bytes: Fraction  # a fraction, for a ring of n processes sends n-ths of a tensor
    calls: int = 0  # of the collective; about so many where traffic is computed
    what: str = ""  # what is sent ("gradients"), where traffic is computed
    group: GroupShape | None = None  # the ranks of a call, where traffic is computed


def ring_bytes(kind: Kind, size: int, full_bytes: int) -> Fraction:
    """Bytes that one of `size` processes sends in a ring, the mean over them where they differ.

    full_bytes: the size of the tensor that is reduced or broadcast, of the result of an all-gather, of the input of a
    reduce-scatter, or of the tensor that a process gives (all-to-all, gather, point-to-point) or gets (scatter).
    """
    if kind == "point-to-point":
        return Fraction(full_bytes)
    return (2 if kind == "all-reduce" else 1) * Fraction(size - 1, size) * full_bytes


def axis_of(ranks: Iterable[int], layout: Layout) -> str:
    """The name of the axes along which some ranks of the world differ."""
    coordinates = [layout.coordinates(rank) for rank in ranks]
    return axis_name(axis for axis in AXES if len({place[axis] for place in coordinates}) > 1)


def axis_name(axes: Iterable[str]) -> str:
    """``replicate x shard``; "alone" for no axes."""
    return " x ".join(axes) or "alone"


def axis_along(layout: Layout, *axes: str) -> tuple[str, int]:
    """Name and number of processes of some axes together; axes of size 1 are not in the name."""
    sizes = {axis: size for axis, size in zip(AXES, layout.sizes, strict=True) if axis in axes and size > 1}
    return axis_name(sizes), math.prod(sizes.values())


def axis_of_data_ranks(layout: Layout, start: int, step: int, count: int) -> str:
    """The name of the axes along which some data and context ranks differ: numbers `start`, `start + step` and so on,
    `count` of them, of those that `Layout.gradient_ranks` lists.

    It takes no longer in a larger world.
    """
    place, differing = 1, list[str]()
    for axis, size in (("context", layout.context), ("shard", layout.shard), ("replicate", layout.replicate)):
        if _digit_changes(start, step, count, place, size):
            differing.insert(0, axis)
        place *= size
    return axis_name(differing)


def _digit_changes(start: int, step: int, count: int, place: int, size: int) -> bool:
    """Whether the digit of a place (number // place % size) differs among `count` numbers that are `step` apart."""
    cycle = place * size
    forward = step % cycle
    if size == 1 or not forward:
        return False
    rest = start % place
    backward = cycle - forward
    if forward < place:  # steps until the next digit
        needed = -(-(place - rest) // forward)
    elif backward < place:  # the same as steps backward
        needed = rest // backward + 1
    else:
        needed = 1
    return count > needed


@dataclass(frozen=True)
class Row:
    """A row of the table: the bytes that were counted next to those of the formula."""

    axis: str
    kind: str
    what: str
    calls: int  # counted
    measured_bytes: Fraction
    formula_bytes: Fraction
    beside_bytes: int  # that may be sent beyond what the formula says

    @property
    def agrees(self) -> bool:
        """Whether as many bytes were sent as the formula says, or up to `beside_bytes` more."""
        return 0 <= self.measured_bytes - self.formula_bytes <= self.beside_bytes

    def cells(self) -> tuple[str, ...]:
        """The texts of the columns of `HEADINGS`."""
        return (
            self.axis,
            self.kind,
            self.what or ("single numbers" if self.agrees else "in no formula"),
            str(self.calls),
            _bytes(self.measured_bytes),
            _bytes(self.formula_bytes),
            f"{float(self.measured_bytes / self.formula_bytes):.4f}" if self.formula_bytes else "–",
            "yes" if self.agrees else "NO",
        )


HEADINGS = ("axis", "collective", "what", "calls", "sent, bytes", "formula, bytes", "ratio", "agrees")


def table(
    measured: Sequence[CollectiveTraffic],
    formula: Sequence[CollectiveTraffic],
    *,
    beside_bytes: int = SINGLE_NUMBERS_BYTES,
) -> list[Row]:
    """A row for each axis and kind of collective that was used or ought to have been, outermost axis first."""
    counted, computed = _summed(measured), _summed(formula)
    nothing = CollectiveTraffic("", "all-reduce", Fraction(0))
    rows = []
    for key in sorted({*counted, *computed}, key=lambda key: (_order(key[0]), key[1])):
        count, expected = counted.get(key, nothing), computed.get(key, nothing)
        rows.append(Row(*key, expected.what, count.calls, count.bytes, expected.bytes, beside_bytes))
    return rows


def _summed(parts: Sequence[CollectiveTraffic]) -> dict[tuple[str, Kind], CollectiveTraffic]:
    """The sum for each axis and kind, of those that are not zero."""
    grouped = defaultdict(list)
    for part in parts:
        grouped[part.axis, part.kind].append(part)
    return {
        (axis, kind): CollectiveTraffic(
            axis,
            kind,
            sum((part.bytes for part in group), Fraction(0)),
            sum(part.calls for part in group),
            ", ".join(dict.fromkeys(part.what for part in group if part.what)),
        )
        for (axis, kind), group in grouped.items()
        if any(part.calls or part.bytes for part in group)
    }


def _order(axis: str) -> tuple[int, ...]:
    return tuple(AXES.index(name) for name in axis.split(" x ") if name in AXES)


def _bytes(value: Fraction) -> str:
    return f"{float(value):,.0f}" if value.denominator == 1 else f"{float(value):,.1f}"
