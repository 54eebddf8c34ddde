"""A step as its ranks run it, action by action: seconds, and the bytes that come and go. Imports no torch.

The lists are those of the executor (`training.executor`), and the bytes follow what it keeps and frees: activations
from a chunk's forward to its backward pass, values that wait for a put-off weight gradient, gradients from the first
backward pass to the update, received tensors from their receive on, and sent ones until they have arrived. Seconds are
those of `pipeline_simulation`. Bytes depend on the order of a rank's own list alone, not on seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from danlu.parallel.schedules import Action
from danlu.parallel.schedules.messages import UNFINISHED_SENDS
from danlu.planning.layer_memory import PassBytes

if TYPE_CHECKING:
    from danlu.parallel.timeline import TimelineEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCost:
    """Seconds and bytes of one micro-batch's passes through one chunk of the model, on one rank.

    Bytes of a pass are those of this micro-batch in this chunk alone, with all that it has kept by then: the chunk's
    input, its output, and in the backward passes the gradients of both. Gradients of weights that earlier micro-batches
    have made are left out.
    """

    forward: float = 0.0
    """Seconds, as are the next five."""
    input: float = 0.0
    weight: float = 0.0
    backward: float | None = None
    """A whole backward pass; None: input and weight gradient together."""
    send: float = 0.0
    """A message of this chunk, until it has arrived: its output, or the gradient of its input."""
    reduce: float = 0.0
    """The sum of the chunk's gradients over data ranks."""
    kept: int = 0
    """Bytes from the end of the forward pass to the backward pass, with the chunk's input and output."""
    forward_peak: int = 0
    """The most bytes in the forward pass, without the loss."""
    loss: int = 0
    """Bytes of the loss in addition to `kept`, at the end of the last chunk's forward pass: logits."""
    backward_peak: int = 0
    """The most bytes in a whole backward pass, where weights have their gradients already."""
    first_backward: PassBytes | None = None
    """The same in the pass that makes the chunk's gradients first; None: as if all of them were there at its peak."""
    input_peak: int = 0
    """The most bytes in the pass that leaves weight gradients for later, with what it puts off."""
    kept_for_weight: int = 0
    """Bytes that wait from then on for the weight pass."""
    weight_peak: int = 0
    """The most bytes in the weight pass."""
    first_weight: PassBytes | None = None
    """The same in the pass that makes the chunk's gradients first; None: as if all of them were there at its peak."""
    gradients: int = 0
    """Bytes of the gradients of the chunk's weights."""
    gradients_of_input: int = 0
    """The bytes of those that the pass makes which leaves the others for later: norms, embedding, head."""
    gradients_of_forward: int = 0
    """The bytes of those that each forward pass makes, and holds until its backward pass: the head's, by the loss."""
    whole_gradients: int = 0
    """Bytes of whole gradients, besides those of shards, that a pass which makes gradients has at a time."""
    gathered: int = 0
    """Bytes of whole parameters that are gathered from shards for a pass."""
    reduce_buffer: int = 0
    """Bytes that the sum of the gradients copies them to."""
    message: int = 0
    """Bytes of the hidden states that go to the next chunk, and of their gradient, which comes back."""
    frozen_message: int = 0
    """Bytes of hidden states of frozen models, which go the same way, are not kept, and have no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """Seconds and bytes of one rank that belong to none of its chunks."""

    update: float = 0.0
    """Seconds of the optimizer's step."""
    keeps_gathered: bool = False
    """Whether gathered parameters stay from a chunk's first forward to its last backward pass (zero1, zero2)."""
    trained: int = 0
    """Bytes of the trained weights: of one version in PipeDream's stash."""
    weight_delay: int = 0
    """The number of updates that a micro-batch's weights lack (`parallel.pipeline.Pipeline.weight_delay`)."""


class WalkBytes(NamedTuple):
    """Bytes of one rank at a moment of a step, besides those that are there throughout: weights, optimizer state."""

    activations: int
    logits: int
    """The loss's own bytes, and the head's gradients that it has made and that no backward pass has handed out yet."""
    gradients: int
    gathered: int
    stash: int
    """Versions of weights before the newest (PipeDream)."""
    queue: int
    """Values that wait for put-off weight gradients."""
    messages: int
    """Tensors that were received and are not used yet, wait to be sent, or are on their way."""

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(self)


