"""Scheduling: which tokens a forward pass computes, and where their keys and values go, without a model or torch.

A sequence is (computed, known) tokens: of a growing one all but the last are computed, of a prompt none. So prompts
read in chunks, decoding, and reading again after a preemption are the same case.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from danlu.inference.blocks import BlockPool
from danlu.inference.sequence_state import SequenceState


class Chunk(NamedTuple):
    """Tokens `start` to `stop` of a sequence, which a forward pass computes. Those before `start` are cached."""

    sequence: int
    """The engine's number of the sequence, one answer of one request."""
    start: int
    stop: int
    blocks: Sequence[int]
    """Block i of the pool holds the tokens from i x block on; there are enough for `stop` tokens."""
    length: int
    """Tokens of the sequence's prompt. Dynamic rotary scaling rotates each of them by it, and a token behind it by its
    own position + 1, as when it was drawn."""
    rotary_length: int = 0
    """Tokens that the text may have at last, by which LongRoPE rotates all of them."""
    slot: int = -1
    """The slot of the sequence's state in the pool of states, or of its newest tokens, where the cache has slots."""


@dataclass(frozen=True)
class Plan:
    """A forward pass, and the changes of the pool before it, in the order of the fields."""

    swapped_out: tuple[tuple[int, int], ...] = ()
    """Pairs (block of the pool, block of the host's pool) that are copied to the host."""
    swapped_in: tuple[tuple[int, int], ...] = ()
    """Pairs (block of the host's pool, block of the pool) that are copied back."""
    copies: tuple[tuple[int, int], ...] = ()
    """Pairs (from, to) of blocks that several sequences share and that one is about to write in."""
    state_copies: tuple[tuple[int, int], ...] = ()
    """Pairs (from, to) of slots of sequences that continue from another one's states or newest tokens."""
    fresh: tuple[int, ...] = ()
    """Blocks that are written from their beginning: they are cleared, since their old content may be NaN."""
    chunks: tuple[Chunk, ...] = ()
    """Those of one token first."""
    preempted: tuple[int, ...] = ()
    """Sequences that lost their place; they come back by themselves."""


@dataclass
class Counters:
    """Counts of an engine's schedulers; the fields are those of `engine.EngineStatistics`."""

    passes: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    swap_fallbacks: int = 0
    peak_blocks: int = 0
    slots: int = 0
    empty_slots: int = 0


class _PlanBuilder:
    """A plan while it is made."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens that the pass can still take
        self.swapped_out: list[tuple[int, int]] = []
        self.swapped_in: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.state_copies: list[tuple[int, int]] = []
        self.fresh: list[int] = []
        self.chunks: list[Chunk] = []
        self.preempted: list[int] = []
        self.planned: set[int] = set()  # numbers of the sequences with a chunk

    def add(self, sequence: SequenceState, stop: int) -> None:
        """Takes a sequence's tokens up to `stop` into the pass."""
        start, length = sequence.computed, sequence.prompt_length
        self.chunks.append(
            Chunk(sequence.number, start, stop, sequence.blocks, length, sequence.rotary_length, sequence.slot)
        )
        self.planned.add(sequence.number)
        self.budget -= stop - start

    def build(self) -> Plan:
        self.chunks.sort(key=lambda chunk: chunk.stop - chunk.start > 1)
        return Plan(
            tuple(self.swapped_out),
            tuple(self.swapped_in),
            tuple(self.copies),
            tuple(self.state_copies),
            tuple(self.fresh),
            tuple(self.chunks),
            tuple(self.preempted),
        )


