"""Trees of branches give the same losses and gradients on several processes as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders.equal_shards import assemble_equal
from builders.parallel_steps import LINEAR_ATTENTION, recipe_file, see_trees
from builders.process_group import run_group
from builders.tiny_world import World
from builders.worst_errors import worst_relative_error

from danlu.verification.trace import Trace

pytestmark = pytest.mark.distributed

PACKS, MICRO = 5, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "tensor+sequence": {"tensor": 2, "sequence": True},
    "zero3": {"shard": "zero3"},
    "context": {"context": 2},
    "ulysses, zero3": {"context": {"size": 2, "method": "ulysses"}, "shard": "zero3"},
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, recomputed": {"memory": {"recompute": {"kind": "full"}}},
    "lora": {"adapter": {"kind": "lora", "dropout": 0.1}},
    "prefix": {"adapter": {"kind": "prefix", "tokens": 3}},
    "linear attention": LINEAR_ATTENTION,
}
REFUSED = [("prefix", "context"), ("prefix", "ulysses, zero3"), ("linear attention", "context")]
"""Virtual tokens under context parallelism, and a ring of linear attention."""


def is_close(seen: list[Trace], alone: Trace) -> bool:
    for step, wanted in enumerate(alone.steps):
        gradients = assemble_equal([trace.steps[step].gradients for trace in seen])
        if worst_relative_error(gradients, assemble_equal([wanted.gradients])) > 1e-6:
            return False
        if any(trace.steps[step].loss != pytest.approx(wanted.loss, rel=1e-6) for trace in seen):
            return False
    return all(trace.evaluation == pytest.approx(alone.evaluation, rel=1e-6) for trace in seen)


def test_a_layout_is_one_process_for_trees(tiny_world: World, tmp_path: Path) -> None:
    def file(kind: str, layout: str) -> str:
        model = {"model": {"path": str(tiny_world.base), "config": None, "tokenizer": None}}
        changes = {**KINDS[kind], **(model if "adapter" in KINDS[kind] else {})}
        optimizer = {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9}
        changes |= {"optimizer": optimizer, "precision": "fp32", "parallel": LAYOUTS.get(layout, {})}
        return recipe_file(tiny_world, tmp_path, f"{kind}-{layout}".replace(", ", "-"), **changes)

    alone = {kind: file(kind, "one") for kind in KINDS}
    files = {
        (kind, layout): file(kind, layout) for kind in KINDS for layout in LAYOUTS if (kind, layout) not in REFUSED
    }
    wanted = see_trees(list(alone.values()), PACKS, MICRO, 1)
    seen = run_group(see_trees, 2, list(files.values()), PACKS, MICRO)
    assert [
        f"{kind}, {layout}"
        for (kind, layout), path in files.items()
        if not is_close([traces[path] for traces in seen], wanted[alone[kind]])
    ] == []
    # Negative control: the same tokens as one document each.
    without = see_trees([alone["full"]], PACKS, MICRO, 1, mistake=True)[alone["full"]]
    assert not is_close([traces[files["full", "zero3"]] for traces in seen], without)
