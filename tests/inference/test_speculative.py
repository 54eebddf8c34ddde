"""Speculative decoding over a small Markov chain in place of a model, against plain draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from builders.chi_square import chi_square_p
from builders.covering import fast

from danlu.inference.penalties import SeenTokens, TokenCounts
from danlu.inference.request import SamplingOptions
from danlu.inference.sampling import DrawRow, draw, propose
from danlu.inference.speculative import DraftSequence, NgramProposer, Speculation

V = 9
GREEDY = SamplingOptions(temperature=0)
OPTIONS = [
    GREEDY,
    SamplingOptions(seed=3),
    SamplingOptions(temperature=0.7, top_p=0.9),
    SamplingOptions(top_k=4, min_p=0.05, repetition_penalty=1.3),
    SamplingOptions(allowed_ids=(0, 2, 3, 5, 8), temperature=1.4),
    SamplingOptions(temperature=0, repetition_penalty=1.2),
]


def chain(seed: int, distance: float = 0.0, order: int = 2) -> torch.Tensor:
    """Logits [V, V, V] of the next token by the last two; `distance` away from those of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn([V] * (order + 1), generator=generator) * 1.5
    return base + distance * torch.randn(base.shape, generator=generator)


def logits_behind(table: torch.Tensor, tokens: list[int], count: int) -> torch.Tensor:
    """[count, V]: behind each of the last `count` tokens."""
    places = range(len(tokens) - count, len(tokens))
    return torch.stack([table[tokens[place - 1], tokens[place]] for place in places])


class ChainProposer:
    """A draft model that is a chain, too."""

    draws = True

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def propose(self, sequences):
        proposed = [[] for _ in sequences]
        for step in range(max(sequence.limit for sequence in sequences) + 1):
            rows, logits, places = [], [], []
            for place, sequence in enumerate(sequences):
                if step < sequence.limit + (sequence.row.options.temperature > 0):
                    tokens = [token.token for token in proposed[place]]
                    rows.append(sequence.rows(tokens)[-1])
                    logits.append(logits_behind(self.table, [*sequence.tokens, *tokens], 1))
                    places.append(place)
            if rows:
                for place, token in zip(places, propose(torch.cat(logits), rows), strict=True):
                    proposed[place].append(token)
        return proposed

    def forget(self, number):
        pass

    def reset(self):
        pass


def next_row(options, number, prompt, tokens) -> DrawRow:
    seen = SeenTokens(tokens).ids if options.repetition_penalty != 1.0 else None
    return DrawRow(options, number, 0, len(tokens), seen)


def plainly(table, prompt, options, number, length) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < length:
        tokens += draw(logits_behind(table, tokens, 1), [next_row(options, number, prompt, tokens)]).tokens
    return tokens


def speculatively(table, prompt, options, number, length, proposer, *, limit=3, cut=None, on_drawn=None) -> list[int]:
    """As an engine does. cut: how many of the proposals are checked, by the round; None: all of them, and a number
    below zero has the sequence read again instead."""
    speculation, tokens, rounds = Speculation(proposer), list(prompt), 0
    while len(tokens) < length:
        row = next_row(options, number, prompt, tokens)
        sequence = DraftSequence(number, list(tokens), len(prompt), min(limit, length - len(tokens) - 1), row, 0, 0)
        checked = None if cut is None else cut(rounds)
        proposed: list[int] = []
        if len(tokens) > len(prompt) and (checked is None or checked >= 0):
            proposed = speculation.propose([sequence])[0][:checked]
        logits = logits_behind(table, [*tokens, *proposed], len(proposed) + 1)
        (drawn,) = speculation.draw(logits, [(sequence, proposed)])
        if on_drawn is not None:
            on_drawn(list(tokens), drawn, proposed)
        tokens += drawn.tokens
        rounds += 1
    speculation.forget(number)
    return tokens


def proposer_of(kind: str):
    return NgramProposer(3) if kind == "ngram" else ChainProposer(chain(0, distance=0.5))


