"""Items of very different lengths, dealt to ranks by tokens."""

from __future__ import annotations

import time

import numpy as np
import pytest

from danlu.parallel.batch_sharding import shard_by_tokens

CAPACITY = 100


def lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, longest + 1, count).tolist()


def slowly(tokens: list[int], ranks: int, capacity: int) -> list[list[int]]:
    """All bins by falling load: each item, longest first, into the lightest; one round more until all fit."""
    rounds = max(1, -(-sum(tokens) // (capacity * ranks)))
    while True:
        bins: list[list[int]] = [[] for _ in range(rounds * ranks)]

        def load(numbers: list[int]) -> int:
            return sum(tokens[number] for number in numbers)

        for item in sorted(range(len(tokens)), key=lambda item: -tokens[item]):
            min(bins, key=load).append(item)
        if all(load(numbers) <= capacity or len(numbers) == 1 for numbers in bins):
            return [sorted(numbers) for numbers in sorted(bins, key=load, reverse=True)]
        rounds += 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "tokens",
    [
        lengths(50, 40),
        lengths(50, 100, seed=1),
        lengths(7, 250),  # some longer than a micro-batch
        [100] * 5,
        [30, 30, 30, 30, 30, 51],
        [1],
        [],
    ],
)
def test_every_item_once_in_as_many_micro_batches_on_each_rank(tokens: list[int], ranks: int) -> None:
    dealt = [shard_by_tokens(tokens, rank, ranks, CAPACITY) for rank in range(ranks)]
    assert len({len(micro_batches) for micro_batches in dealt}) == 1
    everything = [micro_batch for micro_batches in dealt for micro_batch in micro_batches]
    assert sorted(item for micro_batch in everything for item in micro_batch) == list(range(len(tokens)))
    for micro_batch in everything:
        assert sum(tokens[item] for item in micro_batch) <= CAPACITY or len(micro_batch) == 1
        assert micro_batch == sorted(micro_batch)
    rounds = len(dealt[0])
    assert [dealt[rank][number] for number in range(rounds) for rank in range(ranks)] == slowly(tokens, ranks, CAPACITY)


def test_fewer_items_than_ranks_leave_micro_batches_empty() -> None:
    assert [shard_by_tokens([5, 9], rank, 4, CAPACITY) for rank in range(4)] == [[[1]], [[0]], [[]], [[]]]


def test_there_can_be_more_micro_batches_than_it_takes() -> None:
    tokens = [40] * 9 + [10] * 16
    assert len(shard_by_tokens(tokens, 0, 2, 1000)) == 1
    dealt = [shard_by_tokens(tokens, rank, 2, 1000, least=4) for rank in range(2)]
    assert sorted(item for micro_batches in dealt for numbers in micro_batches for item in numbers) == [*range(25)]
    assert [len(micro_batches) for micro_batches in dealt] == [4, 4]
    assert len(shard_by_tokens(tokens, 0, 2, 40, least=4)) > 4  # which their capacity asks for


def test_micro_batches_that_ranks_make_together_are_alike() -> None:
    tokens = [40] * 9 + [10] * 16
    dealt = [shard_by_tokens(tokens, rank, 4, CAPACITY) for rank in range(4)]
    for together in zip(*dealt, strict=True):
        loads = [sum(tokens[item] for item in micro_batch) for micro_batch in together]
        assert max(loads) - min(loads) <= 40
    assert dealt == [shard_by_tokens(tokens, rank, 4, CAPACITY) for rank in range(4)]  # the same on every process


def test_ten_thousand_items_take_no_time() -> None:
    tokens = lengths(10_000, 2000)
    start = time.process_time()
    shard_by_tokens(tokens, 0, 8, 4096)
    assert time.process_time() - start < 1.0
