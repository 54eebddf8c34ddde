"""What is told of runs by their files: by runs of `danlu train`, and by what kills and strangers leave."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World, danlu

from danlu.core.file_lock import AlreadyLocked, FileLock, holder_of
from danlu.core.run_files import RunLock
from danlu.training import runs
from danlu.training.runs import find_runs, read_run


@pytest.fixture
def finished(tiny_world: World, tmp_path: Path, tokenising_here: None) -> Path:
    """A run of 12 steps with evaluations and checkpoints of 4, 8 and 12."""
    output = tmp_path / "runs" / "one"
    changes: dict[str, Any] = {"data": {"eval": 10}, "evaluation": {"every": 4}, "checkpoint": {"every": 4, "keep": 3}}
    assert danlu("train", tiny_world.recipe(output, tmp_path / "one.yaml", **changes)) == 0
    return output


def listed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    capsys.readouterr()
    assert danlu("runs", "list", *arguments) == 0
    out, said = capsys.readouterr()
    assert said == ""
    return out.splitlines()


def test_each_state_is_told(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, going = (Path(shutil.copytree(finished, finished.with_name(name))) for name in ("stopped", "going"))
    for run in (stopped, going):
        (run / "summary.json").unlink()
    shutil.rmtree(stopped / "checkpoints" / "step-00000012")
    told = json.loads((finished / "summary.json").read_text())
    with RunLock(going):
        found = {info.folder.name: info for info in find_runs(tmp_path / "runs")}
        assert {name: info.state for name, info in found.items()} == {
            "one": "finished", "stopped": "stopped", "going": "running"
        }  # fmt: skip
        monkeypatch.chdir(tmp_path)
        lines = listed(capsys)
        (as_json,) = [one for one in json.loads("\n".join(listed(capsys, "runs", "--json"))) if one["pid"] is not None]
    assert (found["one"].step, found["stopped"].step, found["going"].step) == (12, 8, 12)
    assert {info.steps for info in found.values()} == {12}
    assert found["one"].loss == told["loss"] and found["one"].seconds == told["seconds"]
    assert found["one"].evaluation_loss == told["evaluation"]["last"]
    assert found["going"].loss == told["loss"] and found["going"].evaluation_loss == told["evaluation"]["last"]
    assert found["one"].best_evaluation_loss == told["evaluation"]["best"]
    assert lines[0].split() == ["state", "stage", "step", "loss", "eval", "time", "last", "change", "run"]
    assert [line.split()[0] for line in lines[1:]] == [info.state for info in found.values()]
    assert {line.split()[1] for line in lines[1:]} == {"sft"}
    assert any(f"12/12  {told['loss']:.4f}" in line and line.endswith("runs/one") for line in lines)
    assert max(map(len, lines)) <= 80
    assert as_json["folder"] == "runs/going" and as_json["state"] == "running" and as_json["loss"] == told["loss"]


def test_a_run_alone_runs_deeper_down_and_none(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(listed(capsys, finished)) == 2
    deep = tmp_path / "runs" / "study" / "a"
    deep.mkdir(parents=True)
    shutil.copytree(finished, deep / "seed-0")
    (tmp_path / "runs" / "other").mkdir()
    assert [info.folder.name for info in find_runs(tmp_path / "runs")] == ["one", "seed-0"]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert listed(capsys) == ["no runs in runs: `danlu train RECIPE` writes them where the recipe's `output` says"]
    assert json.loads("\n".join(listed(capsys, "--json"))) == []
    assert danlu("runs", "list", "nowhere") == 5
    assert capsys.readouterr().err == "error: nowhere: there is no such folder.\n"


def test_what_is_damaged_or_not_finite_says_what_it_can(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (finished / "summary.json").write_text("{")
    lines = (finished / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    spoilt = b'{"step": 13, "loss": "nan", "elapsed_s": 3.5}\n[1]\n\xff\n{"step": 14, "lo'
    (finished / "metrics.jsonl").write_bytes(b"".join(lines) + spoilt)
    info = read_run(finished)
    assert info.state == "stopped" and info.step == 12 and info.seconds == 3.5
    assert str(info.loss) == "nan" and info.evaluation_loss is not None
    assert json.loads("\n".join(listed(capsys, finished, "--json")))[0]["loss"] == "nan"
    (finished / "metrics.jsonl").unlink()
    shutil.rmtree(finished / "checkpoints")
    info = read_run(finished)
    assert (info.state, info.step, info.steps, info.loss, info.seconds) == ("stopped", 0, None, None, None)
    assert find_runs(finished) == []  # like a start that failed


def test_the_stages_of_a_chain_are_named_and_rewards_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chain = Path("runs/chain")
    lines = {"tuned": {"step": 7, "loss": 2.5}, "grpo": {"step": 3, "loss": -0.01, "reward": 0.75}, "late": None}
    for name, line in lines.items():
        (chain / name).mkdir(parents=True)
        stage = "rl" if name == "grpo" else "sft"
        (chain / name / "recipe.yaml").write_text(f"stage: {stage}\nmodel: gone\ndata: gone.json\noutput: run\n")
        (chain / name / "environment.json").write_text("{}")
        if line is not None:
            (chain / name / "metrics.jsonl").write_text(f"{json.dumps(line)}\n")
    (chain / "chain.json").write_text(json.dumps({"tuned": {}, "grpo": {"tuned": "1"}, "next": {}}))
    tuned, grpo = (line.split() for line in listed(capsys)[1:])  # `late` failed before its first step
    assert tuned[:4] == ["stopped", "sft", "0", "2.5000"] and tuned[-1] == "runs/chain/tuned"
    assert grpo[:5] == ["stopped", "rl", "0", "reward", "0.7500"] and grpo[-1] == "runs/chain/grpo"
    as_json = json.loads("\n".join(listed(capsys, "runs", "--json")))
    assert [(one["stage"], one["chain"], one["reward"]) for one in as_json] == [
        ("sft", "runs/chain", None),
        ("rl", "runs/chain", 0.75),
    ]
    assert danlu("report", chain, "--json") == 0
    assert [one["stage"] for one in json.loads(capsys.readouterr().out)] == ["sft", "rl"]
    assert danlu("report", chain) == 0
    out, said = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("stage ")] == ["stage tuned", "stage grpo"]
    assert said == "written to runs/chain/tuned/report.html\nwritten to runs/chain/grpo/report.html\n"
    assert danlu("report", chain, "--out", "page.html") == 2
    assert "Name one of them: runs/chain/tuned, runs/chain/grpo" in capsys.readouterr().err.replace("\n  ", " ")


def test_a_long_file_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_BLOCK_BYTES", 64)
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": 3, "eval_loss": 2.5}, *({"step": step, "loss": step / 10} for step in range(4, 60))]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert runs._last_lines(file) == (lines[-1], lines[0])
    monkeypatch.setattr(runs, "_MAX_BYTES", 300)
    assert runs._last_lines(file) == (lines[-1], {})


def test_looking_disturbs_nobody(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    assert holder_of(lock) is None and not lock.exists()
    held = FileLock(lock)
    held.acquire()
    holder = holder_of(lock)
    assert holder is not None and str(holder).startswith("pid ")
    with pytest.raises(AlreadyLocked):
        FileLock(lock).acquire()
    held.release()
    assert holder_of(lock) is None
    program = f"""
import sys
from pathlib import Path
from danlu.core.file_lock import holder_of
print("looking", flush=True)
while True:
    holder_of(Path({str(lock)!r}))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as looking:
        assert looking.stdout is not None and looking.stdout.readline() == "looking\n"
        for _ in range(50):
            held.acquire()
            held.release()
        looking.kill()


def test_listing_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from danlu.cli.main import main; main(['runs', 'list', '.']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
