"""Sampling against transformers' logits processors, and draws that depend on nothing but their key."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders.chi_square import chi_square_p

from danlu.core.errors import DataError, RecipeError
from danlu.inference.request import SamplingOptions
from danlu.inference.sampling import DrawRow, check_allowed_ids, draw, uniform
from danlu.inference.support import Support, support_matrix
from danlu.objectives.token_logprobs import token_logprobs

V = 50


def logits_of(rows: int, width: int = V, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


def rows_of(options: SamplingOptions, count: int, *, seen=None, position: int = 7, top: int = 0) -> list[DrawRow]:
    """One row for each of `count` requests."""
    histories = [None] * count if seen is None else [np.array(ids) for ids in seen]
    return [DrawRow(options, i, 0, position, histories[i], top) for i in range(count)]


def transformers_filter(logits, options, histories):
    """The oracle: transformers' processors, in the order its `generate` builds them."""
    from transformers.generation import logits_process as lp

    processors = lp.LogitsProcessorList()
    if options.repetition_penalty != 1.0:
        processors.append(lp.RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.allowed_ids is not None:
        allowed = list(options.allowed_ids)
        processors.append(lp.PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1))
    if options.temperature != 1.0:
        processors.append(lp.TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        processors.append(lp.TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        processors.append(lp.TopPLogitsWarper(options.top_p))
    if options.min_p > 0.0:
        processors.append(lp.MinPLogitsWarper(options.min_p))
    return processors(torch.tensor(histories), logits.clone())


HISTORIES = [[1, 2, 2], [3, 4, 5], [0, 0, 0], [49, 1, 7], [8, 8, 9], [30, 31, 32]]
OPTIONS = [
    SamplingOptions(),
    SamplingOptions(temperature=0.7),
    SamplingOptions(top_k=5),
    SamplingOptions(top_p=0.6),
    SamplingOptions(top_p=1e-6),
    SamplingOptions(min_p=0.1),
    SamplingOptions(temperature=1.7, top_k=12, top_p=0.8, min_p=0.05, repetition_penalty=1.4),
    SamplingOptions(temperature=0.4, top_p=0.95, repetition_penalty=0.8),
    SamplingOptions(repetition_penalty=1.3),
    SamplingOptions(top_k=1000),
    SamplingOptions(allowed_ids=(3, 4, 30, 7)),
    SamplingOptions(allowed_ids=(9, 3, 4, 30, 7, 11), top_k=3, temperature=0.9),
    SamplingOptions(allowed_ids=tuple(range(0, V, 2)), top_p=0.7, repetition_penalty=1.4),
    SamplingOptions(top_k=20, top_p=0.9),
]


def check_against_transformers(logits, options, histories, drawn):
    """What `drawn` was drawn from: the tokens that are left, and their log-probabilities."""
    filtered = transformers_filter(logits, options, histories)
    expected = filtered.log_softmax(-1)
    for row, (token, logprob, support) in enumerate(zip(drawn.tokens, drawn.drawn, drawn.supports, strict=True)):
        left = filtered[row].isfinite()
        assert (support is None) == bool(left.all())
        if support is not None:
            assert support.ids.tolist() == left.nonzero()[:, 0].tolist()
            assert support.vocab_size == logits.shape[1]
        assert left[token]
        assert logprob == pytest.approx(expected[row, token].item(), abs=2e-6)


@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_drawn_from_equals_transformers(options):
    logits = logits_of(6)
    check_against_transformers(logits, options, HISTORIES, draw(logits, rows_of(options, 6, seen=HISTORIES)))


def test_rows_of_one_batch_may_have_any_options():
    """Also the control: options of a neighbour would be noticed."""
    greedy = SamplingOptions(temperature=0, repetition_penalty=1.5)
    options = [*OPTIONS, greedy, SamplingOptions(temperature=0, allowed_ids=(8, 9))]
    logits = logits_of(len(options))
    histories = (HISTORIES * 3)[: len(options)]
    rows = [DrawRow(o, 5, i, 9, np.array(h)) for i, (o, h) in enumerate(zip(options, histories, strict=True))]
    together = draw(logits, rows)
    for i, row in enumerate(rows):
        alone = draw(logits[i : i + 1], [row])
        assert (alone.tokens[0], alone.logprobs[0], alone.drawn[0]) == (
            together.tokens[i],
            together.logprobs[i],
            together.drawn[i],
        )
        kept = [None if s is None else s.ids.tolist() for s in (alone.supports[0], together.supports[i])]
        assert kept[0] == kept[1]
    supports = {None if s is None else tuple(s.ids) for s in together.supports}
    assert len(supports) > 8, "the options differ in what they leave"


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty_at_either_sign(penalty):
    logits, histories = logits_of(3), HISTORIES[:3]
    options = SamplingOptions(repetition_penalty=penalty)
    for number in range(40):
        rows = [DrawRow(options, number, i, 0, np.array(ids)) for i, ids in enumerate(histories)]
        check_against_transformers(logits, options, histories, draw(logits, rows))


def test_a_penalty_decides_between_tokens_of_negative_logits():
    logits, seen = torch.tensor([[-1.0, -1.5]]), np.array([0])
    assert draw(logits, [DrawRow(SamplingOptions(temperature=0), 0, 0, 0, seen)]).tokens == [0]
    penalised = SamplingOptions(temperature=0, repetition_penalty=2.0)
    assert draw(logits, [DrawRow(penalised, 0, 0, 0, seen)]).tokens == [1]
    assert logits.tolist() == [[-1.0, -1.5]], "the caller's logits are left alone"


@pytest.mark.parametrize("width", [5000, 8192])  # one that is not a multiple of the blocks, and one that is
@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
@pytest.mark.parametrize(
    "options", [SamplingOptions(top_p=0.9), SamplingOptions(min_p=0.02), SamplingOptions(top_k=40)]
)
def test_nuclei_of_any_width_equal_transformers(width, scale, options):
    logits = logits_of(3, width) * torch.tensor([[scale], [scale * 2], [1.0]])
    drawn = draw(logits, rows_of(options, 3))
    check_against_transformers(logits, options, [[0]] * 3, drawn)
    if scale == 0.01 and not options.top_k:
        assert len(drawn.supports[0].ids) > 4000 if drawn.supports[0] else options.min_p, "nearly all are kept"


def test_ties_with_the_last_kept_token_are_kept():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    for options in (SamplingOptions(top_k=2), SamplingOptions(top_p=0.7)):
        assert draw(logits, rows_of(options, 1)).supports[0].ids.tolist() == [1, 2, 3]
    flat = torch.zeros(1, 8192)
    flat[0, 5] = 1.0
    assert draw(flat, rows_of(SamplingOptions(top_k=2), 1)).supports == [None]


def test_greedy_takes_the_likeliest_and_penalty_counts():
    logits = torch.tensor([[1.0, 3.0, 2.9], [0.5, -1.0, 0.1]])
    drawn = draw(logits, rows_of(SamplingOptions(temperature=0), 2))
    assert drawn.tokens == [1, 0] and drawn.drawn == [0.0, 0.0] and drawn.supports == [None, None]
    torch.testing.assert_close(torch.tensor(drawn.logprobs), logits.log_softmax(-1)[[0, 1], [1, 0]])
    options = SamplingOptions(temperature=0, repetition_penalty=10.0)
    assert draw(logits, rows_of(options, 2, seen=[[1], [0]])).tokens == [2, 2]


@pytest.mark.parametrize("width", [4096, 5000])
def test_greedy_takes_the_first_of_the_largest(width):
    logits = logits_of(4, width)
    logits[1, [4000, 300, 301]] = 30.0
    assert draw(logits, rows_of(SamplingOptions(temperature=0), 4)).tokens == logits.argmax(-1).tolist()


def test_logprobs_are_of_the_whole_vocabulary_at_this_temperature():
    logits, options = logits_of(4), SamplingOptions(temperature=0.5, top_k=3, top_p=0.9, repetition_penalty=1.3)
    drawn = draw(logits, rows_of(options, 4, seen=[range(10)] * 4, top=2))
    tokens, logprobs = torch.tensor(drawn.tokens)[:, None], torch.tensor(drawn.logprobs)
    expected = (logits / 0.5).log_softmax(-1)
    torch.testing.assert_close(logprobs, expected.gather(1, tokens)[:, 0])
    assert (logprobs - logits.log_softmax(-1).gather(1, tokens)[:, 0]).abs().max() > 1e-3  # control: T matters
    assert (logprobs - torch.tensor(drawn.drawn)).abs().max() > 1e-3  # control: so do penalty and filters
    top = expected.topk(2)
    assert [[token for token, _ in row] for row in drawn.top] == top.indices.tolist()
    torch.testing.assert_close(torch.tensor([[p for _, p in row] for row in drawn.top]), top.values)


def test_top_logprobs_of_each_row_are_as_many_as_it_asks_for():
    rows = [DrawRow(SamplingOptions(), i, 0, 0, None, top) for i, top in enumerate((0, 3, 1, 99))]
    assert [len(row) for row in draw(logits_of(4), rows).top] == [0, 3, 1, V]


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(top_p=0.9),
        SamplingOptions(temperature=0.7, top_k=7),
        SamplingOptions(min_p=0.1),
        SamplingOptions(allowed_ids=(1, 4, 9), temperature=1.3),
    ],
)
def test_a_trainer_gets_what_was_drawn_from_by_the_support(options):
    generator = torch.Generator().manual_seed(3)
    hidden, head = (torch.randn(n, 8, generator=generator) for n in (6, V))
    drawn = draw(hidden @ head.t(), rows_of(options, 6))
    support = torch.from_numpy(support_matrix(drawn.supports))
    tokens = torch.tensor(drawn.tokens)
    got = token_logprobs(hidden, head, tokens, temperature=options.temperature, support=support).logprobs
    torch.testing.assert_close(got, torch.tensor(drawn.drawn), atol=1e-6, rtol=1e-6)
    whole = token_logprobs(hidden, head, tokens, temperature=options.temperature).logprobs
    torch.testing.assert_close(whole, torch.tensor(drawn.logprobs), atol=2e-6, rtol=1e-6)
    assert (whole - got).abs().max() > 1e-3, "control: the filters change log-probabilities"


