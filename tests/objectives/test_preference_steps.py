"""A preference objective is one of the whole step: neither micro-batches nor processes change it."""

from __future__ import annotations

import pytest
from builders.context_mistakes import CountedByAll, GradientOfOneRank, SumsOfOneRank
from builders.preference_steps import OBJECTIVES, OF_MICRO_BATCHES, OF_STEP, OwnShare, PerMicroBatch, Seen, see
from builders.process_group import run_group
from builders.worst_errors import worst_relative_error

from danlu.recipe.sections import Context, Parallel
from danlu.stages.learner import DecoderLearner

CLOSE = 1e-6


@pytest.fixture(scope="module")
def whole() -> dict[str, Seen]:
    return see(list(OBJECTIVES), 16)


def differs(seen: Seen, wanted: Seen) -> bool:
    same_metrics = seen[1].keys() == wanted[1].keys() and seen[1] == pytest.approx(wanted[1], rel=CLOSE, abs=1e-9)
    same = seen[0] == pytest.approx(wanted[0], rel=CLOSE) and worst_relative_error(seen[2], wanted[2]) < CLOSE
    return not (same and same_metrics)


@pytest.mark.parametrize("micro", [1, 8])
@pytest.mark.slow
def test_micro_batches_change_nothing(whole: dict[str, Seen], micro: int) -> None:
    seen = see(list(OBJECTIVES), micro)
    assert [name for name, wanted in whole.items() if differs(seen[name], wanted)] == []


def test_micro_batches_change_nothing_and_a_mean_or_sort_over_each_is_seen() -> None:
    """Of objectives that have to see the whole step, and of two that do not."""
    names = [*OF_MICRO_BATCHES, "ipo", "sigmoid with everything"]
    wanted, seen = see(names, 16), see(names, 8)
    assert [name for name in names if differs(seen[name], wanted[name])] == []
    mistaken = see(OF_MICRO_BATCHES, 4, PerMicroBatch)
    assert [name for name in OF_MICRO_BATCHES if not differs(mistaken[name], wanted[name])] == []
    assert all(worst_relative_error(mistaken[name][2], wanted[name][2]) > 100 * CLOSE for name in OF_MICRO_BATCHES)


@pytest.mark.distributed
def test_two_processes_change_nothing_and_one_that_sees_its_own_share_is_seen(whole: dict[str, Seen]) -> None:
    for seen in run_group(see, 2, list(OBJECTIVES), 3):
        assert [name for name, wanted in whole.items() if differs(seen[name], wanted)] == []
    for seen in run_group(see, 2, OF_STEP, 8, OwnShare):
        assert [name for name in OF_STEP if not differs(seen[name], whole[name])] == []


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("processes", "context"),
    [(2, Context(size=2)), (4, Context(size=2, method="ulysses"))],
    ids=["ring", "data x ulysses"],
)
def test_context_ranks_change_nothing(whole: dict[str, Seen], processes: int, context: Context) -> None:
    for seen in run_group(see, processes, list(OBJECTIVES), 3, DecoderLearner, Parallel(context=context)):
        assert [name for name, wanted in whole.items() if differs(seen[name], wanted)] == []


@pytest.mark.distributed
def test_sums_of_branches_that_are_not_those_of_all_ranks_are_seen(whole: dict[str, Seen]) -> None:
    names = ["sigmoid", "kto and sft", "orpo", "sigmoid with everything"]
    for mistake in (SumsOfOneRank, GradientOfOneRank, CountedByAll):
        for seen in run_group(see, 2, names, 3, mistake, Parallel(context=Context(size=2))):
            assert [name for name in names if not differs(seen[name], whole[name])] == [], mistake
