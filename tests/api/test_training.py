"""`danlu.train` from a program: the bits of the command line, in a notebook's surroundings, once and again."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from builders.tiny_world import World, danlu, differences

import danlu as package
from danlu.api.training import Run, override_texts, train
from danlu.core.errors import CheckpointError, RecipeError
from danlu.core.stop_signals import STOP_SIGNALS
from danlu.training import loop

IMPORT = """
import json, sys
import danlu
heavy = ("torch", "pydantic", "typer", "numpy", "yaml")
print(json.dumps([name for name in heavy if name in sys.modules]))
print(json.dumps([name for name in danlu.__all__ if name not in dir(danlu)]))
danlu.train
print(json.dumps("torch" in sys.modules))
"""


def test_the_package_imports_its_functions_when_they_are_used() -> None:
    command = [sys.executable, "-c", IMPORT]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert [json.loads(line) for line in printed.splitlines()] == [[], [], False]
    assert package.train is train and package.Run is Run and package.load.__module__ == "danlu.api.model"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        package.trian  # noqa: B018


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        ((), []),
        (["steps=3", "seed=1"], ["steps=3", "seed=1"]),
        ({"steps": 3, "optimizer.learning_rate": 1e-05}, ["steps=3", "optimizer.learning_rate=1e-05"]),
        ({"model": Path("a b"), "adapter": None}, ['model="a b"', "adapter=null"]),
        ({"data.train": ("a", "é"), "compile": True}, ['data.train=["a", "é"]', "compile=true"]),
        ({"batch": {"sequences": np.int64(4)}, "ema": np.float32(0.5)}, ['batch={"sequences": 4}', "ema=0.5"]),
    ],
)
def test_overrides_are_written_as_on_the_command_line(overrides: Any, texts: list[str]) -> None:
    assert override_texts(overrides) == texts


def test_written_values_are_read_as_they_were(tmp_path: Path) -> None:
    from danlu.recipe import load

    file = tmp_path / "recipe.yaml"
    file.write_text("stage: sft\nmodel: owner/folder\ndata: a.json\noutput: run\n")
    (tmp_path / "a.json").write_text("")
    given = {"optimizer.learning_rate": 1e-05, "output": "a: b # c", "data.train": str(tmp_path / "a.json")}
    recipe = load(file, override_texts({**given, "batch": {"sequences": 3}})).recipe
    assert (recipe.optimizer.learning_rate, recipe.output, recipe.batch.sequences) == (1e-05, "a: b # c", 3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("steps=3", r"overrides: 'steps=3' is one text\. Use a list, \['steps=3'\], or a dict of keys"),
        ({"steps": object()}, r"overrides: steps: <object .* \(object\) cannot be written in a recipe\. Use texts"),
        ({"ema": float("nan")}, r"overrides: ema: nan \(float\) cannot be written in a recipe"),
    ],
)
def test_overrides_that_no_recipe_has(overrides: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        override_texts(overrides)


def test_processes_are_one_or_more_and_those_of_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match=r"processes: 0 is no number of processes\. Use 1 or more"):
        train("recipe.yaml", processes=0)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="has started this as process 1 of 2, and danlu.train starts processes by it"):
        train("recipe.yaml")


class NotebookOutput(io.StringIO):
    """A stream of a notebook, which has no descriptor."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


def test_a_program_has_the_bits_of_the_command_line(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_world.recipe(tmp_path / "file", steps=6, data={"eval": 5})
    assert danlu("train", recipe, f"output={tmp_path / 'command'}") == 0
    handlers, threads = [signal.getsignal(number) for number in STOP_SIGNALS], torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    output = NotebookOutput()
    monkeypatch.setattr(sys, "stderr", output)
    runs: list[Run] = []

    async def cell() -> None:  # a notebook's cells run within an event loop
        runs.append(train(recipe, {"output": tmp_path / "cell"}))

    asyncio.run(cell())
    thread = threading.Thread(target=lambda: runs.append(train(recipe, [f"output={tmp_path / 'thread'}"])))
    thread.start()
    thread.join()
    monkeypatch.undo()
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    for name, run in zip(("cell", "thread"), runs, strict=True):
        folder = tmp_path / name
        assert run == Run(folder, 6, 0, folder / "model") and not run.stopped
        assert differences(tmp_path / "command", folder) == []
        assert [line["step"] for line in run.metrics() if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert output.getvalue().count("finished after step 6: ") == 2
    assert train(recipe, {"output": tmp_path / "cell"}).steps == 6  # which is finished already
    with pytest.raises(CheckpointError, match="holds a run"):
        train(recipe, {"output": tmp_path / "cell"}, resume="never")
    train(recipe, {"output": tmp_path / "other", "seed": 1})
    assert differences(tmp_path / "command", tmp_path / "other")  # control
    assert runs[0].load().generate("One day", max_new_tokens=3, temperature=0) != ""


def test_an_interrupted_call_saves_and_the_same_call_goes_on(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", steps=4)
    whole = train(recipe, {"output": tmp_path / "whole"})
    real, calls = loop.accumulate, []

    def interrupt(*arguments: Any, **options: Any) -> Any:
        calls.append(options["step"])
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options)

    monkeypatch.setattr(loop, "accumulate", interrupt)
    run = train(recipe)
    assert (run.steps, run.exit_code, run.result, run.stopped) == (2, 130, None, True)
    with pytest.raises(package.DanluError, match="was stopped before its end; call train again, and it goes on"):
        run.load()
    run = train(recipe)
    assert (run.steps, run.exit_code, run.result) == (4, 0, tmp_path / "run" / "model")
    assert calls == [1, 2, 3, 4]
    assert differences(whole.folder, run.folder) == []


def test_a_chain_has_the_runs_of_its_stages(tiny_world: World, tmp_path: Path) -> None:
    values = tiny_world.values(tmp_path / "chain", steps=2, stage=None)
    model, data = values.pop("model"), values.pop("data")
    stages = [
        {"name": "first", "stage": "pretrain", "model": model, "data": {**data, "train": str(tiny_world.text)}},
        {"name": "second", "stage": "sft", "data": data},
    ]
    file = tmp_path / "chain.yaml"
    file.write_text(yaml.safe_dump({**values, "stages": stages}))
    run = train(file)
    assert (run.folder, run.steps, run.exit_code) == (tmp_path / "chain", 4, 0)
    assert [stage.folder.name for stage in run.stages] == ["first", "second"]
    assert run.result == run.stages[1].result == tmp_path / "chain" / "second" / "model"
    assert run.metrics() == run.stages[1].metrics() != run.stages[0].metrics()
