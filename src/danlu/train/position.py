"""Where a run is in its data: which packs the next step takes."""

from __future__ import annotations

from typing import Any, Protocol

from danlu.types import Item


class PackSource(Protocol):
    """The data of a run: pack n is a pure function of (seed, n). A stream gives packs in order only."""

    def at(self, number: int) -> Item:
        """Pack `number` of the run, counted from 0."""

    def state(self, number: int) -> dict[str, Any]:
        """What a checkpoint keeps of the source, as JSON, so that pack `number` comes next after `restore`."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from what `state` returned."""


class Feed:
    """Hands each step its packs, in order, without those that a rewind left out.

    Args:
        source     the packs
        per_step   packs in a step
        total      packs of the whole run; the last step takes what is left. None: endless, steps decide.
    """

    def __init__(self, source: PackSource, *, per_step: int, total: int | None) -> None:
        self.source = source
        self.per_step = per_step
        self.total = total
        self.next = 0
        self.excluded: set[int] = set()
        self.last_taken: list[int] = []

    @property
    def exhausted(self) -> bool:
        """Whether no pack is left for another step."""
        return self.total is not None and not any(n not in self.excluded for n in range(self.next, self.total))

    def take(self) -> list[Item]:
        """The packs of the next step; at least one, unless `exhausted`."""
        self.last_taken = []
        packs: list[Item] = []
        while len(packs) < self.per_step and (self.total is None or self.next < self.total):
            pack = self.source.at(self.next)  # also of one left out: a stream must be read through
            if self.next not in self.excluded:
                packs.append(pack)
                self.last_taken.append(self.next)
            self.next += 1
        return packs

    def give_back(self) -> None:
        """Takes back the last `take`, whose step did not happen: the next one starts where it did."""
        if self.last_taken:
            self.next = self.last_taken[0]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {"next": self.next, "excluded": sorted(self.excluded), "source": self.source.state(self.next)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state()`."""
        self.next = int(state["next"])
        self.excluded = set(state["excluded"])
        self.source.restore(state["source"])
