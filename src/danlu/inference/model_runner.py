"""Carries plans out: moves blocks of the cache, runs the decoder over the chunks, and draws the next tokens.

T tokens of a pass, flat · R rows to draw from · D model width · V vocabulary
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.core.errors import DanluError, DataError, ModelError
from danlu.core.spelling import did_you_mean
from danlu.inference.answer import Answer, DrawnToken
from danlu.inference.cache_size import cache_sizes, layer_caches
from danlu.inference.device_pools import DevicePools
from danlu.inference.engine import EngineOptions
from danlu.inference.engine_adapters import EngineAdapters
from danlu.inference.exact_paged import ExactPagedAttention
from danlu.inference.fused_decoder import FusedDecoder
from danlu.inference.pipelined_decoder import PipelinedDecoder
from danlu.inference.pool import CachePool
from danlu.inference.sampling import Drawn, DrawRow, TokenScore, draw, score
from danlu.inference.scheduler import Chunk, Plan
from danlu.inference.speculative import DraftSequence, Speculation
from danlu.inference.token_masks import MaskWriter
from danlu.models.attend import NOT_EXACT, PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.packed_weights import PackedWeights
from danlu.models.router_replay import recording
from danlu.numerics import batch_invariant
from danlu.objectives.vocab_slices import EXACT_SLICE_ROWS, logits_in_slices
from danlu.planning.cache_memory import GIB, PoolSize, newest_tokens

PROMPT_ROWS = 128
"""The number of a prompt's tokens with logits in memory at a time: logits of all would be larger than the model."""


@dataclass(frozen=True)
class PassOutcome:
    """The result of a pass."""

    drawn: list[tuple[Answer, list[DrawnToken]]] = field(default_factory=list)
    """Answers with their new tokens, those that failed among them."""
    failed: list[tuple[Answer, DanluError]] = field(default_factory=list)
    """Answers with log-probabilities that are not finite, and those that cannot go on by their grammar."""


