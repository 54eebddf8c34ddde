"""Rows of judged answers as trees: the tokens of each path, the stem, the facts, on the disk and back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.tiny_world import World, write_rows

from danlu.data.answer_trees import render_answers
from danlu.data.preference_rows import answers_of, parse_answers
from danlu.data.prepare import DatasetSpec, PreparedData, prepare
from danlu.data.render import RenderedSample, RenderSettings, render_rows
from danlu.data.tokenizer import Tokenizer, load_tokenizer
from danlu.recipe.sections import Data
from danlu.types import Branch, RowType

ASK, TELL = {"role": "user", "content": "Who is there?"}, {"role": "assistant", "content": "A small fox."}
WORSE = {"role": "assistant", "content": "A small dog, I think."}
PAIR = {"prompt": [ASK], "chosen": [TELL], "rejected": [WORSE]}


@pytest.fixture(scope="module")
def tokenizer(tiny_world: World) -> Tokenizer:
    return load_tokenizer(str(tiny_world.tokenizer))


def tree_of(tokenizer: Tokenizer, value: dict[str, Any], row_type: RowType = "preference") -> RenderedSample:
    row = parse_answers(value, "auto", row_type, "rows.jsonl:1")
    (tree,) = render_answers([row], ["rows.jsonl:1"], tokenizer, RenderSettings())
    assert isinstance(tree, RenderedSample)
    return tree


def paths(tree: RenderedSample, column: str = "tokens") -> list[np.ndarray]:
    """The tokens from the root to the end of each branch, or their weights or reasons."""
    result: list[np.ndarray] = []
    for parent, start, stop in tree.branches:
        own = getattr(tree, column)[start:stop]
        result.append(np.concatenate([result[parent], own]) if parent >= 0 else own)
    return result


@pytest.mark.parametrize(
    "value",
    [PAIR, {"prompt": "Once upon a", "chosen": " time", "rejected": " day"}],
    ids=["messages", "strings"],
)
def test_a_path_has_the_tokens_of_its_text_as_a_whole(tokenizer: Tokenizer, value: dict[str, Any]) -> None:
    row = parse_answers(value, "auto", "preference", "row")
    whole = render_rows(answers_of(row), ["row", "row"], tokenizer, RenderSettings())
    tree = tree_of(tokenizer, value)
    stem, chosen, rejected = tree.branches
    assert (stem.parent, chosen.parent, rejected.parent) == (-1, 0, 0) and stem.stop > 1
    for column in ("tokens", "weights", "reasons"):
        for path, (expected,) in zip(paths(tree, column)[1:], whole, strict=True):  # type: ignore[misc]
            assert path.tolist() == getattr(expected, column).tolist()
    assert not tree.weights[: stem.stop].any() and tree.weights[stem.stop] == tree.weights[rejected.start] == 1
    assert [math.isnan(tree.facts["label"][0]), *tree.facts["label"][1:]] == [True, 1, 0]
    assert np.isnan(tree.facts["margin"]).all()
    assert tree_of(tokenizer, {**value, "margin": 0.5}).facts["margin"].tolist()[1:] == [0.5, 0.5]


def ready(world: World, file: Path, row_type: RowType, **data: Any) -> PreparedData:
    section = Data(train=[{"path": str(file)}], cache=str(file.parent / "cache"), workers=1, **data)  # type: ignore[list-item]
    return prepare(DatasetSpec(section, "preference", str(world.tokenizer), None, 0, row_type=row_type))


def test_trees_come_back_from_the_disk(tiny_world: World, tokenizer: Tokenizer, tmp_path: Path) -> None:
    margins = [{**PAIR, "margin": 0.25 * number} for number in range(3)]
    file = write_rows(tmp_path / "pairs.jsonl", margins)
    prepared = ready(tiny_world, file, "preference")
    assert prepared.train is not None
    for number, sample in enumerate(prepared.train):
        tree = tree_of(tokenizer, margins[number])
        assert sample.tokens.tolist() == tree.tokens.tolist() and sample.weights.tolist() == tree.weights.tolist()
        assert sample.branches == tree.branches and isinstance(sample.branches[0], Branch)
        for name, values in tree.facts.items():
            np.testing.assert_array_equal(sample.facts[name], values)
    changed = write_rows(tmp_path / "others.jsonl", [{**PAIR, "margin": 0.5}, *margins[1:]])
    again, other = ready(tiny_world, file, "preference"), ready(tiny_world, changed, "preference")
    assert again.train is not None and other.train is not None
    assert prepared.train.digest() == again.train.digest() != other.train.digest()
