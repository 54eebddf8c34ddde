"""Context parallelism: its short form, and rules of which each row of the table breaks exactly one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from danlu.core.errors import RecipeError
from danlu.recipe import load
from danlu.recipe.sections import Context

Write = Callable[..., str]

BASE = {"stage": "sft", "model": "base", "data": "rows.json", "output": "runs/x", "parallel": "{context: 2}"}


def text(**changed: str) -> str:
    return "\n".join(f"{key}: {value}" for key, value in {**BASE, **changed}.items())


def test_a_number_is_its_size(write: Write) -> None:
    assert load(write(text())).recipe.parallel.context == Context(size=2)
    full = load(write(text(parallel="{context: {size: 4, method: gather, ulysses: 2}}"))).recipe.parallel.context
    assert full == Context(size=4, method="gather", ulysses=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": "{context: {size: 4, ulysses: 3}}"}, "parallel.context.ulysses: 3 does not divide the 4"),
        (
            {"parallel": "{context: {size: 4, method: ulysses, ulysses: 2}}"},
            "parallel.context.ulysses: with method: ulysses all context ranks exchange heads",
        ),
        ({"parallel": "{context: 2, workers: threads}"}, "parallel.context: threads in one process"),
        ({"numerics": "exact"}, "numerics: context ranks add up attention in another order"),
        ({"compile": "true"}, "compile: torch.compile does not follow the collectives of context"),
        (
            {"memory": "{recompute: {kind: planned, budget: 1}}", "batch": "{sequences: 8, micro: 1}"},
            "memory.recompute.kind: a plan",
        ),
        ({"adapter": "{kind: prefix, tokens: 4}"}, "adapter.kind: virtual tokens are kept where a document begins"),
        ({"router": "{balance: step, capacity: 2.0}"}, "router.capacity: which rows an expert has no room for"),
    ],
)
def test_what_context_ranks_cannot_do_is_refused(write: Write, changes: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(write(text(**changes)))
    assert [problem for problem in caught.value.problems if message in problem], caught.value.problems
    if "parallel" not in changes:  # control: without context ranks it is allowed
        load(write(text(**changes, parallel="{context: 1}")))


def test_every_stage_of_language_goes_on_context_ranks(write: Write) -> None:
    for changes in (
        {"stage": "dpo", "reference": "frozen", "batch": "{rows: 4}"},
        {"stage": "reward", "batch": "{rows: 4}"},
        {"stage": "distill", "teacher": "teacher"},
        {"stage": "grpo", "batch": "{prompts: 4}", "rewards": "{kind: length, most: 9}"},
    ):
        load(write(text(**changes)))
    with pytest.raises(RecipeError, match="stage: context parallelism cuts documents, and images are not of tokens"):
        load(write(text(stage="classify", model="{preset: lenet5}")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router": "{balance: sequence}"}, "router.sequence: rows of stage preference are trees"),
        ({"parallel": "{context: 2, expert: 2}"}, "parallel.expert: experts are distributed among context ranks in"),
    ],
)
def test_what_rows_that_are_trees_cannot_do_is_refused(write: Write, changes: dict[str, str], message: str) -> None:
    pairs = {"stage": "dpo", "reference": "frozen", "batch": "{rows: 4}"}
    with pytest.raises(RecipeError) as caught:
        load(write(text(**pairs, **changes)))
    assert [problem for problem in caught.value.problems if message in problem], caught.value.problems
    load(write(text(**changes)))  # of plain documents it is allowed
