"""How many processes stand along each axis: computed from the recipe and the number of processes, without any of them.

The order of axes is the order of ranks: neighbours along `tensor` have neighbouring ranks, so that the axis that sends
most stays inside a machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from danlu.errors import RecipeError
from danlu.recipe.sections import Parallel

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Of the mesh, outermost first. Experts are dealt out over `shard` and `context`, and have no axis of their own."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; their product is the number of processes."""

    pipeline: int = 1
    replicate: int = 1  # copies of the model, whole or sharded
    shard: int = 1  # data ranks among which a copy is sharded
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """Ranks that each take other rows."""
        return self.replicate * self.shard

    @property
    def sizes(self) -> tuple[int, ...]:
        """Along `AXES`."""
        return self.pipeline, self.replicate, self.shard, self.context, self.tensor

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        place = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, place[axis] = divmod(rank, size)
        return place

    def __str__(self) -> str:
        named = {"data": self.data, "shards": self.shard, "tensor": self.tensor, "pipeline": self.pipeline}
        parts = [f"{name} {size}" for name, size in named.items() if size > 1 and (name, size) != ("shards", self.data)]
        return " x ".join(parts) or "one process"


@dataclass(frozen=True)
class Sizes:
    """What of a model limits how it can be cut."""

    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int


def layout_of(section: Parallel, world: int) -> Layout:
    """The layout of a recipe on so many processes. Raises RecipeError, proposing the nearest that fit."""
    for axis in ("pipeline", "context", "expert"):
        if getattr(section, axis) != 1:
            raise RecipeError(f"parallel.{axis}: {getattr(section, axis)}, but only 1 works so far. Leave it out")
    if section.workers == "threads":
        if world > 1:
            raise RecipeError(
                f"parallel.workers: threads trains in one process, and there are {world}. Start danlu without "
                "--processes, or use workers: processes"
            )
        return Layout()
    others = section.tensor
    if world % others:
        near = ", ".join(f"tensor: {degree}" for degree in _nearest(divisors(world), section.tensor))
        raise RecipeError(
            f"parallel.tensor: {section.tensor} does not divide the {_processes(world)} of this run. Use {near}, or "
            f"start danlu with --processes {_multiples(world, others)}"
        )
    data = world // others
    if section.data not in ("auto", data):
        raise RecipeError(
            f"parallel.data: {section.data} (times tensor {others}) asks for {section.data * others} processes, not "
            f"for the {_processes(world)} of this run. Use data: {data}, or start danlu with "
            f"--processes {section.data * others}"
        )
    if section.shard == "none":
        return Layout(replicate=data, tensor=others)
    if data % section.replicate:
        near = " or ".join(str(degree) for degree in _nearest(divisors(data), section.replicate))
        raise RecipeError(f"parallel.replicate: {section.replicate} does not divide the {data} data ranks. Use {near}")
    return Layout(replicate=section.replicate, shard=data // section.replicate, tensor=others)


def problems(section: Parallel, sizes: Sizes) -> Iterator[str]:
    """What of a layout a model cannot be cut into, each with the nearest that it can."""
    degree = section.tensor
    if degree == 1:
        return
    fits = [one for one in divisors(sizes.heads) if _kv_fits(sizes.kv_heads, one) and sizes.intermediate % one == 0]
    near = " or ".join(str(one) for one in _nearest(fits, degree))
    if sizes.heads % degree:
        yield f"parallel.tensor: {degree} does not divide the model's {sizes.heads} attention heads. Use {near}"
    elif not _kv_fits(sizes.kv_heads, degree):
        yield (
            f"parallel.tensor: {degree} neither divides the model's {sizes.kv_heads} key/value heads nor is a multiple "
            f"of them. Use {near}"
        )
    elif sizes.intermediate % degree:
        yield f"parallel.tensor: {degree} does not divide the MLP's width of {sizes.intermediate}. Use {near}"
    elif sizes.vocabulary < degree:
        yield f"parallel.tensor: {degree} is more than the {sizes.vocabulary} tokens of the vocabulary. Use {near}"


def divisors(number: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _kv_fits(kv_heads: int, degree: int) -> bool:
    return kv_heads % degree == 0 or degree % kv_heads == 0


def _nearest(fits: list[int], wanted: int) -> list[int]:
    """The largest that fits below what was wanted, and the smallest above."""
    below, above = [one for one in fits if one < wanted], [one for one in fits if one > wanted]
    return below[-1:] + above[:1]


def _multiples(world: int, degree: int) -> str:
    below = world // degree * degree
    return f"{below} or {below + degree}" if below else f"{degree}"


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"
