"""Ctrl-C and SIGTERM at every stage of `danlu train`: what is saved and said, the exit code, how it goes on."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import termios
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World, danlu, differences, last_state, metrics, start

from danlu.run import train
from danlu.stages import export, reader
from danlu.stages.learner import DecoderLearner
from danlu.training import loop
from danlu.training.checkpoints.verification import verify


def ctrl_c(*arguments: Any, **options: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def before(real: Callable[..., Any], *hooks: Callable[..., None], at: int = 1) -> Callable[..., Any]:
    """`real`, with the hooks called before its `at`-th call."""
    calls = [0]

    def call(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            for hook in hooks:
                hook()
        return real(*arguments, **options)

    return call


def test_a_real_process_saves_says_so_and_goes_on(tiny_world: World, tmp_path: Path) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", steps=100_000, checkpoint={"every": 50_000})
    log = tmp_path / "log.txt"
    for number, code, told in (
        (signal.SIGINT, 130, "stopping after this step; press Ctrl-C again to stop at once"),
        (signal.SIGTERM, 143, "stopping after this step; send SIGTERM again to stop at once"),
        (signal.SIGUSR1, 138, "SIGUSR1: stopping after this step; press Ctrl-C twice to stop at once"),
    ):
        log.unlink(missing_ok=True)
        file = tmp_path / "run" / "metrics.jsonl"
        done = len(metrics(tmp_path / "run")) if file.exists() else 0
        process = start(["train", recipe], log)
        while len(metrics(tmp_path / "run") if file.exists() else []) < done + 3:
            assert process.is_alive(), log.read_text()
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join()
        said = log.read_text()
        assert process.exitcode == code, said
        path, _, state = last_state(tmp_path / "run")
        step = state["run"]["step"]
        assert f"\n{told}\n" in said
        assert f"stopped after step {step}, saved in {tmp_path}/run; the same command goes on from there\n" in said
        assert "Traceback" not in said
        assert path.name == f"step-{step:08d}" and verify(path) == []
        assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, step + 1))


def print_into(path: str) -> None:
    """Leads stdout and stderr of this process into a named pipe, or a terminal, which becomes its own."""
    os.setsid()
    file = os.open(path, os.O_WRONLY)  # of a session without a terminal: the first that it opens
    os.dup2(file, 1)
    os.dup2(file, 2)
    if os.isatty(file):
        fcntl.ioctl(file, termios.TIOCSCTTY, 0)
    os.close(file)


def read_until(file: int, text: bytes) -> bytes:
    said = b""
    while text not in said:
        part = os.read(file, 4096)
        assert part, said
        said += part
    return said


def test_a_run_outlives_whoever_reads_what_it_prints(tiny_world: World, tmp_path: Path) -> None:
    """`2>&1 | tee log` with Ctrl-C, of which tee dies first; a terminal that is closed, which sends SIGHUP too."""
    recipe = tiny_world.recipe(tmp_path / "run", steps=100_000, checkpoint={"every": 50_000})
    os.mkfifo(tmp_path / "pipe")
    piped = start(["train", recipe], tmp_path / "log.txt", partial(print_into, str(tmp_path / "pipe")))
    reader_end = os.open(tmp_path / "pipe", os.O_RDONLY)
    read_until(reader_end, b"step 1/")
    os.close(reader_end)
    assert piped.pid is not None
    os.kill(piped.pid, signal.SIGINT)
    piped.join()
    first = last_state(tmp_path / "run")[2]["run"]["step"]
    assert piped.exitcode == 130 and first

    pane, terminal = pty.openpty()
    shown = start(["train", recipe], tmp_path / "log.txt", partial(print_into, os.ttyname(terminal)))
    read_until(pane, b"loss")
    os.close(terminal)
    os.close(pane)
    shown.join()
    path, _, state = last_state(tmp_path / "run")
    step = state["run"]["step"]
    assert shown.exitcode == 129 and step > first and verify(path) == []
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, step + 1))


def test_a_second_ctrl_c_stops_at_once_and_leaves_the_last_checkpoint(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run")
    monkeypatch.setattr(loop, "accumulate", before(loop.accumulate, ctrl_c, ctrl_c, at=7))
    assert danlu("train", recipe) == 130
    said = capsys.readouterr().err
    assert "stopped at once; the checkpoint of step 4 stays, and the same command goes on from there\n" in said
    path, _, _ = last_state(tmp_path / "run")
    assert path.name == "step-00000004" and verify(path) == []
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["step-00000004"]
    assert danlu("train", recipe) == 0
    assert danlu("train", tiny_world.recipe(tmp_path / "whole")) == 0
    assert differences(tmp_path / "whole", tmp_path / "run") == []


def test_a_second_ctrl_c_while_the_first_is_being_saved(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from danlu.training.checkpoints import store

    monkeypatch.setattr(loop, "accumulate", before(loop.accumulate, ctrl_c, at=7))
    monkeypatch.setattr(store, "write_shard", before(store.write_shard, ctrl_c, at=4))  # two a checkpoint
    assert danlu("train", tiny_world.recipe(tmp_path / "run")) == 130
    assert "stopped at once; the checkpoint of step 4 stays" in capsys.readouterr().err
    assert sorted(entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000004"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_before_the_first_step_there_is_nothing_to_wait_for(
    tiny_world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "prepare", before(reader.prepare, lambda: signal.raise_signal(number)))
        assert danlu("train", recipe) == code
    lines = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("precision: ")
    ]  # on some machines
    assert lines == ["stopped at once; nothing was saved, and the same command goes on from there"]
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert danlu("train", recipe) == 0


def test_a_stop_that_comes_just_before_the_first_step(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(train, "fit", before(train.fit, ctrl_c))
        assert danlu("train", recipe) == 130
    said = capsys.readouterr().err
    assert said.endswith("stopped before the first step, with nothing to save; the same command starts again\n")
    assert danlu("train", recipe) == 0


def test_while_exporting_the_training_is_safe_and_the_export_is_done_again(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", ema=0.9)
    with monkeypatch.context() as patch:
        patch.setattr(export, "save", before(export.save, ctrl_c, at=2))
        assert danlu("train", recipe) == 130
    said = capsys.readouterr().err
    assert "stopped at once; the checkpoint of step 12 stays, and the same command goes on from there\n" in said
    assert not (tmp_path / "run" / "model").exists()  # the average is written first
    assert danlu("train", recipe) == 0
    assert "was finished already" not in capsys.readouterr().err
    assert danlu("train", tiny_world.recipe(tmp_path / "whole", ema=0.9)) == 0
    assert differences(tmp_path / "whole", tmp_path / "run") == []


def test_in_the_last_step_the_evaluation_and_the_export_are_left_for_the_next_time(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"data": {"eval": 10}, "evaluation": {"every": 5}}
    recipe = tiny_world.recipe(tmp_path / "run", **changes)
    monkeypatch.setattr(loop, "accumulate", before(loop.accumulate, ctrl_c, at=12))
    assert danlu("train", recipe) == 130
    assert not (tmp_path / "run" / "model").exists()
    assert [line["step"] for line in metrics(tmp_path / "run") if "eval_loss" in line] == [5, 10]
    assert danlu("train", recipe) == 0
    assert [line["step"] for line in metrics(tmp_path / "run") if "eval_loss" in line] == [5, 10, 12]
    assert danlu("train", tiny_world.recipe(tmp_path / "whole", **changes)) == 0
    assert differences(tmp_path / "whole", tmp_path / "run") == []


def test_during_an_evaluation_it_is_cut_short_and_done_anew(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"data": {"eval": 10}, "evaluation": {"every": 5}, "checkpoint": {"every": 5, "keep_best": True}}
    recipe = tiny_world.recipe(tmp_path / "run", **changes)
    with monkeypatch.context() as patch:
        patch.setattr(DecoderLearner, "assess", before(DecoderLearner.assess, ctrl_c, at=2))  # in the first evaluation
        assert danlu("train", recipe) == 130
    assert last_state(tmp_path / "run")[0].name == "step-00000005"
    assert not [line for line in metrics(tmp_path / "run") if "eval_loss" in line]
    assert danlu("train", recipe) == 0
    assert danlu("train", tiny_world.recipe(tmp_path / "whole", **changes)) == 0
    assert differences(tmp_path / "whole", tmp_path / "run") == []
