"""Rows that are drawn: as many as are wanted, evenly, each as likely as the others, whatever the shards."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
import pytest
from builders.curated_rows import check_gathering, documents

from danlu.curation.rows import Row, document
from danlu.curation.run_steps import run_steps
from danlu.curation.selection import Selection, even_quotas

SOURCES = [
    document(f"text {number} of {source}", source, number)
    for source, count in enumerate((2, 6, 10))
    for number in range(count)
]


def drawn(rows: list[Row], step: Selection) -> list[Row]:
    return run_steps([rows], [step]).rows


@pytest.mark.parametrize("by", ["random", "quota"])
def test_as_many_rows_stay_whatever_the_batches(by: Literal["random", "quota"]) -> None:
    for wanted in (1, 7, 17, 18, 40):
        assert len(check_gathering(Selection(wanted, by), SOURCES).rows) == min(wanted, len(SOURCES))


def test_a_quota_is_even_over_sources_and_what_small_ones_lack_goes_to_the_others() -> None:
    rows = drawn(SOURCES, Selection(11, "quota"))
    assert Counter(row.place >> 40 for row in rows) == {0: 2, 1: 5, 2: 4}
    at_random = Counter(row.place >> 40 for row in drawn(SOURCES, Selection(11)))
    assert at_random != {0: 2, 1: 5, 2: 4}  # control
    assert even_quotas([5, 0, 3, 9], 10).tolist() == [4, 0, 3, 3]
    assert even_quotas([1, 1, 1], 2).tolist() == [1, 1, 0]


def test_a_quota_over_languages() -> None:
    texts = ["The house by the river was old and empty.", "河边的老房子已经空了很久。"]
    rows = documents(*(f"{text} {number}" for number in range(8) for text in texts[: 1 + (number < 3)]))
    result = run_steps([rows], [Selection(6, "quota", "language")])
    assert sum("河" in row.text for row in result.rows) == 3
    reasons = {verdict.reason for account in result.accounts for _, verdict in account.decisions}
    assert reasons == {"not drawn: language en"}


def test_every_row_is_as_likely_and_another_seed_draws_others() -> None:
    rows = documents(*(f"text {number}" for number in range(40)))
    counts = Counter(row.place for seed in range(300) for row in drawn(rows, Selection(10, seed=seed)))
    expected = 300 * 10 / 40
    chi_square = sum((counts[row.place] - expected) ** 2 for row in rows) / (expected * (1 - 10 / 40))
    assert abs(chi_square - 39) < 5 * np.sqrt(2 * 39)
    smaller, larger = ({row.id for row in drawn(rows, Selection(count, seed=3))} for count in (10, 20))
    assert smaller < larger
