"""Runs a study: every combination of the values that vary, each by a `danlu train` of its own.

A process of its own gives each run its own peak of memory, and lets the others go on when one fails. This file loads no
torch: beside a run that trains, the study itself is small.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from danlu import recipe as recipes
from danlu.atomic_write import write_atomically
from danlu.errors import CheckpointError, RecipeError, ResourceError
from danlu.file_lock import is_lock_of
from danlu.output_folder import refuse_foreign_files
from danlu.recipe import Recipe, changes, resolved_yaml
from danlu.recipe.explanation import value_at
from danlu.recipe.parameter_grid import SEED, Combination, VariedKey, parameter_grid
from danlu.recipe.sections import Section
from danlu.report.study_results import STUDY, is_finished, known_runs, study_json
from danlu.train.run_lock import LOCK_FILE, RunLock

POLL_S = 0.2  # how often the console is told what a run has written
MAX_LINES = 12  # of a failed run's log
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class PlannedRun:
    """A run with its recipe, whose `output` is the run's own folder."""

    run: Combination
    recipe: Recipe

    @property
    def folder(self) -> Path:
        return Path(self.recipe.output)

    @property
    def recipe_file(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.yaml")

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass(frozen=True)
class Plan:
    """What a study folder is to hold: the runs asked for, and those that it knows beside them."""

    folder: Path
    keys: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    others: tuple[Combination, ...]


class Child(Protocol):
    """A process under way, as `subprocess.Popen` has it."""

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...


class StudyObserver(Protocol):
    """Told what becomes of the runs."""

    def skipped(self, run: PlannedRun) -> None: ...

    def began(self, run: PlannedRun) -> None: ...

    def wrote(self, text: str) -> None:
        """What the run under way has told its console since the last time, in whole lines."""
        ...

    def ended(self, run: PlannedRun, failure: str | None) -> None:
        """failure: why, for one that failed."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How a study ended."""

    finished: int
    of: int
    failed: tuple[str, ...]
    signal: int | None  # what it was told to stop by
    stopped_in: str | None  # the run that this stopped

    @property
    def stopped(self) -> bool:
        return self.signal is not None and self.finished < self.of


# -- what is to be run ------------------------------------------------------------------------------------------------


def plan(path: Path, varied: Sequence[VariedKey], overrides: Sequence[str]) -> Plan:
    """The runs that the arguments ask for, each with its checked recipe, and the folder that they go to.

    A combination that the folder knows already keeps the name that it has there; others join it. Nothing is written.
    Raises RecipeError with all that is wrong with any combination, ResourceError for a folder of something else, and
    CheckpointError for one that holds a study of another recipe.
    """
    combinations = parameter_grid(varied)
    recipes_of = _load(path, varied, combinations, overrides)
    folder = Path(recipes_of[0].output).expanduser()
    _refuse_strangers(folder)
    keys, known = _known(folder)
    keys = tuple(dict.fromkeys((*keys, *(one.key for one in varied))))
    if known:
        _refuse_another(folder, known[0], recipes_of[0], keys)
    planned: list[PlannedRun] = []
    for combination, recipe in zip(combinations, recipes_of, strict=True):
        here = [one for one in planned if _same(one.recipe, recipe, keys)]
        if here:
            raise RecipeError(f"{_told(here[0].run)} and {_told(combination)} are the same run: leave one out")
        there = [one.run.name for one in known if _same(one.recipe, recipe, keys)]
        name = there[0] if there else _free(combination.name, {one.run.name for one in (*known, *planned)})
        run = _filled(Combination(name, combination.values), recipe, keys)
        planned.append(PlannedRun(run, recipe.model_copy(update={"output": str(folder / name)})))
    names = {one.run.name for one in planned}
    others = tuple(_filled(one.run, one.recipe, keys) for one in known if one.run.name not in names)
    return Plan(folder, keys, tuple(planned), others)


def notes(plan: Plan) -> list[str]:
    """Remarks on a study that may run but may not say what it seems to; for the console, once."""
    drawn = plan.runs[0].recipe.data.eval
    if SEED in plan.keys and isinstance(drawn, int | float):
        return [
            f"data.eval: {drawn} is drawn by the seed, so runs of another seed are judged by other rows, and the "
            "spread of their losses is that of the rows too; name a file to judge all by the same"
        ]
    return []


def _filled(run: Combination, recipe: Recipe, keys: Sequence[str]) -> Combination:
    """With a value for every key: what was written, or what the recipe has."""
    return Combination(run.name, {key: run.values.get(key) or shown(recipe, key) for key in keys})


def _load(
    path: Path, varied: Sequence[VariedKey], combinations: Sequence[Combination], overrides: Sequence[str]
) -> list[Recipe]:
    """The recipe of each combination. Raises RecipeError with every problem once, told of the argument it is of."""
    set_twice = [
        f"override {text!r}: {one.argument} gives this key its values. Leave one of them out"
        for text in overrides
        for one in varied
        if text.partition("=")[0].strip() == one.key
    ]
    if set_twice:
        raise RecipeError(set_twice)
    arguments = {f"override {f'{one.key}={value}'!r}": one.argument for one in varied for value in one.values}
    found: list[Recipe] = []
    where: dict[str, list[Combination]] = {}
    for combination in combinations:
        try:
            found.append(recipes.load(path, [*overrides, *combination.overrides]).recipe)
        except RecipeError as error:
            for line in error.problems:
                place = next((place for place in arguments if line.startswith(place)), None)
                told = line if place is None else arguments[place] + line.removeprefix(place)
                where.setdefault(told, []).append(combination)
    if where:
        raise RecipeError([_placed(line, of, combinations) for line, of in where.items()])
    return found


def _placed(line: str, of: Sequence[Combination], combinations: Sequence[Combination]) -> str:
    """A problem of the file that only some combinations have says which is the first."""
    if line.startswith("--") or len(of) == len(combinations):
        return line
    return f"{line} (with {_told(of[0])})"


def _told(combination: Combination) -> str:
    return " ".join(combination.overrides)


def shown(recipe: Recipe, key: str) -> str:
    """A value of a recipe as a table shows it: a section by what stands for it alone, its kind or its path."""
    value = value_at(recipe, key)
    if isinstance(value, Section) and value.short is not None:
        value = getattr(value, value.short)
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


# -- the folder -------------------------------------------------------------------------------------------------------


def _refuse_strangers(folder: Path) -> None:
    """Raises ResourceError for a folder that holds other things than a study."""
    if not folder.is_dir() or (folder / STUDY).is_file():
        return
    refuse_foreign_files(
        folder,
        lambda name: is_lock_of(name, LOCK_FILE),
        holds="the output folder holds other things than a study",
        advice="Choose an empty or new `output`.",
    )


def _known(folder: Path) -> tuple[tuple[str, ...], list[PlannedRun]]:
    """Keys and runs of the study in a folder, with their recipes as they were written there."""
    keys, runs = known_runs(folder)
    known = []
    for run in runs:
        file = folder / f"{run.name}.yaml"
        try:
            known.append(PlannedRun(run, recipes.load(file).recipe))
        except RecipeError as error:
            lines = "\n  ".join(error.problems)
            raise CheckpointError(
                f"{folder}: the recipe of a run of this study does not hold any more:\n  {lines}\n"
                "Put that right, or choose another `output`."
            ) from error
    return keys, known


def _refuse_another(folder: Path, known: PlannedRun, recipe: Recipe, keys: Sequence[str]) -> None:
    """Raises CheckpointError if the recipes differ in more than the keys that vary."""
    found = [one for one in changes(known.recipe, recipe) if one.matters and not _is_varied(one.key, keys)]
    if found:
        lines = "\n  ".join(str(one) for one in found)
        raise CheckpointError(
            f"{folder} holds a study of another recipe; what differs (there -> here):\n  {lines}\n"
            "To start anew, choose another `output`; to extend the study, undo the change or vary that key as well."
        )


def _same(one: Recipe, other: Recipe, keys: Sequence[str]) -> bool:
    """Whether two recipes are one run of the study: alike in what varies, and in what matters to the result."""
    return not any(
        change.key != "output" and (change.matters or _is_varied(change.key, keys)) for change in changes(one, other)
    )


def _is_varied(changed: str, keys: Sequence[str]) -> bool:
    """Whether a key lies at, below or above one that varies; a `kind` brings a whole section with it."""
    tops = [key.removesuffix(".kind") for key in keys]
    return any(changed == top or changed.startswith(f"{top}.") or top.startswith(f"{changed}.") for top in tops)


def _free(name: str, taken: set[str]) -> str:
    """The name, or one with a number behind it where another run has it."""
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def _write(plan: Plan) -> None:
    """study.json, and the recipes of runs that are not finished."""
    try:
        for one in plan.runs:
            if not is_finished(one.folder):
                write_atomically(one.recipe_file, resolved_yaml(one.recipe).encode())
        runs = (*plan.others, *(one.run for one in plan.runs))
        write_atomically(plan.folder / STUDY, study_json(plan.keys, runs).encode())
    except OSError as error:
        raise ResourceError(
            f"{plan.folder}: the study folder cannot be written: {error.strerror}. "
            "Free some space, or choose another `output`."
        ) from error


# -- running ----------------------------------------------------------------------------------------------------------


def launch(run: PlannedRun) -> Child:
    """`danlu train` of the run's recipe; what it tells its console goes to the end of its log.

    In a process group of its own, so that Ctrl-C reaches it once: through `SignalForwarder`.
    """
    # -P: a file of the working directory that is named like a package (datasets.py) must not take its place.
    command = [sys.executable, "-P", "-m", "danlu", "train", str(run.recipe_file)]
    with run.log.open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0
        )


