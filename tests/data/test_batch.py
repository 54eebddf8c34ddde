from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from danlu.core.token_buckets import padding_to_bucket
from danlu.core.types import Batch, Pack, Sample
from danlu.data.batch import (
    EMPTY_PACK,
    _in_one_buffer,
    _of_one_buffer,
    _to_device,
    collate,
    pad_to_bucket,
)


def sample(tokens: list[int], weights: list[float], row: str = "rows.jsonl:1") -> Sample:
    return Sample(np.array(tokens, np.int32), np.array(weights, np.float32), row)


PACKS = [
    Pack((sample([5, 6, 7], [0, 1, 0.5], "a"), sample([8], [0], "b"))),
    Pack((sample([9, 10, 11, 12], [0, 0, 0, 2], "c"),)),
]


def slow_targets(packs: list[Pack]) -> list[tuple[int, int, float]]:
    """(token it is predicted from, target, weight), one sample at a time."""
    triples = []
    for pack in packs:
        for one in pack.samples:
            for i in range(1, len(one.tokens)):
                if one.weights[i] > 0:
                    triples.append((int(one.tokens[i - 1]), int(one.tokens[i]), float(one.weights[i])))
    return triples


def triples_of(batch: Batch) -> list[tuple[int, int, float]]:
    return list(
        zip(batch.tokens[batch.logits_indices].tolist(), batch.targets.tolist(), batch.weights.tolist(), strict=True)
    )


def test_batch_by_hand() -> None:
    batch = collate(PACKS)
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert batch.boundaries == (0, 3, 4, 8)
    assert batch.logits_indices.tolist() == [0, 1, 6]
    assert batch.targets.tolist() == [6, 7, 12]
    assert batch.weights.tolist() == [1, 0.5, 2]
    assert batch.weight == 3.5
    assert batch.rows == ("a", "b", "c")
    assert [t.dtype for t in (batch.tokens, batch.positions, batch.logits_indices, batch.targets)] == [torch.int64] * 4
    assert batch.weights.dtype == torch.float32


def test_tokens_before_every_document_by_hand() -> None:
    batch = collate(PACKS, virtual_token_ids=(90, 91))
    assert batch.tokens.tolist() == [90, 91, 5, 6, 7, 90, 91, 8, 90, 91, 9, 10, 11, 12]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert batch.boundaries == (0, 5, 8, 14)
    assert batch.logits_indices.tolist() == [2, 3, 12]
    plain = collate(PACKS)
    for same in ("targets", "weights"):
        assert torch.equal(getattr(batch, same), getattr(plain, same))
    assert (batch.weight, batch.rows) == (plain.weight, plain.rows)
    assert [t.dtype for t in (batch.tokens, batch.positions, batch.logits_indices, batch.targets)] == [torch.int64] * 4
    with pytest.raises(ValueError, match="rows.jsonl:7: the first token of a sample carries weight"):
        collate([Pack((sample([3, 4], [1, 1], "rows.jsonl:7"),))], virtual_token_ids=(90, 91))


def random_packs(seed: int) -> list[Pack]:
    generator = np.random.default_rng(seed)
    packs = []
    for _ in range(3):
        members = []
        for _ in range(int(generator.integers(1, 5))):
            length = int(generator.integers(1, 12))
            weights = generator.choice([0.0, 1.0, 0.25], length)
            weights[0] = 0
            members.append(sample(generator.integers(0, 1000, length).tolist(), weights.tolist()))
        packs.append(Pack(tuple(members)))
    return packs


@pytest.mark.parametrize("seed", range(10))
def test_targets_equal_the_obvious_version(seed: int) -> None:
    packs = random_packs(seed)
    assert triples_of(collate(packs)) == slow_targets(packs)


def test_the_check_sees_a_target_across_documents() -> None:
    """Negative control: one long document instead of three gives other pairs."""
    merged = [Pack((sample([5, 6, 7, 8, 9, 10, 11, 12], [0, 1, 0.5, 0, 1, 0, 0, 2]),))]
    assert triples_of(collate(merged)) != slow_targets(PACKS)


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl:7: the first token of a sample carries weight"):
        collate([Pack((sample([1, 2], [0, 1]), sample([3, 4], [1, 1], "rows.jsonl:7")))])


