"""The rank of this process in a layout, and its process groups along each axis."""

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
    coordinates = layout.coordinates(rank)

    def along(axis: str) -> Group:
        ranks = tuple(_ranks_along(layout, coordinates, (axis,)))
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


def _ranks_along(layout: Layout, coordinates: dict[str, int], axes: tuple[str, ...]) -> list[int]:
    """The ranks whose coordinates differ from the given ones along `axes` alone, in order."""
    ranks = torch.arange(layout.world).view(layout.sizes)
    index = tuple(slice(None) if axis in axes else coordinates[axis] for axis in AXES)
    return ranks[index].flatten().tolist()  # type: ignore[no-any-return]


def _data_group(layout: Layout, rank: int) -> Group:
    """The group of this process along replicate and shard together.

    All processes create the groups at all coordinates of the other axes, as `new_group` demands.
    """
    own = Group("data", (rank,))
    if layout.data == 1:
        return own
    for pipeline, context, tensor in itertools.product(
        *(range(n) for n in (layout.pipeline, layout.context, layout.tensor))
    ):
        coordinates = {"pipeline": pipeline, "replicate": 0, "shard": 0, "context": context, "tensor": tensor}
        group = new_group("data", _ranks_along(layout, coordinates, ("replicate", "shard")))
        own = group if rank in group.ranks else own
    return own
