"""Adapters of every kind where data ranks share the model: gradients, and what is trained, are those of one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from builders.equal_shards import assemble_equal
from builders.parallel_steps import matrices_left, recipe_file, see, see_without_sums
from builders.process_group import run_group
from builders.tiny_world import World
from builders.worst_errors import worst_relative_error

from danlu.verification.trace import Trace

pytestmark = pytest.mark.distributed

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"kind": "lora", "targets": ["all-linear", "embed_tokens", "lm_head"]},
    "dropout": {"kind": "lora", "dropout": 0.3},
    "narrower than there are ranks": {"kind": "lora", "rank": 1},
    "modules_to_save": {"kind": "lora", "modules_to_save": ["lm_head", "norm"]},
    "in full in layers": {"kind": "lora", "targets": ["v_proj"], "modules_to_save": ["q_proj", "input_layernorm"]},
    "pissa": {"kind": "pissa"},
    "lora-fa": {"kind": "lora-fa"},
    "dora": {"kind": "dora"},
    "vera": {"kind": "vera", "rank": 16},  # projections that all layers share
    "mora": {"kind": "mora"},
    "ia3": {"kind": "ia3"},
    "bottleneck": {"kind": "bottleneck", "width": 8},
    "prefix": {"kind": "prefix", "tokens": 3},
    "projected prefix": {"kind": "prefix", "tokens": 3, "projection": 8},  # so is its network, and it is trained
    "prompt": {"kind": "prompt", "tokens": 3},
}
CUT_TOO = ("in full in layers", "pissa", "dora", "vera")
CASES = [*((name, 1) for name in ADAPTERS), *((name, 2) for name in CUT_TOO)]
"""Adapters, and among how many ranks their layers are cut before they are sharded among two."""
SIZE = 2


def recipe_of(world: World, folder: Path, name: str, tensor: int = 1) -> str:
    changes: dict[str, Any] = {
        "model": {"path": str(world.base), "config": None, "tokenizer": None},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "parallel": {"shard": "zero3", "tensor": tensor},
    }
    return recipe_file(world, folder, f"{name} {tensor}", adapter=ADAPTERS[name], **changes)


@pytest.fixture(scope="module")
def seen(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, int], list[Trace]]:
    """Of each adapter: what one process sees (in place of 0 ranks), and what each of several does."""
    folder = tmp_path_factory.mktemp("sharded")
    found = {}
    for tensor in (1, 2):
        files = {name: recipe_of(tiny_world, folder, name, tensor) for name, each in CASES if each == tensor}
        many = run_group(see, SIZE * tensor, list(files.values()), 5, 2)
        found |= {(name, tensor): [one[file] for one in many] for name, file in files.items()}
    files = {name: recipe_of(tiny_world, folder, name) for name in ADAPTERS}
    one = see(list(files.values()), 5, 2, 1)
    return found | {(name, 0): [one[file]] for name, file in files.items()}


@pytest.mark.parametrize(("name", "tensor"), CASES)
def test_a_sharded_adapter_learns_as_on_one_process(
    seen: Mapping[tuple[str, int], list[Trace]], name: str, tensor: int
) -> None:
    (one,), many = seen[name, 0], seen[name, tensor]
    for step, wanted in enumerate(one.steps):
        found = [each.steps[step] for each in many]
        for parts in ("gradients", "weights"):
            ours, theirs = (
                assemble_equal([getattr(each, parts) for each in found]),
                assemble_equal([getattr(wanted, parts)]),
            )
            assert worst_relative_error(ours, theirs) < 1e-6
        assert [each.steps[step].grad_norm for each in many] == pytest.approx([wanted.grad_norm] * len(many), rel=1e-6)


def test_no_process_holds_more_than_one_layer_of_a_frozen_base_whole(tiny_world: World, tmp_path: Path) -> None:
    file = recipe_of(tiny_world, tmp_path, "lora")
    for each in run_group(matrices_left, SIZE, file):
        assert each == [(7, 0)] * len(each) and len(each) > 1


def test_a_sum_that_is_left_out_is_seen(tiny_world: World, tmp_path: Path) -> None:
    file = recipe_of(tiny_world, tmp_path, "projected prefix")
    found = run_group(see_without_sums, SIZE, [file], 5, 2)
    with pytest.raises(ValueError, match="processes that hold the same part of it differ"):
        assemble_equal([each[file].steps[0].gradients for each in found])