class Scheduler:
    """Continuous batching with chunked prefill, as in vLLM: each pass takes all growing sequences, then prompts.

    The earliest sequence always goes on: blocks that it lacks are taken from the latest, which is preempted. No
    sequence is added that would need more blocks than there are, so each finishes.

    Args:
        pool: the blocks. host: those of the host's memory, for preemption by swap.
        block: tokens of a block. batch_tokens: the most of a pass. running_limit: the most sequences that have blocks.
        preempt: the treatment of a sequence that has to make room.
        window: the largest of all layers' attention windows, in tokens; None where a layer has none. Blocks that it has
            passed are given back.
        has_states: whether layers keep a state of each sequence that runs. One that makes room is read again then.
        keeps_newest: whether the tokens of a block that is not full are kept as they are, for each sequence that runs.
            One that is swapped out reads them again.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block: int,
        batch_tokens: int,
        running_limit: int,
        preempt: Literal["recompute", "swap"] = "recompute",
        host: BlockPool | None = None,
        counters: Counters | None = None,
        window: int | None = None,
        has_states: bool = False,
        keeps_newest: bool = False,
    ) -> None:
        assert not has_states or preempt == "recompute", "states are not swapped out"
        self.window, self._keeps_newest = window, keeps_newest
        has_slots = has_states or keeps_newest
        self._free_slots: list[int] | None = list(range(running_limit))[::-1] if has_slots else None
        self._state_copies: list[tuple[int, int]] = []
        self.pool, self.host = pool, host or BlockPool(0)
        self.block, self.batch_tokens, self.running_limit = block, batch_tokens, running_limit
        self.preempt = preempt
        self.counters = counters or Counters()
        self.running: list[SequenceState] = []  # by number
        self.waiting: list[SequenceState] = []  # by number; without blocks of the pool
        self.sequences: dict[int, SequenceState] = {}

    def add(self, sequence: SequenceState) -> None:
        """Takes a sequence of which nothing is computed."""
        assert self._blocks_of(len(sequence.tokens)) <= self.pool.blocks, "the pool cannot hold the sequence"
        self.sequences[sequence.number] = sequence
        insort(self.waiting, sequence, key=_number)

    def fork(self, parent: SequenceState, children: Sequence[SequenceState]) -> None:
        """Adds sequences that begin with the parent's computed prompt, and share its blocks as long as they can run.

        The tokens of a child are the prompt's and the one that was drawn for it.
        """
        parent.forks = 0
        for child in children:
            self.sequences[child.number] = child
            if len(self.running) >= self.running_limit:
                insort(self.waiting, child, key=_number)
                continue
            child.blocks, child.computed, child.passed = list(parent.blocks), parent.computed, parent.passed
            child.digests = None if parent.digests is None else list(parent.digests)
            child.remembered = parent.remembered
            for block in child.own_blocks:
                self.pool.share(block)
            self._take_slot(child)
            if child.slot >= 0:
                self._state_copies.append((parent.slot, child.slot))
            self.counters.prompt_tokens_reused += child.computed
            insort(self.running, child, key=_number)

    def remove(self, sequence: SequenceState) -> None:
        """Gives the blocks of a sequence back."""
        del self.sequences[sequence.number]
        (self.running if sequence.blocks else self.waiting).remove(sequence)
        self._release(sequence)
        self._release_host(sequence)

    def plan(self) -> Plan:
        """The next pass: growing sequences, then prompts that are being read, then those that wait.

        It has a chunk whenever there is a sequence. The blocks that it needs are taken already.
        """
        builder = _PlanBuilder(self.batch_tokens)
        builder.state_copies, self._state_copies = self._state_copies, []
        growing = [sequence for sequence in self.running if sequence.uncomputed == 1]
        reading = [sequence for sequence in self.running if sequence.uncomputed > 1]
        for sequence in growing:
            if builder.budget > 0 and sequence.blocks:  # else it was preempted meanwhile
                self._plan_growing(sequence, builder)
        starved = False
        for sequence in reading:
            if sequence.blocks:
                starved |= not self._plan_reading(sequence, builder)
        if not builder.preempted and not starved:
            self._admit(builder)
        return builder.build()

    def commit(self, plan: Plan, rejected: Mapping[int, int] | None = None) -> None:
        """Records that the pass of a plan is done: its tokens are computed, and full blocks enter the prefix cache.

        rejected: the number of drafts of a sequence that are not kept, by its number. Those that are kept are among the
        known tokens by now.
        """
        counters = self.counters
        counters.passes += 1
        counters.peak_blocks = max(counters.peak_blocks, self.pool.used)
        for chunk in plan.chunks:
            sequence = self.sequences[chunk.sequence]
            sequence.computed = chunk.stop
            if rejected and chunk.sequence in rejected:
                sequence.computed -= rejected[chunk.sequence]
                for block in sequence.blocks[self._blocks_of(len(sequence.tokens)) :]:
                    self.pool.release(block)
                del sequence.blocks[self._blocks_of(len(sequence.tokens)) :]
            if sequence.computed // self.block > sequence.remembered:
                sequence.remember(self.pool, self.block)
            self._give_back_passed(sequence)
            if chunk.start < chunk.length:
                counters.prompt_tokens_computed += min(chunk.stop, chunk.length) - chunk.start
        counters.slots += self.block * sum(len(sequence.own_blocks) for sequence in self.running)
        counters.empty_slots += sum(len(each.blocks) * self.block - each.computed for each in self.running)

    def _plan_growing(self, sequence: SequenceState, builder: _PlanBuilder) -> None:
        """The last known token and its drafts; others make room for them."""
        self._cut_drafts(sequence)
        stop = len(sequence.tokens) + len(sequence.drafts)
        if stop - sequence.computed > builder.budget:
            return
        while self._lacking(sequence, stop) > self.pool.free:
            latest = next(other for other in reversed(self.running) if other.number not in builder.planned)
            self._preempt(latest, builder)
            if latest is sequence:
                return
        self._take_blocks(sequence, stop, builder)
        builder.add(sequence, stop)

    def _plan_reading(self, sequence: SequenceState, builder: _PlanBuilder) -> bool:
        """Plans as much of the rest of a prompt as budget and free blocks allow. False where blocks were lacking."""
        self._cut_drafts(sequence)
        room = (len(sequence.blocks) + self.pool.free) * self.block - sequence.computed
        # Without a chunk so far all that run are being read. `_admit` saw blocks for all that these know, and what
        # others took since then they have given back.
        assert room > 0 or builder.chunks, "nothing goes on: the blocks that a sequence was let in for are gone"
        wanted = len(sequence.tokens) + len(sequence.drafts) - sequence.computed
        stop = sequence.without_a_part_of_the_drafts(sequence.computed + min(wanted, room, builder.budget))
        if stop > sequence.computed:
            self._take_blocks(sequence, stop, builder)
            builder.add(sequence, stop)
        return room >= min(wanted, builder.budget)

    def _cut_drafts(self, sequence: SequenceState) -> None:
        """Drops the drafts that no pass has room for after the last known token, since all are checked in one pass."""
        if len(sequence.drafts) >= self.batch_tokens:
            del sequence.drafts[self.batch_tokens - 1 :]

    def _admit(self, builder: _PlanBuilder) -> None:
        """Lets sequences in that wait, as long as there are blocks for all they know and one more for each that runs.

        A sequence waits while its next block is being read for another, and others are let in before it.
        """
        if not self.waiting:
            return
        being_read = {digest for sequence in self.running for digest in sequence.digests_to_come(self.block)}
        promised = sum(map(self._promised, self.running))
        skipped = 0
        while skipped < min(len(self.waiting), self.running_limit):
            if builder.budget == 0 or len(self.running) >= self.running_limit:
                return
            sequence = self.waiting[skipped]
            self._cut_drafts(sequence)
            cached = [] if sequence.host_blocks else sequence.find_cached(self.pool, self.block)
            if not sequence.host_blocks and sequence.next_digest(len(cached), self.block) in being_read:
                skipped += 1
                continue
            wanted = len(sequence.tokens) + len(sequence.drafts)
            kept = sequence.passed if sequence.host_blocks else len(cached)
            lacking = self._blocks_of(wanted) - kept + sum(map(self.pool.is_free, cached))
            if self.running and lacking + sequence.forks + promised > self.pool.free:
                return
            computed = sequence.computed if sequence.host_blocks else len(cached) * self.block
            stop = sequence.without_a_part_of_the_drafts(min(wanted, computed + builder.budget))
            if stop == computed:
                return
            del self.waiting[skipped]
            insort(self.running, sequence, key=_number)
            self._bring_in(sequence, cached, builder)
            self._take_blocks(sequence, stop, builder)
            builder.add(sequence, stop)
            being_read.update(sequence.digests_to_come(self.block))
            promised += self._promised(sequence)

    def _bring_in(self, sequence: SequenceState, cached: list[int], builder: _PlanBuilder) -> None:
        """Gives a sequence that is let in its blocks back from the host, or those of the prefix cache; and a slot."""
        self._take_slot(sequence)
        if sequence.host_blocks:
            blocks = [self.pool.allocate() for _ in sequence.host_blocks]
            builder.swapped_in += zip(sequence.host_blocks, blocks, strict=True)
            sequence.blocks = [*blocks[:1] * sequence.passed, *blocks]
            self._release_host(sequence)
            self._count_read_again(sequence)
            return
        for block in cached:
            self.pool.share(block)
        sequence.blocks = cached
        sequence.remembered = len(cached)
        sequence.computed = len(cached) * self.block
        self.counters.prompt_tokens_reused += min(sequence.computed, sequence.prompt_length)
        self._count_read_again(sequence)

    def _count_read_again(self, sequence: SequenceState) -> None:
        computed_before = len(sequence.tokens) - 1  # but for the last, which is new; nothing of a prompt's
        self.counters.recomputed_tokens += max(0, computed_before - max(sequence.computed, sequence.prompt_length))

    def _preempt(self, sequence: SequenceState, builder: _PlanBuilder) -> None:
        """Takes all blocks from a sequence and puts it back to those that wait, at the place of its arrival."""
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=_number)
        builder.preempted.append(sequence.number)
        self.counters.preemptions += 1
        kept = sequence.computed // self.block if self._keeps_newest else self._blocks_of(sequence.computed)
        computed_blocks = sequence.blocks[sequence.passed : kept]
        if self.preempt == "swap" and computed_blocks and len(computed_blocks) <= self.host.free:
            self.counters.swaps += 1
            sequence.computed = min(sequence.computed, kept * self.block)
            sequence.host_blocks = [self.host.allocate() for _ in computed_blocks]
            builder.swapped_out += zip(computed_blocks, sequence.host_blocks, strict=True)
        else:
            self.counters.swap_fallbacks += self.preempt == "swap" and len(computed_blocks) > 0
            sequence.computed = 0
        self._release(sequence)
        if not sequence.host_blocks:
            sequence.passed = 0

    def _release(self, sequence: SequenceState) -> None:
        # The end first: of the prefix cache, beginnings are kept longest.
        for block in reversed(sequence.own_blocks):
            self.pool.release(block)
        if self._free_slots is not None and sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        sequence.blocks, sequence.remembered = [], 0

    def _take_slot(self, sequence: SequenceState) -> None:
        """There is one for each sequence that may run."""
        if self._free_slots is not None:
            sequence.slot = self._free_slots.pop()

    def _give_back_passed(self, sequence: SequenceState) -> None:
        """Releases the blocks that no token to come can see."""
        if self.window is None:
            return
        passed = max(0, sequence.computed - self.window + 1) // self.block
        passed = min(passed, len(sequence.blocks) - 1)  # one that runs has a block
        if passed > sequence.passed:
            for block in sequence.pass_blocks(passed):
                self.pool.release(block)

    def _release_host(self, sequence: SequenceState) -> None:
        for block in sequence.host_blocks:
            self.host.release(block)
        sequence.host_blocks = []

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def _lacking(self, sequence: SequenceState, stop: int) -> int:
        """Blocks that must be taken before tokens up to `stop` can be computed."""
        return self._blocks_of(stop) - len(sequence.blocks) + self._writes_to_shared(sequence)

    def _promised(self, sequence: SequenceState) -> int:
        """Free blocks that one of those that run is going to need: for the rest of its prompt, or as it grows."""
        return max(1, self._blocks_of(len(sequence.tokens)) - len(sequence.blocks)) + sequence.forks

    def _writes_to_shared(self, sequence: SequenceState) -> bool:
        """Whether the next token goes to a block that other sequences read."""
        place = sequence.computed // self.block
        return place < len(sequence.blocks) and self.pool.is_shared(sequence.blocks[place])

    def _take_blocks(self, sequence: SequenceState, stop: int, builder: _PlanBuilder) -> None:
        """Takes the blocks for tokens up to `stop`; a shared one that would be written in is copied first."""
        if self._writes_to_shared(sequence):
            place = sequence.computed // self.block
            source, target = sequence.blocks[place], self.pool.allocate()
            builder.copies.append((source, target))
            self.pool.release(source)
            sequence.blocks[place] = target
            sequence.fill_passed()
        for _ in range(self._blocks_of(stop) - len(sequence.blocks)):
            block = self.pool.allocate()
            builder.fresh.append(block)
            sequence.blocks.append(block)


def _number(sequence: SequenceState) -> int:
    return sequence.number
