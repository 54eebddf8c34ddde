"""Ring collectives and torch's over the same tensors, on each process of a group."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from builders import ring_collectives
from builders.ring_collectives import Moved
from danlu.parallel.comm import Group
from danlu.parallel.layout import Layout
from danlu.parallel.traffic_counter import TrafficCounter

ADDED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
SHAPES = ((24,), (7,), (2,), (0,), (), (5, 3))  # 24: alike at 2, 3 and 4; 2 and 0: some chunks are empty


@dataclass(frozen=True)
class Outcome:
    """Of one collective on one process."""

    name: str
    ours: Tensor
    theirs: Tensor
    sent_bytes: int  # as the ring says
    counted_bytes: float  # as the messages are seen
    full_bytes: int
    alike: bool  # whether all shares are of one size


def compared() -> list[Outcome]:
    group = everyone()
    found = [_all_reduced(group, shape, dtype) for dtype in (*ADDED, torch.complex64) for shape in SHAPES]
    found.append(_all_reduced(group, (6, 4), torch.float32, turned=True))
    for dtype in (torch.float32, torch.int64):
        found += [_scattered(group, rows, dtype) for rows in ([3] * group.size, _uneven(group.size), None)]
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.float8_e4m3fn):
        found += [_gathered(group, rows, dtype) for rows in ([3] * group.size, _uneven(group.size), None)]
        found += [_exchanged(group, even, dtype) for even in (True, False)]
    return found


def summed_floats() -> tuple[Tensor, Tensor]:
    """Random numbers, whose sum depends on the order: (this process's, what the ring makes of all)."""
    group = everyone()
    x = torch.randn(29, generator=torch.Generator().manual_seed(group.index))
    return x, ring_collectives.all_reduce(x, group).tensor


def with_wrong_neighbours() -> list[tuple[Tensor, Tensor]]:
    """The same comparison where everyone sends two places on: messages meet, and what they bring is wrong."""
    group = everyone()

    def wrong(index: int, size: int, places: int = 1) -> tuple[int, int]:
        return (index + places + 1) % size, (index - places - 1) % size

    with mock.patch.object(ring_collectives, "neighbours", wrong):
        reduced = _all_reduced(group, (24,), torch.float32)
        gathered = _gathered(group, None, torch.float32)
    return [(reduced.ours, reduced.theirs), (gathered.ours, gathered.theirs)]


def everyone() -> Group:
    size, rank = dist.get_world_size(), dist.get_rank()
    return Group("shard", tuple(range(size)), rank, dist.group.WORLD)


def _all_reduced(group: Group, shape: tuple[int, ...], dtype: torch.dtype, turned: bool = False) -> Outcome:
    x = _whole(shape, dtype, group.index)
    x = x.T if turned else x
    before, theirs = x.clone(), x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(theirs)
    moved, counted = _counted(lambda: ring_collectives.all_reduce(x, group), group)
    assert torch.equal(x, before), "a collective leaves alone what it is given"
    return _outcome("all_reduce", moved, theirs, counted, x.nbytes, x.numel() % group.size == 0)


def _scattered(group: Group, rows: list[int] | None, dtype: torch.dtype) -> Outcome:
    shares = rows or [3 + (index < 1) for index in range(group.size)]
    x = _whole((sum(shares), 2), dtype, group.index)
    theirs = x.new_empty((shares[group.index], 2))
    dist.reduce_scatter(theirs, list(x.clone().split(shares)))
    moved, counted = _counted(lambda: ring_collectives.reduce_scatter(x, group, rows), group)
    return _outcome("reduce_scatter", moved, theirs, counted, x.nbytes, len(set(shares)) == 1)


def _gathered(group: Group, rows: list[int] | None, dtype: torch.dtype) -> Outcome:
    shares = rows or [2] * group.size
    x = _whole((shares[group.index], 2), torch.float32, group.index).to(dtype)
    theirs = torch.cat(_objects(x))
    moved, counted = _counted(lambda: ring_collectives.all_gather(x, group, rows), group)
    return _outcome("all_gather", moved, theirs, counted, theirs.nbytes, len(set(shares)) == 1)


def _exchanged(group: Group, even: bool, dtype: torch.dtype) -> Outcome:
    table = [[2 if even else (3 * to + source) % 4 for to in range(group.size)] for source in range(group.size)]
    sends, receives = table[group.index], [row[group.index] for row in table]
    x = _whole((sum(sends), 3), torch.float32, group.index).to(dtype)
    theirs = torch.cat([given.split(table[source])[group.index] for source, given in enumerate(_objects(x))])
    told = (None, None) if even else (sends, receives)
    moved, counted = _counted(lambda: ring_collectives.all_to_all(x, group, *told), group)
    return _outcome("all_to_all", moved, theirs, counted, x.nbytes, even)


def _objects(x: Tensor) -> list[Tensor]:
    found: list[Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, x.float())  # torch cannot read back what it has written in eight bits
    return [one.to(x.dtype) for one in found if one is not None]


def _whole(shape: tuple[int, ...], dtype: torch.dtype, index: int) -> Tensor:
    """Small whole numbers, which every type adds exactly in any order."""
    made = torch.Generator().manual_seed(100 + index)
    return torch.randint(0, 9, shape, generator=made).to(dtype)


def _uneven(size: int) -> list[int]:
    return [4, 0, 1, 2][:size]


def _counted(call: object, group: Group) -> tuple[Moved, float]:
    with TrafficCounter(Layout(shard=group.size)) as traffic:
        moved = call()  # type: ignore[operator]
    assert {one.kind for one in traffic.counted()} <= {"point-to-point"}
    return moved, float(sum(one.bytes for one in traffic.counted()))


def _outcome(name: str, moved: Moved, theirs: Tensor, counted: float, full_bytes: int, alike: bool) -> Outcome:
    bits = (lambda x: x.view(torch.uint8)) if theirs.dtype == torch.float8_e4m3fn else lambda x: x
    return Outcome(name, bits(moved.tensor), bits(theirs), moved.sent_bytes, counted, full_bytes, alike)
