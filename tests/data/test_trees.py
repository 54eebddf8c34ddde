"""Trees written out: each leaf with a copy of what it shares."""

from __future__ import annotations

import numpy as np
import pytest

from danlu.core.types import Branch, Sample
from danlu.data.trees import longest_path, repeat_stem

NAN = float("nan")


def tree(branches: tuple[Branch, ...], trained: tuple[int, ...], **facts: list[float]) -> Sample:
    tokens = np.arange(10, 10 + (branches[-1].stop if branches else 4), dtype=np.int32)
    weights = np.isin(np.arange(len(tokens)), trained).astype(np.float32)
    return Sample(
        tokens,
        weights,
        "pairs.jsonl:3",
        "pairs",
        branches,
        {"reference": -tokens.astype(np.float32), "old": np.stack([tokens, tokens], 1)},
        {name: np.array(values, np.float32) for name, values in facts.items()},
    )


def paths(sample: Sample) -> list[tuple[list[int], list[float], list[float]]]:
    """(tokens, weights, reference) from each root to each leaf."""
    parents = {branch.parent for branch in sample.branches}
    found = []
    for leaf in range(len(sample.branches)):
        places: list[int] = []
        number = leaf
        while leaf not in parents and number >= 0:
            branch = sample.branches[number]
            places, number = [*range(branch.start, branch.stop), *places], branch.parent
        if places:
            found.append(
                tuple(x[places].tolist() for x in (sample.tokens, sample.weights, sample.columns["reference"]))
            )
    return found


def test_a_pair_by_hand() -> None:
    pair = tree((Branch(-1, 0, 3), Branch(0, 3, 5), Branch(0, 5, 6)), (3, 4, 5), label=[NAN, 1, 0], margin=[NAN, 2, 2])
    repeated = repeat_stem(pair)
    assert repeated.tokens.tolist() == [10, 11, 12, 13, 14, 10, 11, 12, 15]
    assert repeated.weights.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert repeated.branches == (Branch(-1, 0, 5), Branch(-1, 5, 9))
    assert repeated.facts["label"].tolist() == [1, 0] and repeated.facts["margin"].tolist() == [2, 2]
    assert repeated.columns["old"].shape == (9, 2) and repeated.columns["old"][8].tolist() == [15, 15]
    assert (repeated.row, repeated.source, repeated.documents) == (pair.row, pair.source, 2)
    assert (longest_path(pair), longest_path(repeated)) == (5, 5)


# Two documents: a stem, within it a second one with two leaves of which one is a chain, a leaf; and a chain.
NESTED = (
    Branch(-1, 0, 2), Branch(0, 2, 3), Branch(1, 3, 5), Branch(2, 5, 6), Branch(1, 6, 7), Branch(0, 7, 9),
    Branch(-1, 9, 12), Branch(6, 12, 13),
)  # fmt: skip


def test_every_path_keeps_its_tokens_weights_and_columns() -> None:
    sample = tree(NESTED, (3, 4, 5, 6, 8, 12), label=[NAN, NAN, 1, 0, 0.5, 0.25, NAN, 0.125])
    repeated = repeat_stem(sample)
    assert paths(repeated) == paths(sample) and len(paths(sample)) == 4
    assert repeated.documents == 4 and longest_path(repeated) == longest_path(sample) == 6
    assert repeated.facts["label"].tolist()[:4] == [1, 0, 0.5, 0.25]
    assert [branch.parent for branch in repeated.branches] == [-1, 0, -1, -1, -1, 4]
    assert paths(repeat_stem(tree(NESTED[:5], (3,)))) != paths(sample)  # negative control


def test_what_shares_nothing_is_left_as_it_is() -> None:
    for branches in ((), (Branch(-1, 0, 4),), (Branch(-1, 0, 2), Branch(0, 2, 3), Branch(1, 3, 4))):
        sample = tree(branches, (2,))
        assert repeat_stem(sample) is sample and longest_path(sample) == 4


def test_a_stem_that_carries_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pairs\.jsonl:3: tokens that several branches share carry weight"):
        repeat_stem(tree((Branch(-1, 0, 3), Branch(0, 3, 5), Branch(0, 5, 6)), (2, 4)))
