"""Columns asked of a model before training: their key, and how a run that was stopped meanwhile goes on."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.reference_stage import STAGE, PairSamples, place_stage, recipe_file, train
from builders.tiny_world import World

from danlu.core.errors import Stopped
from danlu.data import column_store
from danlu.models.loading import load as load_model
from danlu.models.saving import save
from danlu.parallel.ranks import Ranks
from danlu.recipe import load
from danlu.stages.builder import DecoderBuilder
from danlu.stages.protocols import StageData, StoredRows


def folders(world: World, folder: Path, rows: int = 16, **changes: Any) -> set[str]:
    """The names of the folders that the columns of a recipe are in; their numbers are not looked at."""
    cache = folder / "cache"
    before = {path.name for path in cache.glob("reference-*")}
    recipe = load(Path(recipe_file(world, folder, "run", reference={"kind": "cached"}, **changes))).recipe
    stage_data = STAGE.reader(recipe).read(io.StringIO())
    assert stage_data.stored is not None
    stored = replace(stage_data.stored, train=PairSamples(rows))
    builder = DecoderBuilder(recipe, STAGE)
    builder.with_columns(Ranks(), torch.device("cpu"), replace(stage_data, stored=stored), io.StringIO())
    return {path.name for path in cache.glob("reference-*")} - before


def test_the_key_is_what_the_values_follow_from(tiny_world: World, tmp_path: Path) -> None:
    assert len(folders(tiny_world, tmp_path)) == 2  # of the training rows, and of those held out
    unmoved = {"optimizer": {"kind": "sgd"}, "steps": 9, "batch": {"micro": 4}, "adapter": {"kind": "lora"}, "seed": 3}
    assert folders(tiny_world, tmp_path, **unmoved) == set()
    assert len(folders(tiny_world, tmp_path, rows=15)) == 1
    assert len(folders(tiny_world, tmp_path, precision="bf16")) == 2
    quantized = {"adapter": {"kind": "lora"}, "quantization": {"kind": "int8"}}
    assert len(folders(tiny_world, tmp_path, **quantized)) == 2
    pissa = {"adapter": {"kind": "pissa", "rank": 2}}
    assert len(folders(tiny_world, tmp_path, **pissa)) == 2
    assert len(folders(tiny_world, tmp_path, **pissa, seed=1)) == 2
    model = load_model(tiny_world.base)
    with torch.no_grad():
        model.layers["0"].mlp.up_proj.weight[7, 5] += 1e-3  # neither at the beginning of its tensor nor at the end
    save(model, tmp_path / "changed", tokenizer_from=tiny_world.tokenizer)
    assert len(folders(tiny_world, tmp_path, model={"path": str(tmp_path / "changed")})) == 2
    shutil.copytree(tiny_world.base, tmp_path / "copied")
    assert folders(tiny_world, tmp_path, model={"path": str(tmp_path / "copied")}) == set()


def reference_of(stage_data: StageData) -> list[np.ndarray]:
    assert isinstance(stage_data.stored, StoredRows)
    samples = stage_data.stored.train
    return [samples.sample(number).columns["reference"] for number in range(len(samples))]


def test_it_goes_on_with_the_next_block(tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_store, "MAX_BLOCK_TOKENS", 40)
    file = recipe_file(tiny_world, tmp_path, "run", reference={"kind": "cached"})
    whole = reference_of(place_stage(load(Path(file)).recipe)[1])
    answers = [np.count_nonzero(values) for values in whole]
    sample = PairSamples().sample(3)
    assert answers[3] == len(sample.tokens) - sample.branches[0].stop  # the mismatched answer's too
    shutil.rmtree(tmp_path / "cache")

    written, write = list[int](), column_store.ColumnStore.write

    def killed_after_two(self: Any, number: int, values: Any) -> None:
        if len(written) == 2:
            raise Stopped(15, "stopped")
        written.append(number)
        write(self, number, values)

    monkeypatch.setattr(column_store.ColumnStore, "write", killed_after_two)
    with pytest.raises(Stopped):
        train([file])
    assert len(list((tmp_path / "cache").glob("*/*.bin"))) == 2
    again = list[int]()

    def counted(self: Any, number: int, values: Any) -> None:
        again.append(number)
        write(self, number, values)

    monkeypatch.setattr(column_store.ColumnStore, "write", counted)
    resumed = reference_of(place_stage(load(Path(file)).recipe)[1])
    assert written == [0, 1] and again[:2] == [2, 3]
    assert all(np.array_equal(one, other) for one, other in zip(whole, resumed, strict=True))


def test_it_shows_its_progress(tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danlu.training.progress._ROWS_INTERVAL_S", 0.0)
    recipe = load(Path(recipe_file(tiny_world, tmp_path, "run", reference={"kind": "cached"}))).recipe
    builder, stream = DecoderBuilder(recipe, STAGE), io.StringIO()
    stage_data = STAGE.reader(recipe).read(io.StringIO())
    builder.with_columns(Ranks(), torch.device("cpu"), stage_data, stream)
    assert "reference: 16 of 19 rows" in stream.getvalue()


def test_what_the_values_follow_from_can_be_read(tiny_world: World, tmp_path: Path) -> None:
    folders(tiny_world, tmp_path)
    descriptions = [json.loads(file.read_text()) for file in (tmp_path / "cache").glob("*/columns.json")]
    assert {description["samples"] for description in descriptions} == {"16 pairs of seed 0", "3 pairs of seed 1"}
    for description in descriptions:
        assert description["precision"] == "fp32" and description["columns"] == {"reference": ["<f4", []]}
        assert [name for name, _ in description["weights"]] == ["model.safetensors"]
