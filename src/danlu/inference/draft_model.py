"""Proposals of a small model with the same vocabulary, which reads the large model's text into a cache of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from danlu.core.errors import ModelError
from danlu.inference.blocks import BlockPool
from danlu.inference.cache_size import cache_sizes
from danlu.inference.engine import EngineOptions
from danlu.inference.model_runner import ModelRunner
from danlu.inference.sampling import ProposedToken, propose
from danlu.inference.scheduler import Chunk, Plan
from danlu.inference.speculative import DraftSequence, NgramProposer, Speculation
from danlu.models.decoder import Decoder
from danlu.planning.cache_memory import shares_of_cache


@dataclass
class _CachedText:
    """The part of a sequence that the draft model has read."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    slot: int = -1


@dataclass
class _Draft:
    """The proposals for a sequence while they are made."""

    sequence: DraftSequence
    cached: _CachedText
    text: list[int]  # known tokens, without virtual ones, and proposals
    count: int  # of proposals to make
    proposed: list[ProposedToken] = field(default_factory=list)


class DraftModelProposer:
    """Satisfies `speculative.Proposer`: the draft model draws by the same options as the model that checks it.

    Its cache holds as many sequences as fit; evicted ones are read again.

    Args:
        options: of the engine; `cache_gib` is the draft model's own.

    Raises ModelError for a model with another vocabulary, and ResourceError where not one block fits into the cache.
    """

    draws = True

    def __init__(
        self, model: Decoder, options: EngineOptions, *, vocab_size: int, dtype: torch.dtype | None = None
    ) -> None:
        if model.config.vocab_size != vocab_size:
            raise ModelError(
                f"rollout.draft.model: the draft model's vocabulary has {model.config.vocab_size} tokens, and the "
                f"model's has {vocab_size}: choose a draft model with the same tokenizer"
            )
        self._runner = ModelRunner(model, dataclasses.replace(options, preempt="recompute", routes=False), dtype, None)
        self._block, self._batch_tokens = options.block, options.batch_tokens
        self._slots = self._runner.running_limit if options.cache == "int4" else 0
        # Longer texts get no proposals.
        self._longest = min(model.config.context_length, self._runner.pool.blocks * options.block)
        self.reset()

    def propose(self, sequences: Sequence[DraftSequence]) -> list[list[ProposedToken]]:
        """`limit` proposals for each sequence, and one more where the temperature is above 0; fewer where its context
        ends, which is by the length of the text alone."""
        proposals: dict[int, list[ProposedToken]] = {}
        for group in self._groups(sequences):
            self._reserve(group)
            with torch.inference_mode():
                self._fill(group)
            proposals |= {draft.sequence.number: draft.proposed for draft in group}
        return [proposals[sequence.number] for sequence in sequences]

    def forget(self, number: int) -> None:
        """Gives the blocks of a sequence back."""
        cached = self._cached.pop(number, None)
        if cached is None:
            return
        for block in cached.blocks:
            self._blocks.release(block)
        if cached.slot >= 0:
            self._free_slots.append(cached.slot)

    def reset(self) -> None:
        """Gives all blocks back."""
        self._cached: dict[int, _CachedText] = {}  # by sequence, the one used last at the end
        self._blocks = BlockPool(self._runner.pool.blocks)
        self._free_slots = list(range(self._slots))

    def _groups(self, sequences: Sequence[DraftSequence]) -> Iterator[list[_Draft]]:
        """Groups sequences such that the texts and proposals of a group fit into the pool and its slots together."""
        group: list[_Draft] = []
        free = self._blocks.blocks
        for sequence in sequences:
            draft = self._new_draft(sequence)
            needed = self._blocks_of(draft)
            if needed > free or len(group) == self._slots > 0:
                yield group
                group, free = [], self._blocks.blocks
            group.append(draft)
            free -= needed
        yield group

    def _new_draft(self, sequence: DraftSequence) -> _Draft:
        text = list(sequence.tokens[sequence.virtual_tokens :])
        wanted = sequence.limit + (sequence.row.options.temperature > 0)
        count = max(0, min(wanted, self._longest - len(text) + 1))  # the last proposal is not read
        return _Draft(sequence, _CachedText(), text, count)

    def _blocks_of(self, draft: _Draft) -> int:
        return -(-(len(draft.text) + draft.count - 1) // self._block) if draft.count else 0

    def _reserve(self, group: Sequence[_Draft]) -> None:
        """Gives each of a group its blocks; the sequences that were not used for longest lose theirs if need be."""
        for draft in group:
            draft.cached = self._cached.pop(draft.sequence.number, draft.cached)
            self._cached[draft.sequence.number] = draft.cached
            needed = self._blocks_of(draft)
            for block in draft.cached.blocks[needed:]:
                self._blocks.release(block)
            del draft.cached.blocks[needed:], draft.cached.tokens[needed * self._block :]
        for draft in group:
            while (lacking := self._blocks_of(draft) - len(draft.cached.blocks)) > self._blocks.free:
                self.forget(next(iter(self._cached)))
            if self._slots and draft.cached.slot < 0:
                if not self._free_slots:
                    self.forget(next(iter(self._cached)))
                draft.cached.slot = self._free_slots.pop()
            draft.cached.blocks += (self._blocks.allocate() for _ in range(lacking))

    def _fill(self, group: Sequence[_Draft]) -> None:
        """Reads new tokens and proposes, token after token, all sequences of a group together."""
        for draft in group:
            _cut_to_shared(draft.cached.tokens, draft.text)
        cleared = {
            block for draft in group for block in draft.cached.blocks[-(-len(draft.cached.tokens) // self._block) :]
        }
        while drafts := [draft for draft in group if len(draft.proposed) < draft.count]:
            plan, tokens, ends = self._plan(drafts, tuple(cleared))
            cleared = set()
            self._runner.pool.carry_out(plan)
            hidden = self._runner.hidden(plan, tokens)
            assert hidden is not None, "a draft model is whole on each process"
            if ends:
                index = torch.tensor(list(ends.values()), device=hidden.device)
                growing = [drafts[place] for place in ends]
                rows = [draft.sequence.rows([token.token for token in draft.proposed])[-1] for draft in growing]
                proposals = propose(self._runner.logits(hidden.index_select(0, index)), rows)
                for draft, proposal in zip(growing, proposals, strict=True):
                    draft.proposed.append(proposal)
                    draft.text.append(proposal.token)

    def _plan(self, drafts: Sequence[_Draft], fresh: tuple[int, ...]) -> tuple[Plan, list[int], dict[int, int]]:
        """A pass over the next unread tokens of drafts, these tokens, and by draft the place of its last one if that is
        among them. Afterwards they count as read."""
        chunks: list[Chunk] = []
        tokens: list[int] = []
        ends: dict[int, int] = {}
        # Single tokens come first.
        order = sorted(range(len(drafts)), key=lambda place: len(drafts[place].text) - len(drafts[place].cached.tokens))
        for place in order:
            draft = drafts[place]
            read = len(draft.cached.tokens)
            new = draft.text[read : read + self._batch_tokens - len(tokens)]
            if not new:
                break
            number, prompt_length = draft.sequence.number, draft.sequence.prompt_length - draft.sequence.virtual_tokens
            rotary_length = draft.sequence.rotary_length - draft.sequence.virtual_tokens
            stop, slot = read + len(new), draft.cached.slot
            chunks.append(Chunk(number, read, stop, draft.cached.blocks, prompt_length, rotary_length, slot))
            draft.cached.tokens += new
            tokens += new
            if len(draft.cached.tokens) == len(draft.text):
                ends[place] = len(tokens) - 1
        return Plan(fresh=fresh, chunks=tuple(chunks)), tokens, ends


def _cut_to_shared(cached: list[int], text: Sequence[int]) -> None:
    """Shortens the read tokens to their common beginning with the text, without its last token: that one is read for
    its logits.

    The tokens that differ are rejected proposals at the end.
    """
    del cached[len(text) - 1 :]
    while cached and cached != text[: len(cached)]:
        del cached[-1]


def speculation_of(
    model: Decoder, options: EngineOptions, dtype: torch.dtype | None, draft_model: Decoder | None
) -> tuple[Speculation | None, EngineOptions]:
    """Returns an engine's proposer of tokens, and its options: a draft model gets a part of the cache, so that its own
    and the engine's hold as many tokens. Raises as `DraftModelProposer` does."""
    if options.draft is None:
        return None, options
    for decoder, whose in ((model, "the model"), (draft_model, "the draft model")):
        if decoder is not None and decoder.config.has_states:
            raise ModelError(
                f"draft: {whose} has linear attention, and its state cannot go back to before a token that is not "
                "kept. Leave draft out"
            )
    if options.draft.kind == "ngram":
        return Speculation(NgramProposer(options.draft.longest)), options
    assert draft_model is not None, "options.draft asks for a draft model: give it"
    of_draft = dataclasses.replace(options, routes=False)
    sizes = [
        cache_sizes(decoder, own, dtype or next(decoder.parameters()).dtype)
        for decoder, own in ((model, options), (draft_model, of_draft))
    ]
    shares = [dataclasses.replace(options, cache_gib=share) for share in shares_of_cache(options.cache_gib, sizes)]
    proposer = DraftModelProposer(draft_model, shares[1], vocab_size=model.config.vocab_size, dtype=dtype)
    return Speculation(proposer), shares[0]
