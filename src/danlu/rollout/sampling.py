"""From logits to the next token: greedy, or drawn with temperature, top-k, top-p and min-p.

B sequences · V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from danlu.rollout.request import SamplingOptions

# How many of the likeliest tokens top-p considers before it sorts the whole vocabulary: for V = 128256 on one CPU core
# `topk` of 1024 takes 0.7 ms and the sort 9 ms, and these nearly always contain the nucleus.
NUCLEUS_HEAD = 1024

_MASK64 = (1 << 64) - 1


def sample(
    logits: Tensor,  # [B, V] float32
    options: SamplingOptions,
    seen: Tensor | None,  # [B, V] bool, True where the token is in the sequence so far; None = no repetition penalty
    samples: Sequence[int],
    positions: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The next token of each sequence, and its log-probability.

    The draw for row b depends on (options.seed, samples[b], positions[b]) and its logits alone: not on which other
    sequences share the batch. Filters come in the order of transformers: repetition penalty, temperature, top-k, top-p,
    min-p; tokens that tie with the last one kept are kept too.

    Returns tokens [B] int64 and log-probabilities [B] float32, in nats, of softmax(logits / temperature) over the whole
    vocabulary, before penalty and filters (temperature 0 counts as 1): what a trainer recomputes.
    """
    penalised = logits
    if seen is not None and options.repetition_penalty != 1.0:
        penalised = penalise_repetition(logits, seen, options.repetition_penalty)
    if options.temperature == 0:
        tokens = penalised.argmax(dim=-1)
        return tokens, _logprobs(logits, tokens)
    scaled = penalised / options.temperature
    if options.truncates:
        scaled = keep_likely(scaled, options)
    tokens = _draw(scaled, [uniform(options.seed, *index) for index in zip(samples, positions, strict=True)])
    return tokens, _logprobs(logits / options.temperature, tokens)


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits [B, V] where each token of `seen` [B, V] is divided by the penalty if positive, multiplied if negative."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_likely(logits: Tensor, options: SamplingOptions) -> Tensor:
    """Logits [B, V], already divided by the temperature, with -inf where top-k, top-p or min-p leave a token out.

    Each filter keeps the tokens from a threshold up, so the result does not depend on the order of a sort.
    """
    if 0 < options.top_k < logits.shape[-1]:
        logits = _drop_below(logits, logits.topk(options.top_k, dim=-1).values[:, -1:])
    if options.top_p < 1:
        logits = _drop_below(logits, _nucleus_threshold(logits, options.top_p))
    if options.min_p > 0:
        logits = _drop_below(logits, logits.amax(dim=-1, keepdim=True) + math.log(options.min_p))
    return logits


def _drop_below(logits: Tensor, threshold: Tensor) -> Tensor:
    return logits.masked_fill(logits < threshold, float("-inf"))


def _nucleus_threshold(logits: Tensor, top_p: float) -> Tensor:
    """[B, 1]: the smallest logit of the nucleus, which is every token that less than top_p lies above."""
    normaliser = logits.logsumexp(dim=-1, keepdim=True)  # [B, 1]
    width = min(NUCLEUS_HEAD, logits.shape[-1])
    while True:
        head = logits.topk(width, dim=-1).values  # [B, width], falling
        probabilities = (head - normaliser).exp()
        above = _cumsum(probabilities) - probabilities  # probability before each token
        inside = above < top_p
        if width == logits.shape[-1] or not bool(inside[:, -1].any()):
            last = inside.sum(dim=-1, keepdim=True) - 1  # the first is always inside: nothing lies above it
            return head.gather(-1, last.clamp_(min=0))
        width = logits.shape[-1]


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments (splitmix64 finaliser, chained)."""
    state = 0
    for word in (seed, sample, position):
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def _draw(logits: Tensor, numbers: Sequence[float]) -> Tensor:
    """Inverse of the cumulative distribution, in vocabulary order; float64, as float32 sums drift over 100k tokens."""
    cumulative = _cumsum(logits.softmax(dim=-1).double())  # [B, V]
    targets = torch.tensor(numbers, dtype=torch.float64, device=logits.device).unsqueeze(1) * cumulative[:, -1:]
    # right=True: the first token whose sum is above the target, so one of probability zero is never drawn.
    # The clamp matters only for logits that are not finite: the caller finds those by their log-probability.
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_(max=logits.shape[-1] - 1)


def _cumsum(x: Tensor) -> Tensor:
    """Sums [B, n] from the left; torch has none on a GPU that gives the same bits each time, so where that is asked for
    it is done on the CPU."""
    if x.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        return x.cpu().cumsum(dim=-1).to(x.device)
    return x.cumsum(dim=-1)


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=-1)