@dataclass(frozen=True)
class StageWalk:
    """The step of one rank."""

    events: tuple[TimelineEvent, ...]
    """One for each action, in their order."""
    bytes: tuple[int, ...]
    """The most bytes at once during each action."""
    index: int
    """The number of the action with the most bytes, the first of equal ones."""
    parts: WalkBytes
    """These bytes."""

    @property
    def peak(self) -> int:
        """The most bytes at once."""
        return self.parts.total


Costs = Sequence[ChunkCost] | Sequence[Sequence[ChunkCost]]
"""The cost of each chunk of the model; or for each micro-batch that of each chunk, where they differ in size."""


def walk(lists: Sequence[Sequence[Action]], costs: Costs, ranks: Sequence[RankCost] = ()) -> tuple[StageWalk, ...]:
    """Goes through the list of each rank; returns its events and its bytes.

    lists: of `schedules.schedule`, or of `schedules.unsplit` without a pipeline. ranks: empty, or for each list what
    belongs to no chunk.
    """
    by_micro = _by_micro(costs, lists)
    ranks = ranks or (RankCost(),) * len(lists)
    events = step_events(lists, costs, ranks)
    walks = []
    for actions, own, of_rank in zip(lists, ranks, events, strict=True):
        moments = rank_bytes(actions, by_micro, own)
        totals = tuple(map(sum, moments))
        index = max(range(len(totals)), key=totals.__getitem__)
        walks.append(StageWalk(tuple(of_rank), totals, index, moments[index]))
    return tuple(walks)


def step_events(
    lists: Sequence[Sequence[Action]], costs: Costs, ranks: Sequence[RankCost]
) -> list[list[TimelineEvent]]:
    """The events of each rank, as `walk` has them, without bytes."""
    from danlu.planning.pipeline_simulation import simulate_seconds  # a plan of memory needs no events

    by_micro = _by_micro(costs, lists)
    seconds = [
        [_seconds(by_micro, own, action) for action in actions] for actions, own in zip(lists, ranks, strict=True)
    ]
    events: list[list[TimelineEvent]] = [[] for _ in lists]
    for event in simulate_seconds(lists, seconds):
        events[event.rank].append(event)
    return events


def _by_micro(costs: Costs, lists: Sequence[Sequence[Action]]) -> Sequence[Sequence[ChunkCost]]:
    if isinstance(costs[0], ChunkCost):
        micro_batches = 1 + max(action.micro or 0 for actions in lists for action in actions)
        return [costs] * micro_batches  # type: ignore[list-item]
    return costs  # type: ignore[return-value]


def _seconds(costs: Sequence[Sequence[ChunkCost]], rank: RankCost, action: Action) -> float:
    if action.kind == "receive":
        return 0.0
    if action.chunk is None:
        return rank.update
    cost = costs[action.micro or 0][action.chunk]
    if action.kind == "backward" and cost.backward is None:
        return cost.input + cost.weight
    return getattr(cost, action.kind)  # type: ignore[no-any-return]


def rank_bytes(
    actions: Sequence[Action], costs: Sequence[Sequence[ChunkCost]], rank: RankCost = RankCost()
) -> list[WalkBytes]:
    """The bytes of one rank at the moment of each action when they are the most.

    costs: for each micro-batch that of each chunk of the model.
    """
    moments = []
    for memory in _walked(actions, costs, rank):
        moments.append(memory.fullest)
        memory.most = -1
    return moments


def peak_bytes(
    actions: Sequence[Action], costs: Sequence[Sequence[ChunkCost]], rank: RankCost = RankCost()
) -> WalkBytes:
    """The first of the moments of `rank_bytes` with the most bytes, in less time."""
    *_, memory = _walked(actions, costs, rank)
    return memory.fullest


