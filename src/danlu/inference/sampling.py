"""Draws the next token of each sequence from logits: greedy, or with temperature, top-k, top-p and min-p.

Rows of a batch may have different options.

B sequences · V vocabulary
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from danlu.core.errors import DataError
from danlu.inference.blocked_softmax import BlockedSoftmax, BlockSums, column, cumsum, likeliest, search
from danlu.inference.filters import Kept, keep
from danlu.inference.penalties import TokenCounts, penalise
from danlu.inference.request import SamplingOptions
from danlu.inference.support import Support, support_matrix
from danlu.objectives.token_logprobs import logprobs_of_logits

DRAW, ACCEPT, RESIDUAL, PROPOSE = range(4)
"""Purposes of a number: a plain draw; whether a proposed token is kept, and the draw in its place; a draft model's
draw."""

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class DrawRow:
    """The inputs of the draw of a sequence's next token, apart from its logits."""

    options: SamplingOptions
    number: int
    """The number of the request."""
    sample: int
    position: int
    """The position of the drawn token in the sequence, virtual tokens included."""
    seen: np.ndarray | Sequence[int] | None = None
    """[n] the tokens of prompt and answer so far, in any order, repeats allowed; only a repetition penalty asks for
    them (`SeenTokens.ids` keeps them ready)."""
    top_logprobs: int = 0
    proposed: ProposedToken | None = None
    """The draft model's token for this place: it is kept where that leaves each token as likely as without it."""
    generated: TokenCounts | None = None
    """The tokens of the answer so far, counted; only presence and frequency penalties ask for them."""
    mask: np.ndarray | None = None
    """[ceil(V / 8)] uint8, the lowest bit first: the tokens that may be drawn here, of a grammar for example; those
    that `options.allowed_ids` leave out have no bit. None: all that the options allow."""


@dataclass(frozen=True)
class ProposedToken:
    """A token that a draft model gives for a place."""

    token: int
    probabilities: Tensor | None
    """[V] float32, of the distribution that it was drawn from; None where it was not drawn, but is certain."""


class TokenScore(NamedTuple):
    """The model's score of a given token."""

    logprob: float
    """The log-probability over the whole vocabulary, of the logits divided by the temperature, in nats."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens in its place, with theirs."""


@dataclass(frozen=True)
class Drawn:
    """The next token of each row; the fields are those of `Completion`."""

    tokens: list[int]
    logprobs: list[float]
    drawn: list[float]
    supports: list[Support | None]
    """The tokens that filters and allowed tokens left; None where that is the whole vocabulary, and for greedy rows
    without allowed tokens."""
    top: list[tuple[tuple[int, float], ...]]

    def rows(self, start: int, stop: int) -> Drawn:
        """Those from `start` to `stop`."""
        part = slice(start, stop)
        return Drawn(self.tokens[part], self.logprobs[part], self.drawn[part], self.supports[part], self.top[part])


