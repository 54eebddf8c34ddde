"""Which blocks are free and which referenced, against a count that is kept beside; what the prefix cache returns."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from danlu.inference.blocks import BlockPool, chain_hash, root_digest

BLOCKS = 6
TEXTS = [(root_digest(adapter, 0), (token, token)) for adapter in ("none", "a") for token in range(3)]


class References(RuleBasedStateMachine):
    """Any order of what can be done to a pool."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.references = Counter()
        self.texts = {}  # of the blocks in the prefix cache

    @precondition(lambda self: self.pool.free)
    @rule()
    def allocate(self):
        block = self.pool.allocate()
        assert block not in self.references and 0 <= block < BLOCKS
        self.references[block] = 1
        if block in self.texts:  # the prefix cache gives a block up only where no other is free
            assert len(self.texts.keys() - self.references.keys()) == self.pool.cached
            assert self.pool.cached == BLOCKS - len(self.references)
            del self.texts[block]

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data):
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.release(block)
        self.references -= Counter([block])

    @precondition(lambda self: self.references)
    @rule(data=st.data(), text=st.sampled_from(TEXTS))
    def remember(self, data, text):
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.remember(block, chain_hash(*text), text[1])
        if block not in self.texts and text not in self.texts.values():
            self.texts[block] = text

    @rule(text=st.sampled_from(TEXTS))
    def share_what_is_cached(self, text):
        block = self.pool.find(chain_hash(*text), text[1])
        assert self.texts.get(block) == (text if block is not None else None)
        assert (block is None) == (text not in self.texts.values())
        if block is not None:
            self.pool.share(block)
            self.references[block] += 1

    @rule()
    def forget(self):
        self.pool.forget()
        self.texts.clear()

    @invariant()
    def counts_agree(self):
        assert self.pool.used + self.pool.free == BLOCKS
        assert self.pool.used == len(self.references)
        assert self.pool.cached == len(self.texts.keys() - self.references.keys())
        for block in range(BLOCKS):
            assert self.pool.is_free(block) == (block not in self.references)
            if block in self.references:
                assert self.pool.is_shared(block) == (self.references[block] > 1)


TestReferences = References.TestCase
TestReferences.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_hash_stands_for_the_text_before_the_adapter_and_the_weights():
    root = root_digest("a", 3)
    digests = {
        chain_hash(parent, tokens)
        for parent in (root, root_digest("b", 3), root_digest("a", 4), root_digest(None, 3), chain_hash(root, [1, 2]))
        for tokens in ([1, 2], [2, 1], [1, 2, 0])
    }
    assert len(digests) == 15
    assert chain_hash(root, [1, 2]) == chain_hash(root, (1, 2))


def test_equal_hashes_of_other_tokens_are_no_hit():
    pool = BlockPool(2)
    pool.remember(pool.allocate(), b"collision", [1, 2])
    assert pool.find(b"collision", [1, 2]) == 0
    assert pool.find(b"collision", [1, 3]) is None and pool.find(b"other", [1, 2]) is None


def test_the_first_released_is_used_again_first_and_the_unknown_before_the_known():
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(4)]
    for block in blocks[:3]:
        pool.remember(block, bytes([block]), [block])
    for block in (2, 0, 3, 1):
        pool.release(block)
    assert [pool.allocate() for _ in range(4)] == [3, 2, 0, 1]
    with pytest.raises(AssertionError, match="no block is free"):
        pool.allocate()


def test_blocks_that_were_never_used_are_used_before_the_prefix_cache():
    pool = BlockPool(3)
    first = pool.allocate()
    pool.remember(first, b"text", [1])
    pool.release(first)
    assert [pool.allocate(), pool.allocate()] == [1, 2] and pool.find(b"text", [1]) == first
    assert pool.allocate() == first and pool.find(b"text", [1]) is None
