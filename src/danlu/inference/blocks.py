"""The blocks of a cache pool: which are free, how often each is referenced, and which hold the beginnings of known
texts.

Bookkeeping of numbers alone, as vLLM's block pool does it: no tensor is touched here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

Digest = bytes
"""The hash of a full block's tokens and of everything before them: h_i = H(h_{i-1}, tokens of block i)."""


def root_digest(adapter: str | None, version: int) -> Digest:
    """The first digest of a text's chain: keys and values depend on the weights and on the active adapter."""
    return blake2b(repr((adapter, version)).encode(), digest_size=16).digest()


def long_root_digest(root: Digest) -> Digest:
    """The first digest of a text with keys that are rotated as those of a long one, by other frequencies (LongRoPE)."""
    return blake2b(root + b"long", digest_size=16).digest()


def chain_hash(parent: Digest, tokens: Sequence[int]) -> Digest:
    """The hash of a block's tokens after the text that `parent` is the digest of."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Numbers 0 to `blocks` - 1: free, or referenced by one sequence or several.

    A block that holds a known text stays in the prefix cache when its last reference goes. Such blocks are used again
    last, the one that was released first before the others; blocks without a known text are used first.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._references: dict[int, int] = {}  # of each block in use, at least 1
        self._never_used = 0  # blocks from this one on have never been given out: their memory is not touched before
        self._empty: list[int] = []  # free, with nothing worth keeping; the last is taken first
        self._cached: dict[int, None] = {}  # free, but in the prefix cache; in the order of their release
        self._by_digest: dict[Digest, tuple[int, tuple[int, ...]]] = {}  # block, and its tokens
        self._digest_of: dict[int, Digest] = {}

    @property
    def free(self) -> int:
        """Blocks without a reference, those of the prefix cache among them."""
        return self.blocks - len(self._references)

    @property
    def used(self) -> int:
        """Blocks with a reference."""
        return len(self._references)

    @property
    def cached(self) -> int:
        """Blocks that only the prefix cache keeps."""
        return len(self._cached)

    def allocate(self) -> int:
        """A free block, now referenced once. The caller has made sure that there is one."""
        if self._empty:
            block = self._empty.pop()
        elif self._never_used < self.blocks:
            block = self._never_used
            self._never_used += 1
        else:
            assert self._cached, "no block is free"
            block = next(iter(self._cached))
            del self._cached[block]
            del self._by_digest[self._digest_of.pop(block)]
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that is in use or in the prefix cache."""
        references = self._references.get(block, 0)
        if references == 0:
            del self._cached[block]
        self._references[block] = references + 1

    def release(self, block: int) -> None:
        """One reference less; the last one frees the block."""
        references = self._references[block] - 1
        if references:
            self._references[block] = references
            return
        del self._references[block]
        if block in self._digest_of:
            self._cached[block] = None
        else:
            self._empty.append(block)

    def is_shared(self, block: int) -> bool:
        """Whether several sequences reference the block, so that none of them may write to it."""
        return self._references[block] > 1

    def remember(self, block: int, digest: Digest, tokens: Sequence[int]) -> None:
        """Enters a full block into the prefix cache, unless another one with this text is there already."""
        assert block in self._references, f"block {block} is free"
        if digest not in self._by_digest and block not in self._digest_of:
            self._by_digest[digest] = (block, tuple(tokens))
            self._digest_of[block] = digest

    def find(self, digest: Digest, tokens: Sequence[int]) -> int | None:
        """The block of the prefix cache with this text; None where there is none. Token ids are compared too."""
        block, known = self._by_digest.get(digest, (None, ()))
        return block if known == tuple(tokens) else None

    def is_free(self, block: int) -> bool:
        """Whether a block has no reference."""
        return block not in self._references

    def forget(self) -> None:
        """Drops the prefix cache. Blocks in use stay in use."""
        self._empty.extend(self._cached)
        self._cached, self._by_digest, self._digest_of = {}, {}, {}
