"""`danlu study` at the console: the table, the files, what is told of failures and interruptions."""

from __future__ import annotations

import io
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from builders.study_folders import write_run
from builders.tiny_world import World, danlu, start

from danlu.study import runner
from danlu.study.plan import PlannedRun


class Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def wait(self, timeout: float | None = None) -> int:
        return self.code

    def send_signal(self, number: int) -> None:
        self.code = 128 + number


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[PlannedRun], Ended]], None]:
    return lambda launch: monkeypatch.setattr(runner, "launch", launch)


def trained(run: PlannedRun) -> Ended:
    process = start(["train", run.recipe_file], run.log)
    process.join()
    assert process.exitcode is not None
    return Ended(process.exitcode)


def pretended(run: PlannedRun) -> Ended:
    write_run(run.folder, evaluations={2: 2.0 + run.recipe.seed})
    run.log.write_text("step 1/2 loss 4.000\nstep 2/2 loss 3.000\n")
    return Ended(0)


def cells(table: str) -> list[dict[str, str]]:
    headings, *lines = ([cell.strip() for cell in re.split(r" {2,}", line.strip())] for line in table.splitlines())
    return [dict(zip(headings, line, strict=True)) for line in lines if len(line) == len(headings)]


def test_a_study(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], launching: Any) -> None:
    folder = tmp_path / "study"
    recipe = tiny_world.recipe(folder, data={"eval": 10}, evaluation={"every": 2}, steps=4)
    launching(trained)
    arguments = ["study", recipe, "--vary", "optimizer.learning_rate=1e-2,2e-2", "batch.micro=4"]
    assert danlu(*arguments) == 0
    out = capsys.readouterr()
    lines = out.err.splitlines()
    assert lines[0] == f"2 runs in {folder}"
    assert lines[1] == "[1/2] learning_rate-1e-2: training"
    assert re.fullmatch(r"\[1/2\] learning_rate-1e-2: finished, evaluation loss \d\.\d{4}, 0:00:0\d", lines[2])
    assert lines[-1] == (
        f"written to {folder}: study.html, study.md, study.csv, evaluation_loss.png, evaluation_loss.svg, cost.png, "
        "cost.svg, loss_curves.png, loss_curves.svg"
    )
    rows = cells(out.out)
    assert [row["learning_rate"] for row in rows] == ["1e-2", "2e-2"]
    for row in rows:  # every number from metrics.jsonl and the files themselves
        run = folder / f"learning_rate-{row['learning_rate']}"
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in metrics if "loss" in line]
        losses = [line["eval_loss"] for line in metrics if "eval_loss" in line]
        assert len(steps) == 4 and len(losses) == 2
        assert row["trained"] == "44,192" and row["share, %"] == "100"
        assert row["eval loss, last"] == f"{losses[-1]:.4f}" and row["eval loss, best"] == f"{min(losses):.4f}"
        assert row["tokens/s"] == f"{median(line['tokens_per_second'] for line in steps):,.0f}"
        assert float(row["peak memory, MiB"]) >= round(max(line["memory_bytes"] for line in steps) / 2**20)
        assert row["result, KiB"] == f"{(run / 'model' / 'model.safetensors').stat().st_size / 2**10:.0f}"
    names = {"study.json", "study.html", "study.md", "study.csv", ".lock"}
    names |= {f"{name}.{kind}" for name in ("evaluation_loss", "cost", "loss_curves") for kind in ("png", "svg")}
    names |= {f"learning_rate-{rate}{end}" for rate in ("1e-2", "2e-2") for end in ("", ".yaml", ".log")}
    assert {entry.name for entry in folder.iterdir()} == names
    launching(lambda run: pytest.fail("nothing is left to do"))
    assert danlu(*arguments) == 0
    again = capsys.readouterr()
    assert again.out == out.out
    assert "[2/2] learning_rate-2e-2: finished before, evaluation loss" in again.err


def test_seeds_are_one_row(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], launching: Any
) -> None:
    launching(pretended)
    assert danlu("study", tiny_world.recipe(tmp_path / "study"), "--seeds", "0,1,2") == 0
    (row,) = cells(capsys.readouterr().out)
    assert row["seeds"] == "3" and row["eval loss, last"] == "3.0000 ± 1.0000"


