"""Which runs `danlu study` plans, how it runs them, and what it does about signals, failures and what is there already.

Runs are processes forked from one that has torch loaded, or none at all where only the planning is looked at.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from builders.study_folders import write_run
from builders.tiny_world import World, differences, last_state, metrics, start

from danlu import recipe as recipes
from danlu.core.errors import CheckpointError, RecipeError, ResourceError
from danlu.recipe.parameter_grid import parse_vary_options
from danlu.report.study_results import known_runs, read_study
from danlu.study import runner
from danlu.study.plan import Plan, PlannedRun, make_plan, notes, value_text


class RecordingObserver:
    """What became of the runs, by name."""

    def __init__(self) -> None:
        self.skips: list[str] = []
        self.begins: list[str] = []
        self.failures: dict[str, str] = {}
        self.said = ""

    def run_skipped(self, run: PlannedRun) -> None:
        self.skips.append(run.name)

    def run_started(self, run: PlannedRun) -> None:
        self.begins.append(run.name)

    def run_printed(self, text: str) -> None:
        assert text.endswith("\n")
        self.said += text

    def run_ended(self, run: PlannedRun, failure: str | None) -> None:
        if failure is not None:
            self.failures[run.name] = failure


class Forked:
    """A forked process as `study` sees one."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("danlu", timeout or 0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def forked(before: Callable[[], None] | None = None) -> Callable[[PlannedRun], Forked]:
    def launch(run: PlannedRun) -> Forked:
        run.log.touch()
        return Forked(start(["train", run.recipe_file], run.log, before))

    return launch


class Over:
    """A process that has ended already."""

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def send_signal(self, number: int) -> None:
        raise AssertionError("there is nothing to be told")


def written(run: PlannedRun) -> Over:
    """A run that takes no time."""
    run.log.touch()
    write_run(run.folder)
    return Over()


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "launch", written)


def planned(recipe: Path, *vary: str, seeds: str | None = None, overrides: tuple[str, ...] = ()) -> Plan:
    return make_plan(recipe, parse_vary_options(vary, seeds), overrides)


def names(of: Plan) -> list[str]:
    return [one.name for one in of.runs]


# -- planning ---------------------------------------------------------------------------------------------------------


def test_each_run_has_the_recipe_with_its_values(tiny_world: World, tmp_path: Path, pretended: None) -> None:
    folder = tmp_path / "study"
    recipe = tiny_world.recipe(folder)
    wanted = planned(recipe, "optimizer.learning_rate=1e-3,1e-2", "batch.micro=1", seeds="0,7", overrides=("steps=3",))
    assert (wanted.folder, wanted.other_runs) == (folder, ())
    assert wanted.keys == ("optimizer.learning_rate", "batch.micro", "seed")
    runner.run(wanted, RecordingObserver())
    for one, (rate, seed) in zip(wanted.runs, [(1e-3, 0), (1e-3, 7), (1e-2, 0), (1e-2, 7)], strict=True):
        own = recipes.load(one.recipe_file).recipe
        assert own == one.recipe
        assert (own.optimizer.learning_rate, own.seed, own.batch.micro, own.steps) == (rate, seed, 1, 3)
        assert Path(own.output) == one.folder == folder / one.name


@pytest.mark.parametrize(
    ("vary", "seeds", "said"),
    [
        (["optimizer.lerning_rate=1,2"], None, ["optimizer.lerning_rate: unknown key in AdamW. Did you mean 'learni"]),
        (["lr=1,2"], None, ["--vary 'lr=1,2' lr: unknown key. danlu's key for it is optimizer.learning_rate"]),
        (["batch.micro=1,x,0"], None, [
            "--vary 'batch.micro=1,x,0' batch.micro: expected a whole number, 1 or more, or auto, not 'x'.",
            "--vary 'batch.micro=1,x,0' batch.micro: expected a whole number, 1 or more, or auto, not 0",
        ]),
        (
            ["batch.micro=3,2"],
            None,
            ["--vary 'batch.micro=3,2' batch.micro: 3 does not divide the 4 sequences of a step."],
        ),
        (["seed=1", "data.train=none.json,nil.json"], None, ["'none.json'", "'nil.json'"]),
        ([], "0,-1", ["--seeds '0,-1' seed: expected a whole number from 0 to below 2^63, not -1"]),
        (["a.b=[1,2"], None, ["--vary 'a.b=[1,2': not valid YAML"]),
        (["steps=4", "schedule.warmup=9,2"], None, ["--vary 'schedule.warmup=9,2' schedule.warmup: a warm-up of 9 st"]),
    ],
)  # fmt: skip
def test_every_value_is_checked_before_anything_runs(
    tiny_world: World, tmp_path: Path, vary: list[str], seeds: str | None, said: list[str]
) -> None:
    recipe = tiny_world.recipe(tmp_path / "study")
    with pytest.raises(RecipeError) as caught:
        planned(recipe, *vary, seeds=seeds)
    assert len(caught.value.problems) == len(said)
    assert all(part in problem for part, problem in zip(said, caught.value.problems, strict=True))
    assert not (tmp_path / "study").exists()


