"""Whole parameters and gradients that a process of a sharded model has at a time, on sizes that are easy to add up."""

from __future__ import annotations

import pytest

from danlu.planning.gathered_memory import ShardedSizes, gathered_at_a_time
from danlu.recipe.sections import Parallel

LAYER, REST = ShardedSizes(200, 100, 25), ShardedSizes(80, 40, 10)
SIZES = {"layers.0.a": LAYER, "layers.1.a": LAYER, "layers.1.b": LAYER, "embed_tokens.weight": REST}
SHARDS, WHOLE = 4 * (3 * 25 + 10), 4 * (3 * 100 + 40)


@pytest.mark.parametrize(
    ("shard", "gathered", "gradients"),
    [
        ("zero1", 680, WHOLE - SHARDS),  # whole ones become shards, and are never there together
        ("zero2", 680, 4 * 200),  # those of the larger layer
        ("zero3", 80 + 400 + 200, 4 * 200),
    ],
)
def test_whole_parameters_and_gradients(shard: str, gathered: int, gradients: int) -> None:
    section = Parallel(shard=shard, data=4, prefetch=1)  # type: ignore[arg-type]
    assert gathered_at_a_time(SIZES, section) == (gathered, gradients)
    frozen = {name: sizes._replace(trained=0, of_shard=0) for name, sizes in SIZES.items()}
    assert gathered_at_a_time(frozen, section) == (gathered, 0)
    assert gathered_at_a_time({}, section) == (0, 0)
