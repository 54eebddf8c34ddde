"""Bytes of the whole parameters and gradients that a process of a sharded model has at a time. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from danlu.recipe.sections import Parallel

_FLOAT32 = 4


class ShardedSizes(NamedTuple):
    """The sizes of a parameter that data ranks share."""

    gathered: int
    """Bytes of the whole one."""
    trained: int
    """Elements of its gradient; 0 of a frozen one."""
    of_shard: int
    """Elements of the gradient of this rank's shard."""


def gathered_at_a_time(sharded: Mapping[str, ShardedSizes], section: Parallel) -> tuple[int, int]:
    """Returns (bytes of whole parameters, bytes of whole gradients besides those of shards) that a process has at a
    time.

    sharded: the sizes of each sharded parameter, by name.
    """
    if not sharded:
        return 0, 0
    by_layer: dict[str, list[ShardedSizes]] = {}
    for name, sizes in sharded.items():
        parts = name.split(".")
        by_layer.setdefault(parts[1] if parts[0] == "layers" else "", []).append(sizes)
    outside = by_layer.pop("", [])
    layers = [[sum(column) for column in zip(*sizes, strict=True)] for sizes in by_layer.values()]
    gathered = gathered_bytes(
        [sizes[0] for sizes in layers],
        sum(sizes.gathered for sizes in outside),
        shard=section.shard,
        prefetch=section.prefetch,
    )
    trained = [sizes[1] for sizes in layers] + [sum(sizes.trained for sizes in outside)]
    if section.reduces_each_micro_batch:  # whole gradients are there one layer after the other
        return gathered, _FLOAT32 * max(trained)
    # They wait for the last backward pass, in which each layer's become those of shards.
    shards = sum(sizes.of_shard for sizes in sharded.values())
    return gathered, _FLOAT32 * max(0, sum(trained) - shards)


def gathered_bytes(layers: Sequence[int], rest: int, *, shard: str, prefetch: int) -> int:
    """The most bytes of whole parameters at a time that a process gathers from shards.

    layers: bytes of each layer's sharded parameters in the type in which they are gathered; rest: of the sharded
    parameters outside of layers. shard, prefetch: as `parallel.shard` and `parallel.prefetch` say.
    """
    match shard:
        case "none":
            return 0
        case "zero3":  # what lies outside of layers is resharded only after the backward pass
            return rest + sum(sorted(layers, reverse=True)[: 1 + prefetch])
        case _:
            return rest + sum(layers)
