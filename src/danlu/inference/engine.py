"""The interface of every rollout engine, and the settings of the embedded one. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from danlu.inference.request import Completion, Request
from danlu.planning.cache_memory import CacheKind, EngineBounds, RolloutPrecision

PauseMode = Literal["abort", "keep"]
"""The treatment of unfinished requests: they end as they are, or stay where they are until `resume`. As in vLLM's
`/pause`."""


class RolloutEngine(Protocol):
    """The engine that a trainer asks for answers. Not safe for several threads at once.

    `EmbeddedEngine` decodes in this process, `ParallelEngine` is one of these on each process, and `ServedPolicy` asks
    rollout servers; on several processes all make the same calls in the same order.
    """

    @property
    def version(self) -> int: ...  # of the weights that the next token is drawn with

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...  # all answers, by request and sample

    # Raises DataError for a prompt that the model cannot continue, ResourceError for one the cache cannot hold.

    def update(self, version: int) -> None: ...  # goes on with the policy's present weights; nothing cached is left

    def sleep(self) -> None: ...  # gives the cache's memory back

    def wake(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def awake(engine: RolloutEngine) -> Iterator[None]:
    """A context in which an engine that sleeps elsewhere answers with the policy's present weights."""
    engine.wake()
    try:
        engine.update(engine.version + 1)
        yield
    finally:
        engine.sleep()


@dataclass(frozen=True)
class DraftOptions:
    """Speculative decoding (arXiv:2211.17192): tokens proposed cheaply, checked by the model in one pass."""

    kind: Literal["ngram", "model"] = "ngram"
    tokens: int = 4
    """Proposed at a time."""
    longest: int = 3
    """ngram: the longest end of the text that is looked for earlier in it (prompt lookup); shorter ones follow."""
    model: str | None = None
    """model: a folder or hub id with the same vocabulary."""


@dataclass(frozen=True)
class EngineOptions:
    """Settings of the embedded engine.

    None of them changes an answer but four: a draft model where tokens are drawn, which leaves their distribution as
    it is, and `exact`, `precision` and `cache`, which are about rounding.
    """

    block: int = 16
    """The number of tokens in a block of the cache."""
    cache_gib: float = 2.0
    """The most memory that keys and values take, in GiB, on each process."""
    cache: CacheKind = "auto"
    """auto keeps keys and values in the type of activations; fp8 and int8 as codes with a scale for each token and
    head (`encoded_blocks`), int4 with one for each channel of a block's keys and for each token's values
    (`grouped_blocks`)."""
    precision: RolloutPrecision = "auto"
    """The arithmetic of the products of linear layers: that of activations, or int8 and fp8 with weights that are
    encoded after each update (`numerics.encoded_products`)."""
    fp8_recipe: str = "tile"
    """precision: fp8: the blocks that share a scale, as `precision.recipe` of a recipe names them."""
    packed_gib: float = 2.0
    """The most memory of copies of weights in the order in which a CPU multiplies fastest; 0: none are made but those
    that have another type than the weights."""
    batch_tokens: int = 1024
    """The most tokens of one forward pass: enough for efficient matrix products, few enough that attention scores over
    a long prompt stay small."""
    sequences: int = 256
    """The most answers that grow at a time."""
    prefix_sharing: bool = True
    """Whether prompts that begin alike are read once."""
    draft: DraftOptions | None = None
    preempt: Literal["recompute", "swap"] = "recompute"
    """The treatment of an answer that has to make room: it is read again later, or copied to the host's memory."""
    swap_gib: float = 4.0
    """Host memory for answers that were swapped out, in GiB."""
    exact: bool = False
    routes: bool = False
    """Whether `Completion.routes` is recorded, for a model with experts. Blocks that all windows have passed are kept
    then."""

    @property
    def bounds(self) -> EngineBounds:
        """The limits of what the engine computes and keeps at a time."""
        return EngineBounds(
            self.sequences,
            self.batch_tokens,
            self.block,
            self.cache_gib,
            self.swap_gib if self.preempt == "swap" else 0.0,
            self.prefix_sharing,
            0 if self.draft is None else self.draft.tokens,
            self.routes,
            self.cache,
        )


@dataclass(frozen=True)
class EngineStatistics:
    """The embedded engine's present load, and its counts since it was made."""

    running: int
    """Sequences that have blocks of the cache."""
    waiting: int
    """Sequences that have none."""
    blocks: int
    """The number of blocks of the cache."""
    blocks_used: int
    """Those that an unfinished sequence has."""
    blocks_cached: int
    """Those that only the prefix cache keeps; they are free."""
    generated_tokens: int
    drafts_proposed: int
    """Tokens that were checked in speculative decoding."""
    drafts_accepted: int
    passes: int
    prompt_tokens_computed: int
    """Tokens of prompts, those among them that were read again."""
    prompt_tokens_reused: int
    """Tokens of prompts that were in the prefix cache, or computed for another sample."""
    recomputed_tokens: int
    """Tokens of answers that were read again, after a preemption or an update."""
    preemptions: int
    swaps: int
    """Preemptions by a copy to the host's memory."""
    swap_fallbacks: int
    """Preemptions by recompute, since the host's pool was full."""
    peak_blocks: int
    slots: int
    """Places for tokens in the blocks that sequences have, summed over passes."""
    empty_slots: int
    """Those of them that hold no token."""

    @property
    def wasted(self) -> float:
        """The mean share of empty slots."""
        return self.empty_slots / max(1, self.slots)
