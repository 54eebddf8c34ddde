from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import danlu
from danlu.cli import checkpoint
from danlu.cli.checkpoint import app
from danlu.core.errors import CheckpointError, ResourceError
from danlu.core.run_files import RunLock
from danlu.training.checkpoints import folders
from danlu.training.checkpoints.folders import remove_checkpoint
from danlu.training.checkpoints.store import CheckpointStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with CheckpointStore(tmp_path / "run" / "checkpoints", keep=9, background=False) as store:
        for step, loss in ((100, 2.5), (200, 2.25), (300, None)):
            store.save(step, {"model": {"w": torch.ones(500)}}, {}, loss=loss)
    return tmp_path / "run"


def invoke(*arguments: object) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout.splitlines()


def steps(run: Path) -> list[int]:
    return [info.step for info in CheckpointStore(run / "checkpoints").checkpoints()]


def test_list_shows_each_checkpoint(run: Path) -> None:
    (run / "checkpoints" / "step-00000300" / "COMPLETE").unlink()
    code, lines = invoke("list", run)
    assert code == 0
    assert lines[0].split() == ["step", "size", "eval", "loss", "saved", "state"]
    assert [line.split()[0] for line in lines[1:]] == ["100", "200", "300"]
    assert "2.5000" in lines[1]
    assert lines[2].rstrip().endswith("complete, best")
    assert lines[3].rstrip().endswith("half-written, ignored")


@pytest.fixture
def pruned_meanwhile(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that deletes its checkpoint of step 100 right after the folders have been listed."""
    real = folders._subfolders

    def listed(folder: Path) -> list[Path]:
        found = real(folder)
        if (folder / "step-00000100").exists():
            remove_checkpoint(folder / "step-00000100")
        return found

    monkeypatch.setattr(folders, "_subfolders", listed)
    return run


def test_list_beside_a_run_that_prunes(pruned_meanwhile: Path) -> None:
    code, lines = invoke("list", pruned_meanwhile)
    assert code == 0 and [line.split()[0] for line in lines[1:]] == ["200", "300"]


def test_a_list_that_a_save_overtakes_is_made_anew(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that were there when the folders were listed are gone when they are looked at; a new one has come."""
    real = folders._subfolders
    calls = [0]

    def listed(folder: Path) -> list[Path]:
        found = real(folder)
        calls[0] += 1
        if calls[0] == 1:
            for old in found:
                remove_checkpoint(old)
            with CheckpointStore(folder, background=False) as store:
                store.save(400, {"model": {"w": torch.ones(500)}}, {})
        return found

    monkeypatch.setattr(folders, "_subfolders", listed)
    assert [info.step for info in folders.list_checkpoints(run / "checkpoints")] == [400]


def test_list_of_a_checkpoint_whose_files_are_being_deleted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mark goes first: from then on it shows as half-written, or not at all."""
    going = run / "checkpoints" / "step-00000100"
    (going / "COMPLETE").unlink()
    real = Path.glob

    def glob(path: Path, pattern: str) -> list[Path]:
        found = list(real(path, pattern))
        if path == going:
            remove_checkpoint(going)
        return found

    monkeypatch.setattr(Path, "glob", glob)
    code, lines = invoke("list", run)
    assert code == 0 and [line.split()[0] for line in lines[1:]] == ["200", "300"]
    with pytest.raises(CheckpointError, match="step-00000100: there is no such checkpoint"):
        folders.describe(going, 100)


def test_verify_beside_a_run_that_prunes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint.verify

    def slowly(path: Path) -> list[str]:
        if path.name == "step-00000100":
            remove_checkpoint(path)
        return real(path)

    monkeypatch.setattr(checkpoint, "verify", slowly)
    code, lines = invoke("verify", run)
    assert code == 0
    assert lines[0] == "step 100: gone, the run has deleted it meanwhile"
    assert [line.split(" (")[0] for line in lines[1:]] == ["step 200: intact", "step 300: intact"]


def test_verify_says_intact_and_exits_5_on_damage(run: Path) -> None:
    code, lines = invoke("verify", run)
    assert code == 0
    assert [line.split(" (")[0] for line in lines] == ["step 100: intact", "step 200: intact", "step 300: intact"]
    shard = run / "checkpoints" / "step-00000200" / "model-00001-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    code, lines = invoke("verify", run)
    assert code == 5
    assert lines[1].startswith("step 200: DAMAGED")
    assert lines[2] == f"  {shard}: tensor w was altered (SHA-256 differs)."
    assert invoke("verify", run / "checkpoints" / "step-00000100")[0] == 0
    assert invoke("verify", run / "checkpoints" / "step-00000200")[0] == 5


def test_prune_first_says_and_then_does(run: Path) -> None:
    (run / "checkpoints" / "step-00000050").mkdir()
    code, lines = invoke("prune", run, "--keep", 1, "--dry-run")
    assert code == 0
    assert [line.split(" (")[0] for line in lines[:2]] == ["would delete step 50", "would delete step 100"]
    assert lines[2].endswith("would be freed, 2 checkpoints stay")
    assert steps(run) == [50, 100, 200, 300]
    code, lines = invoke("prune", run, "--keep", 1)
    assert code == 0
    assert steps(run) == [200, 300]  # 200 has the lowest loss
    assert invoke("prune", run, "--keep", 1, "--no-keep-best")[0] == 0
    assert steps(run) == [300]


def test_prune_refuses_while_the_run_trains(run: Path) -> None:
    with RunLock(run), pytest.raises(ResourceError, match="another danlu process"):
        invoke("prune", run, "--keep", 1)
    assert steps(run) == [100, 200, 300]


def test_wrong_folders_are_explained(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: there is no such folder"):
        invoke("list", tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no checkpoints here"):
        invoke("list", tmp_path)
    with pytest.raises(CheckpointError, match=f"this is one checkpoint; give the run folder, {run}"):
        invoke("prune", run / "checkpoints" / "step-00000100", "--keep", 1)
    assert invoke("list", run / "checkpoints")[0] == 0


def test_the_verb_does_not_load_torch() -> None:
    code = "import sys, danlu.cli.checkpoint; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(danlu.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
