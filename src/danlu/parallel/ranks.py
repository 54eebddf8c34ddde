"""Where this process stands among all: its groups along each axis."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from danlu.parallel.comm import ALONE, Group, new_group
from danlu.parallel.layout import AXES, Layout


@dataclass(frozen=True)
class Ranks:
    """This process, its groups, and torch's mesh for what torch shards itself. By default: alone."""

    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    world: Group = ALONE
    data: Group = ALONE  # replicate x shard: those that take other rows
    replicate: Group = ALONE
    shard: Group = ALONE
    tensor: Group = ALONE
    mesh: Any = field(default=None, repr=False)  # DeviceMesh over AXES; None alone

    @property
    def alone(self) -> bool:
        return self.layout.world == 1

    @property
    def leads(self) -> bool:
        """Whether this process speaks for all: shows progress, writes metrics and results."""
        return self.rank == 0


def ranks_of(layout: Layout, device_type: str) -> Ranks:
    """The groups of this process; every process of the world calls it, and torch.distributed is initialised."""
    if layout.world == 1:
        return Ranks(layout)
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == layout.world, f"a layout of {layout.world} on {world} processes"
    mesh: DeviceMesh = init_device_mesh(device_type, layout.sizes, mesh_dim_names=AXES)
    place = layout.coordinates(rank)

    def along(axis: str) -> Group:
        ranks = tuple(int(one) for one in _line(layout, place, (axis,)))
        return Group(axis, ranks, ranks.index(rank), mesh.get_group(axis)) if len(ranks) > 1 else _alone(axis, rank)

    return Ranks(
        layout,
        rank,
        Group("world", tuple(range(world)), rank, dist.group.WORLD),
        _data_group(layout, rank),
        along("replicate"),
        along("shard"),
        along("tensor"),
        mesh,
    )


def _line(layout: Layout, place: dict[str, int], axes: tuple[str, ...]) -> list[int]:
    """Ranks that differ from `place` along some axes alone, in order."""
    numbers = torch.arange(layout.world).view(layout.sizes)
    index = tuple(slice(None) if axis in axes else place[axis] for axis in AXES)
    return [int(one) for one in numbers[index].flatten()]


def _data_group(layout: Layout, rank: int) -> Group:
    """replicate x shard together. Made for every place on the other axes: all processes make all groups."""
    mine = _alone("data", rank)
    if layout.data == 1:
        return mine
    for pipeline, context, tensor in itertools.product(
        *(range(n) for n in (layout.pipeline, layout.context, layout.tensor))
    ):
        place = {"pipeline": pipeline, "replicate": 0, "shard": 0, "context": context, "tensor": tensor}
        ranks = _line(layout, place, ("replicate", "shard"))
        group = new_group("data", ranks)
        mine = group if rank in ranks else mine
    return mine


def _alone(name: str, rank: int) -> Group:
    return Group(name, (rank,))
