"""Products in FP8 on data ranks, with whole and with sharded weights: as on one process."""

from __future__ import annotations

from typing import Any

import pytest
from builders.equal_traces import differences
from builders.parallel_steps import recipe_file, see
from builders.process_group import run_group
from builders.tiny_world import World

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PACKS, MICRO = 4, 1
FP8 = {"kind": "fp8", "recipe": "tile", "activations": "fp32"}
SGD = {"kind": "sgd", "learning_rate": 0.1}


def test_data_ranks_are_one_process(tiny_world: World, tmp_path: Any) -> None:
    """The same micro-batches have the same tiles; the control is one process in float32."""
    layouts: dict[str, dict[str, Any]] = {"ddp": {}, "zero3": {"shard": "zero3"}}
    files = {
        name: recipe_file(tiny_world, tmp_path, name, parallel=parallel, precision=FP8, optimizer=SGD)
        for name, parallel in layouts.items()
    }
    alone = recipe_file(tiny_world, tmp_path, "one", precision=FP8, optimizer=SGD)
    plain = recipe_file(tiny_world, tmp_path, "plain", precision="fp32", optimizer=SGD)
    by_rank = run_group(see, 2, list(files.values()), PACKS, MICRO, timeout=600)
    one = see([alone, plain], PACKS, MICRO, 1)
    for file in files.values():
        assert differences([traces[file] for traces in by_rank], one[alone]) == []
        assert differences([traces[file] for traces in by_rank], one[plain])
