"""A loss that is not finite is explained alike on all processes, whichever of them holds what made it so."""

from __future__ import annotations

from typing import Any

import pytest
from builders import not_finite_worker
from builders.parallel_steps import recipe_file
from builders.process_group import run_group
from builders.tiny_world import tiny_world

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "sequence": {"tensor": 2, "sequence": True},
    "tensor": {"tensor": 2},
    "zero2": {"shard": "zero2"},
    "zero3": {"shard": "zero3"},
}


@pytest.fixture(scope="module")
def everyones(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[tuple[str, ...]], list[str]]]:
    """By rank."""
    folder = tmp_path_factory.mktemp("not-finite")
    files = [recipe_file(tiny_world(), folder, name, parallel=parallel) for name, parallel in LAYOUTS.items()]
    return run_group(not_finite_worker.all_said, 2, files, 2)


@pytest.fixture(scope="module")
def said(everyones: list[tuple[list[tuple[str, ...]], list[str]]]) -> list[dict[str, tuple[str, ...]]]:
    """By rank and layout."""
    return [dict(zip(LAYOUTS, found, strict=True)) for found, _ in everyones]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_that_overflows_is_named(layout: str, said: list[dict[str, tuple[str, ...]]]) -> None:
    for rank in said:
        assert "step 3: the loss is not finite, first in the output of layers.1.mlp.up_proj" in rank[layout][0]
    assert said[0][layout][0] == said[1][layout][0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_that_is_not_finite_on_one_process_is_named_by_all(
    layout: str, said: list[dict[str, tuple[str, ...]]]
) -> None:
    for rank in said:
        assert f"because a weight is not: {not_finite_worker.WEIGHT}." in rank[layout][1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_is_not_finite_on_the_last_process_is_named_by_all(
    layout: str, said: list[dict[str, tuple[str, ...]]]
) -> None:
    for rank in said:
        named = f"step 1: the loss is finite but its gradient is not, in {not_finite_worker.WEIGHT}. The run stopped"
        assert rank[layout][2].startswith(named)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_updated_weight_that_is_not_finite_on_the_last_process_is_named_by_all(
    layout: str, said: list[dict[str, tuple[str, ...]]]
) -> None:
    for rank in said:
        assert f"its update made weights that are not finite: {not_finite_worker.WEIGHT}. They" in rank[layout][3]
        assert rank[layout][4] == "", "before it all were finite"


def test_an_evaluation_ends_with_the_errors_of_all_processes(
    everyones: list[tuple[list[tuple[str, ...]], list[str]]],
) -> None:
    own = "ResourceError: rank 0: no room for 0\nrank 1: no room for 1"
    for _, found in everyones:
        assert found == ["", "ResourceError: no room", "ResourceError: no room", own]
