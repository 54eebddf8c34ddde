"""How many processes there are along each axis: computed from the recipe and the number of processes, starting none.

The order of axes is the order of ranks: neighbours along `tensor` have neighbouring ranks, so that the axis that sends
most stays inside a machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from danlu.core.errors import RecipeError
from danlu.models.config import ModelConfig
from danlu.models.layer_spec import Experts, Mixer
from danlu.models.mixer_spec import Delta, Latent
from danlu.recipe.sections import Parallel, Recipe

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Axes of the mesh, outermost first. Experts are distributed among data and context ranks, and have no axis of their
own in it."""
EXPERT_AXES = ("pipeline", "replicate", "shard", "expert", "tensor")
"""Axes of the mesh of experts: neighbours along `expert` have other experts, those along `shard` the same ones."""
GRADIENT_AXES = ("pipeline", "replicate", "shard", "tensor")
"""Axes of the mesh that gradients are summed along: a copy of the model is sharded among data and context ranks."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; their product is the number of processes."""

    pipeline: int = 1
    replicate: int = 1  # copies of the model, whole or sharded
    shard: int = 1  # data ranks among which a copy is sharded
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """Neighbours among data and context ranks, of which each has other experts; divides those that a copy of the model
    is sharded among, or all of them."""
    ulysses: int = 1  # neighbouring context ranks that exchange heads in attention; divides `context`

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
        among = self.shard * self.context
        if among % self.expert == 0:
            replicate, shard = self.replicate, among // self.expert
        else:  # whole copies, of which several together have all experts
            replicate, rest = divmod(self.replicate * among, self.expert)
            shard = 1
            assert self.shard == 1 and not rest, f"{self.expert} does not divide the ranks of {self}"
        return self.pipeline, replicate, shard, self.expert, self.tensor

    def data_ranks(self, rank: int) -> list[int]:
        """Returns the ranks of all data ranks of `rank`, itself included: they have the same part of dense
        parameters.
        """
        return self.ranks_along(rank, ("replicate", "shard"))

    @property
    def gradient_sizes(self) -> tuple[int, ...]:
        """Degrees in the order of `GRADIENT_AXES`."""
        return self.pipeline, self.replicate, self.shard * self.context, self.tensor

    def gradient_ranks(self, rank: int) -> list[int]:
        """The ranks that take other tokens through the same part of dense parameters: data and context ranks."""
        return self.ranks_along(rank, ("replicate", "shard", "context"))

    def ulysses_ranks(self, rank: int) -> list[int]:
        """The context ranks that exchange heads with `rank`, itself included."""
        ranks = self.ranks_along(rank, ("context",))
        first = ranks.index(rank) // self.ulysses * self.ulysses
        return ranks[first : first + self.ulysses]

    def ring_ranks(self, rank: int) -> list[int]:
        """The context ranks that have the same heads in attention: every `ulysses`-th."""
        ranks = self.ranks_along(rank, ("context",))
        return ranks[ranks.index(rank) % self.ulysses :: self.ulysses]

    def expert_ranks(self, rank: int) -> list[int]:
        """The neighbours among `gradient_ranks` that have all experts together, each other ones."""
        ranks = self.gradient_ranks(rank)
        first = ranks.index(rank) // self.expert * self.expert
        return ranks[first : first + self.expert]

    def expert_data_ranks(self, rank: int) -> list[int]:
        """Those of `gradient_ranks` that have the same experts: every `expert`-th."""
        ranks = self.gradient_ranks(rank)
        return ranks[ranks.index(rank) % self.expert :: self.expert]

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of a rank along each axis."""
        index_along = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, index_along[axis] = divmod(rank, size)
        return index_along

    def ranks_along(self, rank: int, axes: Sequence[str]) -> list[int]:
        """Returns the ranks with coordinates that differ from those of `rank` along `axes` alone, in order."""
        strides, stride = dict[str, tuple[int, int]](), 1
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            strides[axis] = stride, size
            stride *= size
        ranks = [rank - sum(index * strides[axis][0] for axis, index in self.coordinates(rank).items() if axis in axes)]
        for axis in (axis for axis in AXES if axis in axes):
            stride, size = strides[axis]
            ranks = [first + stride * index for first in ranks for index in range(size)]
        return ranks

    def __str__(self) -> str:
        degrees = {
            "data": self.data,
            "shards": self.shard,
            "expert": self.expert,
            "context": self.context,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
        }
        if self.shard == self.data:
            del degrees["shards"]
        parts = [f"{name} {size}" for name, size in degrees.items() if size > 1]
        return " x ".join(parts) or "one process"


def layout_of(section: Parallel, world: int) -> Layout:
    """The layout of a recipe on `world` processes. Raises RecipeError that proposes the nearest degrees that fit."""
    if section.workers == "threads":
        if world > 1:
            raise RecipeError(
                f"parallel.workers: threads trains in one process, and there are {world}. Start danlu without "
                "--processes, or use workers: processes"
            )
        return Layout()
    if section.device_map is not None and world > 1:
        raise RecipeError(
            f"parallel.device_map: the layers of one process on several devices, and there are {world} processes. "
            "Start danlu without --processes, or use parallel: {pipeline: 2}: its stages are processes"
        )
    stages = section.pipeline.stages
    if world % stages:
        near = ", ".join(f"pipeline: {degree}" for degree in _nearest(divisors(world), stages))
        raise RecipeError(
            f"parallel.pipeline: {stages} stages do not divide the {_processes(world)} of this run. Use {near}, or "
            f"start danlu with --processes {_multiples(world, stages)}"
        )
    whole = "this run" if stages == 1 else f"each of the {stages} pipeline stages"
    world //= stages
    if world % section.tensor:
        near = ", ".join(f"tensor: {degree}" for degree in _nearest(divisors(world), section.tensor))
        raise RecipeError(
            f"parallel.tensor: {section.tensor} does not divide the {_processes(world)} of {whole}. Use {near}, or "
            f"start danlu with --processes {_multiples(world, section.tensor, stages)}"
        )
    context, copies = section.context.size, world // section.tensor
    if copies % context:
        near = ", ".join(f"context: {degree}" for degree in _nearest(divisors(copies), context))
        fitting = _multiples(world, section.tensor * context, stages)
        raise RecipeError(
            f"parallel.context: {context} (times tensor {section.tensor}) does not divide the {_processes(world)} of "
            f"{whole}. Use {near}, or start danlu with --processes {fitting}"
        )
    data = copies // context
    if section.data not in ("auto", data):
        asked = section.data * section.tensor * context
        times = f"tensor {section.tensor}" + (f" and context {context}" if context > 1 else "")
        raise RecipeError(
            f"parallel.data: {section.data} (times {times}) asks for {asked} processes, not for the "
            f"{_processes(world)} of {whole}. Use data: {data}, or start danlu with --processes {asked * stages}"
        )
    if data % section.replicate:
        near = " or ".join(str(degree) for degree in _nearest(divisors(data), section.replicate))
        raise RecipeError(f"parallel.replicate: {section.replicate} does not divide the {data} data ranks. Use {near}")
    of_one_copy = data // section.replicate
    if of_one_copy * context % section.expert:
        near = " or ".join(str(degree) for degree in _nearest(divisors(of_one_copy * context), section.expert))
        ranks = f"{of_one_copy} data ranks" if context == 1 else f"{of_one_copy * context} data and context ranks"
        each = " of each replica" if section.replicate > 1 else ""
        raise RecipeError(f"parallel.expert: {section.expert} does not divide the {ranks}{each}. Use {near}")
    copy = Layout(
        pipeline=stages,
        context=context,
        tensor=section.tensor,
        expert=section.expert,
        ulysses=context if section.context.method == "ulysses" else section.context.ulysses,
    )
    if section.shard == "none":
        return replace(copy, replicate=data)
    return replace(copy, replicate=section.replicate, shard=of_one_copy)


def placing_problems(recipe: Recipe, layout: Layout, device_type: str) -> Iterator[str]:
    """Why no model can be placed in a layout with the settings of its recipe. device_type: "cpu" or "cuda"."""
    if recipe.optimizer.kind == "galore" and layout.world > 1:
        yield (
            "optimizer.kind: galore projects a gradient as soon as it is there, before other processes have added "
            "theirs. Use adamw or adamw8bit, or one process"
        )
    is_sharded = recipe.parallel.shard != "none" and layout.data * layout.context > 1
    if "parameters" in recipe.memory.offload and device_type != "cpu" and not is_sharded:
        yield (
            "memory.offload: parameters leave a GPU as shards, which takes parallel.shard: zero3 (or zero1, zero2) and "
            "two processes or more. On one GPU offload optimizer and activations"
        )


def problems(section: Parallel, config: ModelConfig) -> Iterator[str]:
    """Why a model cannot be cut by `section.tensor`, its attention not by `section.context`, or its experts not
    distributed by `section.expert`; each message proposes the nearest degrees that fit."""
    yield from _tensor_problems(section.tensor, config)
    yield from _context_problems(section, config)
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


def _context_problems(section: Parallel, config: ModelConfig) -> Iterator[str]:
    context = section.context
    if context.size == 1:
        return
    if config.shares_keys:
        yield (
            "parallel.context: keys are exchanged by the layer that makes them, and layers of this model read those of "
            "earlier layers. Use parallel.tensor with sequence: true, or parallel.shard: zero3"
        )
        return
    mixers = list(dict.fromkeys(kind.mixer for kind in config.kinds))
    if context.method != "ulysses" and any(isinstance(mixer, Delta) for mixer in mixers):
        yield (
            f"parallel.context.method: {context.method}, but linear attention goes through a document in order, and a "
            "ring has its tokens all at once. Use method: ulysses, which exchanges tokens for heads"
        )
        return
    key, degree = ("size", context.size) if context.method == "ulysses" else ("ulysses", context.ulysses)
    for has_state, heads, kv_heads in dict.fromkeys(
        (isinstance(mixer, Delta), *attention_heads(mixer, section.tensor)) for mixer in mixers
    ):
        # Keys may go to several ranks, but a state is of one key head and one value head.
        fitting = [n for n in divisors(heads) if kv_heads % n == 0 or (n % kv_heads == 0 and not has_state)]
        if degree not in fitting:
            near = " or ".join(map(str, _nearest(fitting, degree)))
            each = " of each tensor rank" if section.tensor > 1 else ""
            names = ("value heads", "key heads") if has_state else ("query heads", "key/value heads")
            yield (
                f"parallel.context.{key}: {degree} ranks cannot share out the {heads} {names[0]} and {kv_heads} "
                f"{names[1]}{each}. Use {near}"
            )


def attention_heads(mixer: Mixer, tensor: int) -> tuple[int, int]:
    """Query heads, and heads of expanded keys, that a tensor rank has; of linear attention heads of values and keys."""
    match mixer:
        case Delta():
            kv_heads = mixer.key_heads
        case Latent():
            kv_heads = mixer.heads
        case _:
            kv_heads = mixer.kv_heads
    return max(1, mixer.heads // tensor), max(1, kv_heads // tensor)


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
    """Returns, of rising numbers, the largest below `wanted` and the smallest above it."""
    return [n for n in fitting if n < wanted][-1:] + [n for n in fitting if n > wanted][:1]


def _multiples(world: int, degree: int, stages: int = 1) -> str:
    """The multiples of `degree` next to `world`, times the stages of a pipeline."""
    below = world // degree * degree
    return f"{below * stages} or {(below + degree) * stages}" if below else f"{degree * stages}"


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"
