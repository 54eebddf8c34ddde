"""Columns of samples on disk: what was written comes back by number, and what is damaged or missing is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.logged import logged

from danlu.core.errors import ResourceError
from danlu.data import column_store
from danlu.data.column_store import ColumnStore, ColumnType, SamplesWithColumns
from danlu.data.samples import SampleBlock

LENGTHS = np.array([3, 5, 1, 9, 2, 4], np.int32)
TYPES = {"reference": ColumnType("<f4"), "ids": ColumnType("<i4", (2,))}


def store_of(folder: Path, **key: Any) -> ColumnStore:
    return ColumnStore(folder, "reference", LENGTHS, TYPES, {"weights": "a", **key})


def values_of(store: ColumnStore, number: int) -> dict[str, np.ndarray]:
    samples = store.blocks[number]
    tokens = np.concatenate([100 * sample + np.arange(LENGTHS[sample]) for sample in samples])
    return {"reference": tokens.astype(np.float32), "ids": np.stack([tokens, -tokens], 1).astype(np.int32)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_store, "MAX_BLOCK_TOKENS", 8)


def test_columns_come_back_by_the_number_of_the_sample(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    assert [list(block) for block in store.blocks] == [[0, 1], [2], [3], [4, 5]]  # 8 tokens, or one longer sample
    assert store.missing() == [0, 1, 2, 3]
    for number in (2, 0, 3, 1):
        store.write(number, values_of(store, number))
    again = store_of(tmp_path)
    assert again.missing() == []
    for sample in (5, 0, 3, 1, 2, 4):
        columns = again.columns(sample)
        want = 100 * sample + np.arange(LENGTHS[sample])
        assert np.array_equal(columns["reference"], want) and columns["reference"].dtype == np.float32
        assert np.array_equal(columns["ids"], np.stack([want, -want], 1)) and columns["ids"].dtype == np.int32


def test_blocks_that_are_damaged_truncated_or_missing_are_told(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    for number in range(4):
        store.write(number, values_of(store, number))
    files = sorted(store.folder.glob("*.bin"))
    content = bytearray(files[0].read_bytes())
    content[-1] ^= 1
    files[0].write_bytes(content)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[3].unlink()
    with logged() as text:
        assert store_of(tmp_path).missing() == [0, 1, 3]
    assert "its content is not what was written" in text.getvalue() and "bytes, expected" in text.getvalue()


def test_another_key_is_another_folder(tmp_path: Path) -> None:
    one = store_of(tmp_path)
    assert store_of(tmp_path).folder == one.folder
    others = [store_of(tmp_path, weights="b"), store_of(tmp_path, precision="bf16")]
    others.append(ColumnStore(tmp_path, "reference", LENGTHS, {"reference": ColumnType("<f8")}, {"weights": "a"}))
    assert len({store.folder for store in (one, *others)}) == 4


def test_samples_get_the_columns_of_their_numbers(tmp_path: Path) -> None:
    tokens = [np.full(length, number, np.int32) for number, length in enumerate(LENGTHS)]
    ones = [np.ones(length, np.float32) for length in LENGTHS]
    reasons = [np.zeros(length, np.uint8) for length in LENGTHS]
    block = SampleBlock.of(tokens, ones, reasons, range(6), [f"row {number}" for number in range(6)])
    store = store_of(tmp_path)
    for number in range(4):
        store.write(number, values_of(store, number))
    samples = SamplesWithColumns(block, store)
    assert len(samples) == 6 and samples.digest() == block.digest()
    for number in (4, 1):
        sample = samples.sample(number)
        assert sample.columns["reference"][0] == 100 * number == 100 * sample.tokens[0]
        assert sample.columns["ids"].shape == (LENGTHS[number], 2)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = store_of(tmp_path / "file")
    with pytest.raises(ResourceError, match=r"cannot be written: .* set data\.cache to another folder"):
        store.write(0, values_of(store, 0))
