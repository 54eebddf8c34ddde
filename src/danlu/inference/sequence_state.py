"""A sequence as the scheduler sees it: its known tokens, its computed ones, and the hashes by which it shares
blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from danlu.inference.blocks import BlockPool, Digest, chain_hash


@dataclass(eq=False, slots=True)
class SequenceState:
    """One answer of one request."""

    number: int
    """Rises with arrival: the latest of those that run has to make room first."""
    tokens: list[int]
    """All that are known: virtual ones, the prompt's and those drawn so far. The engine appends to it."""
    prompt_length: int
    forks: int = 0
    """Sequences that branch off as soon as the prompt is computed."""
    digests: list[Digest] | None = None
    """The hash of each full block, behind that of the root; None: shares nothing with other requests."""
    drafts: list[int] = field(default_factory=list)
    """Tokens proposed to follow the known ones. They are checked by the pass that computes the last known token, all of
    them: the draws must not depend on how full a pass is."""
    computed: int = 0
    """The number of tokens with keys and values in the blocks."""
    blocks: list[int] = field(default_factory=list)
    """Its blocks of the pool, in order; empty while it waits. Those that every layer's window has passed are given
    back. In their places stands the first that is left: exact attention reads whole tiles, and hides the positions
    before the window."""
    passed: int = 0
    """Blocks at the beginning that were given back."""
    host_blocks: list[int] = field(default_factory=list)
    """Its blocks of the host's pool while it is swapped out, for those that were not given back."""
    rotary_length: int = 0
    """Tokens that it may have at last, by which LongRoPE rotates all of them."""
    slot: int = -1
    """Its slot of the pool of states, or of newest tokens, while it runs and where the cache has slots."""
    remembered: int = 0
    """Full blocks that were offered to the prefix cache, or come from it."""

    @property
    def uncomputed(self) -> int:
        """Known tokens that no pass has computed, at least 1."""
        return len(self.tokens) - self.computed

    @property
    def own_blocks(self) -> list[int]:
        """The blocks that it has a reference to."""
        return self.blocks[self.passed :]

    def pass_blocks(self, passed: int) -> list[int]:
        """Gives up its first `passed` blocks; returns those that it still had."""
        given_back = self.blocks[self.passed : passed]
        self.passed = max(self.passed, passed)
        self.fill_passed()
        return given_back

    def fill_passed(self) -> None:
        """Puts the first own block in the places of those that were given back."""
        self.blocks[: self.passed] = self.blocks[self.passed : self.passed + 1] * self.passed

    def without_a_part_of_the_drafts(self, stop: int) -> int:
        """`stop`, or before the last known token where only some of the drafts would be checked."""
        known = len(self.tokens)
        return known - 1 if known <= stop < known + len(self.drafts) else stop

    def find_cached(self, pool: BlockPool, block: int) -> list[int]:
        """Returns blocks of the prefix cache that hold the beginning; never that of the last known token, which is read
        for its hidden state."""
        cached: list[int] = []
        if self.digests is None:
            return cached
        for place in range((len(self.tokens) - 1) // block):
            found_block = pool.find(self._digest(place, block), self._tokens_of(place, block))
            if found_block is None:
                break
            cached.append(found_block)
        return cached

    def next_digest(self, place: int, block: int) -> Digest | None:
        """The hash of the first block that the prefix cache lacks, where it would be of use."""
        if self.digests is None or place >= (len(self.tokens) - 1) // block:
            return None
        return self._digest(place, block)

    def digests_to_come(self, block: int) -> Iterator[Digest]:
        """Hashes of the blocks that are about to be filled with tokens known already."""
        if self.digests is not None:
            for place in range(self.computed // block, len(self.tokens) // block):
                yield self._digest(place, block)

    def remember(self, pool: BlockPool, block: int) -> None:
        """Enters the blocks that are full by now into the prefix cache."""
        full = self.computed // block
        if self.digests is not None:
            for place in range(max(self.remembered, self.passed), full):
                pool.remember(self.blocks[place], self._digest(place, block), self._tokens_of(place, block))
        self.remembered = full

    def _digest(self, place: int, block: int) -> Digest:
        assert self.digests is not None, "the sequence shares nothing"
        while len(self.digests) <= place + 1:
            self.digests.append(chain_hash(self.digests[-1], self._tokens_of(len(self.digests) - 1, block)))
        return self.digests[place + 1]

    def _tokens_of(self, place: int, block: int) -> list[int]:
        return self.tokens[place * block : (place + 1) * block]