@pytest.mark.parametrize("options", OPTIONS)
def test_answers_with_ngrams_are_those_without(options):
    table, kept = chain(0), []
    for number in range(3):
        got = speculatively(
            table, (1, 2, 1), options, number, 40, NgramProposer(3), on_drawn=lambda _, d, p: kept.append(len(d.tokens))
        )
        assert got == plainly(table, (1, 2, 1), options, number, 40)
    assert max(kept) > 1, "some proposals were right"
    assert got != plainly(table, (1, 2, 1), options, 77, 40) or options.temperature == 0


@pytest.mark.parametrize("options", [option for option in OPTIONS if option.temperature == 0])
def test_greedy_answers_with_a_draft_model_are_those_without(options):
    table, kept = chain(0), []
    got = speculatively(
        table, (1, 2), options, 0, 40, proposer_of("model"), on_drawn=lambda _, d, p: kept.append(len(d.tokens))
    )
    assert got == plainly(table, (1, 2), options, 0, 40)
    assert max(kept) == 4 and min(kept) == 1, "proposals were right and wrong"


@pytest.mark.parametrize("kind", ["ngram", "model"])
@pytest.mark.parametrize("options", OPTIONS)
def test_answers_do_not_hang_on_where_rounds_end(kind, options):
    """Fewer proposals checked where others need room; none where the sequence is read again."""
    table, args = chain(0), ((1, 2), options, 5, 40)
    undisturbed = speculatively(table, *args, proposer_of(kind))
    for seed in range(2):
        cuts = np.random.default_rng(seed).integers(-1, 4, size=200).tolist()
        assert speculatively(table, *args, proposer_of(kind), cut=cuts.__getitem__) == undisturbed
    assert speculatively(table, *args, proposer_of(kind), limit=1) == undisturbed


def pair_probabilities(table, prompt, options) -> torch.Tensor:
    """[V * V], of the second and third token of an answer whose first is known."""

    def of(tokens):
        rows = [next_row(options, 0, prompt, tokens)]
        drawn = [draw(logits_behind(table, tokens, 1), rows)]
        support = drawn[0].supports[0]
        logits = logits_behind(table, tokens, 1).clone()
        if options.repetition_penalty != 1.0:
            seen = sorted(set(tokens))
            values = logits[:, seen]
            logits[:, seen] = torch.where(
                values < 0, values * options.repetition_penalty, values / options.repetition_penalty
            )
        logits = logits / options.temperature
        if support is not None:
            outside = torch.ones(V, dtype=torch.bool)
            outside[support.ids] = False
            logits[:, outside] = -torch.inf
        return logits[0].softmax(0)

    first = of(list(prompt))
    return torch.cat(
        [first[token] * of([*prompt, token]) if first[token] > 0 else torch.zeros(V) for token in range(V)]
    )


DRAWN = [option for option in OPTIONS if option.temperature > 0]


@pytest.mark.parametrize(
    ("options", "wrong"),
    fast(itertools.product(DRAWN, [False, True]), *((one, False) for one in DRAWN), (DRAWN[0], True)),
)
def test_tokens_with_a_draft_model_follow_the_distribution(options, wrong, monkeypatch):
    """Two tokens behind a known one, over many requests; a rule that keeps every proposal is the control."""
    if wrong:
        keep_all = lambda p, q, proposed, accept, residual: proposed  # noqa: E731
        monkeypatch.setattr("danlu.inference.sampling.rejection_sample", keep_all)
    table, prompt, n = chain(0), [1, 2], 1000
    speculation = Speculation(ChainProposer(chain(0, distance=0.5)))
    sequences = [DraftSequence(i, prompt, 1, 2, next_row(options, i, prompt, prompt), 0, 0) for i in range(n)]
    proposed = speculation.propose(sequences)
    logits = torch.cat([logits_behind(table, [*prompt, *tokens], 3) for tokens in proposed])
    drawn = speculation.draw(logits, list(zip(sequences, proposed, strict=True)))
    counts = torch.zeros(V * V)
    for i, part in enumerate(drawn):
        tokens = part.tokens
        if len(tokens) == 1:  # the second comes of the next round
            after = [*prompt, *tokens]
            sequence = DraftSequence(i, after, 1, 0, next_row(options, i, prompt, after), 0, 0)
            tokens = tokens + speculation.draw(logits_behind(table, after, 1), [(sequence, [])])[0].tokens
        counts[tokens[0] * V + tokens[1]] += 1
    probabilities = pair_probabilities(table, prompt, options)
    frequent = probabilities * n > 5
    if wrong:
        counts, probabilities = counts[frequent], probabilities[frequent]
        assert chi_square_p(counts, probabilities / probabilities.sum()) < 1e-6
    else:
        rest = [counts[~frequent].sum()[None], probabilities[~frequent].sum()[None]]
        counts, probabilities = torch.cat([counts[frequent], rest[0]]), torch.cat([probabilities[frequent], rest[1]])
        assert chi_square_p(counts, probabilities) > 1e-3