def draw(logits: Tensor, rows: Sequence[DrawRow], *, slice_rows: int | None = None) -> Drawn:
    """Draws the next token of each sequence; returns it with its log-probabilities and the tokens it was chosen from.

    The draw of a row depends on (options.seed, number, sample, position), its options and its logits alone: not on
    which other rows there are. Penalties and allowed tokens come first, then temperature, top-k, top-p, min-p, in the
    order of transformers; tokens that tie with the last one kept are kept too.

    `logprobs` are of softmax(logits / temperature) over the whole vocabulary, before penalties and filters (where the
    temperature is 0 it counts as 1), as a trainer recomputes them. `drawn` are under the distribution that was drawn
    from, so 0 where the temperature is. Both are NaN where the logits have no finite maximum.

    Args:
        logits: [B, V] float32, after a final soft cap; not changed.
        slice_rows: log-probabilities are summed in slices of this many tokens, which gives the bits of
            `objectives.token_logprobs` in such slices; None sums in blocks, which is faster.
    """
    assert len(rows) == len(logits), f"{len(rows)} rows for {len(logits)} rows of logits"
    temperatures = [row.options.temperature or 1.0 for row in rows]
    scaled_model = _divide(logits, temperatures)  # [B, V]
    of_model = BlockedSoftmax.of(scaled_model)
    altered = _alter(logits, rows)
    if altered is logits:
        scaled, softmax = scaled_model, of_model
    else:
        scaled = _divide(altered, temperatures)
        softmax = BlockedSoftmax.of(scaled)
    choice = _choose(scaled, softmax, rows)
    if slice_rows is None:
        logprobs, drawn = of_model.logprobs(scaled_model, choice.tokens), choice.drawn
    else:
        logprobs, drawn = _sliced_logprobs(logits, altered, rows, choice, slice_rows)
    # The one copy to the host, where nothing is filtered. float64 holds tokens and float32 without loss.
    columns = torch.stack((choice.tokens.double(), logprobs.double(), drawn.double())).tolist()
    top = _top_logprobs(scaled_model, of_model, [row.top_logprobs for row in rows])
    return Drawn([int(token) for token in columns[0]], columns[1], columns[2], choice.supports, top)


def _sliced_logprobs(
    logits: Tensor, altered: Tensor, rows: Sequence[DrawRow], choice: _Choice, slice_rows: int
) -> tuple[Tensor, Tensor]:
    """`Drawn.logprobs` and `Drawn.drawn`, [B] each, by the arithmetic of a trainer that knows the supports.

    altered: the logits after penalties and allowed tokens; a support leaves the latter's infinities out.
    """
    logprobs, drawn = torch.empty_like(choice.drawn), choice.drawn.clone()
    groups: dict[tuple[float, bool, bool], list[int]] = {}  # a trainer divides by one temperature
    for i, (row, support) in enumerate(zip(rows, choice.supports, strict=True)):
        key = (row.options.temperature, row.options.penalises, support is not None)
        groups.setdefault(key, []).append(i)
    for (temperature, penalised, filtered), members in groups.items():
        index = torch.tensor(members, device=logits.device)
        logprobs_of = partial(logprobs_of_logits, temperature=temperature or 1.0, slice_rows=slice_rows)
        logprobs[index] = logprobs_of(logits[index], choice.tokens[index])
        if temperature > 0 and (penalised or filtered):
            supports = [support for i in members if (support := choice.supports[i]) is not None]
            matrix = torch.from_numpy(support_matrix(supports)).to(logits.device) if filtered else None
            drawn[index] = logprobs_of(altered[index], choice.tokens[index], support=matrix)
        elif temperature > 0:
            drawn[index] = logprobs[index]
    return logprobs, drawn


def score(
    logits: Tensor, tokens: Sequence[int], options: SamplingOptions, top_logprobs: int, *, slice_rows: int | None = None
) -> list[TokenScore]:
    """Scores known tokens, one for each row of logits [B, V], as `draw` scores those that it draws."""
    scaled = _divide(logits, [options.temperature or 1.0] * len(tokens))
    softmax, ids = BlockedSoftmax.of(scaled), torch.tensor(tokens, device=logits.device)
    if slice_rows is None:
        logprobs = softmax.logprobs(scaled, ids)
    else:
        logprobs = logprobs_of_logits(logits, ids, temperature=options.temperature or 1.0, slice_rows=slice_rows)
    top = _top_logprobs(scaled, softmax, [top_logprobs] * len(tokens))
    return list(map(TokenScore, logprobs.tolist(), top))


