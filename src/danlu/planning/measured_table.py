"""Seconds that were measured at a grid of sizes, and the seconds of sizes between and beyond them. No torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class Seconds(float):
    """Seconds that an operation takes, and whether its size lies outside of those that were measured."""

    extrapolated: bool

    def __new__(cls, value: float, extrapolated: bool = False) -> Seconds:
        """A number of seconds; arithmetic with it gives plain floats."""
        seconds = super().__new__(cls, value)
        seconds.extrapolated = extrapolated
        return seconds


@dataclass(frozen=True)
class Table:
    """Seconds at every combination of the sizes of some axes."""

    axes: tuple[tuple[int, ...], ...]
    """The rising sizes of each axis: of products rows, outputs and inputs."""
    seconds: tuple[float, ...]
    """One number for each combination, the last axis the fastest."""
    powers: tuple[int, ...] = ()
    """How the seconds grow along each axis at its end: 2 for the length of attention; empty where all are 1.

    Along an axis with another power than 1 they are interpolated as a power of the size, which two neighbours give:
    attention grows from linearly to quadratically.
    """

    @classmethod
    def rising(cls, axes: Sequence[Sequence[int]], seconds: Sequence[float], powers: Sequence[int] = ()) -> Table:
        """A table in which nothing gets faster as it gets larger: noise can only have made the smaller one slower."""
        values = list(seconds)
        stride = 1
        for axis in reversed(axes):
            for index in reversed(range(len(values))):
                if index // stride % len(axis) < len(axis) - 1:
                    values[index] = min(values[index], values[index + stride])
            stride *= len(axis)
        return cls(tuple(map(tuple, axes)), tuple(values), tuple(powers))

    def fastest(self, other: Table) -> Table:
        """Returns the lesser seconds of this and another measurement of the same sizes."""
        assert (self.axes, self.powers) == (other.axes, other.powers), "two measurements of the same sizes"
        return Table.rising(self.axes, list(map(min, self.seconds, other.seconds)), self.powers)

    def at(self, *sizes: float) -> Seconds:
        """Returns the seconds at a size: those that were measured, or between them an interpolation, multilinear or by
        powers.

        Beyond the largest size of an axis it takes as long for each unit of work as at that size; below the smallest
        one as long as the smallest.
        """
        assert len(sizes) == len(self.axes), f"{len(sizes)} sizes for {len(self.axes)} axes"
        factor, is_outside = 1.0, False
        places: list[tuple[int, float]] = []  # of each axis: the size below, and how far it is to the next one
        for number, (axis, size) in enumerate(zip(self.axes, sizes, strict=True)):
            power = self.powers[number] if self.powers else 1
            is_outside |= not axis[0] <= size <= axis[-1]
            factor *= max(1.0, size / axis[-1]) ** power
            inside = min(max(size, axis[0]), axis[-1])
            below = bisect_right(axis, inside) - 1
            if axis[below] == inside:
                places.append((below, 0.0))
            else:
                scale = math.log if power != 1 else float
                start, stop = scale(axis[below]), scale(axis[below + 1])
                places.append((below, (scale(inside) - start) / (stop - start)))
        return Seconds(factor * self._between(places), is_outside)

    def _between(self, places: Sequence[tuple[int, float]], axis: int = 0, index: int = 0) -> float:
        """The seconds at a place, by the index and the share of the way to the next size of each axis from `axis` on.

        index: of the combination of the axes before.
        """
        if axis == len(self.axes):
            return self.seconds[index]
        below, share = places[axis]
        index = index * len(self.axes[axis]) + below
        first = self._between(places, axis + 1, index)
        if not share:
            return first
        second = self._between(places, axis + 1, index + 1)
        if self.powers and self.powers[axis] != 1:
            return float(first ** (1 - share) * second**share)
        return first + share * (second - first)

    def to_json(self) -> dict[str, Any]:
        """Returns the table as JSON holds it."""
        return {"axes": self.axes, "seconds": self.seconds, "powers": self.powers}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Table:
        """Reads a table. Raises ValueError, KeyError or TypeError for what is none."""
        axes = tuple(tuple(int(size) for size in axis) for axis in content["axes"])
        seconds = tuple(float(value) for value in content["seconds"])
        powers = tuple(int(power) for power in content["powers"])
        if not axes or any(list(axis) != sorted(set(axis)) or axis[:1] < (1,) for axis in axes):
            raise ValueError("sizes that do not rise")
        if len(seconds) != math.prod(map(len, axes)) or len(powers) not in (0, len(axes)):
            raise ValueError(f"{len(seconds)} numbers for {math.prod(map(len, axes))} sizes")
        if not all(math.isfinite(value) and value > 0 for value in seconds):
            raise ValueError("seconds that are no positive numbers")
        return cls(axes, seconds, powers)
