"""The assignment of a step's items to processes and micro-batches: pure functions, computed alike on every process.

Every process makes as many micro-batches as any other, for each has the same collectives; the last ones may be empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from danlu.parallel.parallel_context import ParallelContext

T = TypeVar("T")


def shard_in_order(items: Sequence[T], parallel: ParallelContext, micro: int) -> list[range]:
    """The numbers of the items in each micro-batch of this process: a contiguous share, `micro` in each micro-batch."""
    local = parallel.local_range(items)
    count = parallel.num_micro_batches(len(items), micro)
    return [local[start : start + micro] for start in range(0, count * micro, micro)]


def shard_by_tokens(
    tokens: Sequence[int], data_rank: int, data_ranks: int, capacity: int, *, least: int = 1
) -> list[list[int]]:
    """Returns the numbers of the items in each micro-batch of one data rank, for items of very different lengths.

    There are as few micro-batches as hold at most `capacity` tokens each (or one item, if it is longer), filled longest
    item first, each into the one with the fewest tokens (Graham's LPT rule). Micro-batch k of all ranks are of nearly
    the same length, for ranks that gather parameters wait for each other in each of them.

    Args:
        tokens: the tokens of each item of the step, on all ranks.
        capacity: tokens in a micro-batch.
        least: micro-batches of each rank, even where fewer would hold the items.
    """
    longest_first = sorted(range(len(tokens)), key=lambda number: (-tokens[number], number))
    rounds = max(least, -(-sum(tokens) // (capacity * data_ranks)))
    while (bins := _fill(longest_first, tokens, rounds * data_ranks, capacity)) is None:
        rounds += 1
    # Stable, so that bins of one load stay in their order.
    by_load = sorted(bins, key=lambda numbers: -sum(tokens[number] for number in numbers))
    return [sorted(by_load[round_ * data_ranks + data_rank]) for round_ in range(rounds)]


def _fill(longest_first: Sequence[int], tokens: Sequence[int], count: int, capacity: int) -> list[list[int]] | None:
    """The items in `count` bins, each put into the lightest (of equal ones the first); None where they do not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    lightest = [(0, number) for number in range(count)]  # a heap of (tokens, bin)
    for item in longest_first:
        load, number = lightest[0]
        if bins[number] and load + tokens[item] > capacity:
            return None
        bins[number].append(item)
        heapq.heapreplace(lightest, (load + tokens[item], number))
    return bins
