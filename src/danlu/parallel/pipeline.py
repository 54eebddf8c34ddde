"""How one process takes part in a pipeline: its list of actions, and the messages between stages.

No shape is ever sent: every stage knows the packs of a step, and with them the shape and type of the tensors that pass
between two chunks. Messages of one direction between two ranks are sent and received in one order, which the lists
promise, so they need no tags. Each direction has a process group, and with NCCL a stream, of its own: messages
downstream never wait for messages upstream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from danlu.parallel.comm import ALONE, Group
from danlu.parallel.phase import PHASE
from danlu.parallel.schedules import Action, evaluation_actions, peak_in_flight, placement, schedule, schedule_problems
from danlu.parallel.schedules.messages import UNFINISHED_SENDS

T = TypeVar("T")

_ROUND = 4
"""Micro-batches for each stage in a round of an evaluation: (p - 1)/4p of its time are a bubble."""


@dataclass(frozen=True)
class Pipeline:
    """The part of one process in a pipeline."""

    schedule: str
    chunks_per_rank: int
    stages: Group
    """The ranks that have the other layers of the same copy of the model, in the order of stages."""
    downstream: Group = ALONE
    """The same ranks, for messages to stages of a higher index."""
    upstream: Group = ALONE
    """The same ranks, for messages to stages of a lower index."""
    vertical_sync: bool = False
    """Whether all stages use one version of the weights for a micro-batch; otherwise each stage uses its own newest."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """The numbers of this process's chunks, rising."""
        return self._placement[self.stages.index]

    @property
    def num_chunks(self) -> int:
        """The number of chunks of the whole model."""
        return self.stages.size * self.chunks_per_rank

    @property
    def last_stage(self) -> int:
        """The index of the stage that has the last chunk."""
        return self.stage_of(self.num_chunks - 1)

    def stage_of(self, chunk: int) -> int:
        """The index of the stage that has a chunk."""
        return next(stage for stage, chunks in enumerate(self._placement) if chunk in chunks)

    @property
    def _placement(self) -> tuple[tuple[int, ...], ...]:
        return placement(self.schedule, self.stages.size, self.chunks_per_rank)

    def actions(self, micro_batches: int) -> tuple[Action, ...]:
        """Returns this process's actions in a step of `micro_batches` micro-batches, in order."""
        lists = schedule(self.schedule, self.stages.size, self.chunks_per_rank, micro_batches)
        return lists[self.stages.index]

    def evaluation_rounds(self, micro_batches: int) -> Iterator[tuple[Sequence[Action], range]]:
        """The forward passes of an evaluation in rounds, each with the numbers of its micro-batches.

        A round fills the pipeline and empties it; between rounds, processes may agree on whether to go on.
        """
        size = _ROUND * self.stages.size
        for start in range(0, micro_batches, size):
            numbers = range(start, min(start + size, micro_batches))
            own = evaluation_actions(self._placement, len(numbers))[self.stages.index]
            yield [action._replace(micro=start + (action.micro or 0)) for action in own], numbers

    @property
    def micro_batches_in_flight(self) -> float:
        """The number of micro-batches with activations kept at once by this process, in a step that fills the
        pipeline.
        """
        return peak_in_flight(self.actions(_ROUND * self.stages.size)) / self.chunks_per_rank

    @property
    def updates_each_micro_batch(self) -> bool:
        """Whether a step is one micro-batch, with an update of its own while others are in flight (PipeDream)."""
        return self.schedule == "pipedream"

    @property
    def weight_delay(self) -> int:
        """The number of updates that this stage's weights lack when a micro-batch begins.

        They are those of the micro-batches right before it that are still in flight, here or (`vertical_sync`) on the
        first stage.
        """
        if not self.updates_each_micro_batch:
            return 0
        return self.stages.size - 1 - (0 if self.vertical_sync else self.stages.index)

    def problems(self, micro_batches: int) -> list[str]:
        """Returns the reasons why the schedule is not possible with `micro_batches` micro-batches."""
        problems = schedule_problems(self.schedule, self.stages.size, self.chunks_per_rank, micro_batches)
        return [message for _, message in problems]

    def all_gather(self, value: T) -> list[T]:
        """The values of all stages, on all of them, each of which calls this."""
        values: list[T] = self.stages.all_gather_objects(value)
        return values

    def from_last(self, value: T) -> T:
        """The value of the stage that has the last chunk, on all stages, each of which calls this."""
        return self.stages.broadcast_object(value, self.last_stage)

    def from_last_to_first(self, x: Tensor) -> Tensor:
        """Sends x from the stage that has the last chunk to the first stage; all stages call this.

        Returns the received tensor on the first stage, and x itself on others. x has the same shape, type and device on
        all stages.
        """
        last = self.last_stage
        if last == 0 or self.stages.index not in (0, last):
            return x
        if self.stages.index == last:
            self.upstream.exchange([(x, 0)], [])
            return x
        received = torch.empty_like(x)
        self.upstream.exchange([], [(received, last)])
        return received


@dataclass
class Messages:
    """The messages of one run through a list of actions."""

    pipeline: Pipeline
    _sends: deque[Callable[[], None]] = field(default_factory=deque)

    def send(self, action: Action, message: Sequence[Tensor]) -> None:
        """Starts to send the action's tensors, one or several. Waits where many earlier messages have not arrived."""
        peer = action.peer
        assert peer is not None
        tensors = [x.contiguous() for x in message]
        wait = self._direction(peer).start_exchange([(x, peer) for x in tensors], [])

        def arrived(kept: Sequence[Tensor] = tensors) -> None:  # the tensors must not be freed before
            wait()

        self._sends.append(arrived)
        if len(self._sends) > UNFINISHED_SENDS:
            PHASE.begin(f"waiting until rank {self._rank(peer)} receives")
            self._sends.popleft()()

    def receive(self, action: Action, into: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Starts to receive the action's message into tensors; returns a function that waits for them and
        returns them.
        """
        peer = action.peer
        assert peer is not None
        wait = self._direction(self.pipeline.stages.index, source=peer).start_exchange([], [(x, peer) for x in into])

        def received() -> tuple[Tensor, ...]:
            PHASE.begin(f"waiting for the {action.what} of micro-batch {action.micro} from rank {self._rank(peer)}")
            wait()
            return into

        return received

    def finish(self) -> None:
        """Waits until all that was sent has arrived."""
        while self._sends:
            self._sends.popleft()()

    def _direction(self, to: int, source: int | None = None) -> Group:
        source = self.pipeline.stages.index if source is None else source
        return self.pipeline.downstream if to > source else self.pipeline.upstream

    def _rank(self, stage: int) -> int:
        """The global rank of a pipeline stage."""
        return self.pipeline.stages.ranks[stage]
