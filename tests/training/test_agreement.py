"""Errors of several processes as one: no text is lost, and none is said twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from danlu.core.errors import CheckpointError, ResourceError
from danlu.parallel.comm import Group
from danlu.training.agreement import Failure, agree, one_failure

FULL, TORN = Failure(ResourceError, "the disk is full"), Failure(CheckpointError, "a file is torn")


def test_no_failure_is_none() -> None:
    assert one_failure({}) is None and one_failure({0: None, 1: None}) is None


def test_one_text_is_said_once_with_its_ranks_where_they_are_asked_for() -> None:
    by_rank = {0: None, 1: FULL, 2: FULL, 3: FULL}
    assert one_failure(by_rank) == FULL
    named = one_failure(by_rank, names_rank=True)
    assert named == Failure(ResourceError, "rank 1: the disk is full (and on 2 other ranks: 2, 3)")


def test_different_texts_are_all_said_and_the_first_decides_on_the_kind() -> None:
    found = one_failure({0: TORN, 1: None, 2: FULL, 3: TORN})
    text = "rank 0: a file is torn (and on 1 other ranks: 3)\nrank 2: the disk is full"
    assert found == Failure(CheckpointError, text)


def test_of_many_different_texts_the_ranks_are_said() -> None:
    found = one_failure({rank: Failure(CheckpointError, f"torn at {rank}") for rank in range(9)})
    assert found is not None
    *shown, rest = found.text.splitlines()
    assert shown == [f"rank {rank}: torn at {rank}" for rank in range(4)]
    assert rest == "and other errors on ranks 4, 5, 6 and 2 others"


@dataclass(frozen=True)
class _FirstOfThree(Group):
    """The first rank of a group; the shares of the two others are given."""

    ranks: tuple[int, ...] = (0, 1, 2)
    others: tuple[Any, ...] = ()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *self.others]

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value] * 3


def test_a_share_that_failed_elsewhere_is_raised_and_nothing_is_decided() -> None:
    assert agree(_FirstOfThree(others=(2, 3)), lambda: 1, sum) == 6
    with pytest.raises(ResourceError, match="rank 1: the disk is full"):
        agree(_FirstOfThree(others=(FULL, 3)), lambda: 1, sum)
