"""Rows that compare or judge answers as the items of a run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.tiny_world import InThisProcess, World, write_rows

from danlu.core.errors import CheckpointError, RecipeError
from danlu.core.types import Pack
from danlu.data.batch import collate
from danlu.recipe import Recipe, load
from danlu.stages.protocols import StageData
from danlu.stages.tree_reader import TreeReader

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"How many are {number} and {number}?"}],
        "chosen": f"{2 * number} they are.",
        "rejected": f"{2 * number + 1}, I think.",
    }
    for number in range(8)
]
JUDGED = [
    {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": row["chosen"]}], "label": number % 3 > 0}
    for number, row in enumerate(ROWS)
]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danlu.data.prepare.WorkerPool", InThisProcess)


def recipe(
    world: World,
    folder: Path,
    rows: list[dict[str, Any]],
    stage: str = "dpo",
    *,
    objective: Sequence[str] | None = None,
    **data: Any,
) -> Recipe:
    file = write_rows(folder / "rows.jsonl", rows)
    changes: dict[str, Any] = {"stage": stage, "batch": None, "reference": "frozen"}
    changes |= {} if objective is None else {"objective": list(objective)}
    return load(world.recipe(folder / "run", data={"train": str(file), **data}, **changes)).recipe


def stage_data(chosen: Recipe) -> StageData:
    return TreeReader(chosen).read(io.StringIO())


def test_a_row_is_a_pack_and_rows_are_held_out(tiny_world: World, tmp_path: Path) -> None:
    chosen = recipe(tiny_world, tmp_path, ROWS, eval=2)
    read = stage_data(chosen)
    assert chosen.data.packing.kind == "none" and read.per_epoch == 6 and read.held_out is not None
    packs = [read.source.at(number) for number in range(6)]
    rows = sorted(row for pack in [*packs, *read.held_out] for row in pack.rows)
    assert rows == [f"rows.jsonl:{number}" for number in range(1, 9)]
    for pack in packs:
        assert isinstance(pack, Pack) and [len(sample.branches) for sample in pack.samples] == [3]
    batch = collate(packs[:4])  # type: ignore[arg-type]
    assert len(batch.trees) == 12 and batch.facts["label"].nan_to_num(-1).tolist() == [-1, 1, 0] * 4
    assert isinstance(read.empty, Pack) and read.empty.samples[0].facts.keys() == {"label", "margin"}
    read.source.restore(read.source.state(3))
    other = stage_data(recipe(tiny_world, tmp_path, ROWS[:-1], eval=2))
    with pytest.raises(CheckpointError, match="not what the checkpoint was made with"):
        other.source.restore(read.source.state(3))


def test_each_answer_may_have_a_copy_of_its_prompt(tiny_world: World, tmp_path: Path) -> None:
    shared = stage_data(recipe(tiny_world, tmp_path, ROWS))
    apart = stage_data(recipe(tiny_world, tmp_path, ROWS, share_stem=False))
    assert "data.share_stem: false: each answer has a copy of its prompt" in apart.lines
    for number in range(8):
        (one,), (other,) = shared.source.at(number).samples, apart.source.at(number).samples  # type: ignore[union-attr]
        stem = one.branches[0].stop
        assert [branch.parent for branch in other.branches] == [-1, -1]
        first, second = (other.tokens[branch.start : branch.stop] for branch in other.branches)
        np.testing.assert_array_equal(first, one.tokens[: one.branches[1].stop])
        np.testing.assert_array_equal(second[stem:], one.tokens[one.branches[2].start :])


def test_margins_that_no_term_asks_for_are_told(tiny_world: World, tmp_path: Path) -> None:
    with_margins = [{**row, "margin": 0.5} for row in ROWS]

    def told(rows: list[dict[str, Any]], *kinds: str) -> list[str]:
        chosen = recipe(tiny_world, tmp_path, rows, "preference", objective=kinds)
        return [line for line in stage_data(chosen).lines if "margin" in line]

    (line,) = told(with_margins, "ipo", "sft")
    assert line == (
        "data: not read: 'margin' in 8 rows, which objective ipo and sft does not ask for. sigmoid, robust, hinge, "
        "sigmoid-norm, simpo, cpo do"
    )
    assert not told(with_margins, "ipo", "sigmoid") and not told(ROWS, "ipo")  # control


def test_judged_answers_get_the_answer_of_another_row(tiny_world: World, tmp_path: Path) -> None:
    read = stage_data(recipe(tiny_world, tmp_path, JUDGED, "kto"))
    facts = read.source.at(0).samples[0].facts  # type: ignore[union-attr]
    assert facts["mismatched"].tolist() == [0, 0, 1] and read.stored is not None
    assert len(read.stored.train.sample(0).branches) == 3
    assert TreeReader(recipe(tiny_world, tmp_path, JUDGED, "kto")).amount(4) == "4 rows"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"streaming": True}, "data.streaming: stage preference reads its rows before it begins"),
        ({"overlong": "split"}, "data.overlong: an answer that is compared or judged cannot be split"),
        ({"train_on": "all"}, "data.train_on: stage preference trains the answers of its rows"),
        ({"packing": "best-fit"}, "data.packing.kind: a step of stage preference counts rows"),
    ],
)
def test_what_these_stages_do_not_read(tiny_world: World, tmp_path: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(tiny_world, tmp_path, ROWS, **data)