def test_a_problem_of_the_file_with_some_values_says_with_which(tiny_world: World, tmp_path: Path) -> None:
    recipe = tiny_world.recipe(tmp_path / "study", batch={"sequences": None, "tokens": 128, "micro": "auto"}, seed="x")
    with pytest.raises(RecipeError) as caught:
        planned(recipe, "data.max_length=64,100")
    always, sometimes = sorted(caught.value.problems, key=lambda line: "data.max_length" in line)
    assert "seed: expected a whole number" in always and "(with" not in always
    assert sometimes.endswith("Use 100 or 200 (with data.max_length=100)")


def test_a_key_is_set_or_varied(tiny_world: World, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"override 'seed=3': --seeds '0,1' gives this key its values. Leave one of"):
        planned(tiny_world.recipe(tmp_path / "study"), seeds="0,1", overrides=("seed=3",))


def test_two_ways_of_writing_one_value(tiny_world: World, tmp_path: Path) -> None:
    recipe = tiny_world.recipe(tmp_path / "study")
    with pytest.raises(
        RecipeError, match="optimizer.learning_rate=1e-3 and optimizer.learning_rate=0.001 are the same"
    ):
        planned(recipe, "optimizer.learning_rate=1e-3,0.001")
    # Where it is the varying that is of interest, values that change no result are not the same run.
    assert len(planned(recipe, "batch.micro=1,2").runs) == 2


def test_seeds_that_draw_their_own_held_out_rows_are_noted(tiny_world: World, tmp_path: Path) -> None:
    drawn = tiny_world.recipe(tmp_path / "study", data={"eval": 0.1})
    (note,) = notes(planned(drawn, seeds="0,1"))
    assert note.startswith("data.eval: 0.1 is drawn by the seed, so runs of another seed are judged by other rows")
    assert notes(planned(drawn, "steps=2,3")) == []
    assert notes(planned(tiny_world.recipe(tmp_path / "study"), seeds="0,1")) == []
    named = tiny_world.recipe(tmp_path / "study", data={"eval": [{"path": str(tiny_world.chat)}]})
    assert notes(planned(named, seeds="0,1")) == []


# -- a folder that is there already -----------------------------------------------------------------------------------


def test_a_study_is_extended(tiny_world: World, tmp_path: Path, pretended: None) -> None:
    recipe = tiny_world.recipe(tmp_path / "study")
    observer = RecordingObserver()
    runner.run(planned(recipe, "optimizer.learning_rate=1e-2,2e-2"), observer)
    # Other values of the key,
    runner.run(planned(recipe, "optimizer.learning_rate=0.02,5e-2"), observer)
    assert observer.begins == ["learning_rate-1e-2", "learning_rate-2e-2", "learning_rate-5e-2"]
    assert observer.skips == ["learning_rate-2e-2"]
    # and seeds: the runs that are there had the recipe's own, 0.
    runner.run(planned(recipe, "optimizer.learning_rate=1e-2", seeds="0,1"), observer)
    assert observer.skips[1:] == ["learning_rate-1e-2"] and observer.begins[3:] == ["learning_rate-1e-2_seed-1"]
    found = read_study(tmp_path / "study")
    assert found.keys == ("optimizer.learning_rate", "seed")
    assert [tuple(one.values.values()) for one in found.results] == [
        ("1e-2", "0"), ("1e-2", "1"), ("0.02", "0"), ("5e-2", "0"),
    ]  # fmt: skip
    assert [len(group.results) for group in found.groups] == [2, 1, 1]


