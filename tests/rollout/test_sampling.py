"""Sampling against transformers' logits processors, and draws that depend on nothing but their seed."""

from __future__ import annotations

import pytest
import torch

from danlu.errors import RecipeError
from danlu.rollout.request import SamplingOptions
from danlu.rollout.sampling import keep_likely, penalise_repetition, sample, uniform

V = 50


def logits_of(rows: int, width: int = V, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


def transformers_filter(logits, options, histories):
    """The oracle: transformers' processors, in the order its `generate` builds them."""
    from transformers.generation import logits_process as lp

    processors = lp.LogitsProcessorList()
    if options.repetition_penalty != 1.0:
        processors.append(lp.RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.temperature != 1.0:
        processors.append(lp.TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        processors.append(lp.TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        processors.append(lp.TopPLogitsWarper(options.top_p))
    if options.min_p > 0.0:
        processors.append(lp.MinPLogitsWarper(options.min_p))
    return processors(torch.tensor(histories), logits.clone())


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=0.7),
        SamplingOptions(top_k=5),
        SamplingOptions(top_p=0.6),
        SamplingOptions(top_p=1e-6),
        SamplingOptions(min_p=0.1),
        SamplingOptions(temperature=1.7, top_k=12, top_p=0.8, min_p=0.05, repetition_penalty=1.4),
        SamplingOptions(temperature=0.4, top_p=0.95, repetition_penalty=0.8),
        SamplingOptions(top_k=1000),
    ],
)
def test_filters_equal_transformers(options):
    logits, histories = logits_of(6), [[1, 2, 2], [3, 4, 5], [0, 0, 0], [49, 1, 7], [8, 8, 9], [30, 31, 32]]
    seen = torch.zeros(6, V, dtype=torch.bool).scatter_(1, torch.tensor(histories), True)
    got = keep_likely(penalise_repetition(logits, seen, options.repetition_penalty) / options.temperature, options)
    expected = transformers_filter(logits, options, histories)
    assert torch.equal(got.isinf(), expected.isinf())
    torch.testing.assert_close(got, expected)
    assert not torch.equal(got, logits) or options.top_k > V


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty_alone_equals_transformers_at_either_sign(penalty):
    logits, histories = logits_of(3), [[1, 2, 2], [3, 4, 5], [49, 1, 7]]
    seen = torch.zeros(3, V, dtype=torch.bool).scatter_(1, torch.tensor(histories), True)
    assert (logits[seen] < 0).any() and (logits[seen] > 0).any(), "both branches are asked for"
    got = penalise_repetition(logits, seen, penalty)
    torch.testing.assert_close(got, transformers_filter(logits, SamplingOptions(repetition_penalty=penalty), histories))
    assert ((got < logits) if penalty > 1 else (got > logits))[seen].all(), "what was said becomes less likely, or more"
    assert torch.equal(got[~seen], logits[~seen])


def test_a_penalty_decides_between_tokens_of_negative_logits():
    logits, seen = torch.tensor([[-1.0, -1.5]]), torch.tensor([[True, False]])
    assert sample(logits, SamplingOptions(temperature=0), seen, [0], [0])[0].tolist() == [0]
    assert sample(logits, SamplingOptions(temperature=0, repetition_penalty=2.0), seen, [0], [0])[0].tolist() == [1]


def test_nucleus_wider_than_the_head_sorts_everything():
    logits, options = logits_of(2, 5000) * 0.01, SamplingOptions(top_p=0.9)  # nearly uniform: ~4500 tokens are kept
    got = keep_likely(logits, options)
    assert torch.equal(got.isinf(), transformers_filter(logits, options, [[0], [0]]).isinf())
    assert got.isfinite().sum() > 2 * 4000


def test_ties_with_the_last_kept_token_are_kept():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    assert keep_likely(logits, SamplingOptions(top_k=2)).isfinite().tolist() == [[False, True, True, True, False]]
    assert keep_likely(logits, SamplingOptions(top_p=0.7)).isfinite().tolist() == [[False, True, True, True, False]]


def test_greedy_takes_the_likeliest_and_penalty_counts():
    logits = torch.tensor([[1.0, 3.0, 2.9], [0.5, -1.0, 0.1]])
    tokens, logprobs = sample(logits, SamplingOptions(temperature=0), None, [0, 1], [5, 5])
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])
    seen = torch.tensor([[False, True, False], [True, False, False]])
    options = SamplingOptions(temperature=0, repetition_penalty=10.0)
    assert sample(logits, options, seen, [0, 1], [5, 5])[0].tolist() == [2, 2]


def test_logprobs_are_of_the_whole_vocabulary_at_this_temperature():
    logits, options = logits_of(4), SamplingOptions(temperature=0.5, top_k=3, top_p=0.9, repetition_penalty=1.3)
    seen = torch.zeros(4, V, dtype=torch.bool)
    seen[:, :10] = True
    tokens, logprobs = sample(logits, options, seen, range(4), [7] * 4)
    expected = (logits / 0.5).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)
    assert (logprobs - logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]).abs().max() > 1e-3  # control: T matters


def test_a_draw_does_not_depend_on_its_neighbours():
    logits, options = logits_of(8), SamplingOptions(seed=11)
    together, _ = sample(logits, options, None, range(8), range(40, 48))
    alone = [sample(logits[i : i + 1], options, None, [i], [40 + i])[0].item() for i in range(8)]
    assert together.tolist() == alone
    shifted, _ = sample(logits, options, None, range(1, 9), range(40, 48))
    assert shifted.tolist() != alone


def test_draws_follow_the_distribution():
    logits, n = torch.tensor([[2.0, 1.0, 0.0, float("-inf")]]), 4000
    tokens, _ = sample(logits.expand(n, 4), SamplingOptions(seed=5), None, range(n), [0] * n)
    shares = torch.bincount(tokens, minlength=4) / n
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=0.025, rtol=0)
    assert shares[3] == 0


def test_random_numbers_are_uniform_and_a_function_of_all_three():
    numbers = torch.tensor([uniform(0, i, j) for i in range(50) for j in range(40)], dtype=torch.float64)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02 and abs(numbers.var() - 1 / 12) < 0.005
    lag = torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1]
    assert abs(lag) < 0.06
    assert len({uniform(a, b, c) for a in range(8) for b in range(8) for c in range(8)}) == 512


def test_options_name_every_problem():
    with pytest.raises(RecipeError) as caught:
        SamplingOptions(temperature=-1.0, top_p=0.0, top_k=-2, min_p=1.5, repetition_penalty=0.0, seed=-1)
    assert caught.value.problems == [
        "temperature: -1.0 is out of range; it must be 0 (greedy) or a positive number",
        "top_p: 0.0 is out of range; it must be above 0 and at most 1 (1 keeps every token)",
        "top_k: -2 is out of range; it must be 0 (keep every token) or more",
        "min_p: 1.5 is out of range; it must be between 0 (keep every token) and 1",
        "repetition_penalty: 0.0 is out of range; it must be positive (1 changes nothing)",
        "seed: -1 is out of range; it must be at least 0 and below 2^63",
    ]
    with pytest.raises(RecipeError, match="temperature: nan"):
        SamplingOptions(temperature=float("nan"))
