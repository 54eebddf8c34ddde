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
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, str]]]:
    """By rank and layout."""
    folder = tmp_path_factory.mktemp("not-finite")
    files = [recipe_file(tiny_world(), folder, name, parallel=parallel) for name, parallel in LAYOUTS.items()]
    return [dict(zip(LAYOUTS, found, strict=True)) for found in run_group(not_finite_worker.said, 2, files, 2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_that_overflows_is_named(layout: str, said: list[dict[str, tuple[str, str]]]) -> None:
    for rank in said:
        assert "step 3: the loss is not finite, first in the output of layers.1.mlp.up_proj" in rank[layout][0]
    assert said[0][layout][0] == said[1][layout][0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_that_is_not_finite_on_one_process_is_named_by_all(
    layout: str, said: list[dict[str, tuple[str, str]]]
) -> None:
    for rank in said:
        assert f"because a weight is not: {not_finite_worker.WEIGHT}." in rank[layout][1]