def test_what_does_not_matter_may_change(tiny_world: World, tmp_path: Path, pretended: None) -> None:
    folder, observer = tmp_path / "study", RecordingObserver()
    runner.run(planned(tiny_world.recipe(folder), "optimizer.weight_decay=0,0.1"), observer)
    runner.run(planned(tiny_world.recipe(folder, checkpoint={"every": 5}), "optimizer.weight_decay=0"), observer)
    assert observer.skips == ["weight_decay-0"]
    # But a run that is compared for its batch.micro is one of its own.
    runner.run(planned(tiny_world.recipe(folder), "optimizer.weight_decay=0", "batch.micro=4,2"), observer)
    assert observer.begins[2:] == ["weight_decay-0_micro-4"] and observer.skips[1:] == ["weight_decay-0"]


def test_a_name_is_given_once(tiny_world: World, tmp_path: Path, pretended: None) -> None:
    folder = tmp_path / "study"
    auto, one = (tiny_world.recipe(folder, tmp_path / f"{micro}.yaml", batch={"micro": micro}) for micro in ("auto", 1))
    runner.run(planned(auto, "seed=0"), RecordingObserver())
    runner.run(planned(auto, "seed=0", "batch.micro=2"), RecordingObserver())
    # Now that batch.micro varies, a recipe with another one is another run, whose name is taken.
    for _ in range(2):
        wanted = planned(one, "seed=0")
        assert names(wanted) == ["seed-0-2"] and wanted.runs[0].combination.values == {"seed": "0", "batch.micro": "1"}
        runner.run(wanted, RecordingObserver())
    assert [run.name for run in known_runs(folder)[1]] == ["seed-0", "seed-0_micro-2", "seed-0-2"]


def test_another_recipe_is_refused(tiny_world: World, tmp_path: Path, pretended: None) -> None:
    folder = tmp_path / "study"
    runner.run(planned(tiny_world.recipe(folder), "optimizer.weight_decay=0,0.1"), RecordingObserver())
    before = sorted(folder.iterdir())
    with pytest.raises(CheckpointError) as caught:
        planned(tiny_world.recipe(folder, steps=13), "optimizer.weight_decay=0.2")
    assert str(caught.value) == (
        f"{folder} holds a study of another recipe; what differs (there -> here):\n  steps: 12 -> 13\n"
        "To start again, choose another `output`; to extend the study, undo the change or vary that key as well."
    )
    assert sorted(folder.iterdir()) == before
    # As it says: with that key among those that vary, the study goes on.
    wanted = planned(tiny_world.recipe(folder), "optimizer.weight_decay=0", "steps=12,13")
    assert names(wanted) == ["weight_decay-0", "weight_decay-0_steps-13"]
    assert [one.name for one in wanted.other_runs] == ["weight_decay-0.1"]


def test_a_whole_section_may_vary(tiny_world: World, tmp_path: Path, pretended: None) -> None:
    folder = tmp_path / "study"
    recipe = tiny_world.recipe(folder)
    runner.run(planned(recipe, "optimizer.kind=adamw,lion"), RecordingObserver())
    assert names(planned(recipe, "optimizer.kind=muon")) == ["kind-muon"]
    runner.run(
        planned(recipe, "optimizer={kind: sgd, momentum: 0},{kind: adamw, learning_rate: 0.01}"), RecordingObserver()
    )
    _, runs = known_runs(folder)
    assert [dict(run.values) for run in runs] == [
        {"optimizer.kind": "lion", "optimizer": "lion"},
        {"optimizer.kind": "sgd", "optimizer": "{kind: sgd, momentum: 0}"},
        {"optimizer.kind": "adamw", "optimizer": "{kind: adamw, learning_rate: 0.01}"},
    ]


