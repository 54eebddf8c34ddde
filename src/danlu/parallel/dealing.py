"""Which items of a step each process takes, in which micro-batches: pure functions, computed alike on every process.

Every process makes as many micro-batches as any other, for each has the same collectives; the last ones may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from danlu.parallel.step_parallel import StepParallel

T = TypeVar("T")


def deal_in_order(items: Sequence[T], parallel: StepParallel, micro: int) -> list[range]:
    """The numbers of the items in each micro-batch of this process: a contiguous share, `micro` in each micro-batch."""
    local = parallel.local_range(items)
    count = parallel.num_micro_batches(len(items), micro)
    return [local[start : start + micro] for start in range(0, count * micro, micro)]


def deal_by_tokens(tokens: Sequence[int], data_rank: int, data_ranks: int, capacity: int) -> list[list[int]]:
    """The numbers of the items in each micro-batch of one data rank, of items that are of very different lengths.

    As few micro-batches as hold at most `capacity` tokens each (or one item, if it is longer), filled longest item
    first, each into the one with the fewest tokens (Graham's LPT rule). Micro-batch k of all ranks are of nearly the
    same length, for ranks that gather parameters wait for each other in each of them.

    Args:
        tokens: of each item of the step, on all ranks.
        capacity: tokens in a micro-batch.
    """
    rounds = max(1, -(-sum(tokens) // (capacity * data_ranks)))
    longest_first = sorted(range(len(tokens)), key=lambda number: (-tokens[number], number))
    while True:
        bins: list[list[int]] = [[] for _ in range(rounds * data_ranks)]
        loads = [0] * len(bins)
        for number in longest_first:
            lightest = loads.index(min(loads))
            bins[lightest].append(number)
            loads[lightest] += tokens[number]
        if all(load <= capacity or len(members) == 1 for load, members in zip(loads, bins, strict=True)):
            break
        rounds += 1
    by_load = sorted(range(len(bins)), key=lambda number: (-loads[number], number))
    return [sorted(bins[by_load[round_ * data_ranks + data_rank]]) for round_ in range(rounds)]