class SignalForwarder:
    """While entered, SIGINT, SIGTERM and SIGHUP are passed on to the run under way, which saves and stops.

    A signal that was ignored before (`nohup`) stays so.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._child: Child | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalForwarder:
        for number in _PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def stopping(self) -> bool:
        return self.received is not None

    def to(self, child: Child | None) -> None:
        """Pass signals on to this process from now on; also the one that came while it was being started."""
        self._child = child
        if child is not None and self.received is not None:
            child.send_signal(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        told = b"stops at once" if self.stopping() else b"saves and stops; once more to stop it at once"
        # A run knows what to do about these two; the terminal that was closed is the study's, not its own.
        self.received = signal.SIGTERM if number == signal.SIGHUP else number
        if self._child is not None:
            os.write(2, b"\nthe run under way " + told + b"\n")  # print may find its own buffer half-written
            self._child.send_signal(self.received)


def run(plan: Plan, shows: StudyObserver) -> Outcome:
    """Trains what is not finished, in order. Another `danlu study` of the folder is kept out meanwhile.

    A run that fails is told of, and the next one begins. After a signal the run under way saves and stops, and no other
    begins. Raises ResourceError for a folder that cannot be written or is in use.
    """
    failed: list[str] = []
    stopped_in = None
    with RunLock(plan.folder), SignalForwarder() as relay:
        _write(plan)
        for one in plan.runs:
            if relay.stopping():
                break
            if is_finished(one.folder):
                shows.skipped(one)
                continue
            shows.began(one)
            start = one.log.stat().st_size if one.log.is_file() else 0
            try:
                child = launch(one)
            except OSError as error:
                raise ResourceError(f"{one.run.name}: its process cannot be started: {error}") from error
            relay.to(child)
            code = _follow(child, one.log, start, shows)
            relay.to(None)
            if code and relay.stopping():
                stopped_in = one.run.name
                break
            failure = _failure(code, one.log, start) if code else None
            shows.ended(one, failure)
            failed += [one.run.name] if failure is not None else []
    done = sum(is_finished(one.folder) for one in plan.runs)
    return Outcome(done, len(plan.runs), tuple(failed), relay.received, stopped_in)


def _follow(child: Child, log: Path, start: int, shows: StudyObserver) -> int:
    """Waits for the end of a process, telling meanwhile what it writes; its exit code."""
    with log.open("rb") as told:
        told.seek(start)
        rest = b""
        while True:
            try:
                code: int | None = child.wait(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                code = None
            whole, newline, rest = (rest + told.read()).rpartition(b"\n")
            if newline:
                shows.wrote((whole + newline).decode(errors="replace"))
            if code is not None:
                return code


def _failure(code: int, log: Path, start: int) -> str:
    """Why a run failed: its error message, or the end of what it wrote."""
    lines = [line for line in log.read_bytes()[start:].decode(errors="replace").splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if line.startswith("error: ")), None)
    told = lines[-MAX_LINES:] if first is None else lines[first : first + MAX_LINES]
    if code < 0:
        name = signal.Signals(-code).name
        told.append(f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else ""))
    return "\n".join(told) or f"ended with exit code {code}"
