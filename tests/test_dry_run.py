"""`danlu train --dry-run` does all up to the first step and keeps nothing; `--quiet` prints errors alone."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World, danlu, differences, metrics

from danlu.recipe import load
from danlu.run.preview_model import preview_parameters

pytestmark = pytest.mark.usefixtures("tokenising_here")


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Of every file below a folder: when it was changed last, and what is in it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_dry_run_tells_what_a_run_would_and_leaves_nothing(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = {"samples": {"prompts": ["Who?"], "max_new_tokens": 4}}
    changes = {"data": {"cache": str(tmp_path / "cache"), "eval": 10}, "evaluation": samples}
    changes["log"] = {"tensorboard": True}
    recipe = tiny_world.recipe(tmp_path / "run", **changes)
    assert danlu("train", recipe, "--dry-run") == 0
    out, said = capsys.readouterr()
    assert out == "" and not (tmp_path / "run").exists()
    lines = said.splitlines()
    assert any(line.startswith("data: ") for line in lines)
    assert any(line.startswith("llama with 44,192 parameters, all trained, on cpu, fp32; 12 steps") for line in lines)
    assert lines[-1] == (f"dry run: all is ready for step 1; nothing was trained, and {tmp_path / 'run'} is as it was")
    assert not any(line.startswith("step ") for line in lines)
    assert list((tmp_path / "cache").glob("*/COMPLETE")), "tokens are kept"
    assert danlu("train", recipe) == 0
    other = tiny_world.recipe(tmp_path / "other", **changes)
    assert danlu("train", other) == 0
    assert differences(tmp_path / "run", tmp_path / "other") == []


def test_what_an_adapter_trains_is_told_with_its_share(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 8 on q, k, v, o and the three of the MLP, in two layers: 8 x (inputs + outputs) each."""
    model = {"path": str(tiny_world.base), "config": None, "tokenizer": None}
    adapter = {"kind": "lora", "rank": 8}
    assert danlu("train", tiny_world.recipe(tmp_path / "run", model=model, adapter=adapter), "--dry-run") == 0
    trained = 2 * 8 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    whole = 44_192 + trained
    assert (
        f"llama with {whole:,} parameters, {trained:,} of them trained ({trained / whole:.2%}), on cpu, fp32; 12 steps"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "adapter",
    [
        None,
        "lora",
        {"kind": "dora", "targets": ["attention", "lm_head"]},
        {"kind": "lora", "modules_to_save": ["embed_tokens"]},
        "vera",
        {"kind": "prompt", "tokens": 5},
    ],
)
def test_preview_tells_the_parameters_that_a_run_does(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], adapter: Any
) -> None:
    model = {"path": str(tiny_world.base), "config": None, "tokenizer": None}
    recipe = tiny_world.recipe(tmp_path / "run", model=model, adapter=adapter)
    assert danlu("train", recipe, "--dry-run") == 0
    (told,) = re.findall(r"llama with ([\d,]+ parameters, .*?), on cpu", capsys.readouterr().err)
    assert ("all trained" in told) == (adapter is None)
    assert preview_parameters(load(recipe).recipe, None) == told


def test_preview_tells_the_parameters_of_an_adapter_that_is_trained_on(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"path": str(tiny_world.base), "config": None, "tokenizer": None}
    first = tiny_world.recipe(tmp_path / "first", model=model, adapter="lora", steps=2)
    assert danlu("train", first) == 0
    again = tiny_world.recipe(
        tmp_path / "again", model={**model, "adapters": [str(tmp_path / "first" / "adapter")]}, adapter="continue"
    )
    capsys.readouterr()
    assert danlu("train", again, "--dry-run") == 0
    (told,) = re.findall(r"llama with ([\d,]+ parameters, .*?), on cpu", capsys.readouterr().err)
    assert danlu("preview", again) == 0
    assert told in capsys.readouterr().out


def test_a_dry_run_of_a_run_that_would_go_on_changes_none_of_its_bytes(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    recipe = tiny_world.recipe(run, checkpoint={"every": 4, "keep": 3})
    assert danlu("train", recipe) == 0
    assert danlu("train", recipe, "--dry-run") == 0
    assert f"was finished already, after step 12: {run}" in capsys.readouterr().err
    before = everything(run)
    assert danlu("train", recipe, "--dry-run", "--resume", run / "checkpoints" / "step-00000004") == 0
    said = capsys.readouterr().err
    assert f"resuming {run} from step-00000004" in said and "all is ready for step 5" in said
    assert everything(run) == before
    branch = tiny_world.recipe(tmp_path / "branch", checkpoint={"every": 4, "keep": 3})
    assert danlu("train", branch, "--dry-run", "--resume", run / "checkpoints" / "step-00000008") == 0
    assert "all is ready for step 9" in capsys.readouterr().err and not (tmp_path / "branch").exists()
    assert danlu("train", recipe, "--resume", run / "checkpoints" / "step-00000004") == 0
    assert everything(run) != before, "the same without --dry-run"


@pytest.mark.distributed
def test_a_dry_run_of_two_processes_leaves_nothing_either(
    tiny_world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    recipe = tiny_world.recipe(tmp_path / "run")
    assert danlu("train", recipe, "--dry-run", "--processes", "2") == 0
    assert capfd.readouterr().err.splitlines()[-1].startswith("dry run: all is ready for step 1")
    left = {path.name for path in tmp_path.iterdir()} - {"tmp"}
    assert left == {"run.yaml"} and not list((tmp_path / "tmp").glob("danlu-*"))


def test_a_dry_run_finds_what_a_run_would(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", model={"chat_template": str(tmp_path / "t.jinja")})
    (tmp_path / "t.jinja").write_text("{{ raise_exception('only Latin') }}")
    assert danlu("train", recipe, "--dry-run") == 3
    assert "only Latin" in capsys.readouterr().err and not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    assert danlu("train", tiny_world.recipe(tmp_path / "r"), "--dry-run", f"output={tmp_path / 'file' / 'run'}") == 6
    assert "the run folder cannot be written: Not a directory" in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_dry_run_tells_of_a_folder_that_may_not_be_written(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    assert danlu("train", tiny_world.recipe(tmp_path / "r"), "--dry-run", f"output={tmp_path / 'locked' / 'run'}") == 6
    assert "the run folder cannot be written: Permission denied" in capsys.readouterr().err


def test_quiet_prints_errors_alone(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", data={"cache": str(tmp_path / "cache"), "eval": 10})
    assert danlu("train", recipe, "--quiet") == 0
    assert capsys.readouterr() == ("", "")
    assert len([line for line in metrics(tmp_path / "run") if "loss" in line]) == 12
    assert danlu("train", recipe, "--quiet", "--dry-run", "output=" + str(tmp_path / "other")) == 0
    assert capsys.readouterr() == ("", "")
    assert danlu("train", recipe, "--quiet", "seed=5") == 5
    assert capsys.readouterr().err.startswith("error: ")
