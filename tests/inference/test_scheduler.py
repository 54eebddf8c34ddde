"""Plans as data: a pool of texts in place of keys and values says whether each pass would have read what it must."""

from __future__ import annotations

import random
from collections import defaultdict

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from danlu.inference.blocks import BlockPool, root_digest
from danlu.inference.scheduler import Chunk, Scheduler
from danlu.inference.sequence_state import SequenceState
from danlu.planning.cache_memory import newest_tokens

NOTHING = ("nothing",)


class TextPool:
    """Each slot holds the text up to its token and the adapter, which is what keys and values follow from."""

    def __init__(self, blocks, host_blocks, block, window=None, ring=0):
        self.block, self.window, self.ring = block, window, ring
        self.newest = defaultdict(lambda: [NOTHING] * ring)  # by slot, where blocks have texts once they are full
        self.slots = [[NOTHING] * block for _ in range(blocks)]
        self.host = [[NOTHING] * block for _ in range(host_blocks)]

    def carry_out(self, plan):
        for source, target in plan.swapped_out:
            self.host[target] = list(self.slots[source])
        for source, target in plan.swapped_in:
            self.slots[target] = list(self.host[source])
        for source, target in plan.state_copies:
            self.newest[target] = list(self.newest[source])
        copied = [list(self.slots[source]) for source, _ in plan.copies]
        for (_, target), texts in zip(plan.copies, copied, strict=True):
            self.slots[target] = texts
        for block in plan.fresh:
            self.slots[block] = [NOTHING] * self.block

    def compute(self, chunk, adapter, tokens):
        """Reads what the chunk needs, then writes its tokens."""
        for position in range(0 if self.window is None else max(0, chunk.start - self.window + 1), chunk.start):
            assert self._slot(chunk, position) == (adapter, *tokens[: position + 1]), f"{position} of {chunk}"
        for position in range(chunk.start, chunk.stop):
            self._set(chunk, position, (adapter, *tokens[: position + 1]))

    def _slot(self, chunk, position):
        if self.ring and position // self.block == chunk.start // self.block:
            return self.newest[chunk.slot][position % self.ring]
        return self.slots[chunk.blocks[position // self.block]][position % self.block]

    def _set(self, chunk, position, text):
        if self.ring:
            ring = self.newest[chunk.slot]
            ring[position % self.ring] = text
            if (position + 1) % self.block == 0:
                texts = [ring[place % self.ring] for place in range(position + 1 - self.block, position + 1)]
                self.slots[chunk.blocks[position // self.block]] = texts
            return
        self.slots[chunk.blocks[position // self.block]][position % self.block] = text


class Simulation:
    """Sequences that end at a length of their own, through a scheduler and a pool of texts."""

    def __init__(
        self,
        *,
        blocks,
        block,
        batch_tokens=8,
        running_limit=4,
        preempt="recompute",
        host_blocks=0,
        window=None,
        ring=0,
    ):
        self.pool, self.host = BlockPool(blocks), BlockPool(host_blocks)
        self.scheduler = Scheduler(
            self.pool,
            block=block,
            batch_tokens=batch_tokens,
            running_limit=running_limit,
            preempt=preempt,
            host=self.host,
            window=window,
            keeps_newest=ring > 0,
        )
        self.texts = TextPool(blocks, host_blocks, block, window, ring)
        self.block, self.window = block, window
        self.growth = {}  # by number: adapter, length at the end, sequences to branch off
        self.finished = {}
        self.steps = 0

    def add(self, number, prompt, length, adapter="none", samples=1, sharing=True):
        digests = [root_digest(adapter, 0)] if sharing else None
        self.growth[number] = (adapter, length, [number + sample for sample in range(1, samples)])
        sequence = SequenceState(number, list(prompt), len(prompt), samples - 1, digests)
        self.scheduler.add(sequence)
        return sequence

    def next_token(self, number, tokens):
        return hash((number, len(tokens))) % 3

    def step(self, drafts=0):
        plan = self.scheduler.plan()
        self.steps += 1
        assert plan.chunks, "a plan has something to do as long as there is a sequence"
        counts = [chunk.stop - chunk.start for chunk in plan.chunks]
        assert sum(counts) <= self.scheduler.batch_tokens and min(counts) > 0
        assert counts == sorted(counts, key=lambda count: count > 1)
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks) <= self.scheduler.running_limit
        self.texts.carry_out(plan)
        drawn, rejected = [], {}
        for chunk in plan.chunks:
            sequence = self.scheduler.sequences[chunk.sequence]
            adapter = self.growth[chunk.sequence][0]
            self.texts.compute(chunk, adapter, sequence.tokens + sequence.drafts)
            if chunk.stop >= len(sequence.tokens):
                assert chunk.stop == len(sequence.tokens) + len(sequence.drafts)
                drawn.append(sequence)
        for sequence in drawn:
            proposed, sequence.drafts = sequence.drafts, []
            for draft in [*proposed, None]:
                token = self.next_token(sequence.number, sequence.tokens)
                sequence.tokens.append(token)
                if token != draft:
                    break
                proposed = proposed[1:]
            if proposed:
                rejected[sequence.number] = len(proposed)
        self.scheduler.commit(plan, rejected)
        for sequence in [other for parent in drawn for other in (parent, *self._branch(parent))]:
            if len(sequence.tokens) >= self.growth[sequence.number][1]:
                self.finished[sequence.number] = sequence.tokens
                self.scheduler.remove(sequence)
            else:
                room = self.growth[sequence.number][1] - len(sequence.tokens) - 1
                sequence.drafts = [random.Random(len(sequence.tokens)).randrange(3) for _ in range(min(drafts, room))]
        self.check()
        return plan

    def _branch(self, sequence):
        adapter, length, children = self.growth[sequence.number]
        if not children:
            return []
        self.growth[sequence.number] = (adapter, length, [])
        states = []
        for number in children:
            prompt = sequence.tokens[: sequence.prompt_length]
            token = self.next_token(number, prompt)
            digests = None if sequence.digests is None else sequence.digests[:1]
            states.append(SequenceState(number, [*prompt, token], len(prompt), 0, digests))
            self.growth[number] = (adapter, length, [])
        self.scheduler.fork(sequence, states)
        return states

    def check(self):
        running = self.scheduler.running
        assert [one.number for one in running] == sorted(one.number for one in running)
        assert {block for one in running for block in one.own_blocks} == {
            block for block in range(self.pool.blocks) if not self.pool.is_free(block)
        }
        assert not any(one.blocks for one in self.scheduler.waiting)
        for one in running:  # at most block - 1 empty slots of a live sequence
            assert len(one.blocks) * self.block - len(one.tokens) < self.block
            assert set(one.blocks[: one.passed]) <= {one.own_blocks[0]}
            if self.window is not None:  # what the window sees of what is computed, and parts of blocks at both ends
                behind = len(one.own_blocks) - -(-(len(one.blocks) * self.block - one.computed) // self.block)
                assert behind * self.block <= self.window - 1 + self.block
        assert self.host.used == sum(len(one.host_blocks) for one in self.scheduler.waiting)

    def run(self, drafts=0):
        while self.scheduler.sequences:
            self.step(drafts)
        assert self.pool.used == self.host.used == 0
        return self.finished


@st.composite
def arrivals(draw):
    """Prompts that often begin alike, each with when it arrives, what it grows to and how often it is sampled."""
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
    settings_of_one = st.tuples(
        prompts, st.integers(1, 8), st.sampled_from(["none", "a"]), st.integers(1, 3), st.integers(0, 6), st.booleans()
    )
    return draw(st.lists(settings_of_one, min_size=1, max_size=6))


@settings(max_examples=150, deadline=None)
@given(
    arrivals=arrivals(),
    block=st.integers(1, 4),
    spare=st.integers(0, 12),
    batch_tokens=st.integers(1, 20),
    running_limit=st.integers(1, 6),
    host_blocks=st.sampled_from([None, 0, 3, 30]),
    drafts=st.integers(0, 6),
    window=st.none() | st.integers(1, 9),
    keeps_newest=st.booleans(),
)
def test_every_sequence_finishes_and_reads_its_own_text(
    arrivals, block, spare, batch_tokens, running_limit, host_blocks, drafts, window, keeps_newest
):
    longest = max(len(prompt) + growth for prompt, growth, *_ in arrivals)
    simulation = Simulation(
        blocks=-(-(longest - 1) // block) + spare,
        block=block,
        batch_tokens=batch_tokens,
        running_limit=running_limit,
        preempt="recompute" if host_blocks is None else "swap",
        host_blocks=host_blocks or 0,
        window=window,
        ring=newest_tokens(block, drafts) if keeps_newest else 0,
    )
    expected = {}
    pending = sorted(enumerate(arrivals), key=lambda item: item[1][4])
    while pending or simulation.scheduler.sequences:
        while pending and (pending[0][1][4] <= simulation.steps or not simulation.scheduler.sequences):
            index, (prompt, growth, adapter, samples, _, sharing) = pending.pop(0)
            simulation.add(10 * index, prompt, len(prompt) + growth, adapter, samples, sharing)
            for number in range(10 * index, 10 * index + samples):
                tokens = list(prompt)
                while len(tokens) < len(prompt) + growth:
                    tokens.append(simulation.next_token(number, tokens))
                expected[number] = tokens
        simulation.step(drafts)
        assert simulation.steps < 2000, "it goes round in circles"
    assert simulation.finished == expected
    assert simulation.pool.used == simulation.host.used == 0


def test_control_a_pool_that_is_not_cleared_or_copied_is_noticed():
    for field in ("copies", "swapped_in"):
        simulation = Simulation(blocks=7, block=4, preempt="swap", host_blocks=20)
        simulation.texts.carry_out = lambda plan, done=simulation.texts.carry_out, field=field: done(
            type(plan)(**{**vars(plan), field: ()})
        )
        simulation.add(0, [1] * 6, 24, samples=3)
        with pytest.raises(AssertionError, match="of Chunk"):
            simulation.run()


def test_blocks_behind_the_window_are_given_back_and_stay_in_the_prefix_cache():
    simulation = Simulation(blocks=20, block=4, batch_tokens=32, window=6)
    simulation.add(0, [1] * 9 + [2] * 4, 30)
    used = []
    while simulation.scheduler.sequences:
        simulation.step()
        used.append(simulation.pool.used)
    assert max(used) == 2 and simulation.scheduler.counters.peak_blocks == 4  # the whole prompt is there for one pass
    simulation.add(1, [1] * 9 + [2] * 4, 30)
    assert [chunk.start for chunk in simulation.step().chunks] == [12]  # three blocks of it were still known
    simulation.run()
    everything = Simulation(blocks=20, block=4, batch_tokens=32)  # control
    everything.add(0, [1] * 9 + [2] * 4, 30)
    everything.run()
    assert everything.scheduler.counters.peak_blocks == 8 and everything.pool.cached == 7


def test_of_what_a_sequence_leaves_in_the_prefix_cache_the_end_is_given_up_first():
    """Its beginning is what others may begin with; a block without those before it is of no use."""
    simulation = Simulation(blocks=5, block=4, batch_tokens=32)
    text = [number % 3 for number in range(16)]
    simulation.add(0, text, 17)
    simulation.run()
    assert simulation.pool.cached == 4
    simulation.add(1, [5] * 11, 12)  # which takes three blocks: one that was never used, and two of those
    simulation.run()
    simulation.add(2, text, 17)
    assert [chunk.start for chunk in simulation.step().chunks] == [8]


def test_a_sequence_that_comes_back_does_not_enter_what_it_gave_back():
    """Its first own block stands in the places of others, whose texts are no longer there."""
    pool, tokens = BlockPool(4), [1, 2, 3, 4, 5, 6, 7]
    blocks = [pool.allocate() for _ in range(3)]
    sequence = SequenceState(0, tokens, 3, digests=[root_digest("none", 0)], computed=6, blocks=blocks)
    for block in sequence.pass_blocks(2):
        pool.release(block)
    assert sequence.blocks == [blocks[2]] * 3 and sequence.own_blocks == [blocks[2]] and pool.used == 1
    sequence.remember(pool, 2)
    same = SequenceState(1, tokens, 3, digests=[root_digest("none", 0)])
    assert same.find_cached(pool, 2) == [] and sequence.remembered == 3
    assert pool.find(sequence.digests[3], [5, 6]) == blocks[2]  # control: its own is there


def test_control_a_window_that_is_larger_than_the_schedulers_is_noticed():
    simulation = Simulation(blocks=9, block=2, batch_tokens=32, window=5)
    simulation.texts.window = 8
    simulation.add(0, [1] * 6, 18)
    with pytest.raises(AssertionError, match="of Chunk"):
        simulation.run()


def test_decoding_goes_first_and_prompts_take_the_rest_of_the_pass():
    simulation = Simulation(blocks=20, block=4, batch_tokens=8)
    simulation.add(0, [1] * 4, 20)
    assert [chunk[:3] for chunk in simulation.step().chunks] == [(0, 0, 4)]
    simulation.add(1, [2] * 12, 20)
    assert [chunk[:3] for chunk in simulation.step().chunks] == [(0, 4, 5), (1, 0, 7)]
    simulation.add(2, [0] * 3, 20)
    assert [chunk[:3] for chunk in simulation.step().chunks] == [(0, 5, 6), (1, 7, 12), (2, 0, 2)]
    assert [chunk[:3] for chunk in simulation.step().chunks] == [(0, 6, 7), (1, 12, 13), (2, 2, 3)]


def test_the_latest_makes_room_and_comes_back_first():
    simulation = Simulation(blocks=5, block=4, batch_tokens=32)
    first, second = simulation.add(0, [1] * 7, 16), simulation.add(1, [2] * 6, 16)
    simulation.add(2, [0] * 6, 16)
    simulation.step()
    assert simulation.scheduler.running == [first, second]  # two blocks each, and one for each to grow into is less
    plans = [simulation.step() for _ in range(4)]
    assert [plan.preempted for plan in plans] == [(), (), (1,), ()]
    assert second.computed == 0 and len(second.tokens) == 9 and simulation.scheduler.waiting[0] is second
    assert simulation.scheduler.counters.preemptions == 1
    simulation.run()
    assert simulation.scheduler.counters.recomputed_tokens > 0


def test_the_latest_makes_room_for_an_earlier_one():
    simulation = Simulation(blocks=5, block=4, batch_tokens=32)
    first, second = simulation.add(0, [1] * 6, 16), simulation.add(1, [2] * 7, 16)
    plans = [simulation.step() for _ in range(4)]
    assert [plan.preempted for plan in plans] == [(), (), (), (1,)]  # the second had taken the last block
    assert simulation.scheduler.running == [first] and simulation.scheduler.waiting == [second]
    assert len(simulation.run()) == 2


def test_a_prompt_is_read_once_for_all_samples_and_once_for_equal_beginnings():
    simulation = Simulation(blocks=40, block=4, batch_tokens=64, running_limit=16)
    simulation.add(0, [1] * 10, 14, samples=4)
    simulation.add(10, [1] * 8 + [2] * 2, 14)
    simulation.step()
    assert [sequence.number for sequence in simulation.scheduler.waiting] == [10]  # until its beginning is there
    plan = simulation.step()
    assert [(chunk.sequence, chunk.start) for chunk in plan.chunks] == [(0, 10), (1, 10), (2, 10), (3, 10), (10, 8)]
    assert len(plan.copies) == 3  # the last sample that writes has the partial block to itself
    assert simulation.pool.used == 2 + 4 + 1
    assert simulation.scheduler.counters.prompt_tokens_computed == 10 + 2
    assert simulation.scheduler.counters.prompt_tokens_reused == 30 + 8
    simulation.run()


def test_the_last_token_of_a_prompt_is_computed_even_where_all_is_cached():
    simulation = Simulation(blocks=20, block=4)
    simulation.add(0, [1] * 8, 10)
    simulation.run()
    sequence = simulation.add(1, [1] * 8, 10)
    assert simulation.step().chunks == (Chunk(1, 4, 8, sequence.blocks, 8),)


def test_other_adapters_and_those_that_share_nothing_read_for_themselves():
    simulation = Simulation(blocks=20, block=4)
    for number, (adapter, sharing) in enumerate([("none", True), ("a", True), ("none", False)]):
        simulation.add(number, [1] * 9, 10, adapter, sharing=sharing)
        assert [chunk.start for chunk in simulation.step().chunks] == [0]
        simulation.run()
    simulation.add(3, [1] * 9, 10)
    assert [chunk.start for chunk in simulation.step().chunks] == [8]  # control: equal ones share


def test_swapped_out_is_not_computed_again_unless_the_host_is_full():
    def preempted(host_blocks, blocks=5, ring=0):
        simulation = Simulation(
            blocks=blocks, block=4, batch_tokens=32, preempt="swap", host_blocks=host_blocks, ring=ring
        )
        simulation.add(0, [1] * 7, 16)
        simulation.add(1, [2] * 6, 16)
        simulation.run()
        return simulation.scheduler.counters

    roomy, full = preempted(9), preempted(1)
    assert (roomy.preemptions, roomy.swaps, roomy.swap_fallbacks, roomy.recomputed_tokens) == (1, 1, 0, 0)
    assert (full.preemptions, full.swaps, full.swap_fallbacks) == (1, 0, 1) and full.recomputed_tokens > 0
    newest = preempted(9, blocks=6, ring=4)  # whole blocks alone are swapped out
    assert (newest.preemptions, newest.swaps) == (1, 1) and 0 < newest.recomputed_tokens < 4


@pytest.mark.parametrize("batch_tokens", [1, 3, 4, 5])
def test_a_pass_has_a_chunk_where_drafts_are_more_than_its_tokens(batch_tokens):
    """As many of them are checked as a pass of this size has room for: which ones follows from the settings alone."""
    simulation = Simulation(blocks=20, block=4, batch_tokens=batch_tokens)
    simulation.add(0, [1], 20)
    simulation.step()
    (sequence,) = simulation.scheduler.running
    sequence.drafts = [0, 1, 2, 0]
    plan = simulation.scheduler.plan()
    assert [chunk[:3] for chunk in plan.chunks] == [(0, 1, 1 + min(batch_tokens, 5))]
    assert sequence.drafts == [0, 1, 2, 0][: batch_tokens - 1]


def test_drafts_run_together_or_not_at_all():
    simulation = Simulation(blocks=20, block=4, batch_tokens=6)
    for number in range(2):
        simulation.add(number, [1], 20)
    simulation.step()
    for sequence in simulation.scheduler.running:
        sequence.drafts = [0, 1, 2]
    plan = simulation.scheduler.plan()
    assert [chunk[:3] for chunk in plan.chunks] == [(0, 1, 5)]
