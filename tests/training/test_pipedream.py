"""Where turns of PipeDream end."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from danlu.training.pipedream import UnfinishedTurn, _Turn, next_flush
from danlu.training.state import Cadence


@pytest.mark.parametrize(
    ("evaluation", "flushes"),
    [(None, [4, 8, 12, 14]), (6, [4, 6, 8, 12, 14]), (1, list(range(1, 15))), (40, [4, 8, 12, 14])],
)
def test_turns_end_where_something_is_due_whenever_they_begin(evaluation: int | None, flushes: list[int]) -> None:
    cadence = Cadence(total=14, log=1, checkpoint=4, evaluation=evaluation)
    for step in range(14):  # after a signal a turn may begin anywhere
        assert next_flush(cadence, step) == min(flush for flush in flushes if flush > step)


@pytest.mark.parametrize(
    ("everyones", "first"),
    [
        ([(0, None), (0, None), (1, ["head.weight"]), (1, [])], "head.weight"),
        ([(0, ["embed.weight"]), (0, []), (1, [])], "its norm"),
        ([(0, []), (0, ["embed.weight"]), (1, None)], "embed.weight"),
        ([(0, None), (1, None)], "the loss"),
    ],
    ids=["last stage, first tensor rank", "no name", "last tensor rank", "loss"],
)
def test_what_any_process_of_the_last_stage_names_is_told(
    everyones: list[tuple[int, list[str] | None]], first: str
) -> None:
    world = SimpleNamespace(all_gather_objects=lambda own: everyones)
    parallel = SimpleNamespace(ranks=SimpleNamespace(world=world, pipeline=SimpleNamespace(index=0)))
    run = SimpleNamespace(learner=SimpleNamespace(parallel=parallel), state=SimpleNamespace(step=4))
    steps = [SimpleNamespace(number=number, items=[]) for number in (5, 6)]
    turn: Any = SimpleNamespace(_run=run, _not_finite=None, _trained=steps)
    with pytest.raises(
        UnfinishedTurn, match=rf"^step 6: its loss \(1\) or its gradient is not finite, first in {first}\."
    ):
        _Turn._check_finite(turn, [1.0, 1.0], [1.0, math.nan])
    _Turn._check_finite(turn, [1.0, 1.0], [1.0, 1.0])


def test_a_turn_ends_when_the_last_sums_of_votes_are_there() -> None:
    """They run on while steps are made, and what goes wrong with them is raised where they are waited for."""
    said: list[str] = []
    parallel = SimpleNamespace(from_end_of_pipeline=lambda own: own, all_gather_pipeline=lambda own: [own])
    run = SimpleNamespace(learner=SimpleNamespace(parallel=parallel))
    votes = [SimpleNamespace(wait=lambda number=number: said.append(f"vote {number}")) for number in range(2)]
    stash = SimpleNamespace(clear=lambda: said.append("cleared"))
    turn: Any = SimpleNamespace(_run=run, _stop_votes=votes, stash=stash, _trained=[], _losses=0, _steps=[])
    turn._check_finite = lambda losses, norms: said.append(f"checked {losses} {norms}")
    assert _Turn.finish(turn) == []
    assert said == ["vote 0", "vote 1", "cleared", "checked [] []"]
