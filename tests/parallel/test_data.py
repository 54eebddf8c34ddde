"""Shards that wait in the host's memory beside a GPU, which the meta device stands for."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from builders import host_shards_worker
from builders.parallel_steps import recipe_file
from builders.process_group import run_group
from builders.tiny_world import CONFIG, World

pytestmark = pytest.mark.distributed

# Rows that two processes cannot share evenly.
OFFLOADED: Mapping[str, object] = {
    "model": {"config": {**CONFIG, "intermediate_size": 101}},
    "parallel": "zero3",
    "memory": {"offload": ["parameters", "gradients"]},
}


@pytest.fixture(scope="module")
def file(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> str:
    return recipe_file(tiny_world, tmp_path_factory.mktemp("host"), "offloaded", **OFFLOADED)


def test_offloaded_shards_are_made_on_the_host_and_norms_on_the_gpu(file: str) -> None:
    for rank in run_group(host_shards_worker.placed_on_gpu, 2, file):
        shards = {name: seen for name, seen in rank.items() if seen[1]}
        assert set(shards.values()) == {("cpu", True, True)}
        whole = {name: seen for name, seen in rank.items() if not seen[1]}
        assert set(whole.values()) == {("meta", False, False)}
        assert whole and all("norm" in name for name in whole)
        assert any("q_proj" in name for name in shards) and any("embed" in name for name in shards)


def test_what_optimizers_change_is_what_fsdp_gathers(file: str) -> None:
    assert run_group(host_shards_worker.shares_memory, 2, file) == [[], []]