def propose(logits: Tensor, rows: Sequence[DrawRow]) -> list[ProposedToken]:
    """Proposes the next token of each row with a draft model's logits [B, V], by the row's own options."""
    drawing = [i for i, row in enumerate(rows) if row.options.temperature > 0]
    scaled = _divide(_alter(logits, rows), [row.options.temperature or 1.0 for row in rows])
    softmax = BlockedSoftmax.of(scaled)
    tokens = softmax.argmax(scaled)
    probabilities: list[Tensor | None] = [None] * len(rows)
    if drawing:
        index = torch.tensor(drawing, device=logits.device)
        members = [rows[i] for i in drawing]
        weights, _ = _weights(scaled[index], softmax.rows(index), members)
        tokens[index] = weights.draw(_numbers(members, logits, PROPOSE))
        for i, row in zip(drawing, weights.probabilities.unbind(), strict=True):
            probabilities[i] = row
    return list(map(ProposedToken, tokens.tolist(), probabilities))


def check_allowed_ids(options: SamplingOptions, vocab_size: int) -> None:
    """Raises DataError for allowed tokens, and tokens with a bias, that are not in the vocabulary."""
    named = [("allowed_ids", token) for token in options.allowed_ids or ()]
    named += [("biased_ids", token) for token in options.biased_ids]
    outside = [(name, token) for name, token in named if not 0 <= token < vocab_size]
    if outside:
        name, token = outside[0]
        raise DataError(f"{name}: token {token} is not in the model's vocabulary, which has {vocab_size} tokens")


def _divide(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """logits [B, V] over the temperature of each row; the logits themselves where all are 1."""
    if all(temperature == 1.0 for temperature in temperatures):
        return logits
    return logits / column(temperatures, logits)


# -- penalties and allowed tokens


def _alter(logits: Tensor, rows: Sequence[DrawRow]) -> Tensor:
    """Logits [B, V] with the penalties of each row, and -inf where a token is not allowed; the logits themselves where
    no row has either."""
    penalised = any(row.options.penalises for row in rows)
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    confined: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(rows):
        if row.options.allowed_ids is not None and row.mask is None:
            confined.setdefault(row.options.allowed_ids, []).append(i)
    if not penalised and not confined and not masked:
        return logits
    altered = logits.clone(memory_format=torch.contiguous_format)
    if penalised:
        penalise(altered, rows)
    for allowed_ids, members in confined.items():
        ids = torch.from_numpy(_allowed(allowed_ids)).to(logits.device)
        left = altered[members][:, ids]
        altered[members] = torch.full_like(altered[members], float("-inf")).index_copy_(1, ids, left)
    if masked:
        outside = _outside([mask for row in rows if (mask := row.mask) is not None], logits)
        if len(masked) == len(rows):
            altered.masked_fill_(outside, float("-inf"))
        else:
            altered[masked] = altered[masked].masked_fill_(outside, float("-inf"))
    return altered


def _outside(masks: Sequence[np.ndarray], like: Tensor) -> Tensor:
    """[n, V] bool, of tokens that masks leave out."""
    bits = np.bitwise_not(np.stack(masks))
    outside = np.unpackbits(bits, axis=1, count=like.shape[1], bitorder="little").view(bool)
    return torch.from_numpy(outside).to(like.device)


@functools.lru_cache(maxsize=8)
def _allowed(ids: tuple[int, ...]) -> np.ndarray:
    """[K] int64, rising, without repeats."""
    return np.unique(np.array(ids, dtype=np.int64))


@functools.lru_cache(maxsize=8)
def _allowed_support(ids: tuple[int, ...], vocab_size: int) -> Support | None:
    distinct = _allowed(ids)
    return Support.of(distinct, vocab_size) if len(distinct) < vocab_size else None


# -- draws


@dataclass(frozen=True)
class _Choice:
    """Tokens of some rows."""

    tokens: Tensor  # [b] int64
    drawn: Tensor  # [b] float32
    supports: list[Support | None]


def _choose(scaled: Tensor, softmax: BlockedSoftmax, rows: Sequence[DrawRow]) -> _Choice:
    """Chooses the tokens of rows, each as it needs: the maximum, a draw from all, or a draw from the kept tokens."""
    kinds: dict[Callable[..., _Choice], list[int]] = {}
    for i, row in enumerate(rows):
        if row.options.temperature == 0:
            kind = _greedy
        elif row.proposed is not None and row.proposed.probabilities is not None:
            kind = _keep_or_draw
        else:
            kind = _draw_kept if _truncates(row.options, scaled.shape[1]) else _draw_any
        kinds.setdefault(kind, []).append(i)
    if len(kinds) == 1:
        return next(iter(kinds))(scaled, softmax, rows)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=scaled.device)
    drawn = torch.empty(len(rows), device=scaled.device)
    supports: list[Support | None] = [None] * len(rows)
    for kind, members in kinds.items():
        index = torch.tensor(members, device=scaled.device)
        choice = kind(scaled[index], softmax.rows(index), [rows[i] for i in members])
        tokens[index], drawn[index] = choice.tokens, choice.drawn
        for i, support in zip(members, choice.supports, strict=True):
            supports[i] = support
    return _Choice(tokens, drawn, supports)