def test_a_draw_does_not_depend_on_its_neighbours():
    logits, options = logits_of(8), SamplingOptions(seed=11)
    rows = [DrawRow(options, 3, i, 40 + i) for i in range(8)]
    together = draw(logits, rows)
    alone = [draw(logits[i : i + 1], rows[i : i + 1]) for i in range(8)]
    assert together.tokens == [one.tokens[0] for one in alone]
    assert together.logprobs == [one.logprobs[0] for one in alone]
    backwards = draw(logits.flip(0), rows[::-1])
    assert backwards.tokens[::-1] == together.tokens
    assert draw(logits, [DrawRow(options, 3, i + 1, 40 + i) for i in range(8)]).tokens != together.tokens


@pytest.mark.parametrize("options", [o for o in OPTIONS if o.top_p > 0.1])
def test_draws_follow_the_distribution(options):
    logits, n = logits_of(1, 12) / 2, 4000
    options = SamplingOptions(**{**vars(options), "allowed_ids": (0, 3, 5, 6, 11) if options.allowed_ids else None})
    rows = rows_of(options, n, seen=[[1, 2]] * n)
    counts = torch.bincount(torch.tensor(draw(logits.expand(n, 12), rows).tokens), minlength=12)
    probabilities = transformers_filter(logits, options, [[1, 2]])[0].softmax(-1)
    assert chi_square_p(counts, probabilities) > 1e-3
    hotter = torch.where(probabilities > 0, probabilities**0.8, 0.0)
    assert chi_square_p(counts, hotter / hotter.sum()) < 1e-3, "control: a distribution that is a little off is noticed"


