"""Recorded rollouts of an asynchronous run that say that other weights drew their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def with_other_versions(lines: Iterable[dict[str, Any]], staleness: int) -> list[dict[str, Any]]:
    """Lines of rollouts.jsonl in which every token, or an answer's first ones, has another version.

    Versions stay among those that an answer may have: of the step before its own, and of `staleness` steps before
    that. The first step's answers have one to choose from and stay as they are.
    """
    return [
        {**line, "answers": [_of_another(answer, line["step"], staleness) for answer in line["answers"]]}
        for line in lines
    ]


def _of_another(answer: dict[str, Any], step: int, staleness: int) -> dict[str, Any]:
    newest, oldest = step - 1, max(0, step - 1 - staleness)
    tokens = sum(count for _, count in answer["versions"])
    other = newest if answer["versions"][0][0] == oldest else oldest
    return {**answer, "versions": [[other, tokens]]}