def test_a_folder_of_something_else_is_refused(tiny_world: World, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    for name in ("recipe.yaml", "checkpoints", "model", "a", "b", "c", "d"):
        (folder / name).mkdir(parents=True)
    with pytest.raises(
        ResourceError, match=r"other things than a study \(a, b, c, checkpoints, d and 2 more\). Choose an"
    ):
        planned(tiny_world.recipe(folder), seeds="0")


def test_a_run_whose_recipe_is_gone(tiny_world: World, tmp_path: Path, pretended: None) -> None:
    folder = tmp_path / "study"
    recipe = tiny_world.recipe(folder)
    runner.run(planned(recipe, seeds="0"), RecordingObserver())
    (folder / "seed-0.yaml").unlink()
    with pytest.raises(
        CheckpointError, match="the recipe of a run of this study does not hold any more:\n.*no such file"
    ):
        planned(recipe, seeds="0,1")


def test_one_study_at_a_time(tiny_world: World, tmp_path: Path, pretended: None) -> None:
    wanted = planned(tiny_world.recipe(tmp_path / "study"), seeds="0")
    from danlu.core.run_files import RunLock

    with RunLock(wanted.folder), pytest.raises(ResourceError, match="another danlu process"):
        runner.run(wanted, RecordingObserver())


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", "0"), ("optimizer", "adamw"), ("optimizer.betas", "(0.9, 0.95)"), ("compile", "false"), ("ema", "null"),
     ("data.train.0.rows", "null"), ("data.train.3.rows", "null"), ("optimizer.momentum", "null")],
)  # fmt: skip
def test_values_of_runs_that_did_not_vary_the_key(tiny_world: World, tmp_path: Path, key: str, value: str) -> None:
    assert value_text(recipes.load(tiny_world.recipe(tmp_path / "run")).recipe, key) == value


# -- running ----------------------------------------------------------------------------------------------------------


