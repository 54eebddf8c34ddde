"""The expected memory and time of a training step, as plain data. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from danlu.core.memory_parts import MemoryParts
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.layout import Layout

if TYPE_CHECKING:
    from danlu.core.types import Role


@dataclass(frozen=True)
class HostBytes:
    """Bytes of one process outside of its device."""

    loading: int
    """The most while the weights are read and placed."""
    step: int
    """Bytes that wait there during a step: what `memory.offload` moved."""
    saving: int
    """The most while a checkpoint is written."""


@dataclass(frozen=True)
class RankMemory:
    """The memory of one process at the peak of a step."""

    parts: MemoryParts
    """Bytes that tensors take on the device. Kept values of deferred weight gradients are activations."""
    by_role: Mapping[Role, int]
    """The bytes of each model, of those that are in `weights` and `adapter`."""
    kv_cache: int = 0
    """Bytes of the rollout engine's cache, where it lies on the same device."""
    engine_copies: int = 0
    """Bytes of the weights that such an engine has in another order or type."""
    communication: int = 0
    """Bytes of the buffers that collectives copy through."""
    reserved: int | None = None
    """Bytes that the allocator of the device holds at that time; None: as many as are allocated, as on a CPU."""
    host: HostBytes = HostBytes(0, 0, 0)
    device: str = ""
    """The device of a device map; empty where all of the process is on one device."""

    @property
    def allocated(self) -> int:
        """Bytes of all tensors."""
        return self.parts.total + self.kv_cache + self.engine_copies + self.communication


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of one step of the slowest process."""

    compute: Mapping[str, float]
    """Kind of operation ("product", "attention", "norm", "update") -> seconds."""
    communication: Mapping[str, float]
    """Axis of the layout -> seconds of its collectives, hidden ones included."""
    exposed: float
    """Seconds of communication in which the process computes nothing."""
    bubble: float
    """Seconds in which it waits for other stages of its pipeline."""
    total: float
    """Seconds from the start of the step to its end."""
    extrapolated: bool = False
    """Whether some sizes lie outside of those that were measured."""


PhaseName = Literal["hand_over", "rollout", "reward", "scoring", "update"]
"""The phases that a run's metrics have: `rollout_s`."""


@dataclass(frozen=True)
class Phase:
    """A phase between the beginning of one rollout and that of the next."""

    name: PhaseName
    seconds: float | None
    """None: unknown."""
    assumption: str = ""
    """A sentence on what was assumed, or why it is unknown."""


@dataclass(frozen=True)
class RlSeconds:
    """The time of a rollout and of the steps that train on it."""

    phases: tuple[Phase, ...]
    steps: int
    """Steps that train on a rollout."""
    rolls_out_aside: bool = False
    """Whether answers are drawn while the trainer works (`rollout.staleness`)."""

    @property
    def total(self) -> float:
        """Seconds from one rollout to the next, without phases that are unknown: of asynchronous rollouts those of the
        slower side."""
        known = {phase.name: phase.seconds or 0.0 for phase in self.phases}
        if not self.rolls_out_aside:
            return sum(known.values())
        rollout = known.pop("rollout", 0.0)
        return max(rollout, sum(known.values()))

    @property
    def slower(self) -> Literal["rollouts", "trainer"] | None:
        """The side that the other one waits for; None where they take turns."""
        if not self.rolls_out_aside:
            return None
        rollout = next(phase.seconds or 0.0 for phase in self.phases if phase.name == "rollout")
        return "rollouts" if rollout >= self.total else "trainer"


@dataclass(frozen=True)
class StagePlan:
    """One stage of a pipeline, as its first process runs it, or one device of a device map; else the only one."""

    memory: RankMemory
    traffic: tuple[CollectiveTraffic, ...]
    """Bytes that the process sends in a step, by axis and collective."""


@dataclass(frozen=True)
class StepPlan:
    """The plan of a step of one recipe in one layout."""

    layout: Layout
    micro: int
    """Packed sequences of a micro-batch."""
    micro_batches: int
    """Micro-batches of a process in a step."""
    stages: tuple[StagePlan, ...]
    seconds: StepSeconds | None
    """None where neither a profile of the machine nor figures of its cards are known."""
    tokens: int
    """Tokens of a step over all processes."""
    flops: int
    """Operations of the model in a step over all processes, as MFU counts them."""
    rollout: RlSeconds | None = None
    """The seconds from one rollout to the next, by phase; None where no answers are drawn, or speeds are not known.
    The step's own are then of rows of full length, and the phase `update` is of the drawn answers."""
    assumptions: tuple[str, ...] = field(default=())
    """Sentences on what was assumed where facts were missing: full packs, an unmeasured link."""

    @property
    def worst(self) -> StagePlan:
        """The stage that allocates most; of equal ones the first."""
        return max(self.stages, key=lambda stage: stage.memory.allocated)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that all processes train on in a second."""
        return None if self.seconds is None else self.tokens / self.seconds.total

    def mfu(self, peak: float) -> float | None:
        """The share of the peak FLOP/s of all processes that the model's operations take; peak: of one."""
        return None if self.seconds is None else self.flops / (self.seconds.total * self.layout.world * peak)

    def hours(self, tokens: int) -> float | None:
        """Hours of a training on a number of tokens."""
        return None if self.seconds is None else math.ceil(tokens / self.tokens) * self.seconds.total / 3600
