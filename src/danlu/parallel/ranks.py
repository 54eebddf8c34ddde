"""The rank of this process in a layout, and its process groups along each axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from danlu.parallel.comm import ALONE, Group, new_group
from danlu.parallel.layout import AXES, EXPERT_AXES, GRADIENT_AXES, Layout


@dataclass(frozen=True)
class DataGroups:
    """The data and context ranks that have the same part of a parameter before it is sharded among them.

    They take different tokens, so the parameter's gradient is a sum over `all`. FSDP2 shards it among `shard`, of which
    there are as many copies as `replicate` has processes; other parameters are whole on all of them.
    """

    all: Group = ALONE
    replicate: Group = ALONE
    shard: Group = ALONE
    mesh: Any = field(default=None, repr=False)  # DeviceMesh of FSDP2: shard, or replicate x shard; None alone


@dataclass(frozen=True)
class Ranks:
    """This process, its groups along the axes, and torch's mesh for FSDP2. By default a single process."""

    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    world: Group = ALONE
    data: Group = ALONE  # replicate x shard: the processes that take different rows
    replicate: Group = ALONE
    shard: Group = ALONE
    tensor: Group = ALONE
    mesh: Any = field(default=None, repr=False)  # DeviceMesh over AXES; None alone
    expert: Group = ALONE  # neighbouring data and context ranks, each with other experts: together they have all
    expert_data: DataGroups = field(default_factory=DataGroups)  # the data and context ranks with the same experts
    dense_data: DataGroups = field(default_factory=DataGroups)  # of all parameters but experts, on every data rank
    ring: Group = ALONE  # context ranks that have the same heads in attention
    ulysses: Group = ALONE  # context ranks that exchange heads; together with `ring` they are all
    pipeline: Group = ALONE  # the stages of one copy of the model, for the same rows
    downstream: Group = ALONE  # the same, with collectives of its own: for messages to stages of a higher index
    upstream: Group = ALONE  # and for messages to stages of a lower index

    @cached_property
    def alone(self) -> bool:
        return self.layout.world == 1

    @property
    def leads(self) -> bool:
        """Whether this is the main process, which shows progress and writes metrics and results."""
        return self.rank == 0


def ranks_of(layout: Layout, device_type: str) -> Ranks:
    """The groups of this process. Every process of the world calls it, once torch.distributed is initialised.

    device_type: of torch's mesh, "cpu" or "cuda".
    """
    if layout.world == 1:
        return Ranks(layout)
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == layout.world, f"a layout of {layout.world} on {world} processes"
    mesh: DeviceMesh = init_device_mesh(device_type, layout.sizes, mesh_dim_names=AXES)
    ranks = Ranks(
        layout,
        rank,
        Group("world", tuple(range(world)), rank, dist.group.WORLD),
        own_of_new_groups("data", map(layout.data_ranks, range(world)), rank),
        _along(mesh, "replicate", rank),
        _along(mesh, "shard", rank),
        _along(mesh, "tensor", rank),
        mesh,
    )
    ranks = replace(ranks, dense_data=_dense_data(ranks, device_type))
    if layout.pipeline > 1:
        stages = [layout.ranks_along(other, ("pipeline",)) for other in range(world)]
        ranks = replace(
            ranks,
            pipeline=_along(mesh, "pipeline", rank),
            downstream=own_of_new_groups("pipeline", stages, rank),
            upstream=own_of_new_groups("pipeline", stages, rank),
        )
    if layout.context > 1:
        ring, ulysses = map(layout.ring_ranks, range(world)), map(layout.ulysses_ranks, range(world))
        ranks = replace(
            ranks, ring=own_of_new_groups("ring", ring, rank), ulysses=own_of_new_groups("ulysses", ulysses, rank)
        )
    if layout.expert == 1:
        return replace(ranks, expert_data=ranks.dense_data)
    # Where experts are distributed, the axis of the ranks that they are distributed among is cut in two.
    expert_mesh = init_device_mesh(device_type, layout.expert_sizes, mesh_dim_names=EXPERT_AXES)
    replicate, shard = (_along(expert_mesh, axis, rank) for axis in ("replicate", "shard"))
    return replace(
        ranks,
        expert=_along(expert_mesh, "expert", rank),
        expert_data=DataGroups(
            own_of_new_groups("expert data", map(layout.expert_data_ranks, range(world)), rank),
            replicate,
            shard,
            expert_mesh["replicate", "shard"] if replicate.size > 1 else expert_mesh["shard"],
        ),
    )


def _dense_data(ranks: Ranks, device_type: str) -> DataGroups:
    """The groups of all parameters but experts: every data rank has them, and every context rank."""
    layout, mesh, every = ranks.layout, ranks.mesh, ranks.data
    replicate, shard = ranks.replicate, ranks.shard
    if layout.context > 1:  # among which a copy is sharded too
        mesh = init_device_mesh(device_type, layout.gradient_sizes, mesh_dim_names=GRADIENT_AXES)
        replicate, shard = (_along(mesh, axis, ranks.rank) for axis in ("replicate", "shard"))
        every = own_of_new_groups("data x context", map(layout.gradient_ranks, range(layout.world)), ranks.rank)
    return DataGroups(every, replicate, shard, mesh["replicate", "shard"] if replicate.size > 1 else mesh["shard"])


def _along(mesh: DeviceMesh, axis: str, rank: int) -> Group:
    """The group of this process along one axis of a mesh."""
    ranks = tuple(mesh[axis].mesh.tolist())
    return Group(axis, ranks, ranks.index(rank), mesh.get_group(axis)) if len(ranks) > 1 else Group(axis, (rank,))


def own_of_new_groups(name: str, members: Iterable[Sequence[int]], rank: int) -> Group:
    """The group of this process among new ones, which all processes make, as `new_group` demands; alone, none is made.

    members: the ranks of each group, in an order that all processes know; the same ones may come several times.
    """
    own = Group(name, (rank,))
    for ranks in dict.fromkeys(map(tuple, members)):
        if len(ranks) > 1:
            group = new_group(name, ranks)
            own = group if rank in ranks else own
    return own