def test_the_command(tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started: danlu's own interpreter, in a group that the terminal's Ctrl-C does not reach."""
    (one,) = planned(tiny_world.recipe(tmp_path / "study"), seeds="0").runs
    one.folder.parent.mkdir()
    started: dict[str, Any] = {}

    def popen(command: list[str], **options: Any) -> None:
        started.update(options, command=command)

    monkeypatch.setattr(subprocess, "Popen", popen)
    runner.launch(one)
    assert started["command"][1:] == ["-P", "-m", "danlu", "train", str(tmp_path / "study" / "seed-0.yaml")]
    assert started["process_group"] == 0 and started["stdin"] == subprocess.DEVNULL
    assert started["stdout"].name == str(one.log) and started["stderr"] == subprocess.STDOUT


def test_a_real_process(tiny_world: World, tmp_path: Path) -> None:
    wanted, observer = planned(tiny_world.recipe(tmp_path / "study", steps=2), seeds="0"), RecordingObserver()
    outcome = runner.run(wanted, observer)
    assert (outcome.finished, observer.failures) == (1, {})
    assert observer.said == wanted.runs[0].log.read_text() and "finished after step 2" in observer.said
    assert read_study(tmp_path / "study").finished[0].losses


def test_a_run_that_fails_does_not_stop_the_others(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_world.recipe(tmp_path / "study", steps=2, batch={"micro": "auto"})
    wanted = planned(recipe, "batch.memory=1e-6,8")
    first, second = names(wanted)
    wanted.folder.mkdir()
    wanted.runs[0].log.write_text("error: of another time\n")
    monkeypatch.setattr(runner, "launch", forked())
    observer = RecordingObserver()
    outcome = runner.run(wanted, observer)
    assert (outcome.finished, outcome.total, outcome.failed, outcome.stopped) == (1, 2, (first,), False)
    assert list(observer.failures) == [first] and observer.begins == [first, second]
    assert " batch.memory: 1e-06 GiB do not hold one packed sequence" in observer.failures[first]
    assert "finished after step 2" in observer.said and "of another time" not in observer.said
    again = RecordingObserver()
    assert runner.run(planned(recipe, "batch.memory=1e-6,8"), again).failed == (first,)
    assert (again.skips, again.begins) == ([second], [first])


def test_a_failure_without_a_message_shows_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("before\n" + "".join(f"line {number}\n\n" for number in range(20)))
    assert runner._failure(1, log, 7) == "\n".join(f"line {number}" for number in range(8, 20))
    assert runner._failure(-signal.SIGSEGV, log, log.stat().st_size) == "ended by SIGSEGV"
    assert runner._failure(3, log, log.stat().st_size) == "ended with exit code 3"


def kill_me_at(step: int) -> None:
    from danlu.training import loop

    real = loop.accumulate

    def accumulate(*arguments: Any, **options: Any) -> Any:
        if options["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    loop.accumulate = accumulate


def interrupt(study_process: int, step: int) -> None:
    """In a run: have the study interrupted in that step, and go on once it has passed that on."""
    from danlu.core.stop_signals import StopRequest
    from danlu.training import loop

    real, handle, arrived = loop.accumulate, StopRequest._handle, []

    def watched(self: StopRequest, *arguments: Any) -> None:
        handle(self, *arguments)
        arrived.append(True)

    def accumulate(*arguments: Any, **options: Any) -> Any:
        if options["step"] == step:
            os.kill(study_process, signal.SIGINT)
            while not arrived:
                time.sleep(0.01)
        return real(*arguments, **options)

    StopRequest._handle = watched  # type: ignore[method-assign]
    loop.accumulate = accumulate


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT is ignored where the tests run in a shell's background, and a study then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupted_and_killed_it_goes_on_to_the_same_bits(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_world.recipe(tmp_path / "study")
    wanted = planned(recipe, "optimizer.learning_rate=1e-2,2e-2")
    first, second = names(wanted)
    monkeypatch.setattr(runner, "launch", forked(partial(interrupt, os.getpid(), 6)))
    observer = RecordingObserver()
    outcome = runner.run(wanted, observer)
    assert (outcome.signal, outcome.stopped, outcome.stopped_in, outcome.finished) == (signal.SIGINT, True, first, 0)
    assert observer.begins == [first] and not observer.failures
    assert "stopped after step 6, saved in" in observer.said
    assert "the run under way saves and stops; once more to stop it at once" in capfd.readouterr().err
    assert last_state(wanted.runs[0].folder)[0].name == "step-00000006"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(runner, "launch", forked(partial(kill_me_at, 7)))
    observer = RecordingObserver()
    outcome = runner.run(planned(recipe, "optimizer.learning_rate=1e-2,2e-2"), observer)
    assert outcome.failed == (first, second) and not outcome.stopped
    assert all(told.endswith("ended by SIGKILL (out of memory?)") for told in observer.failures.values())
    assert [line["step"] for line in metrics(wanted.runs[1].folder)] == [1, 2, 3, 4, 5, 6]
    monkeypatch.setattr(runner, "launch", forked())
    outcome = runner.run(planned(recipe, "optimizer.learning_rate=1e-2,2e-2"), RecordingObserver())
    assert (outcome.finished, outcome.failed, outcome.signal) == (2, (), None)
    for one, rate in zip(wanted.runs, (1e-2, 2e-2), strict=True):
        whole = tmp_path / f"whole-{rate}"
        process = start(["train", tiny_world.recipe(whole, optimizer={"learning_rate": rate})], tmp_path / "log.txt")
        process.join()
        assert differences(whole, one.folder) == []
    assert differences(wanted.runs[0].folder, wanted.runs[1].folder) != []


def test_a_signal_that_comes_while_a_run_is_started_reaches_it(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    class Told(Over):
        def wait(self, timeout: float | None = None) -> int:
            return 128 + told[0]

        def send_signal(self, number: int) -> None:
            told.append(number)

    def launch(run: PlannedRun) -> Told:
        run.log.touch()
        signal.raise_signal(signal.SIGHUP)
        return Told()

    monkeypatch.setattr(runner, "launch", launch)
    outcome = runner.run(planned(tiny_world.recipe(tmp_path / "study"), seeds="0,1"), RecordingObserver())
    assert told == [signal.SIGTERM]  # the terminal that was closed is the study's
    assert (outcome.signal, outcome.stopped_in) == (signal.SIGTERM, "seed-0")


def test_a_repeated_warning_is_forwarded_once_and_sigterm_again() -> None:
    told: list[int] = []

    class Told(Over):
        def send_signal(self, number: int) -> None:
            told.append(number)

    with runner.SignalForwarder() as forwarder:
        forwarder.forward_to(Told())
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(number)
    assert told == [signal.SIGTERM, signal.SIGTERM]  # the second stops the run at once


@pytest.fixture
def ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def test_what_nohup_ignores_stays_ignored(ignored: None) -> None:
    with runner.SignalForwarder() as forwarder:
        signal.raise_signal(signal.SIGHUP)
        assert not forwarder.stopping()
        signal.raise_signal(signal.SIGTERM)
        assert forwarder.stopping()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
