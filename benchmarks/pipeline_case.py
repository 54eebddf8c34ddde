"""A pipeline schedule and how its steps went: the bubble and activations in flight, beside what they are to be."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from danlu.parallel.schedules import chunks_per_rank, schedule
from danlu.parallel.timeline import TimelineEvent, timeline_line, timeline_name
from danlu.planning.action_times import mean_times
from danlu.planning.pipeline_simulation import bubble, bubble_formula, in_flight_formula, simulate


@dataclass(frozen=True)
class Case:
    """A schedule, and how its steps went."""

    kind: str
    stages: int
    micro_batches: int
    steps: list[list[TimelineEvent]]  # of each the events of all ranks
    in_flight: tuple[int, ...] = ()  # by rank; empty where they were not counted

    @property
    def shape(self) -> tuple[str, int, int, int]:
        """The arguments of `schedule`."""
        return self.kind, self.stages, chunks_per_rank(self.kind), self.micro_batches

    @property
    def formula(self) -> float:
        """The bubble that the schedule's formula gives."""
        _, ratio = bubble_formula(*self.shape)
        assert ratio is not None, "there are as many micro-batches as the formulas hold for"
        return ratio

    @property
    def measured(self) -> float:
        return statistics.median(bubble(events).ratio for events in self.steps)

    @property
    def simulated(self) -> float:
        """The bubble of simulations with the mean times of each step."""
        lists, num_chunks = schedule(*self.shape), self.stages * chunks_per_rank(self.kind)
        simulations = [simulate(lists, mean_times(events, num_chunks)) for events in self.steps]
        return statistics.median(bubble(events).ratio for events in simulations)

    @property
    def within(self) -> float:
        """The longest idle time between a rank's own first and last pass, over the busy time of a rank."""
        bubbles = [bubble(events) for events in self.steps]
        return statistics.median(max(each.inner_idle_s) / (each.busy_s / self.stages) for each in bubbles)

    @property
    def promised_in_flight(self) -> tuple[int, ...]:
        return tuple(in_flight_formula(self.kind, rank, *self.shape[1:])[1] for rank in range(self.stages))

    @property
    def differs_in_flight(self) -> bool:
        return bool(self.in_flight) and self.in_flight != self.promised_in_flight

    def write(self, folder: Path) -> None:
        """The last step as the timeline of a run, in a folder of its own."""
        run = folder / f"{self.kind}-p{self.stages}-m{self.micro_batches}"
        run.mkdir(parents=True, exist_ok=True)
        for rank in range(self.stages):
            lines = [timeline_line(event, len(self.steps)) for event in self.steps[-1] if event.rank == rank]
            (run / timeline_name(rank)).write_text("".join(f"{line}\n" for line in lines))
