"""Made rows of judged answers: trees that any objective over answers can be computed of."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from danlu.data.batch import collate
from danlu.recipe.sections.base import RowType
from danlu.verification.synthetic_trees import synthetic_trees


@pytest.mark.parametrize("row_type", get_args(RowType))
@pytest.mark.parametrize("mismatched", [False, True])
def test_they_are_trees_within_a_length(row_type: RowType, mismatched: bool) -> None:
    rows = synthetic_trees(row_type, 20, max_length=32, vocab_size=50, seed=3, mismatched=mismatched)
    again = synthetic_trees(row_type, 20, max_length=32, vocab_size=50, seed=3, mismatched=mismatched)
    for pack, other in zip(rows, again, strict=True):
        (sample,) = pack.samples
        assert np.array_equal(sample.tokens, other.samples[0].tokens)
        assert sample.branches[-1].stop == len(sample.tokens) == len(sample.weights)
        ends = []
        for parent, start, stop in sample.branches:
            ends.append(stop - start + (ends[parent] if parent >= 0 else 0))
        assert max(ends) <= 32 and sample.tokens.max() < 50
        assert np.isnan(sample.facts["label"][0]) and not sample.weights[: sample.branches[0].stop].any()
        assert sample.weights.any()
    collate(rows)
    labels = np.concatenate([pack.samples[0].facts["label"] for pack in rows])
    assert {0.0, 1.0} <= set(labels.tolist())


def test_a_mismatched_answer_has_no_targets() -> None:
    (sample,) = synthetic_trees("unpaired", 1, max_length=32, vocab_size=50, seed=0, mismatched=True)[0].samples
    assert sample.facts["mismatched"].tolist() == [0, 0, 1]
    branch = sample.branches[2]
    assert not sample.weights[branch.start : branch.stop].any() and sample.weights.any()
    plain = synthetic_trees("unpaired", 1, max_length=32, vocab_size=50, seed=0)[0].samples[0]
    assert "mismatched" not in plain.facts and len(plain.branches) == 2