def test_draws_over_a_large_vocabulary_follow_the_distribution():
    """Blocks first, then the token in one: by which block, and by which place in it."""
    logits, n = logits_of(1, 8192) / 3, 6000
    logits[0, 1000:1300] = -torch.inf
    tokens = torch.tensor(draw(logits.expand(n, 8192), rows_of(SamplingOptions(seed=2), n)).tokens)
    probabilities = logits[0].softmax(-1).double()
    blocks = torch.zeros(16, dtype=torch.float64).index_add_(0, torch.arange(8192) // 512, probabilities)
    inside = torch.zeros(16, dtype=torch.float64).index_add_(0, torch.arange(8192) % 16, probabilities)
    assert chi_square_p(torch.bincount(tokens // 512, minlength=16), blocks) > 1e-3
    assert chi_square_p(torch.bincount(tokens % 16, minlength=16), inside) > 1e-3
    assert chi_square_p(torch.bincount(tokens // 512, minlength=16), inside) < 1e-3, "control"


def test_the_ends_of_the_distribution_are_never_left(monkeypatch):
    logits = logits_of(2, 700)
    logits[:, 600:] = -torch.inf
    logits[:, :5] = -torch.inf
    for number, expected in ((0.0, 5), (1 - 2.0**-53, 599)):
        monkeypatch.setattr("danlu.inference.sampling.uniform", lambda *_, number=number: number)
        assert draw(logits, rows_of(SamplingOptions(), 2)).tokens == [expected] * 2


def test_two_training_steps_do_not_repeat_each_others_numbers():
    logits, options = logits_of(1).expand(64, V), SamplingOptions(seed=1)

    def step(first: int) -> list[int]:
        return draw(logits, [DrawRow(options, first + i, 0, 5) for i in range(64)]).tokens

    assert step(0) != step(64)
    assert step(0) == step(0)

    def index_in_the_call_for_a_number() -> list[int]:
        return draw(logits, [DrawRow(options, i, 0, 5) for i in range(64)]).tokens

    assert index_in_the_call_for_a_number() == index_in_the_call_for_a_number(), "control: this is what would happen"


def test_random_numbers_are_uniform_and_a_function_of_every_argument():
    numbers = torch.tensor([uniform(0, 3, i, j) for i in range(50) for j in range(40)], dtype=torch.float64)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02 and abs(numbers.var() - 1 / 12) < 0.005
    lag = torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1]
    assert abs(lag) < 0.06
    places = range(5)
    distinct = {uniform(a, b, c, d, e) for a in places for b in places for c in places for d in places for e in places}
    assert len(distinct) == 5**5


def test_logits_that_are_not_finite_are_seen_by_their_logprobs():
    logits = logits_of(3, 300)
    logits[1, 7] = float("nan")
    filters = ({"top_p": 0.9, "top_k": 4}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}, {"top_p": 0.9, "min_p": 0.1})
    for options in (SamplingOptions(temperature=0), SamplingOptions(), *(SamplingOptions(**each) for each in filters)):
        drawn = draw(logits, rows_of(options, 3))
        assert [np.isfinite(p) for p in drawn.logprobs] == [True, False, True]
        assert all(0 <= token < 300 for token in drawn.tokens)


def test_allowed_tokens_outside_the_vocabulary_are_refused():
    check_allowed_ids(SamplingOptions(allowed_ids=(0, V - 1)), V)
    check_allowed_ids(SamplingOptions(), V)
    with pytest.raises(DataError, match="allowed_ids: token 50 is not in the model's vocabulary, which has 50 tokens"):
        check_allowed_ids(SamplingOptions(allowed_ids=(0, V)), V)


def test_options_name_every_problem():
    with pytest.raises(RecipeError) as caught:
        SamplingOptions(temperature=-1.0, top_p=0.0, top_k=-2, min_p=1.5, repetition_penalty=0.0, seed=-1)
    assert caught.value.problems == [
        "temperature: -1.0 is out of range; it must be 0 (greedy) or a number of at least 1e-06",
        "top_p: 0.0 is out of range; it must be above 0 and at most 1 (1 keeps every token)",
        "top_k: -2 is out of range; it must be 0 (keep every token) or more",
        "min_p: 1.5 is out of range; it must be between 0 (keep every token) and 1",
        "repetition_penalty: 0.0 is out of range; it must be between 1e-06 and 1e+06 (1 changes nothing)",
        "seed: -1 is out of range; it must be at least 0 and below 2^63",
    ]
    with pytest.raises(RecipeError, match="temperature: nan"):
        SamplingOptions(temperature=float("nan"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sliced_logprobs_have_the_bits_of_training(temperature):
    """Rows with all kinds of options in one batch; blocks in place of slices are the control."""
    width, slice_rows = 1000, 256
    generator = torch.Generator().manual_seed(3)
    hidden, head = (torch.randn(n, 8, generator=generator) * 2 for n in (40, width))
    logits = torch.cat([hidden @ part.t() for part in head.split(slice_rows)], 1)
    kinds = [
        {},
        {"top_p": 0.9},
        {"top_k": 20, "top_p": 0.9},
        {"allowed_ids": tuple(range(0, width, 3))},
        {"min_p": 0.1},
    ]
    options = [SamplingOptions(temperature=temperature, **kinds[i % len(kinds)]) for i in range(40)]
    rows = [DrawRow(option, i, 0, 3) for i, option in enumerate(options)]
    sliced, blocked = draw(logits, rows, slice_rows=slice_rows), draw(logits, rows)
    assert sliced.tokens == blocked.tokens
    tokens, settings = torch.tensor(sliced.tokens), {"temperature": temperature, "slice_rows": slice_rows}
    assert sliced.logprobs == token_logprobs(hidden, head, tokens, **settings).logprobs.tolist()
    whole = Support.of(np.arange(width), width)
    support = torch.from_numpy(support_matrix([s or whole for s in sliced.supports]))
    assert sliced.drawn == token_logprobs(hidden, head, tokens, support=support, **settings).logprobs.tolist()
    assert blocked.logprobs != sliced.logprobs
    assert [p for p, s in zip(sliced.drawn, sliced.supports, strict=True) if s is None] == sliced.logprobs[::5]


def test_sliced_logprobs_of_greedy_and_penalised_rows():
    logits = logits_of(2, 300)
    penalised = rows_of(SamplingOptions(repetition_penalty=1.5), 1, seen=[range(200)])
    rows = rows_of(SamplingOptions(temperature=0), 1) + penalised
    sliced, blocked = draw(logits, rows, slice_rows=64), draw(logits, rows)
    torch.testing.assert_close(torch.tensor(sliced.logprobs), torch.tensor(blocked.logprobs))
    torch.testing.assert_close(torch.tensor(sliced.drawn), torch.tensor(blocked.drawn))
    assert sliced.drawn[0] == 0.0 and sliced.drawn[1] != sliced.logprobs[1]


def test_rows_that_keep_few_and_many_tokens_do_not_disturb_each_other():
    """Nuclei of a few tokens, of hundreds and of thousands, and thresholds of min-p, in one batch and alone."""
    logits = logits_of(8, 8192) * torch.tensor([[0.01], [0.3], [1.0], [2.0], [4.0], [0.5], [3.0], [0.0]])
    kinds = [SamplingOptions(top_p=0.9), SamplingOptions(min_p=0.3), SamplingOptions(top_p=0.9, min_p=0.1)]
    rows = [DrawRow(kinds[i % 3], i, 0, 2) for i in range(8)]
    together = draw(logits, rows)
    check = [draw(logits[i : i + 1], rows[i : i + 1]) for i in range(8)]
    assert together.tokens == [one.tokens[0] for one in check]
    assert together.drawn == [one.drawn[0] for one in check]
    for i, row in enumerate(rows):
        check_against_transformers(logits[i : i + 1], row.options, [[0]], check[i])
    sizes = [8192 if support is None else len(support.ids) for support in together.supports]
    assert [size for one, size in zip(check, sizes, strict=True) if one.supports[0] is None] in ([], [8192])
    assert min(sizes) < 20 and max(sizes) > 4000


def test_top_p_keeps_the_tokens_of_each_row_where_rows_are_looked_at_in_different_widths() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 400) * 0.6  # so flat that some rows need a second look, and others are looked at whole
    rows = [DrawRow(SamplingOptions(top_p=0.95), number, 0, 7) for number in range(6)]
    together = draw(logits, rows)
    apart = [draw(logits[i : i + 1], rows[i : i + 1]) for i in range(6)]
    assert together.tokens == [drawn.tokens[0] for drawn in apart]
    ids = [[support.ids.tolist() for support in drawn.supports if support is not None] for drawn in (together, *apart)]
    assert ids[0] == [of_row for (of_row,) in ids[1:]]
    assert len({len(of_row) for of_row in ids[0]}) > 1  # control: rows of another order would have other tokens