def test_failures_are_told_once_and_the_rest_is_done(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], launching: Any
) -> None:
    def launch(run: PlannedRun) -> Ended:
        if run.recipe.seed > 1:
            return pretended(run)
        run.log.write_text("data: 100 rows\nerror: rows.jsonl:3: broken\nSet data.on_bad_row: skip\n")
        return Ended(3)

    launching(launch)
    folder = tmp_path / "a study"
    recipe = tiny_world.recipe(folder)
    assert danlu("study", recipe, "--seeds", "0,1,2") == 1
    out = capsys.readouterr()
    assert out.err.splitlines()[1:8] == [
        "[1/3] seed-0: training",
        "[1/3] seed-0: failed",
        "  error: rows.jsonl:3: broken",
        "  Set data.on_bad_row: skip",
        f"  all that it said: {folder}/seed-0.log; alone: danlu train '{folder}/seed-0.yaml'",
        "[2/3] seed-1: training",
        f"[2/3] seed-1: failed in the same way ({folder}/seed-1.log)",
    ]
    assert out.err.endswith("failed: seed-0, seed-1; the same command tries again\n")
    assert len(cells(out.out)) == 1 and "not finished: seed-0, not begun\n" in out.out
    assert danlu("study", recipe, f"output={tmp_path / 'none'}", "--seeds", "0,1") == 1
    assert capsys.readouterr().out == ""  # there is nothing to make a table of


def test_stopped_it_says_how_to_go_on(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], launching: Any
) -> None:
    def launch(run: PlannedRun) -> Ended:
        if run.recipe.seed == 0:
            return pretended(run)
        run.log.touch()
        signal.raise_signal(signal.SIGINT)
        return Ended(0)

    launching(launch)
    recipe = tiny_world.recipe(tmp_path / "study")
    assert danlu("study", recipe, "--seeds", "0,1,2") == 130
    out = capsys.readouterr()
    said = "stopped in seed-1; 1 of 3 are finished, and the same command goes on from there\n"
    assert out.err.endswith(said) and out.out == ""
    assert not (tmp_path / "study" / "study.md").exists()


def test_what_runs_say(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], launching: Any) -> None:
    launching(pretended)
    assert danlu("study", tiny_world.recipe(tmp_path / "quiet"), "--seeds", "0") == 0
    assert "step 1/2 loss" not in capsys.readouterr().err
    assert danlu("study", tiny_world.recipe(tmp_path / "loud"), "--seeds", "0", "--verbose") == 0
    assert "training\nstep 1/2 loss 4.000\nstep 2/2 loss 3.000\n[1/1] seed-0: finished" in capsys.readouterr().err


def test_at_a_terminal_the_last_line_is_shown_below(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launching: Any
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    launching(pretended)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert danlu("study", tiny_world.recipe(tmp_path / "study"), "--seeds", "0,1") == 0
    said = terminal.getvalue()
    assert "[1/2] seed-0  step 2/2 loss 3.000" in said and "step 1/2" not in said
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", said)
    assert re.search(r"\[1/2\] seed-0: finished, evaluation loss 2.0000, 0:00:12\s", plain)


def test_no_room_for_the_plots(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], launching: Any
) -> None:
    launching(pretended)
    recipe = tiny_world.recipe(tmp_path / "study")
    (tmp_path / "study" / "study.csv").mkdir(parents=True)
    (tmp_path / "study" / "study.json").write_text('{"keys": [], "runs": []}')
    assert danlu("study", recipe, "--seeds", "0") == 6
    out = capsys.readouterr()
    assert "the table and the plots cannot be written: Is a directory. Free some space; the same command" in out.err
    assert len(cells(out.out)) == 1


def test_a_process_that_cannot_be_started(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], launching: Any
) -> None:
    def launch(run: PlannedRun) -> Ended:
        raise BlockingIOError("Resource temporarily unavailable")

    launching(launch)
    assert danlu("study", tiny_world.recipe(tmp_path / "study"), "--seeds", "0") == 6
    assert "seed-0: its process cannot be started: Resource temporarily" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "error: nothing varies: say what does, for example --vary adapter.rank=4,8,16, or --seeds 0,1,2\n"),
        (["--vary", "seed"], "error: --vary 'seed': write a key and its values"),
        (
            ["--vary", "batch.mirco=1,2"],
            "error: --vary 'batch.mirco=1,2' batch.mirco: unknown key in BatchSize. Did you",
        ),
        (["--seeds", "0", "stepz=1"], "error: override 'stepz=1' stepz: unknown key. Did you mean 'steps'?"),
        (["--vary", "seed=0", "--wrong"], "error: No such option: --wrong"),
    ],
)
def test_misuse(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert danlu("study", tiny_world.recipe(tmp_path / "study"), *arguments) == 2
    out = capsys.readouterr()
    assert out.err.startswith(said) and out.out == "" and not (tmp_path / "study").exists()
