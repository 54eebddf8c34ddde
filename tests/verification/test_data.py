"""Packs of the recipe's own rows where they are at hand, and made ones, said so, where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.tiny_world import tiny_world

from danlu.core.errors import CheckpointError
from danlu.recipe import Recipe, load
from danlu.verification.data import ItemList, fold_tokens, proxy_data, synthetic_packs


def recipe(folder: Path, **changes: Any) -> Recipe:
    return load(tiny_world().recipe(folder / "run", folder / "recipe.yaml", **changes)).recipe


def tokens(packs: list[Any]) -> list[np.ndarray]:
    return [sample.tokens for pack in packs for sample in pack.samples]


@pytest.mark.usefixtures("tokenising_here")
def test_own_rows_come_first(tmp_path: Path) -> None:
    found = proxy_data(recipe(tmp_path), 5)
    assert (found.source, found.vocab_size, len(found.packs)) == ("the recipe's own data", 400, 5)
    assert all("chat.jsonl" in sample.row for pack in found.packs for sample in pack.samples)
    assert max(pack.tokens for pack in found.packs) <= 64


def test_rows_that_would_have_to_be_fetched_are_made_up(tmp_path: Path) -> None:
    given = recipe(tmp_path)
    source = given.data.train[0].model_copy(update={"path": "someone/rows"})
    given = given.model_copy(update={"data": given.data.model_copy(update={"train": [source]})})
    found = proxy_data(given, 3)
    assert (
        found.vocab_size is None
        and "synthetic data, for rows of someone/rows" in found.source
        and len(found.packs) == 3
    )


@pytest.mark.usefixtures("tokenising_here")
def test_rows_that_cannot_be_used_are_made_up_and_it_is_told(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{nothing\n")
    found = proxy_data(recipe(tmp_path, data={"train": str(bad)}), 3)
    assert found.vocab_size is None and "synthetic data" in found.source and "bad.jsonl" in found.source


def test_made_packs_are_a_function_of_the_seed(tmp_path: Path) -> None:
    given = recipe(tmp_path)
    one, again = synthetic_packs(given, 4), synthetic_packs(given, 6)[:4]
    other = synthetic_packs(given.model_copy(update={"seed": 1}), 4)
    assert all(np.array_equal(a, b) for a, b in zip(tokens(one), tokens(again), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(tokens(one), tokens(other), strict=False))


def test_made_packs_train_other_numbers_of_tokens(tmp_path: Path) -> None:
    weights = [sum(float(one.weights.sum()) for one in pack.samples) for pack in synthetic_packs(recipe(tmp_path), 8)]
    assert min(weights) > 0 and len(set(weights)) > 4


def test_without_packing_a_pack_is_one_row(tmp_path: Path) -> None:
    packs = synthetic_packs(recipe(tmp_path, data={"packing": "none"}), 6)
    assert {len(pack.samples) for pack in packs} == {1}


def test_mapped_tokens_are_words_of_the_small_vocabulary(tmp_path: Path) -> None:
    packs = synthetic_packs(recipe(tmp_path), 4)
    assert max(int(one.max()) for one in tokens(packs)) >= 50
    assert max(int(one.max()) for one in tokens(fold_tokens(packs, 50))) < 50


def test_a_list_knows_its_own_checkpoint(tmp_path: Path) -> None:
    packs = synthetic_packs(recipe(tmp_path), 3)
    listed = ItemList(packs)
    assert listed.at(4) is packs[1]
    listed.restore(listed.state(2))
    with pytest.raises(CheckpointError, match="over 3 items"):
        ItemList(packs[:2]).restore(listed.state(2))
