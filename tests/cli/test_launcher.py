"""`danlu train --processes`: processes that fail, die, are stopped and start again, and what is told of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders import fake_rank
from builders.tiny_world import World, danlu, differences, metrics
from builders.tiny_world import start as begin

from danlu.cli import launcher
from danlu.cli.launcher import launch
from danlu.core.errors import DataError, InternalError, RecipeError, ResourceError, Stopped
from danlu.parallel import world as worlds

pytestmark = pytest.mark.distributed

FAKE_RANK = str(Path(fake_rank.__file__))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def start(tmp_path: Path, said: list[str]) -> Callable[..., int]:
    """Launches stand-ins with a plan."""

    def run(
        processes: int,
        *,
        restarts: int = 0,
        grace_s: float = 0.3,
        threads: int | None = None,
        log: Callable[[str], None] = said.append,
        progress_s: float | None = None,
        **plan: Any,
    ) -> int:
        command = ["-P", FAKE_RANK, str(tmp_path), json.dumps(plan)]
        return launch(
            lambda attempt: command,
            processes,
            tmp_path,
            restarts=restarts,
            threads=threads,
            from_where=lambda: f"from step {len(steps(tmp_path))}",
            log=log,
            grace_s=grace_s,
            progress_s=progress_s,
        )

    return run


def steps(folder: Path, rank: int = 0) -> list[str]:
    file = folder / f"steps-{rank}.txt"
    return file.read_text().splitlines() if file.exists() else []  # killed before its first


def test_all_goes_well(
    start: Callable[..., int], tmp_path: Path, said: list[str], capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    # The last one's abort comes after its work is done, and is none of the user's business.
    assert start(3, threads=5, does={"2": [6, "abort at the end"]}) == 0
    assert said == [] and [len(steps(tmp_path, rank)) for rank in range(3)] == [6, 6, 6]
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    out, err = capfd.readouterr()
    assert (out, err) == ("hello from 0 with 5 threads\n", "")  # of the first alone
    for rank in (1, 2):
        log = (tmp_path / "logs" / f"rank-{rank}.txt").read_text()
        assert log.startswith("--- ") and log.endswith(f"hello from {rank} with 5 threads\n")


def test_how_many_have_started_is_told_until_all_have(start: Callable[..., int], tmp_path: Path) -> None:
    said: list[str] = []

    def log(text: str) -> None:  # each process loads torch once it has been said that the one before has not, or has
        said.append(text)
        (tmp_path / f"go-{text.split()[1]}").touch()

    waits, loads = {"0": [1, "wait for go-0"], "1": [1, "wait for go-1"]}, {"0": 2, "1": 2}
    assert start(2, progress_s=0.0, log=log, does=waits, loads=loads) == 0
    told = list(dict.fromkeys(said))
    assert told[0] == "starting: 0 of 2 processes have loaded torch"
    assert "starting: 1 of 2 processes have loaded torch" in told and len(told) == 2


def test_the_first_error_is_told_and_not_tried_again(
    start: Callable[..., int], tmp_path: Path, said: list[str], capfd: Any
) -> None:
    with pytest.raises(DataError) as caught:
        start(3, restarts=2, pause_s=0.1, does={"0": [3, "gone"], "1": [2, "data error"], "2": [3, "gone"]}, grace_s=60)
    assert str(caught.value) == "rank 1: rows.jsonl:1: a bad row\nranks 0 and 2 then stopped waiting"
    assert said == []
    assert "error" not in capfd.readouterr().err  # the caller shows it
    assert "rows.jsonl:1: a bad row" in (tmp_path / "logs" / "rank-1.txt").read_text()


def test_what_every_process_met_is_told_once(start: Callable[..., int]) -> None:
    with pytest.raises(RecipeError) as caught:
        start(2, does={"0": [1, "recipe error"], "1": [1, "recipe error"]}, grace_s=60)
    assert caught.value.problems == ["a.yaml:1: first", "a.yaml:2: second"]


def test_a_killed_process_restarts_the_group(start: Callable[..., int], tmp_path: Path, said: list[str]) -> None:
    assert start(2, restarts=3, torch=True, does={"1": [4, "kill"]}) == 0
    assert said == [
        "rank 1 was killed (SIGKILL), as the system does where memory runs out; restart 1 of 3, from step 3"
    ]
    assert steps(tmp_path) == [f"{step} of attempt {int(step > 3)}" for step in range(1, 7)]


def test_beyond_the_restarts(start: Callable[..., int], tmp_path: Path, said: list[str]) -> None:
    with pytest.raises(ResourceError) as caught:
        start(2, restarts=1, attempts=[0, 1], does={"0": [2, "sleep"], "1": [2, "kill"]})
    assert str(caught.value).startswith("rank 1 was killed (SIGKILL)")
    assert str(caught.value).endswith("\nThe processes were started again 1 time (parallel.restarts)")
    assert len(said) == 1
    bug = r"rank 0: ValueError: no such thing\. This is a bug of danlu, not a mistake of yours\nTraceback"
    with pytest.raises(InternalError, match=bug):
        start(2, does={"0": [2, "bug"], "1": [2, "gone"]}, grace_s=60)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 143), (signal.SIGUSR1, 143)])
def test_a_signal_is_handed_on_once_and_saving_is_waited_for(
    start: Callable[..., int], tmp_path: Path, capfd: Any, number: signal.Signals, code: int
) -> None:
    def send() -> None:
        while not (tmp_path / "steps-1.txt").exists() or not (tmp_path / "steps-0.txt").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)
        if number == signal.SIGUSR1:  # a warning may be repeated: only Ctrl-C and SIGTERM ask for more
            time.sleep(0.1)
            os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    # Rank 1 is ready first; the other must not be ended for that.
    try:
        assert start(2, restarts=1, steps=1000, pause_s=0.05, saving_s={"0": 0.5}) == code
    except Stopped as stopped:
        pytest.fail(f"it did not wait: {stopped}")
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()
    assert capfd.readouterr().err.count("stopped after step") == 1


def test_a_signal_before_there_is_anything_to_save(
    start: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = launcher.Agent._start_workers

    def interrupted(self: Any, group: Any) -> Any:
        started = real(self, group)
        signal.raise_signal(signal.SIGINT)
        return started

    monkeypatch.setattr(launcher.Agent, "_start_workers", interrupted)
    with pytest.raises(Stopped, match="stopped at once; the same command goes on") as caught:
        start(2, restarts=1, begins_after_s=60)  # killed before that: one may begin while the other is being started
    assert caught.value.exit_code == 130
    assert not (tmp_path / "steps-0.txt").exists()


def when(folder: Path, ready: str, act: Callable[[], None]) -> threading.Thread:
    """Acts once the file is there; in another thread."""

    def wait() -> None:
        while not (folder / ready).exists():
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_processes_that_no_signal_reaches_are_ended_when_asked_twice(
    start: Callable[..., int], tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[int] = []
    ask_to_stop = launcher.Agent._ask_to_stop

    def noted(self: Any, number: int, frame: Any) -> None:
        ask_to_stop(self, number, frame)
        handled.append(number)

    monkeypatch.setattr(launcher.Agent, "_ask_to_stop", noted)

    def ask_twice() -> None:
        for times in (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
            while len(handled) < times:  # two signals at once would be handled as one
                time.sleep(0.01)

    when(tmp_path, "steps-1.txt", ask_twice)
    with pytest.raises(Stopped, match="stopped at once; the same command goes on") as caught:
        start(2, restarts=1, does={"0": [2, "stuck"], "1": [2, "stuck"]})
    assert caught.value.exit_code == 143 and said == []


def test_a_signal_between_two_attempts(start: Callable[..., int], tmp_path: Path) -> None:
    told: list[str] = []

    def log(text: str) -> None:
        told.append(text)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped) as caught:
        start(2, restarts=2, log=log, does={"0": [3, "gone"], "1": [2, "kill"]})
    assert caught.value.exit_code == 143
    assert len(told) == 1 and "restart 1 of 2" in told[0]
    assert not [line for line in steps(tmp_path) if "of attempt 1" in line]


def test_one_process_that_was_told_to_stop_at_once_stops_the_run(start: Callable[..., int], said: list[str]) -> None:
    with pytest.raises(Stopped, match="^rank 1: stopped at once; nothing was saved$") as caught:
        start(2, restarts=2, grace_s=60, does={"0": [3, "gone"], "1": [2, "stopped"]}, pause_s=0.1)
    assert caught.value.exit_code == 143
    assert said == []  # nothing is started again that somebody has stopped


def test_hanging_up_ends_no_run_that_nohup_has_started(
    start: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hanging_up = when(tmp_path, "steps-1.txt", lambda: os.kill(os.getpid(), signal.SIGHUP))
        assert start(2, steps=20, pause_s=0.05) == 0
        hanging_up.join()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(steps(tmp_path)) == 20


def test_an_error_that_cannot_be_left_for_the_launcher_is_told_at_once(start: Callable[..., int], capfd: Any) -> None:
    with pytest.raises(ResourceError, match="rank 1 ended with exit code 3 and without a word"):
        start(2, does={"0": [3, "gone"], "1": [2, "error on a full disk"]}, pause_s=0.1, grace_s=60)
    assert capfd.readouterr().err == "error: rank 1: rows.jsonl:1: a bad row\n"


@pytest.mark.slow
def test_processes_whose_launcher_is_gone_stop_and_save(tmp_path: Path) -> None:
    plan = json.dumps({"torch": True, "steps": 100000, "pause_s": 0.02})
    command = ["-P", FAKE_RANK, str(tmp_path), plan]
    program = (
        "from pathlib import Path; from danlu.cli.launcher import launch;"
        f"launch(lambda attempt: {command!r}, 2, Path({str(tmp_path)!r}), log=print)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    while not (tmp_path / "steps-1.txt").exists():
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    until = time.monotonic() + 600
    while time.monotonic() < until and not all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1)):
        time.sleep(0.05)
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()
    while time.monotonic() < until and (tmp_path / "logs" / "rank-0.json.tmp").exists():  # until the last word
        time.sleep(0.05)
    assert json.loads((tmp_path / "logs" / "rank-0.json").read_text())["kind"] == "stopped"


def test_no_launch_inside_of_one(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run")
    for name, value in worlds.World(0, 2, 0, "127.0.0.1", 1, "").variables().items():
        monkeypatch.setenv(name, value)
    assert danlu("train", recipe, "--processes", 2) == 2
    said = capsys.readouterr().err
    assert "--processes 2: this was started by environment variables as process 0 of 2 already." in said


def test_what_is_wrong_before_is_told_without_starting_anything(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "launch", lambda *arguments, **options: pytest.fail("something was started"))
    recipe = tiny_world.recipe(tmp_path / "run")
    assert danlu("train", recipe, "stpes=3", "--processes", 2) == 2
    assert "Did you mean 'steps'?" in capsys.readouterr().err
    assert danlu("train", recipe, "parallel.tensor=3", "--processes", 4) == 2
    assert "parallel.tensor: 3 does not divide the 4 processes of this run" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    assert danlu("train", recipe, "--processes", 2) == 6
    assert "holds other things (thesis.tex)" in capsys.readouterr().err
    assert danlu("train", recipe, "--processes", 0) == 2


def test_which_arguments_an_attempt_gets(tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def record(command: Any, processes: int, folder: Path, **options: Any) -> int:
        seen.update(options, command=command, processes=processes, folder=folder)
        return 0

    monkeypatch.setattr(launcher, "launch", record)
    recipe = tiny_world.recipe(tmp_path / "run", parallel={"restarts": 3})
    (tmp_path / "run" / "logs").mkdir(parents=True)  # of an earlier launch: no stranger
    assert danlu("train", recipe, "steps=5", "--processes", 4, "--resume", "never") == 0
    begin = ["-P", "-m", "danlu", "train", str(recipe), "steps=5", "--resume"]
    assert (seen["processes"], seen["folder"], seen["restarts"]) == (4, tmp_path / "run", 3)
    assert seen["command"](0) == seen["command"](1) == [*begin, "never"]
    assert seen["from_where"]() == "from the beginning"
    # Once this run has saved something, that is what it goes on from, wherever it began.
    assert danlu("train", recipe, "checkpoint.keep=1") == 0
    assert seen["command"](1) == [*begin, "auto"]
    assert seen["from_where"]() == "from step 12"
    long_ago = time.time() - 3600
    os.utime(tmp_path / "run" / "checkpoints" / "step-00000012" / "COMPLETE", (long_ago, long_ago))
    assert seen["command"](1) == [*begin, "never"]


def set_variables(environ: dict[str, str]) -> None:
    os.environ.update(environ)


def test_tasks_of_srun_join(tiny_world: World, tmp_path: Path) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", steps=3, device="cpu")
    srun = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    srun |= {"SLURM_STEP_NODELIST": "localhost", "GLOO_SOCKET_IFNAME": "lo"}
    tasks = []
    for rank in ("0", "1"):
        environ = {**srun, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        tasks.append(begin(["train", recipe], tmp_path / f"log-{rank}.txt", partial(set_variables, environ)))
    for task in tasks:
        task.join()
    said = [(tmp_path / f"log-{rank}.txt").read_text() for rank in (0, 1)]
    assert [task.exitcode for task in tasks] == [0, 0], said
    assert "finished after step 3" in said[0]
    assert said[1] == ""  # it is in the run's folder
    assert len(metrics(tmp_path / "run")) == 3


@pytest.mark.slow
def test_a_real_run_killed_and_restarted_ends_as_if_nothing_had_happened(
    tiny_world: World, tmp_path: Path, capfd: Any
) -> None:
    changes: dict[str, Any] = {"parallel": {"restarts": 2}, "device": "cpu", "steps": 40}
    recipe = tiny_world.recipe(tmp_path / "run", **changes)
    file = tmp_path / "run" / "metrics.jsonl"

    def kill() -> None:
        while not file.exists() or len(metrics(tmp_path / "run")) < 6:
            time.sleep(0.01)
        log = (tmp_path / "run" / "logs" / "rank-1.txt").read_text()
        os.kill(int(re.findall(r"process (\d+)$", log, re.MULTILINE)[-1]), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    assert danlu("train", recipe, "--processes", 2) == 0
    said = capfd.readouterr().err
    assert re.search(r"rank 1 was killed \(SIGKILL\).*; restart 1 of 2, from step \d+\n", said)
    assert danlu("train", tiny_world.recipe(tmp_path / "whole", **changes), "--processes", 2) == 0
    assert differences(tmp_path / "whole", tmp_path / "run") == []