def _truncates(options: SamplingOptions, vocab_size: int) -> bool:
    return options.top_p < 1 or 0 < options.top_k < vocab_size or options.min_p > 0


def _allowed_supports(rows: Sequence[DrawRow], vocab_size: int) -> list[Support | None]:
    return [_allowed_support_of(row, vocab_size) for row in rows]


def _allowed_support_of(row: DrawRow, vocab_size: int) -> Support | None:
    if row.mask is not None:
        return Support.of_bits(row.mask, vocab_size)
    return None if row.options.allowed_ids is None else _allowed_support(row.options.allowed_ids, vocab_size)


def _greedy(scaled: Tensor, softmax: BlockedSoftmax, rows: Sequence[DrawRow]) -> _Choice:
    supports = _allowed_supports(rows, scaled.shape[1])
    return _Choice(softmax.argmax(scaled), torch.zeros_like(softmax.highest).squeeze(1), supports)


def _draw_any(scaled: Tensor, softmax: BlockedSoftmax, rows: Sequence[DrawRow]) -> _Choice:
    tokens = softmax.exp.draw(_numbers(rows, scaled))
    return _Choice(tokens, softmax.logprobs(scaled, tokens), _allowed_supports(rows, scaled.shape[1]))


def _draw_kept(scaled: Tensor, softmax: BlockedSoftmax, rows: Sequence[DrawRow]) -> _Choice:
    kept = _kept(scaled, softmax, rows)
    cumulative = cumsum((kept.values - softmax.highest).exp_())  # [b, K]
    places = search(cumulative, _numbers(rows, scaled) * cumulative[:, -1:])
    drawn = kept.values.gather(1, places) - softmax.highest - cumulative[:, -1:].log().float()
    return _Choice(kept.ids.gather(1, places).squeeze(1), drawn.squeeze(1), kept.supports(scaled.shape[1]))


def _kept(scaled: Tensor, softmax: BlockedSoftmax, rows: Sequence[DrawRow]) -> Kept:
    return keep(scaled, softmax.highest, softmax.exp.total, [row.options for row in rows])


def _keep_or_draw(scaled: Tensor, softmax: BlockedSoftmax, rows: Sequence[DrawRow]) -> _Choice:
    """The proposed tokens, or others, so that each token is as likely as without proposals."""
    weights, supports = _weights(scaled, softmax, rows)
    proposed = [row.proposed for row in rows if row.proposed is not None]
    tokens = rejection_sample(
        weights.probabilities,
        torch.stack([token.probabilities for token in proposed if token.probabilities is not None]),
        torch.tensor([token.token for token in proposed], device=scaled.device),
        _numbers(rows, scaled, ACCEPT),
        _numbers(rows, scaled, RESIDUAL),
    )
    drawn = scaled.gather(1, tokens.unsqueeze(1)) - softmax.highest - weights.total.log().float()
    return _Choice(tokens, drawn.squeeze(1), supports)


