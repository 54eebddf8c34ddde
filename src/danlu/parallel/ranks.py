"""The rank of this process in a layout, and its process groups along each axis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from danlu.parallel.comm import ALONE, Group, new_group
from danlu.parallel.layout import AXES, Layout


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

    @property
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

    def along(axis: str) -> Group:
        ranks = tuple(layout.ranks_along(rank, (axis,)))
        return Group(axis, ranks, ranks.index(rank), mesh.get_group(axis)) if len(ranks) > 1 else Group(axis, (rank,))

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


def _data_group(layout: Layout, rank: int) -> Group:
    """The group of this process along replicate and shard together.

    All processes create the groups at all coordinates of the other axes, as `new_group` demands.
    """
    own = Group("data", (rank,))
    if layout.data == 1:
        return own
    data_axes = ("replicate", "shard")
    for first in layout.ranks_along(0, [axis for axis in AXES if axis not in data_axes]):
        group = new_group("data", layout.ranks_along(first, data_axes))
        own = group if rank in group.ranks else own
    return own