@pytest.mark.parametrize("kind", ["ngram", "model"])
@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_said_of_each_token_is_the_models(kind, options):
    """Log-probabilities, supports: as of a plain draw at that place, whose token may be another."""
    table, compared = chain(0), []

    def check(tokens, drawn, proposed):
        for place, token in enumerate(drawn.tokens):
            before = [*tokens, *drawn.tokens[:place]]
            logits = logits_behind(table, before, 1)
            plain = draw(logits, [next_row(options, 5, (1, 2), before)])
            expected = (logits[0] / (options.temperature or 1.0)).log_softmax(0)
            assert drawn.logprobs[place] == pytest.approx(expected[token].item(), abs=2e-6)
            ids = [None if s is None else s.ids.tolist() for s in (drawn.supports[place], plain.supports[0])]
            assert ids[0] == ids[1]
            if plain.tokens[0] == token:
                assert drawn.drawn[place] == pytest.approx(plain.drawn[0], abs=2e-6)
                compared.append(token)

    speculatively(table, (1, 2), options, 5, 60, proposer_of(kind), on_drawn=check)
    assert len(compared) > 10


def test_ngrams_follow_what_came_before():
    def proposed(tokens, limit=3, longest=3):
        sequence = DraftSequence(0, tokens, 0, limit, DrawRow(GREEDY, 0, 0, len(tokens)), 0, 0)
        return [token.token for token in NgramProposer(longest).propose([sequence])[0]]

    assert proposed([1, 2, 3, 4, 1, 2]) == [3, 4, 1]
    assert proposed([1, 2, 3, 9, 2, 4, 1, 2]) == [3, 9, 2], "the longest end"
    assert proposed([1, 2, 3, 9, 2, 4, 1, 2], longest=1) == [4, 1, 2], "and of several places the latest"
    assert proposed([1, 2, 3]) == []
    assert proposed([5]) == []
    assert proposed([7, 7]) == [7, 7, 7], "a short period goes on"
    assert proposed([1, 2, 1, 2, 1], limit=4) == [2, 1, 2, 1]
    assert proposed([1, 2, 1, 2, 1], limit=0) == []


def test_ngrams_are_indexed_as_the_text_grows_and_forgotten():
    text = torch.randint(0, 5, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    proposer = NgramProposer(3)
    for length in (3, 4, 9, 60, 61, 200):
        sequence = DraftSequence(1, text[:length], 0, 4, DrawRow(GREEDY, 0, 0, length), 0, 0)
        assert proposer.propose([sequence]) == NgramProposer(3).propose([sequence])
    other = DraftSequence(1, [1, 2, 3, 1], 0, 2, DrawRow(GREEDY, 0, 0, 4), 0, 0)
    proposer.forget(1)
    assert [token.token for token in proposer.propose([other])[0]] == [2, 3]
    proposer.reset()
    assert [token.token for token in proposer.propose([other])[0]] == [2, 3]


def test_rows_behind_proposals_have_seen_them():
    generated = TokenCounts(np.array([5]), np.array([2]))
    row = DrawRow(SamplingOptions(repetition_penalty=2.0), 4, 1, 10, np.array([3, 5]), generated=generated)
    rows = DraftSequence(0, [3, 5], 0, 2, row, 0, 0).rows([7, 5])
    assert [row.position for row in rows] == [10, 11, 12]
    assert [list(row.seen) for row in rows] == [[3, 5], [3, 5, 7], [3, 5, 7, 5]]
    counts = [dict(zip(*map(np.ndarray.tolist, row.generated), strict=True)) for row in rows]
    assert counts == [{5: 2}, {5: 2, 7: 1}, {5: 3, 7: 1}]
    assert all(row.number == 4 and row.sample == 1 for row in rows)