def _walked(actions: Sequence[Action], costs: Sequence[Sequence[ChunkCost]], rank: RankCost) -> Iterator[_RankMemory]:
    """Yields the bytes of a rank behind each action."""
    each_updates = any(action.kind == "update" and action.micro is not None for action in actions)
    numbers = list(enumerate(actions))
    gradient_passes = [(number, action) for number, action in numbers if action.kind in ("backward", "weight")]
    last_pass = {(action.chunk, action.micro if each_updates else None): number for number, action in gradient_passes}
    last_reduce = {action.micro: number for number, action in numbers if action.kind == "reduce"}
    is_last, is_last_reduce = frozenset(last_pass.values()), frozenset(last_reduce.values())
    updates = sum(action.kind == "update" for action in actions)
    memory = _RankMemory(costs, rank, updates if each_updates else 0)
    for number, action in numbers:
        memory.take(action, is_last=number in is_last)
        if number in is_last_reduce:
            memory.buffers = 0
        yield memory


_NOTHING = WalkBytes(0, 0, 0, 0, 0, 0, 0)


class _Message(NamedTuple):
    """A message that is on its way, with the pass that keeps its hidden states; None of a gradient."""

    place: tuple[int, int] | None
    message: int
    frozen: int


@dataclass
class _RankMemory:
    """The bytes of one rank between two actions."""

    costs: Sequence[Sequence[ChunkCost]]
    rank: RankCost
    updates: int
    """Updates within the list; 0 where the only one ends it."""
    activations: int = 0
    head_gradients: int = 0
    """Those of forward passes without a backward pass."""
    gradients: int = 0
    queue: int = 0
    messages: int = 0
    buffers: int = 0
    gathered: int = 0
    versions: int = 0
    most: int = -1
    """The most bytes at once so far."""
    fullest: WalkBytes = _NOTHING
    """The parts of these."""
    _kept: dict[tuple[int, int], int] = field(default_factory=dict)
    """(chunk, micro-batch) in flight -> its bytes."""
    _received: set[tuple[int, int]] = field(default_factory=set)
    """(chunk, micro-batch) with an input that came as a message."""
    _gradients_there: dict[int, int] = field(default_factory=dict)
    """Chunk -> bytes of its gradients that are there; a chunk that has had no pass is left out."""
    _unfinished: deque[_Message] = field(default_factory=deque)
    _updated: int = 0

    def take(self, action: Action, *, is_last: bool) -> None:
        """Takes an action. is_last: it is the last that makes gradients of its chunk."""
        kind, chunk, micro, _, what = action
        if kind == "update":
            self._update(action)
            return
        assert chunk is not None
        place = chunk, micro or 0
        cost = self.costs[place[1]][chunk]
        match kind:
            case "forward":
                self._forward(place, cost)
            case "backward" | "input":
                self._backward(place, cost, puts_off=kind == "input")
            case "weight":
                self._weight(chunk, cost)
            case "send":
                self._send(place, cost, is_gradient=what == "gradient")
            case "receive":
                self._receive(place, cost, is_gradient=what == "gradient")
            case _:
                self._note()
        if is_last:  # buckets are filled as the pass ends, when its activations are gone
            self.buffers += cost.reduce_buffer
            self.gathered -= cost.gathered if self.rank.keeps_gathered else 0

    def _note(
        self, activations: int = 0, logits: int = 0, gradients: int = 0, gathered: int = 0, queue: int = 0
    ) -> None:
        """Keeps the present bytes, and those in addition of a pass, where they are the most so far."""
        activations, logits = self.activations + activations, self.head_gradients + logits
        gradients, gathered = self.gradients + gradients, self.gathered + gathered
        queue, messages = self.queue + queue, self.messages + self.buffers
        stash = self.versions * self.rank.trained
        total = activations + logits + gradients + gathered + stash + queue + messages
        if total > self.most:
            self.most = total
            self.fullest = WalkBytes(activations, logits, gradients, gathered, stash, queue, messages)

    def _before(self, place: tuple[int, int]) -> ChunkCost | None:
        """The cost of the chunk before one, for the same micro-batch."""
        chunk, micro = place
        return self.costs[micro][chunk - 1] if chunk else None

    def _gathering(self, cost: ChunkCost) -> int:
        return 0 if self.rank.keeps_gathered else cost.gathered

    def _forward(self, place: tuple[int, int], cost: ChunkCost) -> None:
        before, shared, frozen = self._before(place), 0, 0
        if before is not None:
            frozen = before.frozen_message
            if place in self._received:
                self._received.remove(place)
                self.messages -= before.message
            else:  # the output of a chunk of this rank, which keeps it
                shared = before.message
        if self.rank.keeps_gathered and place[1] == 0:
            self.gathered += cost.gathered
        gathered = self._gathering(cost)
        self._note(cost.forward_peak - shared, gathered=gathered)
        self._note(cost.kept - shared, cost.loss + cost.gradients_of_forward, gathered=gathered)  # at the loss
        kept = self._kept[place] = cost.kept - shared
        self.activations += kept
        self.head_gradients += cost.gradients_of_forward
        self.messages -= frozen
        if place[0] + 1 < len(self.costs[place[1]]):
            self.messages += cost.frozen_message  # until they are sent, or used here

    def _backward(self, place: tuple[int, int], cost: ChunkCost, *, puts_off: bool) -> None:
        kept = self._kept.pop(place)
        shared = cost.kept - kept
        if place[0] + 1 < len(self.costs[place[1]]):
            self.messages -= cost.message  # the gradient of its output is among the pass's own bytes
        self.activations -= kept
        self.head_gradients -= cost.gradients_of_forward
        missing = self._missing(place[0], cost.gradients_of_input if puts_off else cost.gradients)
        peak = PassBytes(cost.input_peak if puts_off else cost.backward_peak, missing)
        if missing and not puts_off and cost.first_backward is not None and place[0] not in self._gradients_there:
            peak = cost.first_backward
        self._note(
            peak.activations - shared,
            gradients=peak.gradients + cost.whole_gradients,
            gathered=self._gathering(cost),
        )
        self._make(place[0], missing)
        if puts_off:
            self.queue += cost.kept_for_weight
        if (before := self._before(place)) is not None:
            self.messages += before.message  # the gradient of its input, until it is sent or used here
        if self._unfinished:
            self.messages += sum(each.message for each in self._unfinished if each.place == place)

    def _weight(self, chunk: int, cost: ChunkCost) -> None:
        missing = self._missing(chunk, cost.gradients)
        peak = PassBytes(cost.weight_peak, missing)
        if missing and cost.first_weight is not None:
            peak = cost.first_weight
        self.queue -= cost.kept_for_weight
        self._note(queue=peak.activations, gradients=peak.gradients + cost.whole_gradients)
        self._make(chunk, missing)

    def _missing(self, chunk: int, wanted: int) -> int:
        return max(0, wanted - self._gradients_there.get(chunk, 0))

    def _make(self, chunk: int, missing: int) -> None:
        self._gradients_there[chunk] = self._gradients_there.get(chunk, 0) + missing
        self.gradients += missing

    def _send(self, place: tuple[int, int], cost: ChunkCost, *, is_gradient: bool) -> None:
        if is_gradient:
            before = self._before(place)
            assert before is not None, "the first chunk has no gradient of its input"
            self._unfinished.append(_Message(None, before.message, 0))
        else:
            self._unfinished.append(_Message(place, cost.message, cost.frozen_message))
        self._note()
        if len(self._unfinished) > UNFINISHED_SENDS:
            arrived = self._unfinished.popleft()
            is_kept = arrived.place in self._kept
            self.messages -= arrived.frozen + (0 if is_kept else arrived.message)

    def _receive(self, place: tuple[int, int], cost: ChunkCost, *, is_gradient: bool) -> None:
        if is_gradient:
            self.messages += cost.message
        else:
            before = self._before(place)
            assert before is not None, "the first chunk receives no activation"
            self._received.add(place)
            self.messages += before.message + before.frozen_message
        self._note()

    def _update(self, action: Action) -> None:
        if action.micro is not None:
            self._updated += 1
            self.versions = stashed_versions(self._updated, self.updates, self.rank.weight_delay)
        self._note()
        if action.micro is not None:
            self.gradients -= sum(self._gradients_there.values())
            self._gradients_there.clear()


def stashed_versions(newest: int, micro_batches: int, delay: int) -> int:
    """Versions of weights before the newest that later passes use (`parallel.weight_stash`), after `newest` updates of
    as many micro-batches as a turn has. delay: the updates that a micro-batch's weights lack.
    """
    if newest >= micro_batches:
        return 0
    lowest, highest = max(0, newest - delay), max(0, micro_batches - 1 - delay)
    return max(0, min(highest, newest - 1) - lowest + 1)
