"""Packed sequences dealt to context ranks: each token once, in order, and equally much work on each."""

from __future__ import annotations

import itertools
import random

import pytest

from danlu.core.types import Branch, Run, Share
from danlu.data.context_sharding import WHOLE_SHARE, cost, shares

CASES = [(seed, ranks) for seed in range(6) for ranks in (1, 2, 3, 8)]


def boundaries(seed: int) -> list[int]:
    """Documents of very different lengths."""
    draw = random.Random(seed)
    lengths = [draw.choice([1, 2, 7, 40, 300, 2500]) + draw.randrange(5) for _ in range(draw.randrange(1, 30))]
    return list(itertools.accumulate(lengths, initial=0))


def tokens_of(share: Share) -> list[int]:
    return [token for run in share.runs for token in range(run.start, run.stop)]


def load(share: Share, token_cost: int) -> int:
    """What a rank has to do, counted token by token: its scores, and what else a token costs."""
    return sum(run.position + place + 1 + token_cost for run in share.runs for place in range(run.tokens))


@pytest.mark.parametrize(("seed", "ranks"), CASES)
def test_every_token_is_on_one_rank(seed: int, ranks: int) -> None:
    offsets = boundaries(seed)
    dealt = shares(offsets, ranks)
    assert len(dealt) == ranks
    assert sorted(token for share in dealt for token in tokens_of(share)) == list(range(offsets[-1]))
    first, *others = dealt
    control = [first._replace(chunks=first.chunks[1:], whole=first.whole[1:]), *others]
    assert sum(share.tokens for share in control) < offsets[-1]


@pytest.mark.parametrize(("seed", "ranks"), CASES)
def test_runs_say_where_their_tokens_stand(seed: int, ranks: int) -> None:
    offsets = boundaries(seed)
    for share in shares(offsets, ranks):
        for run in share.runs:
            assert offsets[run.document] + run.position == run.start < run.stop <= offsets[run.document + 1]
        assert share.whole == tuple(sorted(share.whole)) and share.chunks == tuple(sorted(share.chunks))
        for one, other in itertools.pairwise(share.chunks):
            length = offsets[one.document + 1] - offsets[one.document]
            assert one.stop < other.start or one.document != other.document or length < 2 * ranks
        for run in share.whole:
            assert (run.start, run.stop) == (offsets[run.document], offsets[run.document + 1])


@pytest.mark.parametrize("token_cost", [0, 100, 8192])
@pytest.mark.parametrize(("seed", "ranks"), CASES)
def test_no_rank_has_much_more_to_do_than_the_mean(seed: int, ranks: int, token_cost: int) -> None:
    offsets = boundaries(seed)
    dealt = shares(offsets, ranks, token_cost=token_cost)
    loads = [load(share, token_cost) for share in dealt]
    mean = sum(loads) / ranks
    # Chunks of a document differ by a token, so ranks by two for each document that is cut.
    longest = max(stop - start for start, stop in itertools.pairwise(offsets))
    cut = {run.document for share in dealt for run in share.chunks}
    assert max(loads) <= mean * (1 + WHOLE_SHARE) + 2 * len(cut) * (longest + token_cost)


def test_contiguous_halves_would_not_be_balanced() -> None:
    """Negative control of the bound: the second half of a document has three times the scores of the first."""
    offsets, half = [0, 4000], 2000
    halves = [Share((), (Run(0, 0, 0, half),)), Share((), (Run(0, half, half, 4000),))]
    loads = [load(share, 0) for share in halves]
    assert max(loads) > sum(loads) / 2 * (1 + WHOLE_SHARE) + 2 * 4000
    balanced = [load(share, 0) for share in shares(offsets, 2, token_cost=0)]
    assert max(balanced) - min(balanced) <= 2 * 4000


def test_a_long_document_goes_zigzag() -> None:
    assert shares([0, 16], 2) == (
        Share((), (Run(0, 0, 0, 4), Run(0, 12, 12, 16))),
        Share((), (Run(0, 4, 4, 12),)),  # chunks 1 and 2, which touch
    )
    first, _, _, last = shares([0, 5, 85], 4, token_cost=0)
    assert first.chunks == (Run(1, 0, 5, 15), Run(1, 70, 75, 85)) and last.chunks == (Run(1, 30, 35, 55),)


def test_short_documents_stay_whole() -> None:
    dealt = shares([0, *range(10, 1010, 10)], 4)
    assert all(not share.chunks for share in dealt)
    assert [share.tokens for share in dealt] == [250] * 4


def test_what_may_not_be_cut_is_not() -> None:
    offsets = [0, 1000, 1100]
    assert any(run.document == 0 for share in shares(offsets, 2) for run in share.chunks)  # control
    dealt = shares(offsets, 2, uncut={0, 1})
    assert [share.tokens for share in dealt] == [1000, 100] and not any(share.chunks for share in dealt)


def test_one_rank_has_all() -> None:
    assert shares([0, 3, 9], 1) == (Share((Run(0, 0, 0, 3), Run(1, 0, 3, 9)), ()),)


def test_a_document_with_fewer_tokens_than_chunks() -> None:
    dealt = shares([0, 3], 4)
    assert sorted(token for share in dealt for token in tokens_of(share)) == [0, 1, 2]
    assert min(share.tokens for share in dealt) == 0


def test_what_tokens_cost() -> None:
    assert cost(0, 4, 0) == 1 + 2 + 3 + 4 and cost(4, 6, 10) == 5 + 6 + 20
    assert sum(cost(place, place + 1) for place in range(9)) == cost(0, 9)


TREES = (
    Branch(-1, 0, 400), Branch(0, 400, 1600), Branch(0, 1600, 1610), Branch(2, 1610, 3000),
    Branch(-1, 3000, 3005), Branch(4, 3005, 3008), Branch(4, 3008, 3012),
)  # fmt: skip
"""A stem with two long answers, of which one has a short turn before it, and a pair of short ones."""


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_branches_of_trees_are_cut(ranks: int) -> None:
    dealt = shares([0, 3000, 3012], ranks, trees=TREES, token_cost=0)
    assert sorted(token for share in dealt for token in tokens_of(share)) == list(range(3012))
    parents = {0: (), 1: (0,), 2: (0,), 3: (0, 2), 4: (), 5: (4,), 6: (4,)}
    for share in dealt:
        for run in share.runs:
            before = sum(TREES[above].stop - TREES[above].start for above in parents[run.document])
            assert run.ancestors == parents[run.document]
            assert run.position == before + run.start - TREES[run.document].start
    in_chunks = {run.document for share in dealt for run in share.chunks}
    assert in_chunks == (set() if ranks == 1 else {0, 1, 2, 3})
    (small,) = [share.whole for share in dealt if any(run.document == 4 for run in share.whole)]
    assert [run.document for run in small if run.document > 3] == [4, 5, 6]  # a tree that is whole is on one rank
    loads = [load(share, 0) for share in dealt]
    assert max(loads) <= sum(loads) / ranks * (1 + WHOLE_SHARE) + 8 * 3000
    without = [load(share, 0) for share in shares([0, 3000, 3012], ranks, token_cost=0)]
    assert ranks == 1 or sum(without) > 1.3 * sum(loads)  # control: branches would be documents behind each other
