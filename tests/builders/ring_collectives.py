"""Collectives written out over point-to-point messages: what moves in which step, and how many bytes a process sends.

A reference to read and for tests to check against: no code of danlu calls it, and training uses torch's own. Processes
stand in a ring: each sends to its right neighbour and receives from its left one, so every link carries one chunk at a
time and none waits for another. Three processes sum a tensor cut in chunks a b c; (012) is the sum over all, [ ] is
passed on:

    start                step 1                step 2                step 3                step 4
    0: a0  b0 [c0]       0: a0 [b02] c0        0:[a012] b02  c0      0: a012 b02 [c012]    0: a012 b012 c012
    1:[a1] b1  c1        1: a1  b1 [c01]       1: a1 [b012] c01      1:[a012] b012 c01     1: a012 b012 c012
    2: a2 [b2] c2        2:[a12] b2  c2        2: a12  b2 [c012]     2: a12 [b012] c012    2: a012 b012 c012
                         └─ scatter-reduce ──────────────────┘      └─ all-gather ───────────────────────┘

After N - 1 steps each process has the whole sum of one chunk (reduce-scatter); after N - 1 more, all have all of them
(all-gather). A step sends one chunk of Ψ/N bytes, so an all-reduce sends 2(N-1)/N·Ψ from each process: less than 2Ψ,
however many there are. No algorithm sends less (Patarasuk & Yuan, Bandwidth optimal all-reduce algorithms, 2009,
theorem 1), while one process that collects everything would receive (N-1)·Ψ. The price is 2(N-1) messages one after
the other: for small tensors a tree is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from danlu.parallel.comm import Group


@dataclass(frozen=True)
class Moved:
    """What a collective gave this process, and what it cost."""

    tensor: Tensor
    sent_bytes: int  # by this process


@dataclass(frozen=True)
class Step:
    """What one process does at one time: numbers of chunks."""

    sends: int  # to the right
    receives: int  # from the left


def reduce_steps(index: int, size: int) -> list[Step]:
    """Chunk c starts at process c + 1 and is added to on its way round, until it ends at process c."""
    return [Step((index - 1 - turn) % size, (index - 2 - turn) % size) for turn in range(size - 1)]


def gather_steps(index: int, size: int) -> list[Step]:
    """Chunk c starts at process c, and each passes on what it has just received."""
    return [Step((index - turn) % size, (index - 1 - turn) % size) for turn in range(size - 1)]


def all_reduce(x: Tensor, group: Group) -> Moved:
    """The sum of x over the group, for all: a reduce-scatter and an all-gather of the sums.

    x: one shape and dtype everywhere; numbers are dealt out in chunks that differ by one at most, some of them empty if
    there are fewer than processes. The chunk of process i is c_i; it sends 2Ψ - c_i - c_(i+1) bytes, 2(N-1)/N·Ψ where
    all are alike. Each number is summed at one place and then copied: all processes get the same bits.
    """
    whole = x.flatten().clone()  # [Ψ]
    chunks = list(whole.tensor_split(group.size))
    sent_bytes = _reduce(chunks, group) + _gather(chunks, group)
    return Moved(whole.view(x.shape), sent_bytes)


def reduce_scatter(x: Tensor, group: Group, rows: Sequence[int] | None = None) -> Moved:
    """This process's rows of the sum of x over the group.

    x: one shape [R, ..] and dtype everywhere; rows: how many each process gets, by default as alike as can be.
    Sends Ψ less the process's own share: (N-1)/N·Ψ where shares are alike.
    """
    rows = rows if rows is not None else _dealt(x.shape[0], group.size)
    assert len(rows) == group.size and sum(rows) == x.shape[0], f"shares {list(rows)} of {x.shape[0]} rows"
    chunks = list(x.contiguous().clone().split(list(rows)))
    sent_bytes = _reduce(chunks, group)
    return Moved(chunks[group.index].clone(), sent_bytes)


def all_gather(x: Tensor, group: Group, rows: Sequence[int] | None = None) -> Moved:
    """The group's tensors, one behind the other by rows, for all.

    x: [R_i, ..], one dtype and one width everywhere; rows: R of every process, by default as many as here.
    Sends Ψ (of the result) less the right neighbour's share: (N-1)/N·Ψ where shares are alike.
    """
    rows = rows if rows is not None else [x.shape[0]] * group.size
    assert len(rows) == group.size and rows[group.index] == x.shape[0], f"{x.shape[0]} rows, told to be one of {rows}"
    whole = x.new_empty((sum(rows), *x.shape[1:]))
    chunks = list(whole.split(list(rows)))
    chunks[group.index].copy_(x)
    sent_bytes = _gather(chunks, group)
    return Moved(whole, sent_bytes)


def all_to_all(
    x: Tensor, group: Group, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
) -> Moved:
    """Rows for each process, dealt out; what comes back is the rows from each, in the group's order.

    A pairwise exchange: in turn s each process sends straight to the one s places to its right and receives from the
    one s to its left, so in each turn all links are used in both directions and nothing passes through a third.

    x: [R, ..], the rows for process 0 first; sends: how many for each, by default as alike as can be; receives: how
    many come from each, by default as many as are sent there.
    Sends Ψ less what stays here: (N-1)/N·Ψ where shares are alike.
    """
    sends = sends if sends is not None else _dealt(x.shape[0], group.size)
    receives = receives if receives is not None else sends
    assert len(sends) == group.size and sum(sends) == x.shape[0], f"shares {list(sends)} of {x.shape[0]} rows"
    assert len(receives) == group.size and receives[group.index] == sends[group.index], "what stays here stays as it is"
    whole = x.new_empty((sum(receives), *x.shape[1:]))
    outgoing, incoming = x.contiguous().split(list(sends)), whole.split(list(receives))
    incoming[group.index].copy_(outgoing[group.index])
    sent_bytes = 0
    for turn in range(1, group.size):
        to, source = neighbours(group.index, group.size, turn)
        group.exchange([(outgoing[to], to)], [(incoming[source], source)])
        sent_bytes += outgoing[to].nbytes
    return Moved(whole, sent_bytes)


def neighbours(index: int, size: int, places: int = 1) -> tuple[int, int]:
    """Who stands so many places to the right of a process, and to its left."""
    return (index + places) % size, (index - places) % size


def _reduce(chunks: list[Tensor], group: Group) -> int:
    """The process's own chunk becomes its sum over the group; the others become sums of some. Returns bytes sent."""
    sent_bytes = 0
    for step in reduce_steps(group.index, group.size):
        arrived = torch.empty_like(chunks[step.receives])
        sent_bytes += _pass_on(chunks[step.sends], arrived, group)
        chunks[step.receives].add_(arrived)
    return sent_bytes


def _gather(chunks: list[Tensor], group: Group) -> int:
    """Every chunk becomes what the process of its number has in it. Returns bytes sent."""
    return sum(
        _pass_on(chunks[step.sends], chunks[step.receives], group) for step in gather_steps(group.index, group.size)
    )


def _pass_on(x: Tensor, into: Tensor, group: Group) -> int:
    right, left = neighbours(group.index, group.size)
    group.exchange([(x, right)], [(into, left)])
    return x.nbytes


def _dealt(rows: int, size: int) -> list[int]:
    return [rows // size + (index < rows % size) for index in range(size)]
