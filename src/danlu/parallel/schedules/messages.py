"""Messages, sums of gradients and updates, put between the computations of all ranks.

A message stands in the lists of both ranks at the time at which its tensor is ready, were every forward, input and
weight gradient one unit long and messages free. Messages are thereby in one order that all ranks share, so the lists
are free of deadlock even where a send waits until its receive is reached: the earliest message that has not been
exchanged is the next one at both of its ends, and no computation before it waits for a later one. The same order holds
within each pair of ranks and each direction, so that messages need no tags.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from danlu.parallel.schedules.action import Action
from danlu.parallel.schedules.dependencies import Result, needs, result

UNITS = {"forward": 1, "backward": 2, "input": 1, "weight": 1}
"""Time of a computation: the papers' F = B = W."""

UNFINISHED_SENDS = 4
"""Messages of a rank that may be on their way at once; their tensors are kept until they have arrived."""

# Of what stands at the same time in a rank's list: others wait for messages, nobody for what this rank computes next.
_MESSAGE, _REDUCE, _UPDATE, _COMPUTE = range(4)

_Place = tuple[int, int, tuple[object, ...]]  # (time, what comes first then, a key that all ranks sort by)


def with_messages(
    orders: Sequence[Sequence[Action]], chunks_of: Sequence[Sequence[int]], *, update_each: bool
) -> tuple[tuple[Action, ...], ...]:
    """The whole list of each rank.

    Args:
        orders: computations of each rank, in order.
        chunks_of: numbers of the chunks of each rank.
        update_each: gradients are summed and weights updated after each micro-batch, not at the end of the list.
    """
    rank_of = {chunk: rank for rank, chunks in enumerate(chunks_of) for chunk in chunks}
    lists: list[list[tuple[_Place, Action]]] = [[] for _ in orders]
    starts = start_times(orders, len(rank_of))
    for rank, order in enumerate(orders):
        last = {action.chunk: number for number, action in enumerate(order) if action.kind in ("backward", "weight")}
        for number, action in enumerate(order):
            start = starts[rank][number]
            end = start + UNITS[action.kind]
            lists[rank].append(((start, _COMPUTE, ()), action))
            for peer, key, send, receive in _messages(action, rank, rank_of):
                lists[rank].append(((end, _MESSAGE, key), send))
                lists[peer].append(((end, _MESSAGE, key), receive))
            if action.kind in ("backward", "weight") and (update_each or last[action.chunk] == number):
                micro = action.micro if update_each else None
                lists[rank].append(((end, _REDUCE, (action.chunk,)), Action("reduce", action.chunk, micro)))
                if update_each:
                    lists[rank].append(((end, _UPDATE, ()), Action("update", micro=micro)))
    ordered = [[action for _, action in sorted(entries, key=lambda entry: entry[0])] for entries in lists]
    end_of_step = [] if update_each else [Action("update")]
    return tuple((*actions, *end_of_step) for actions in ordered)


def _messages(
    action: Action, rank: int, rank_of: dict[int, int]
) -> Iterator[tuple[int, tuple[object, ...], Action, Action]]:
    """Yields (peer, key, send, receive) where the result of a computation is needed by a chunk on another rank."""
    assert action.chunk is not None
    if action.kind == "weight":
        return
    chunk, micro = action.chunk, action.micro
    what, target = ("activation", chunk + 1) if action.kind == "forward" else ("gradient", chunk - 1)
    if target in rank_of and (peer := rank_of[target]) != rank:
        send = Action("send", chunk, micro, peer, what)  # type: ignore[arg-type]
        receive = Action("receive", target, micro, rank, what)  # type: ignore[arg-type]
        yield peer, (what, chunk, micro), send, receive


def start_times(orders: Sequence[Sequence[Action]], num_chunks: int) -> list[list[int]]:
    """Returns when each computation begins, in `UNITS`, if every rank goes through its order as early as it can.

    Raises AssertionError where no order is possible: that is a mistake in a schedule, never in a recipe.
    """
    starts: list[list[int]] = [[] for _ in orders]
    ends: dict[Result, int] = {}
    free = [0] * len(orders)
    advanced = True
    while advanced:
        advanced = False
        for rank, order in enumerate(orders):
            for action in islice(order, len(starts[rank]), None):
                needed = [ends.get(need) for need in needs(action, num_chunks)]
                if None in needed:
                    break
                start = max([free[rank], *(end for end in needed if end is not None)])
                free[rank] = ends[result(action)] = start + UNITS[action.kind]
                starts[rank].append(start)
                advanced = True
    stuck = [f"rank {rank}: {order[len(done)]}" for rank, order, done in _unfinished(orders, starts)]
    assert not stuck, "computations wait for each other: " + "; ".join(stuck)
    return starts


def _unfinished(
    orders: Sequence[Sequence[Action]], starts: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Sequence[Action], Sequence[int]]]:
    for rank, (order, done) in enumerate(zip(orders, starts, strict=True)):
        if len(done) < len(order):
            yield rank, order, done
