"""Where turns of PipeDream end."""

from __future__ import annotations

import pytest

from danlu.train.pipedream import next_flush
from danlu.train.state import Cadence


@pytest.mark.parametrize(
    ("evaluation", "flushes"),
    [(None, [4, 8, 12, 14]), (6, [4, 6, 8, 12, 14]), (1, list(range(1, 15))), (40, [4, 8, 12, 14])],
)
def test_turns_end_where_something_is_due_whenever_they_begin(evaluation: int | None, flushes: list[int]) -> None:
    cadence = Cadence(total=14, log=1, checkpoint=4, evaluation=evaluation)
    for step in range(14):  # after a signal a turn may begin anywhere
        assert next_flush(cadence, step) == min(flush for flush in flushes if flush > step)
