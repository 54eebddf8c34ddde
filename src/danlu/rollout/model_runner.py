"""Carries plans out: moves blocks of the cache, runs the decoder over the chunks, and draws the next tokens.

T tokens of a pass, flat · R rows to draw from · D model width · V vocabulary
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from danlu.errors import ModelError, ResourceError
from danlu.models.attention_kernels import copy_to
from danlu.models.config import DynamicScaling
from danlu.models.decoder import Decoder, Layer
from danlu.numerics import batch_invariant
from danlu.objectives.vocab_slices import EXACT_SLICE_ROWS, logits_in_slices
from danlu.rollout.answer import Answer, DrawnToken
from danlu.rollout.engine import EngineAdapters, EngineOptions
from danlu.rollout.exact_paged import ExactPagedAttention
from danlu.rollout.pool import CachePool
from danlu.rollout.sampling import DrawRow, draw
from danlu.rollout.scheduler import Chunk, Plan
from danlu.spelling import did_you_mean

GIB = 2**30


class ModelRunner:
    """A decoder with the pool of its cache.

    dtype: of activations and of the cache; by default that of the weights.
    Raises ResourceError where not one block fits into the cache.
    """

    def __init__(
        self, model: Decoder, options: EngineOptions, dtype: torch.dtype | None, adapters: EngineAdapters | None
    ) -> None:
        parameter = next(model.parameters())
        self.model, self.device, self.dtype = model, parameter.device, dtype or parameter.dtype
        self._adapters, self.exact = adapters, options.exact
        if self.exact:
            batch_invariant.enable()
        self._lengths_matter = isinstance(model.config.rope_scaling, DynamicScaling)
        layers = [cast(Layer, layer).attention.cache for layer in model.layers.values()]
        self.block_bytes = CachePool.block_bytes(layers, options.block, self.dtype)
        most = options.sequences * -(-model.config.context_length // options.block)  # with every context full
        blocks = min(most, int(options.cache_gib * GIB) // self.block_bytes)
        if blocks == 0:
            raise ResourceError(
                f"rollout.cache_gib: {options.cache_gib} does not hold one block of {options.block} tokens "
                f"({gib(self.block_bytes)} GiB). Raise it, or lower rollout.block"
            )
        host_bytes = int(options.swap_gib * GIB) if options.preempt == "swap" else 0
        host_blocks = min(most, host_bytes // self.block_bytes)
        self.pool = CachePool(
            layers, blocks=blocks, block=options.block, dtype=self.dtype, device=self.device, host_blocks=host_blocks
        )

    def run(
        self, plan: Plan, answers_by_sequence: Mapping[int, Answer], version: int
    ) -> list[tuple[Answer, DrawnToken]]:
        """One pass; for each answer whose known tokens are all computed by it, the next token.

        Chunks of several adapters go through the decoder one adapter after the other.
        Raises ModelError where logits are not finite.
        """
        with torch.inference_mode():
            self.pool.carry_out(plan)
            if self._adapters is None:
                return self._forward(plan, answers_by_sequence, version)
            groups: dict[str | None, list[Chunk]] = {}
            for chunk in plan.chunks:
                groups.setdefault(answers_by_sequence[chunk.sequence].request.adapter, []).append(chunk)
            drawn = []
            try:
                for adapter, chunks in groups.items():
                    self._adapters.use(adapter)
                    part = Plan(chunks=tuple(chunks))
                    self.pool.carry_out(part)
                    drawn += self._forward(part, answers_by_sequence, version)
            finally:
                self._adapters.use(None)
            return drawn

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

    def _forward(
        self, plan: Plan, answers_by_sequence: Mapping[int, Answer], version: int
    ) -> list[tuple[Answer, DrawnToken]]:
        tokens: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        ends: list[int] = []  # indices of the tokens whose hidden states are drawn from
        answers: list[Answer] = []
        for number, start, stop, _, prompt_length in plan.chunks:
            answer = answers_by_sequence[number]
            assert answer.sequence is not None
            known = answer.sequence.tokens
            tokens += known[start:stop]
            positions += range(start, stop)
            if self._lengths_matter:
                lengths += [max(prompt_length, position + 1) for position in range(start, stop)]
            if stop == len(known):
                drawing = (answer, *answer.branches)
                answers += drawing
                ends += [len(tokens) - 1] * len(drawing)
        columns = [tokens, positions, lengths] if self._lengths_matter else [tokens, positions]
        inputs = copy_to(torch.tensor(columns), self.device)  # [2 or 3, T]
        attend = ExactPagedAttention(plan, self.pool) if self.exact else self.pool.attend(plan)
        hidden = self.model(inputs[0], inputs[1], attend, self.dtype, inputs[2] if self._lengths_matter else None)
        if not ends:
            return []
        if ends != list(range(len(tokens))):
            hidden = hidden.index_select(0, copy_to(torch.tensor(ends), self.device))  # [R, D]
        return list(zip(answers, self._draw(self._logits(hidden), answers, version), strict=True))

    def _logits(self, hidden: Tensor) -> Tensor:
        """[R, V] float32; where numerics are exact by the products that training makes for its log-probabilities."""
        if not self.exact:
            return self.model.logits(hidden)
        cap = self.model.config.final_softcap
        return logits_in_slices(hidden, self.model.head_weight, softcap=cap, slice_rows=EXACT_SLICE_ROWS)

    def _draw(self, logits: Tensor, answers: Sequence[Answer], version: int) -> list[DrawnToken]:
        """The next token of each answer, from logits [R, V]. Raises ModelError where these are not finite."""
        rows = [
            DrawRow(
                answer.request.sampling,
                answer.request.random_number,
                answer.sample,
                len(answer.prompt) + len(answer.drawn),
                answer.seen,
                answer.request.top_logprobs,
            )
            for answer in answers
        ]
        drawn = draw(logits, rows, slice_rows=EXACT_SLICE_ROWS if self.exact else None)
        if not all(map(math.isfinite, drawn.logprobs)):
            row = next(row for row, logprob in zip(rows, drawn.logprobs, strict=True) if not math.isfinite(logprob))
            raise ModelError(
                f"the model's output is not finite at position {row.position}: a weight may be NaN, or the "
                f"numbers leave the range of {str(self.dtype).removeprefix('torch.')} (try a wider dtype)"
            )
        versions = itertools.repeat(version, len(rows))
        return list(map(DrawnToken, drawn.tokens, drawn.logprobs, drawn.drawn, drawn.supports, versions, drawn.top))


def gib(size_bytes: int) -> str:
    """A size in GiB, rounded up so that a setting of it suffices."""
    return f"{math.ceil(size_bytes / GIB * 1e4) / 1e4:g}"