def _weights(
    scaled: Tensor, softmax: BlockedSoftmax, rows: Sequence[DrawRow]
) -> tuple[BlockSums, list[Support | None]]:
    """exp(scaled - its maximum) [b, V] of the tokens that each row may draw, 0 elsewhere; and the supports."""
    vocab_size = scaled.shape[1]
    supports = _allowed_supports(rows, vocab_size)
    truncating = [i for i, row in enumerate(rows) if _truncates(row.options, vocab_size)]
    if not truncating:
        return softmax.exp, supports
    index = torch.tensor(truncating, device=scaled.device)
    kept = _kept(scaled[index], softmax.rows(index), [rows[i] for i in truncating])
    for i, support in zip(truncating, kept.supports(vocab_size), strict=True):
        supports[i] = support
    lowest = torch.full_like(softmax.highest, float("-inf")).index_copy_(0, index, kept.lowest)
    exp = (scaled - softmax.highest).exp_()
    return BlockSums.of(torch.where(scaled < lowest, 0.0, exp)), supports


def _numbers(rows: Sequence[DrawRow], like: Tensor, purpose: int = DRAW) -> Tensor:
    """The random number of each row, [b, 1] float64."""
    numbers = [uniform(row.options.seed, row.number, row.sample, row.position, purpose) for row in rows]
    return column(numbers, like, torch.float64)


def _top_logprobs(
    scaled: Tensor, softmax: BlockedSoftmax, counts: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    """The `counts` likeliest tokens of each row, with the model's log-probabilities."""
    widest = min(max(counts), scaled.shape[1])
    if widest == 0:
        return [() for _ in counts]
    values, ids = likeliest(scaled, widest)
    logprobs = (values - softmax.highest - softmax.exp.total.log().float()).tolist()
    return [
        tuple(zip(tokens[:count], of_tokens[:count], strict=True))
        for count, tokens, of_tokens in zip(counts, ids.tolist(), logprobs, strict=True)
    ]


def rejection_sample(p: Tensor, q: Tensor, proposed: Tensor, accept: Tensor, residual: Tensor) -> Tensor:
    """Tokens [B] int64 that follow p, given proposals that follow q (arXiv:2211.17192, algorithm 1).

    A proposal x is kept with probability min(1, p(x) / q(x)); in place of the others there is a draw from
    max(0, p - q), normalised. No rule keeps more of them. A token that is drawn in place of a proposal differs from it.

    Args:
        p, q: [B, V] float32, rows of probabilities.
        proposed: [B] int64, drawn from q.
        accept, residual: [B, 1] float64 in [0, 1), random numbers that do not depend on those behind `proposed`.
    """
    at_proposed = proposed.unsqueeze(1)
    is_kept = accept * q.gather(1, at_proposed) < p.gather(1, at_proposed)  # [B, 1]
    others = BlockSums.of((p - q).clamp_(min=0))
    # Where p and q differ by rounding alone there may be no rest, and what the rounding says of the proposal is chance.
    is_kept |= others.total == 0
    return torch.where(is_kept.squeeze(1), proposed, others.draw(residual))


def uniform(seed: int, number: int, sample: int, position: int, purpose: int = DRAW) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments (splitmix64 finaliser, chained).

    Args:
        number: of the request. sample: which of its answers. position: of the token in the sequence.
        purpose: DRAW, or one of the others.
    """
    state = _mixed(_sequence_state(seed, number, sample), position)
    return ((state if purpose == DRAW else _mixed(state, purpose)) >> 11) * 2.0**-53


@functools.lru_cache(maxsize=4096)
def _sequence_state(seed: int, number: int, sample: int) -> int:
    """The state that the numbers of one sequence have in common."""
    return functools.reduce(_mixed, (seed, number, sample), 0)


def _mixed(state: int, word: int) -> int:
    state = (state + word + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)
