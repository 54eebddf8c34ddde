"""Data-loader state: which items the next step takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from danlu.core.types import Item


class ItemSource(Protocol):
    """The data of a run. Stored item n is a pure function of (seed, n); a stream gives items in order only."""

    def at(self, number: int) -> Item:
        """Item `number` of the run, counted from 0. All processes ask for the same items in the same order."""

    def state(self, number: int) -> dict[str, Any]:
        """Returns the source's state, as JSON, such that item `number` comes next after `restore`."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the state that `state` returned."""


@runtime_checkable
class GeneratedItems(ItemSource, Protocol):
    """Items that the model makes itself while it is trained.

    They follow from its weights at the time, so those that are not trained yet have a place in checkpoints.
    """

    def tensors(self, number: int) -> Mapping[str, Tensor]:
        """The tensors of the items from `number` on, as far as they are there: the same on all processes."""

    def restore_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores the tensors that `tensors` returned, after `restore`."""

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the latest items, for their step's line of metrics."""

    def close(self) -> None:
        """Closes the source; no more items are asked for."""


class Stretch(NamedTuple):
    """Steps of a run that take as many items each, from a number of their own on."""

    first_step: int  # counted from 1
    first_item: int  # the number where the items of these steps begin
    per_step: int
    metrics: Mapping[str, float]  # what the lines of metrics of these steps say of them
    amount: str = ""  # of a step, for the console: "4 x 2,048 tokens"; empty where all steps are alike


class DataLoader:
    """Hands each step its packs, in order, without those that a rewind left out.

    Args:
        source     the items
        per_step   packs in a step
        total      packs of the whole run; the last step takes the rest. None: endless, steps decide.
        stretches  ranges of steps that differ in their items, in order; by default all steps are alike
    """

    def __init__(
        self, source: ItemSource, *, per_step: int, total: int | None, stretches: Sequence[Stretch] = ()
    ) -> None:
        self.source = source
        self.per_step = per_step
        self.total = total
        self.stretches = stretches or (Stretch(1, 0, per_step, {}),)
        self.next = 0
        self.excluded: set[int] = set()
        self.last_taken: list[int] = []

    @property
    def exhausted(self) -> bool:
        """Whether no pack is left for another step."""
        return self.total is not None and not any(n not in self.excluded for n in range(self.next, self.total))

    def stretch_of(self, step: int) -> Stretch:
        """The steps that `step` is one of."""
        return next(stretch for stretch in reversed(self.stretches) if stretch.first_step <= step)

    def take(self, step: int = 1) -> list[Item]:
        """The packs of `step`, which is the next; at least one, unless `exhausted`."""
        stretch = self.stretch_of(step)
        self.next = max(self.next, stretch.first_item)
        self.last_taken = []
        packs: list[Item] = []
        while len(packs) < stretch.per_step and (self.total is None or self.next < self.total):
            pack = self.source.at(self.next)  # also of one left out: a stream must be read through
            if self.next not in self.excluded:
                packs.append(pack)
                self.last_taken.append(self.next)
            self.next += 1
        return packs

    @property
    def generated(self) -> GeneratedItems | None:
        """The source, where the model itself makes the items."""
        return self.source if isinstance(self.source, GeneratedItems) else None

    def close(self) -> None:
        """Ends a source that makes its items."""
        if self.generated is not None:
            self.generated.close()

    def give_back(self) -> None:
        """Takes back the last `take`, since its step did not happen: the next one starts where it did."""
        if self.last_taken:
            self.next = self.last_taken[0]

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        return {"next": self.next, "excluded": sorted(self.excluded), "source": self.source.state(self.next)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the state that `state()` returned."""
        self.next = int(state["next"])
        self.excluded = set(state["excluded"])
        self.source.restore(state["source"])
