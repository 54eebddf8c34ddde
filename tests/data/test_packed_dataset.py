from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest

from danlu.core.errors import CheckpointError, DataError
from danlu.core.types import Pack, Sample
from danlu.data.packed_dataset import PackedDataset, cut
from danlu.data.samples import SampleBlock, Selection
from danlu.recipe.sections import Packing

KINDS: list[Literal["best-fit", "concatenate", "none"]] = ["best-fit", "concatenate", "none"]


def samples(n: int = 200, seed: int = 0, longest: int = 60) -> Selection:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest, n)
    starts = np.cumsum([0, *lengths])
    tokens = [np.arange(a, b, dtype=np.int32) for a, b in pairwise(starts)]  # every token differs
    weights = [np.concatenate([[0], np.ones(length - 1)]).astype(np.float32) for length in lengths]
    reasons = [np.zeros(length, np.uint8) for length in lengths]
    block = SampleBlock.of(tokens, weights, reasons, list(range(n)), [f"row {i}" for i in range(n)])
    return Selection.all_of([block], ["rows.jsonl"])


def packs_of(kind: Any = "best-fit", seed: int = 3, **settings: Any) -> PackedDataset:
    return PackedDataset(samples(**settings), Packing(kind=kind, window=50), 64, seed)


def tokens_of(pack: Pack) -> list[int]:
    return [int(token) for sample in pack.samples for token in sample.tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_holds_every_token_once(kind: str) -> None:
    packs = packs_of(kind)
    total = int(samples().lengths.sum())
    assert packs.tokens_per_epoch == total
    for epoch in range(3):
        numbers = range(epoch * packs.packs_per_epoch, (epoch + 1) * packs.packs_per_epoch)
        seen = Counter(token for number in numbers for token in tokens_of(packs.at(number)))
        assert seen == Counter(range(total))


@pytest.mark.parametrize("kind", KINDS)
def test_packs_hold_no_more_than_their_length_and_say_how_full_they_are(kind: str) -> None:
    packs = packs_of(kind)
    sizes = [packs.at(number).tokens for number in range(packs.packs_per_epoch)]
    assert max(sizes) <= 64
    assert packs.efficiency == pytest.approx(sum(sizes) / (64 * len(sizes)))


def test_a_pack_is_a_function_of_its_number() -> None:
    """Asked for in any order, by any number of fresh objects: the ground of exact resumption."""
    first, second = packs_of(), packs_of()
    forward = [tokens_of(first.at(number)) for number in range(100)]
    backward = [tokens_of(second.at(number)) for number in reversed(range(100))]
    assert forward == backward[::-1]


def test_epochs_and_seeds_come_in_different_orders() -> None:
    packs, other = packs_of(), packs_of(seed=4)
    n = packs.packs_per_epoch
    epochs = [[tokens_of(packs.at(e * n + i)) for i in range(n)] for e in range(2)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != [tokens_of(other.at(i)) for i in range(n)]


def test_without_shuffling_packs_follow_the_rows() -> None:
    packs = PackedDataset(samples(), Packing(kind="none"), 64, 0, shuffle=False)
    assert [packs.at(number).samples[0].row for number in (0, 7, 207)] == ["row 0", "row 7", "row 7"]


def test_a_cut_piece_starts_without_weight() -> None:
    packs = packs_of("concatenate", longest=200)
    pieces = [sample for number in range(packs.packs_per_epoch) for sample in packs.at(number).samples]
    assert all(piece.weights[0] == 0 and (piece.weights[1:] == 1).all() for piece in pieces)
    whole = Sample(np.arange(5, dtype=np.int32), np.array([0, 1, 1, 1, 1], np.float32), "x", "rows.jsonl")
    assert cut(whole, 2, 5).weights.tolist() == [0, 1, 1] and cut(whole, 2, 5).source == "rows.jsonl"
    assert whole.weights.tolist() == [0, 1, 1, 1, 1], "the sample itself was changed"


def test_state_knows_the_data_again() -> None:
    packs_of().restore(packs_of().state())
    for other in (packs_of(seed=4), packs_of(n=199), packs_of(longest=61)):
        with pytest.raises(CheckpointError, match="the training data is not what the checkpoint was made with"):
            other.restore(packs_of().state())


def test_no_samples_is_an_error() -> None:
    with pytest.raises(DataError, match="there are no samples to pack"):
        PackedDataset(Selection.all_of([SampleBlock.join([])], ["empty.jsonl"]), Packing(), 64, 0)