class ModelRunner:
    """A decoder with the pool of its cache.

    Args:
        dtype: the type of activations and of the cache; by default that of the weights.
        speculation: proposes tokens to check; None: each pass draws one token of a sequence.
        stages: the same decoder with the stages that have its other chunks, each of which has a runner like this one.

    Raises ResourceError where not one block fits into the cache.
    """

    def __init__(
        self,
        model: Decoder,
        options: EngineOptions,
        dtype: torch.dtype | None,
        adapters: EngineAdapters | None,
        speculation: Speculation | None = None,
        stages: PipelinedDecoder | None = None,
    ) -> None:
        self.model, self.device = model, model.input_device
        self.dtype = dtype or next(model.parameters()).dtype
        self._adapters, self.exact, self._stages = adapters, options.exact, stages
        self.speculation = speculation
        self._draft_tokens = 0 if options.draft is None else options.draft.tokens
        self.packed_weights = _packed_weights(model, options)
        self.copies_weights = not self.exact
        """Whether products are made with copies of weights, which are faster to multiply with."""
        self._fused: FusedDecoder | None = None
        self._fused_is_known = False
        if self.exact:
            if options.cache != "auto":
                raise ModelError(
                    f"rollout.cache: {options.cache} rounds the keys and values that training attends to as they are: "
                    "numerics: exact cannot hold. Leave one out"
                )
            if options.precision != "auto":
                raise ModelError(
                    f"rollout.precision: {options.precision} rounds weights and activations that training multiplies "
                    "as they are: numerics: exact cannot hold. Leave one out"
                )
            if model.config.has_states:
                raise ModelError(NOT_EXACT)
            batch_invariant.enable()
        self._mask_writer = MaskWriter()
        self._lengths_matter = model.config.rotates_by_length
        self._lengths_grow = model.config.rotates_by_growth
        sizes = cache_sizes(model, options, self.dtype, None if stages is None else stages.pipeline)
        self.route_shape = routes = model.config.route_shape if options.routes else None
        # A block that is given back would take the routes of its tokens with it.
        self.window = None if routes is not None else sizes.window
        self.block_bytes = sizes.block_bytes
        size = PoolSize.of(sizes, options.bounds, model.config.context_length)
        self.running_limit = size.running
        """Sequences that are computed at a time."""
        counts = {
            "blocks": size.blocks,
            "block": options.block,
            "host_blocks": size.host_blocks,
            "slots": size.slots,
            "newest": newest_tokens(options.block, options.bounds.drafts),
        }
        self.pool: CachePool | DevicePools
        if model.device_map is None:
            self.pool = CachePool(
                layer_caches(model),
                dtype=self.dtype,
                device=self.device,
                route_shape=routes,
                cache=options.cache,
                **counts,
            )
        else:
            assert routes is None and not self.exact, "the recipe's rules refuse both on several devices"
            self.pool = DevicePools(
                layer_caches(model), model.device_map.layers, dtype=self.dtype, cache=options.cache, **counts
            )

    def run(self, plan: Plan, answers_by_sequence: Mapping[int, Answer], version: int) -> PassOutcome:
        """Runs one pass; returns the next token of each answer with all known tokens computed, or several where
        proposals were right.

        Chunks of several adapters go through the decoder one adapter after the other.
        """
        with torch.inference_mode(), self.packed_weights.active() if self.copies_weights else nullcontext():
            self.pool.carry_out(plan)
            if self._adapters is None:
                return self._forward(plan, answers_by_sequence, version)
            groups: dict[str | None, list[Chunk]] = {}
            for chunk in plan.chunks:
                groups.setdefault(answers_by_sequence[chunk.sequence].request.adapter, []).append(chunk)
            outcome = PassOutcome()
            try:
                for adapter, chunks in groups.items():
                    self._adapters.use(adapter)
                    part = Plan(chunks=tuple(chunks))
                    self.pool.carry_out(part)
                    of_part = self._forward(part, answers_by_sequence, version)
                    outcome.drawn.extend(of_part.drawn)
                    outcome.failed.extend(of_part.failed)
            finally:
                self._adapters.use(None)
            return outcome

    def copy_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies values into the model's parameters, by name. Raises ModelError for one that is not there."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in weights:
                parameter = parameters.get(name)
                if parameter is None:
                    raise ModelError(
                        f"update: the model has no parameter {name!r}.{did_you_mean(name, list(parameters))}"
                    )
                if parameter.shape != value.shape:
                    raise ModelError(
                        f"update: {name} has the shape {list(parameter.shape)} in the model, and {list(value.shape)} "
                        "in the update: they are of different models"
                    )
                parameter.copy_(value)

    def weights_changed(self) -> None:
        """Drops copies of weights that are trained. Their version alone does not tell: FSDP gathers weights,
        and `.data` is written to, without counting."""
        self.packed_weights.clear_trained()
        self._fused, self._fused_is_known = None, False

    def drop_copies(self) -> None:
        """Gives the memory of all copies of weights back."""
        self.packed_weights.clear()
        self._fused, self._fused_is_known = None, False

    def propose(self, answers: Iterable[Answer]) -> None:
        """Has tokens proposed that may follow those of growing answers, to be checked with their next pass."""
        if self.speculation is None:
            return
        growing = [(answer, answer.sequence) for answer in answers if answer.drawn and answer.sequence is not None]
        proposals = self.speculation.propose([self._draft_sequence(answer) for answer, _ in growing])
        for (_, sequence), proposed in zip(growing, proposals, strict=True):
            sequence.drafts = proposed

    def hidden(self, plan: Plan, tokens: Sequence[int]) -> Tensor | None:
        """[T, D] of the tokens of a plan's chunks, laid end to end; None on stages without the last chunk. The plan has
        been carried out."""
        columns = [list(tokens), [place for chunk in plan.chunks for place in range(chunk.start, chunk.stop)]]
        if self._lengths_matter:
            columns.append(
                [
                    max(chunk.length, place + 1) if self._lengths_grow else chunk.rotary_length
                    for chunk in plan.chunks
                    for place in range(chunk.start, chunk.stop)
                ]
            )
        inputs = copy_to(torch.tensor(columns), self.device)  # [2 or 3, T]
        pool, lengths = self.pool, inputs[2] if self._lengths_matter else None
        if isinstance(pool, DevicePools):
            return self.model(inputs[0], inputs[1], pool.attend(plan), self.dtype, lengths)
        if (fused := self._fused_decoder(plan)) is not None:
            rows = pool.decode_rows(plan)
            if rows is not None:
                return fused(inputs[0], inputs[1], rows, pool)
        attend = ExactPagedAttention(plan, pool) if self.exact else pool.attend(plan)
        arguments = (inputs[0], inputs[1], attend, self.dtype, lengths)
        forward = self.model if self._stages is None else self._stages
        if pool.routes is None:
            return forward(*arguments)
        with recording(self.model) as recorded:
            hidden = forward(*arguments)
        routes = recorded.stacked(inputs[1])
        pool.write_routes(routes if self._stages is None else self._stages.with_routes_elsewhere(routes))
        return hidden

    def hidden_states(self, tokens: Sequence[int], adapter: str | None) -> Tensor:
        """[S, D] of a whole text [S], without the cache. Raises DataError for a model that needs more than that."""
        if self.model.config.has_states or self._stages is not None or isinstance(self.pool, DevicePools):
            raise DataError("embeddings: not of a model with linear attention, nor of one on several devices")
        ids = torch.tensor(tokens, device=self.device)
        places = torch.arange(len(tokens), device=self.device)
        lengths = torch.full_like(places, len(tokens)) if self._lengths_matter else None
        with torch.inference_mode():
            if (adapters := self._adapters) is not None:
                adapters.use(adapter)
            try:
                return self.model(ids, places, PackedAttention((0, len(tokens))), self.dtype, lengths)
            finally:
                if adapters is not None:
                    adapters.use(None)

    def _fused_decoder(self, plan: Plan) -> FusedDecoder | None:
        """The fused decoder of a pass that brings one token to each sequence; None where the modules compute it."""
        if not self.copies_weights or any(chunk.stop - chunk.start != 1 for chunk in plan.chunks):
            return None
        if not self._fused_is_known or (self._fused is not None and not self._fused.is_current):
            self._fused = FusedDecoder.of(self.model, self.packed_weights, self.dtype)
            self._fused_is_known = True
        return self._fused

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] float32; where numerics are exact by the products that training makes for its log-probabilities."""
        if not self.exact:
            return self.model.logits(hidden)
        cap, hidden = self.model.config.final_softcap, self.model.head_input(hidden)
        return logits_in_slices(hidden, self.model.head_weight, softcap=cap, slice_rows=EXACT_SLICE_ROWS)

    def _forward(self, plan: Plan, answers_by_sequence: Mapping[int, Answer], version: int) -> PassOutcome:
        tokens: list[int] = []
        ends: list[int] = []  # indices of the tokens with hidden states that are drawn from
        answers: list[Answer] = []
        for number, start, stop, *_ in plan.chunks:
            answer = answers_by_sequence[number]
            sequence = answer.sequence
            assert sequence is not None
            tokens += sequence.tokens[start:stop]
            if stop >= len(sequence.tokens):
                tokens += sequence.drafts
                drawing = (answer, *answer.branches)
                answers += drawing
                if sequence.drafts:
                    ends += range(len(tokens) - len(sequence.drafts) - 1, len(tokens))
                else:
                    ends += [len(tokens) - 1] * len(drawing)
        hidden = self.hidden(plan, tokens)
        is_scored = any(
            answers_by_sequence[chunk.sequence].prompt_to_score(chunk.start, chunk.stop) for chunk in plan.chunks
        )
        if not (ends or is_scored):
            return PassOutcome()

        def outcome() -> tuple[list[list[TokenScore]], list[list[DrawnToken]]]:
            assert hidden is not None, "the last chunk is here"
            scores = self._prompt_scores(plan, hidden, answers_by_sequence)
            if not ends:
                return scores, []
            rows = hidden
            if ends != list(range(len(tokens))):
                rows = hidden.index_select(0, copy_to(torch.tensor(ends), self.device))  # [R, D]
            return scores, self._draw(self.logits(rows), answers, version)

        scores, drawn = outcome() if self._stages is None else self._stages.on_last(outcome)
        failed: dict[int, tuple[Answer, DanluError]] = {}
        for chunk, of_chunk in zip(plan.chunks, scores, strict=True):
            if not of_chunk:  # the usual case: a pass that only draws
                continue
            answer = answers_by_sequence[chunk.sequence]
            first = answer.prompt_to_score(chunk.start, chunk.stop).start + 1
            if problem := self._problem(answer, [(score.logprob,) for score in of_chunk], first):
                failed[answer.number] = (answer, problem)
            else:
                answer.prompt_scores += of_chunk
        for answer, new in zip(answers, drawn, strict=True):
            first = len(answer.prompt) + len(answer.drawn)
            if problem := self._problem(answer, [(token.logprob, token.drawn) for token in new], first):
                failed.setdefault(answer.number, (answer, problem))
        return PassOutcome(list(zip(answers, drawn, strict=True)), list(failed.values()))

    def _prompt_scores(
        self, plan: Plan, hidden: Tensor, answers_by_sequence: Mapping[int, Answer]
    ) -> list[list[TokenScore]]:
        """The log-probabilities of requested prompt tokens that follow hidden [T, D], for each chunk."""
        of_chunks: list[list[TokenScore]] = []
        row = 0  # of the chunk's first token
        for number, start, stop, *_ in plan.chunks:
            answer = answers_by_sequence[number]
            of_chunk: list[TokenScore] = []
            places = answer.prompt_to_score(start, stop)
            for first in range(places.start, places.stop, PROMPT_ROWS):
                some = range(first, min(first + PROMPT_ROWS, places.stop))
                logits = self.logits(hidden[row + some.start - start : row + some.stop - start])
                tokens, request = answer.prompt[some.start + 1 : some.stop + 1], answer.request
                slice_rows = EXACT_SLICE_ROWS if self.exact else None
                of_chunk += score(logits, tokens, request.sampling, request.top_logprobs, slice_rows=slice_rows)
            of_chunks.append(of_chunk)
            row += stop - start
        return of_chunks

    def _problem(self, answer: Answer, logprobs: Sequence[Sequence[float]], first: int) -> DanluError | None:
        """The error where log-probabilities of an answer's tokens, from position `first` on, are not finite, and where
        its grammar allows no token."""
        if answer.matcher is not None and (problem := answer.matcher.problem):
            return DataError(f"the grammar allows no token at position {first}: {problem}")
        for position, of_token in enumerate(logprobs, first):
            if not all(map(math.isfinite, of_token)):
                sampling = answer.request.sampling
                return ModelError(
                    f"the model's output is not finite at position {position}: a weight may be NaN, or the numbers "
                    f"leave the range of {str(self.dtype).removeprefix('torch.')} (try a wider dtype), with "
                    f"temperature {sampling.temperature:g} and repetition_penalty {sampling.repetition_penalty:g}"
                )
        return None

    def _draw(self, logits: Tensor, answers: Sequence[Answer], version: int) -> list[list[DrawnToken]]:
        """The next tokens of each answer, from logits [R, V]."""
        slice_rows = EXACT_SLICE_ROWS if self.exact else None
        masks = self._mask_writer.next_masks(answers, logits.shape[1])
        if self.speculation is None:
            rows = [_next_row(answer, mask) for answer, mask in zip(answers, masks, strict=True)]
            tokens = _drawn_tokens(draw(logits, rows, slice_rows=slice_rows), version)
            return [[token] for token in tokens]
        checks = [
            (self._draft_sequence(answer, mask), [] if answer.sequence is None else answer.sequence.drafts)
            for answer, mask in zip(answers, masks, strict=True)
        ]
        parts = self.speculation.draw(logits, checks, slice_rows=slice_rows)
        return [_drawn_tokens(part, version) for part in parts]

    def _draft_sequence(self, answer: Answer, mask: np.ndarray | None = None) -> DraftSequence:
        drafts = 0 if answer.is_confined else self._draft_tokens  # masks are known of the next token alone
        return DraftSequence(
            answer.number,
            answer.prompt if answer.sequence is None else answer.sequence.tokens,
            len(answer.prompt),
            max(0, min(drafts, answer.longest - len(answer.drawn) - 1)),
            _next_row(answer, mask),
            answer.virtual_tokens,
            answer.rotary_length,
        )


def _next_row(answer: Answer, mask: np.ndarray | None) -> DrawRow:
    """The inputs of the draw of an answer's next token, apart from logits. mask: see `DrawRow`."""
    request = answer.request
    position = len(answer.prompt) + len(answer.drawn)
    return DrawRow(
        request.sampling,
        request.random_number,
        request.draw_sample + answer.sample,
        position,
        seen=answer.seen,
        generated=answer.generated,
        top_logprobs=request.top_logprobs,
        mask=mask,
    )


def _drawn_tokens(drawn: Drawn, version: int) -> list[DrawnToken]:
    versions = itertools.repeat(version, len(drawn.tokens))
    return list(map(DrawnToken, drawn.tokens, drawn.logprobs, drawn.drawn, drawn.supports, versions, drawn.top))


def _packed_weights(model: Decoder, options: EngineOptions) -> PackedWeights:
    limit_bytes = int(options.packed_gib * GIB)
    if options.precision == "auto":
        return PackedWeights(limit_bytes)
    from danlu.assembly.arithmetic import encoded_in_rollouts
    from danlu.numerics.encoded_products import encoder_of

    return PackedWeights(limit_bytes, encoder_of(options.precision, options.fp8_recipe), encoded_in_rollouts(model))
