"""How many processes there are along each axis: computed from the recipe and the number of processes, starting none.

The order of axes is the order of ranks: neighbours along `tensor` have neighbouring ranks, so that the axis that sends
most stays inside a machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from danlu.errors import RecipeError
from danlu.models.config import ModelConfig
from danlu.models.layer_spec import Experts
from danlu.recipe.sections import Parallel

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Axes of the mesh, outermost first. Experts are distributed among data ranks, and have no axis of their own in it."""
EXPERT_AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
"""Axes of the mesh of experts: neighbours along `expert` have other experts, those along `shard` the same ones."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; their product is the number of processes."""

    pipeline: int = 1
    replicate: int = 1  # copies of the model, whole or sharded
    shard: int = 1  # data ranks among which a copy is sharded
    context: int = 1
    tensor: int = 1
    expert: int = 1  # neighbouring data ranks, among which experts are distributed; divides `shard`, or `replicate`

    @property
    def world(self) -> int:
        return math.prod(self.sizes)

    @property
    def data(self) -> int:
        """Data ranks: processes that each take different rows."""
        return self.replicate * self.shard

    @property
    def sizes(self) -> tuple[int, ...]:
        """Degrees in the order of `AXES`."""
        return self.pipeline, self.replicate, self.shard, self.context, self.tensor

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        """Degrees in the order of `EXPERT_AXES`."""
        divided = "shard" if self.shard > 1 else "replicate"
        sizes = {**dict(zip(AXES, self.sizes, strict=True)), "expert": self.expert}
        assert sizes[divided] % self.expert == 0, f"{self.expert} does not divide {divided} {sizes[divided]}"
        sizes[divided] //= self.expert
        return tuple(sizes[axis] for axis in EXPERT_AXES)

    def data_ranks(self, rank: int) -> list[int]:
        """The ranks of all data ranks beside `rank`, itself included: they have the same part of dense parameters."""
        return self.ranks_along(rank, ("replicate", "shard"))

    def expert_data_ranks(self, rank: int) -> list[int]:
        """Those of them that have the same experts: every `expert`-th."""
        ranks = self.data_ranks(rank)
        return ranks[ranks.index(rank) % self.expert :: self.expert]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of a rank along each axis."""
        index_along = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, index_along[axis] = divmod(rank, size)
        return index_along

    def ranks_along(self, rank: int, axes: Sequence[str]) -> list[int]:
        """The ranks whose coordinates differ from those of `rank` along `axes` alone, in order."""
        kept = [(axis, index) for axis, index in self.coordinates(rank).items() if axis not in axes]
        return [other for other in range(self.world) if {*kept} <= self.coordinates(other).items()]

    def __str__(self) -> str:
        degrees = {
            "data": self.data,
            "shards": self.shard,
            "expert": self.expert,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
        }
        if self.shard == self.data:
            del degrees["shards"]
        parts = [f"{name} {size}" for name, size in degrees.items() if size > 1]
        return " x ".join(parts) or "one process"


def layout_of(section: Parallel, world: int) -> Layout:
    """The layout of a recipe on `world` processes. Raises RecipeError that proposes the nearest degrees that fit."""
    for axis in ("pipeline", "context"):
        if getattr(section, axis) != 1:
            raise RecipeError(f"parallel.{axis}: {getattr(section, axis)}, but only 1 works so far. Leave it out")
    if section.workers == "threads":
        if world > 1:
            raise RecipeError(
                f"parallel.workers: threads trains in one process, and there are {world}. Start danlu without "
                "--processes, or use workers: processes"
            )
        return Layout()
    if world % section.tensor:
        near = ", ".join(f"tensor: {degree}" for degree in _nearest(divisors(world), section.tensor))
        raise RecipeError(
            f"parallel.tensor: {section.tensor} does not divide the {_processes(world)} of this run. Use {near}, or "
            f"start danlu with --processes {_multiples(world, section.tensor)}"
        )
    data = world // section.tensor
    if section.data not in ("auto", data):
        asked = section.data * section.tensor
        raise RecipeError(
            f"parallel.data: {section.data} (times tensor {section.tensor}) asks for {asked} processes, not for the "
            f"{_processes(world)} of this run. Use data: {data}, or start danlu with --processes {asked}"
        )
    if data % section.replicate:
        near = " or ".join(str(degree) for degree in _nearest(divisors(data), section.replicate))
        raise RecipeError(f"parallel.replicate: {section.replicate} does not divide the {data} data ranks. Use {near}")
    of_one_copy = data // section.replicate
    if of_one_copy % section.expert:
        near = " or ".join(str(degree) for degree in _nearest(divisors(of_one_copy), section.expert))
        each = " of each replica" if section.replicate > 1 else ""
        raise RecipeError(
            f"parallel.expert: {section.expert} does not divide the {of_one_copy} data ranks{each}. Use {near}"
        )
    if section.shard == "none":
        return Layout(replicate=data, tensor=section.tensor, expert=section.expert)
    return Layout(replicate=section.replicate, shard=of_one_copy, tensor=section.tensor, expert=section.expert)


def problems(section: Parallel, config: ModelConfig) -> Iterator[str]:
    """Why a model cannot be cut by `section.tensor`, or its experts distributed by `section.expert`; each message
    proposes the nearest degrees that fit."""
    yield from _tensor_problems(section.tensor, config)
    yield from _expert_problems(section.expert, config)


def _expert_problems(degree: int, config: ModelConfig) -> Iterator[str]:
    if degree == 1:
        return
    counts = sorted({kind.feed.num_experts for kind in config.kinds if isinstance(kind.feed, Experts)})
    if not counts:
        yield f"parallel.expert: {degree}, and the model has no experts to distribute. Leave it out"
        return
    fitting = divisors(math.gcd(*counts))
    if degree not in fitting:
        near = " or ".join(map(str, _nearest(fitting, degree)))
        experts = " and ".join(map(str, counts))
        yield f"parallel.expert: {degree} does not divide the model's {experts} experts. Use {near}"


def _tensor_problems(degree: int, config: ModelConfig) -> Iterator[str]:
    if degree == 1:
        return
    degrees = divisors(config.layers[0].mixer.heads)
    fitting = [n for n in degrees if not any(kind.uncuttable(n) for kind in config.kinds)]
    near = " or ".join(map(str, _nearest(fitting, degree)))
    reasons = filter(None, (kind.uncuttable(degree) for kind in config.kinds))
    if (reason := next(reasons, None)) is not None:
        yield f"parallel.tensor: {reason}. Use {near}"
    elif config.vocab_size < degree:
        yield f"parallel.tensor: {degree} is more than the {config.vocab_size} tokens of the vocabulary. Use {near}"


def expert_shard_dim(shape: Sequence[int], shards: int) -> int:
    """The dimension along which a rank's experts [E, ..] are sharded: another one where they are fewer than shards.

    fully_shard pads experts that are no multiple of the shards, but splits other dimensions evenly alone.
    """
    if shape[0] >= shards:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % shards == 0), 0)


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, rising."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _nearest(fitting: list[int], wanted: int) -> list[int]:
    """Of rising numbers, the largest below `wanted` and the smallest above it."""
    return [n for n in fitting if n < wanted][-1:] + [n for n in fitting if n > wanted][:1]


def _multiples(world: int, degree: int) -> str:
    """The multiples of `degree` next to `world`."""
    below = world // degree * degree
    return f"{below} or {below + degree}" if below else f"{degree}"


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"