def test_negative_weights_and_empty_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x: a weight of -1\.0; weights count from 0 up"):
        collate([Pack((sample([1, 2], [0, -1], "x"),))])
    with pytest.raises(ValueError, match="at least one sample"):
        collate([])


def test_one_copy_keeps_every_array() -> None:
    """The path for other devices, on the meta device for dtypes and shapes."""
    ids = np.arange(6, dtype=np.int32).reshape(3, 2)  # of each token several, as a support or a teacher's top tokens
    arrays = [np.arange(5), np.arange(3, dtype=np.float32), np.arange(0), ids, ids[:0], ids.T, np.arange(2.0)]
    moved = _to_device(arrays, torch.device("meta"))
    assert [tuple(t.shape) for t in moved] == [array.shape for array in arrays]
    int64, float32, int32 = torch.int64, torch.float32, torch.int32
    assert [t.dtype for t in moved] == [int64, float32, int64, int32, int32, int32, torch.float64]
    there = _of_one_buffer(_in_one_buffer(arrays, pinned=False), arrays)
    assert all(np.array_equal(tensor.numpy(), array) for tensor, array in zip(there, arrays, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_on_the_gpu_equals_the_one_on_the_cpu(seed: int) -> None:
    packs = random_packs(seed)
    here, there = collate(packs), collate(packs, "cuda")
    for name in ("tokens", "positions", "logits_indices", "targets", "weights"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu())


def test_few_sizes_for_many_lengths() -> None:
    sizes = [count + padding_to_bucket(count) for count in range(5000)]
    assert all(0 <= size - count <= count / 32 for count, size in enumerate(sizes))
    assert len({size for size in sizes if 2048 < size <= 4096}) == 32
    assert sizes[:64] == list(range(64))  # where a step is cheap anyway, nothing is added


def test_filling_up_adds_a_document_and_targets_of_no_weight() -> None:
    batch = collate([Pack((sample([*range(199)], [0.0] + [1.0] * 198),))])
    filled = pad_to_bucket(batch)
    assert filled.boundaries == (0, 199, 200) and len(filled.tokens) == len(filled.positions) == 200
    assert len(filled.logits_indices) == len(filled.targets) == len(filled.weights) == 200
    for name in ("tokens", "positions", "logits_indices", "targets", "weights"):
        column, before = getattr(filled, name), getattr(batch, name)
        assert torch.equal(column[: len(before)], before)
        assert not column[len(before) :].any()
    assert (filled.weight, filled.rows) == (batch.weight, batch.rows)
    whole = collate([Pack((sample([*range(128)], [0.0] + [1.0] * 127),))])
    assert pad_to_bucket(whole).boundaries == whole.boundaries


SOURCES = ("a.jsonl", "b.jsonl", "c.jsonl")


def sourced(tokens: list[int], weights: list[float], source: str) -> Sample:
    return replace(sample(tokens, weights), source=source)


def test_each_target_knows_its_source() -> None:
    packs = [
        Pack((sourced([1, 2, 3], [0, 1, 0.5], "b.jsonl"), sourced([4, 5], [0, 0], "a.jsonl"))),
        Pack((sourced([6, 7], [0, 2], "a.jsonl"), sourced([8, 9], [0, 4], "elsewhere.jsonl"))),
    ]
    for virtual in ((), (90, 91)):
        batch = collate(packs, virtual_token_ids=virtual, source_names=SOURCES)
        assert batch.target_sources is not None
        assert batch.target_sources.names == SOURCES
        assert batch.targets.tolist() == [2, 3, 7, 9]
        assert batch.target_sources.indices.tolist() == [1, 1, 0, 3]  # 3: of none of them, and counted with none
        assert batch.target_sources.weights == (2.0, 1.5, 0.0)
    assert collate(packs).target_sources is None


def test_a_batch_without_targets_reports_every_source() -> None:
    sources = collate([EMPTY_PACK], source_names=SOURCES).target_sources
    assert sources is not None
    assert (sources.indices.tolist(), sources.weights) == ([], (0.0, 0.0, 0.0))
