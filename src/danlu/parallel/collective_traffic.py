"""What a process sends, by axis of the layout and collective: counted (`traffic_counter`) or computed (`plan.traffic`).

Bytes are those of ring algorithms, the fewest there can be, whatever algorithm the library picks: written out step by
step in `tests/builders/ring_collectives.py`. Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

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

SINGLE_NUMBERS_BYTES = 1024
"""A step also agrees on weights, norms and whether all is finite. These sums of single numbers are in no formula."""


@dataclass(frozen=True)
class CollectiveTraffic:
    """What one process sends along an axis by one kind of collective."""

    axis: str  # "shard", or several: "replicate x shard"
    kind: Kind
    bytes: Fraction  # a ring of n sends n-ths of a tensor
    calls: int = 0  # of the library, where they are counted
    what: str = ""  # in words, where it is computed


def ring_bytes(kind: Kind, size: int, full_bytes: int) -> Fraction:
    """Bytes that one of `size` processes sends, the mean over them where they differ.

    full_bytes: of the tensor that is summed or broadcast; of the gathered one; of the one before it is scattered; of
    what a process gives (all-to-all, gather, point-to-point) or gets (scatter).
    """
    if kind == "point-to-point":
        return Fraction(full_bytes)
    return (2 if kind == "all-reduce" else 1) * Fraction(size - 1, size) * full_bytes


def axis_of(ranks: Iterable[int], layout: Layout) -> str:
    """The axes along which some ranks of the world differ."""
    places = [layout.coordinates(rank) for rank in ranks]
    return axis_name(axis for axis in AXES if len({place[axis] for place in places}) > 1)


def axis_name(axes: Iterable[str]) -> str:
    return " x ".join(axes) or "alone"


def axis_along(layout: Layout, *axes: str) -> tuple[str, int]:
    """Name and number of processes along some axes together, without those of size 1."""
    sizes = {axis: size for axis, size in zip(AXES, layout.sizes, strict=True) if axis in axes and size > 1}
    count = 1
    for size in sizes.values():
        count *= size
    return axis_name(sizes), count


@dataclass(frozen=True)
class Row:
    """A line of the table: measured beside formula."""

    axis: str
    kind: str
    what: str
    calls: int  # measured
    measured_bytes: Fraction
    formula_bytes: Fraction
    beside_bytes: int  # that may be sent over what the formula knows

    @property
    def agrees(self) -> bool:
        return 0 <= self.measured_bytes - self.formula_bytes <= self.beside_bytes

    def cells(self) -> tuple[str, ...]:
        """Texts under `HEADINGS`."""
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
    """A line for each axis and collective that was sent or ought to have been, outermost axis first."""
    found, told = _summed(measured), _summed(formula)
    nothing = CollectiveTraffic("", "all-reduce", Fraction(0))
    rows = []
    for axis, kind in sorted({*found, *told}, key=lambda key: (_place(key[0]), key[1])):
        here, there = found.get((axis, kind), nothing), told.get((axis, kind), nothing)
        rows.append(Row(axis, kind, there.what, here.calls, here.bytes, there.bytes, beside_bytes))
    return rows


def _summed(parts: Sequence[CollectiveTraffic]) -> dict[tuple[str, Kind], CollectiveTraffic]:
    together = defaultdict(list)
    for part in parts:
        together[part.axis, part.kind].append(part)
    return {
        (axis, kind): CollectiveTraffic(
            axis,
            kind,
            sum((part.bytes for part in group), Fraction(0)),
            sum(part.calls for part in group),
            ", ".join(dict.fromkeys(part.what for part in group if part.what)),
        )
        for (axis, kind), group in together.items()
        if any(part.calls or part.bytes for part in group)
    }


def _place(axis: str) -> tuple[int, ...]:
    return tuple(AXES.index(one) for one in axis.split(" x ") if one in AXES)


def _bytes(value: Fraction) -> str:
    return f"{float(value):,.0f}" if value.denominator == 1 else f"{float(value):,.1f}"
