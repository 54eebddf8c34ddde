"""The forward passes in which the rollout engine draws answers of known lengths. Imports no torch.

The engine's scheduler is followed without its blocks by number: it plans each pass by every sequence, and this by what
changes. Passes in which the same answers grow are one `PassRun`, so that the work follows from the answers and not from
their tokens. As long as all answers that run have room the passes are those of the scheduler. Where some are preempted
the prefix cache is followed by texts and not by blocks, so that a few tokens more or less are read again.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from danlu.planning.cache_memory import EngineBounds, PoolSize
from danlu.planning.rollout_lengths import AskedPrompt


@dataclass(frozen=True)
class PassRun:
    """Passes one after the other in which the same answers grow."""

    passes: int
    growing: int
    """Answers that get one token in each pass."""
    keys: int
    """Tokens that these see in the first pass, added up over answers, each with its own one."""
    longest: int
    """Tokens that the longest of them sees in the first pass."""
    chunks: tuple[tuple[int, int], ...] = ()
    """Start and stop of the texts that are read, in tokens; there is one pass then."""
    draws: int = 0
    """Tokens that are drawn in each pass."""

    @property
    def tokens(self) -> int:
        """Tokens of a pass."""
        return self.growing + sum(stop - start for start, stop in self.chunks)


@dataclass(eq=False, slots=True)
class _Answer:
    """An answer that has not ended."""

    number: int
    group: _Group
    known: int
    """Tokens of the prompt and those that are drawn; as long as it grows, those at its first growing pass."""
    to_draw: int
    forks: tuple[int, ...] = ()
    """Tokens of the other answers to its prompt, which branch off as soon as that is read."""
    computed: int = 0
    blocks: int = 0
    """Its own blocks, without those of the prompt that it shares; while it grows, those at its first growing pass."""
    shared: int = 0
    """Blocks of the prompt that it has together with others."""
    cached: int = 0
    """Its own full blocks in the prefix cache, while it waits."""
    first_pass: int = 0
    """The number of the first pass in which it grows."""


@dataclass(eq=False, slots=True)
class _Group:
    """The full blocks of a prompt that its answers share."""

    tokens: int
    """Tokens of the prompt."""
    blocks: int = 0
    """Those that are in the pool."""
    holders: int = 0
    """Answers that have them; of none they are in the prefix cache alone."""


@dataclass
class RolloutPasses:
    """The passes over some prompts, which all are asked at the same time; iterate over `runs`.

    pool: of the model's cache, as `PoolSize.of` divides it. has_states: whether layers have states, which are shared
    by copies alone.
    """

    prompts: Sequence[AskedPrompt]
    bounds: EngineBounds
    pool: PoolSize
    has_states: bool = False
    preemptions: int = 0
    """Answers that had to make room, so far."""
    _pass: int = 0
    _used: int = 0
    _waiting: list[_Answer] = field(default_factory=list)  # by number
    _reading: list[_Answer] = field(default_factory=list)  # by number
    _growing: dict[int, _Answer] = field(default_factory=dict)
    _ends: list[tuple[int, int]] = field(default_factory=list)  # a heap: (the last pass, number)
    _latest: list[int] = field(default_factory=list)  # a heap: less the number
    _longest: list[tuple[int, int]] = field(default_factory=list)  # a heap: (less the offset, number)
    _offsets: int = 0  # of all that grow: in pass p an answer sees p + its offset tokens
    _phases: list[int] = field(default_factory=list)  # how many take a block in passes p with p % block = index
    _copies: int = 0  # blocks that are shared by answers which begin to grow, and copied in the next pass
    _cache: dict[_Group | _Answer, int] = field(default_factory=dict)  # blocks of the prefix cache that are not in use
    _cached: int = 0  # the sum of these

    def __post_init__(self) -> None:
        self._phases = [0] * self.bounds.block
        number = 0
        for prompt in self.prompts:
            if prompt.answers:
                first, *others = prompt.answers
                answer = _Answer(number, _Group(prompt.tokens), prompt.tokens, first, tuple(others))
                self._waiting.append(answer)
            number += len(prompt.answers)

    @property
    def _limit(self) -> int:
        return min(self.pool.running, self.bounds.batch_tokens)

    @property
    def _free(self) -> int:
        return self.pool.blocks - self._used

    def runs(self) -> Iterator[PassRun]:
        """Yields the passes in their order."""
        while self._waiting or self._reading or self._growing:
            yield self._next_run()

    def _next_run(self) -> PassRun:
        preempted = self._make_room()
        growing = len(self._growing)
        keys, longest = self._offsets + growing * self._pass, self._longest_now()
        self._used += self._phases[self._pass % self.bounds.block] + self._copies
        self._copies = 0
        self._evict()
        chunks = self._read(self.bounds.batch_tokens - growing, admits=not preempted)
        if chunks or preempted:
            passes = 1
        else:
            assert growing, "a pass has something to do as long as there is an answer"
            passes = 1 + self._more_passes()
        self._pass += passes
        read = [answer for answer, _, stop in chunks if stop == answer.known]
        draws = growing + sum(1 + len(answer.forks) for answer in read)
        self._draw(read)
        return PassRun(passes, growing, keys, longest, tuple((start, stop) for _, start, stop in chunks), draws)

    # ── blocks ──

    def _make_room(self) -> bool:
        """Takes the blocks of the latest answers until the others can grow; returns whether there were any."""
        block, before = self.bounds.block, self.preemptions
        while self._phases[self._pass % block] + self._copies > self._free:
            reader = self._reading[-1] if self._reading else None
            while self._latest and -self._latest[0] not in self._growing:
                heapq.heappop(self._latest)
            if reader is not None and (not self._latest or reader.number > -self._latest[0]):
                self._preempt(self._reading.pop())
                continue
            assert len(self._growing) > 1, "the pool holds each answer alone"
            answer = self._growing[-heapq.heappop(self._latest)]
            if self._copies and answer.first_pass == self._pass and answer.computed % block:
                self._copies -= 1
                self._used += 1  # which is given back in the next line but one
            self._stop_growing(answer)
            self._preempt(answer)
        return self.preemptions > before

    def _preempt(self, answer: _Answer) -> None:
        self.preemptions += 1
        self._release(answer)
        answer.computed = 0
        insort(self._waiting, answer, key=_number)

    def _release(self, answer: _Answer) -> None:
        """Gives an answer's blocks back; those that are full stay in the prefix cache, the beginnings for longest."""
        group = answer.group
        self._used -= answer.blocks
        if self._shares:
            answer.cached = answer.computed // self.bounds.block - answer.shared
            self._keep(answer, answer.cached)
        if answer.shared:
            group.holders -= 1
            if group.holders == 0:
                self._used -= group.blocks
                if self._shares:
                    self._keep(group, group.blocks)
                else:
                    group.blocks = 0
        answer.blocks = answer.shared = 0
        self._evict()

    def _keep(self, owner: _Group | _Answer, blocks: int) -> None:
        if blocks > 0:
            self._cache[owner] = blocks
            self._cached += blocks

    def _evict(self) -> None:
        """Drops what was given back first from the prefix cache, as far as its blocks are used by now."""
        while (excess := self._used + self._cached - self.pool.blocks) > 0 and self._cache:
            owner, blocks = next(iter(self._cache.items()))
            left = max(0, blocks - excess)
            self._cached -= blocks - left
            if left:
                self._cache[owner] = left
            else:
                del self._cache[owner]
            if isinstance(owner, _Group):
                owner.blocks = left
            else:
                owner.cached = left

    def _find_cached(self, answer: _Answer) -> tuple[int, int]:
        """Returns (blocks of its prompt, its own blocks) that an answer finds in the pool."""
        if not self._shares:
            return 0, 0
        most = (answer.known - 1) // self.bounds.block
        shared = min(answer.group.blocks, most)
        is_whole = shared == answer.group.tokens // self.bounds.block
        return shared, min(answer.cached, most - shared) if is_whole else 0

    def _take_cached(self, answer: _Answer) -> None:
        """Has an answer use what it finds in the pool."""
        answer.shared, answer.blocks = self._find_cached(answer)
        answer.computed = (answer.shared + answer.blocks) * self.bounds.block
        self._cached -= self._cache.pop(answer, 0)
        self._used += answer.blocks
        answer.cached = 0
        group = answer.group
        if answer.shared:
            if group.holders == 0:
                self._cached -= self._cache.pop(group)
                self._used += group.blocks
            group.holders += 1

    # ── reading ──

    def _read(self, budget: int, *, admits: bool) -> list[tuple[_Answer, int, int]]:
        """Reads on where texts are half read, and lets answers in that wait; returns those that are read, with start
        and stop."""
        block, starved = self.bounds.block, False
        chunks: list[tuple[_Answer, int, int]] = []
        for answer in self._reading:
            room = (answer.shared + answer.blocks + self._free) * block - answer.computed
            wanted = answer.known - answer.computed
            if (count := min(wanted, room, budget)) > 0:
                chunks.append(self._compute(answer, answer.computed + count))
            starved |= room < min(wanted, budget)
            budget -= max(0, count)
        if admits and not starved:
            self._admit(budget, chunks)
        self._reading = [answer for answer in self._reading if answer.computed < answer.known]
        return chunks

    def _admit(self, budget: int, chunks: list[tuple[_Answer, int, int]]) -> None:
        promised = len(self._growing) + sum(map(self._promised, self._reading))
        being_read = {answer.group for answer in self._reading if self._fills_prompt(answer)}
        skipped = 0
        while skipped < min(len(self._waiting), self._limit):
            if budget == 0 or len(self._growing) + len(self._reading) >= self._limit:
                return
            answer = self._waiting[skipped]
            if self._shares and answer.group in being_read and not answer.group.blocks:
                skipped += 1
                continue
            lacking = self._blocks_of(answer.known)
            lacking -= self._find_cached(answer)[0] if answer.group.holders else 0
            runs = self._growing or self._reading
            if runs and lacking + len(answer.forks) + promised > self._free:
                return
            del self._waiting[skipped]
            self._take_cached(answer)
            insort(self._reading, answer, key=_number)
            chunk = self._compute(answer, min(answer.known, answer.computed + budget))
            budget -= chunk[2] - chunk[1]
            chunks.append(chunk)
            if self._fills_prompt(answer):
                being_read.add(answer.group)
            promised += self._promised(answer)

    @property
    def _shares(self) -> bool:
        return self.bounds.prefix_sharing and not self.has_states

    def _fills_prompt(self, answer: _Answer) -> bool:
        """Whether an answer reads full blocks of its prompt that others wait for."""
        return not answer.shared and answer.known >= self.bounds.block

    def _promised(self, answer: _Answer) -> int:
        lacking = self._blocks_of(answer.known) - answer.shared - answer.blocks
        return max(1, lacking) + len(answer.forks)

    def _compute(self, answer: _Answer, stop: int) -> tuple[_Answer, int, int]:
        start = answer.computed
        more = self._blocks_of(stop) - answer.shared - answer.blocks
        answer.blocks += more
        self._used += more
        answer.computed = stop
        self._evict()
        return answer, start, stop

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.bounds.block)

    # ── drawing ──

    def _more_passes(self) -> int:
        """The passes that follow in which nothing ends, nothing is let in and no answer has to make room."""
        block, growing = self.bounds.block, len(self._growing)
        while not self._is_end(*self._ends[0]):
            heapq.heappop(self._ends)
        most = self._ends[0][0] - self._pass
        cycles = min(most // block, self._free // growing)
        more = cycles * block
        self._used += cycles * growing
        while more < most:
            taken = self._phases[(self._pass + 1 + more) % block]
            if taken > self._free:
                break
            self._used += taken
            more += 1
        return more

    def _draw(self, read: Sequence[_Answer]) -> None:
        """Has answers with texts that were read grow, and ends those with their last token drawn; the pass is over."""
        self._evict()
        ended = list[_Answer]()
        while self._ends and self._ends[0][0] < self._pass:
            last, number = heapq.heappop(self._ends)
            if self._is_end(last, number):
                ended.append(self._growing[number])
        running = len(self._growing) + len(self._reading) + len(read)
        for answer in read:
            answer.known += 1
            answer.to_draw -= 1
            if answer.forks or self._shares:
                self._give_prompt(answer)
            running += self._branch(answer, self._limit - running)
            self._grow_or_end(answer)
        for answer in ended:
            self._stop_growing(answer)
            self._release(answer)

    def _give_prompt(self, answer: _Answer) -> None:
        """Has others share the full blocks of a prompt that an answer has read, if they have no such blocks."""
        group, full = answer.group, answer.group.tokens // self.bounds.block
        if full and not answer.shared and group.blocks < full:
            self._cached -= self._cache.pop(group, 0)
            answer.blocks -= full
            answer.shared = group.blocks = full
            group.holders = 1

    def _branch(self, parent: _Answer, places: int) -> int:
        """Has the other answers to a prompt branch off, as many as there are places for; the rest waits. Returns the
        number of those that do."""
        forks, parent.forks = parent.forks, ()
        if not forks:
            return 0
        block, prompt, full = self.bounds.block, parent.group.tokens, parent.shared
        branched = 0
        for number, tokens in enumerate(forks, parent.number + 1):
            child = _Answer(number, parent.group, parent.known, tokens - 1)
            if branched >= places:
                if child.to_draw:
                    insort(self._waiting, child, key=_number)
                continue
            branched += 1
            if not child.to_draw:
                continue
            child.computed, child.shared, child.blocks = prompt, full, prompt % block > 0
            parent.group.holders += 1 if full else 0
            if prompt % block:
                self._copies += 1
            self._grow_or_end(child)
        return branched

    def _grow_or_end(self, answer: _Answer) -> None:
        if not answer.to_draw:
            self._release(answer)
            return
        answer.first_pass = self._pass
        offset = answer.computed + 1 - self._pass
        self._growing[answer.number] = answer
        self._offsets += offset
        self._phases[(self._pass - answer.computed) % self.bounds.block] += 1
        heapq.heappush(self._ends, (self._end_of(answer), answer.number))
        heapq.heappush(self._latest, -answer.number)
        heapq.heappush(self._longest, (-offset, answer.number))

    def _is_end(self, last: int, number: int) -> bool:
        return number in self._growing and last == self._end_of(self._growing[number])

    def _end_of(self, answer: _Answer) -> int:
        return answer.first_pass + answer.to_draw - 1

    def _stop_growing(self, answer: _Answer) -> None:
        """Takes an answer out of those that grow, with the tokens and blocks that it has by now."""
        block, grown = self.bounds.block, self._pass - answer.first_pass
        del self._growing[answer.number]
        self._offsets -= answer.computed + 1 - answer.first_pass
        self._phases[(answer.first_pass - answer.computed) % block] -= 1
        answer.computed += grown
        answer.known += grown
        answer.to_draw -= grown
        answer.blocks = self._blocks_of(answer.computed) - answer.shared

    def _longest_now(self) -> int:
        while self._longest:
            offset, number = self._longest[0]
            answer = self._growing.get(number)
            if answer is not None and -offset == answer.computed + 1 - answer.first_pass:
                return self._pass - offset
            heapq.heappop(self._longest)
        return 0


def _number(answer: _Answer) -> int:
    return answer.number
