"""Weight gradients that are put off, in every kind of data parallelism and with cut matrices: as on one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from builders.equal_traces import differences
from builders.parallel_steps import recipe_file, see
from builders.process_group import run_group
from builders.split_steps import see_split
from builders.tiny_world import World

from danlu.verification.trace import Trace

pytestmark = pytest.mark.distributed

PACKS, MICRO = 5, 1  # three micro-batches on one process, two and one without targets on the other
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero2": {"shard": "zero2"},
    "zero2+local": {"shard": "zero2", "accumulate": "local"},
    "zero3+local": {"shard": "zero3", "accumulate": "local"},
    "tensor+sequence": {"tensor": 2, "sequence": True},
}
LORA = {"kind": "lora", "dropout": 0.1}
RECOMPUTED = "zero3+local"  # with every layer recomputed


@dataclasses.dataclass(frozen=True)
class Seen:
    split: Mapping[str, list[Trace]]
    mistaken: Mapping[str, list[Trace]]
    whole: Mapping[str, Trace]  # in one process, backward passes not split


@pytest.fixture(scope="module")
def seen(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("split")
    optimizer = {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9}
    adapted = {"model": {"path": str(tiny_world.base), "config": None, "tokenizer": None}, "adapter": LORA}

    def file(name: str, parallel: dict[str, Any], **changes: Any) -> str:
        return recipe_file(tiny_world, folder, name, optimizer=optimizer, parallel=parallel, **changes)

    files = {
        name: file(name, parallel, memory="full" if name == RECOMPUTED else "none")
        for name, parallel in LAYOUTS.items()
    }
    files["lora"] = file("lora", {"shard": "zero3", "accumulate": "local"}, **adapted)
    alone = {"full": file("one", {}), "lora": file("one-lora", {}, **adapted)}
    by_rank = run_group(see_split, 2, list(files.values()), PACKS, MICRO, timeout=900)
    mistaken = run_group(see_split, 2, [files["ddp"]], PACKS, MICRO, True, timeout=900)
    whole = see(list(alone.values()), PACKS, MICRO, 1)
    return Seen(
        {name: [traces[path] for traces in by_rank] for name, path in files.items()},
        {"ddp": [traces[files["ddp"]] for traces in mistaken]},
        {name: whole[path] for name, path in alone.items()},
    )


@pytest.mark.parametrize("name", [*LAYOUTS, "lora"])
def test_a_layout_that_puts_weight_gradients_off_is_one_process_that_does_not(seen: Seen, name: str) -> None:
    assert differences(seen.split[name], seen.whole["lora" if name == "lora" else "full"]) == []


def test_a_weight_pass_that_is_left_out_is_seen(seen: Seen) -> None:
    assert any("proj" in line for line in differences(seen.mistaken["ddp"], seen.whole["full"]))
