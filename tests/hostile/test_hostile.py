"""Every bad input of the tables: its exit code, a message that says what and where, no traceback, and bounded work."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from builders.tiny_world import InThisProcess, World, danlu

from danlu.core.terminal import printable
from hostile.case import Case, Place
from hostile.cases_data import CASES as DATA
from hostile.cases_environment import CASES as ENVIRONMENT
from hostile.cases_folders import CASES as FOLDERS
from hostile.cases_preference import CASES as PREFERENCE
from hostile.cases_recipe import CASES as RECIPE
from hostile.cases_rl import CASES as RL
from hostile.cases_rollout import CASES as ROLLOUT

CASES = [*RECIPE, *DATA, *FOLDERS, *ENVIRONMENT, *PREFERENCE, *RL, *ROLLOUT]

# Not a bound that a case is judged by: without it, one that waits for ever would end the whole suite without a name.
HANGS_S = 60


class TooMuchError(BaseException):
    """More work than a case may take; no handler of danlu catches it."""


@contextmanager
def at_most(calls: int, read_bytes: int) -> Iterator[None]:
    """Raises TooMuchError as soon as more functions have been called, or afterwards if more bytes have been read."""
    left = [calls]

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            left[0] -= 1
            if left[0] == 0:
                raise TooMuchError(
                    f"more than {calls:,} calls, the last in {frame.f_code.co_filename}:{frame.f_lineno}"
                )

    before = bytes_read()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    if bytes_read() - before > read_bytes:
        raise TooMuchError(f"{bytes_read() - before:,} bytes read, more than {read_bytes:,}")


def bytes_read() -> int:
    """By this process so far, from any file or pipe (Linux)."""
    file = Path("/proc/self/io")
    return int(file.read_text().splitlines()[0].removeprefix("rchar: ")) if file.is_file() else 0


def faults(case: Case, place: Place, code: int, out: str, err: str) -> list[str]:
    """Where what came of a case differs from what must."""
    said = out + err
    found = [f"exit code {code}, not {case.exit_code}"] if code != case.exit_code else []
    found += [f"not said: {place.said(part)}" for part in case.says if place.said(part) not in said]
    found += ["a traceback"] if "Traceback" in said else []
    if not case.on_stdout and not err.startswith("error: ") and "\nerror: " not in err:
        found.append("no line that begins with 'error: '")
    found += [] if printable(said) == said else ["control characters"]
    return found


@pytest.fixture(scope="session")
def home(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder for all cases, in which what is done once a machine is done. Work is counted after that."""
    home = tmp_path_factory.mktemp("home")
    for name in ("danlu.cli.merge", "danlu.cli.train", "danlu.cli.verify", "danlu.run.train"):
        import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setattr("danlu.data.prepare.WorkerPool", InThisProcess)
        folder = tiny_world.folder / "first"
        assert danlu("train", tiny_world.recipe(folder, steps=1, schedule={"warmup": 0})) == 0
        assert danlu("generate", folder, "--prompt", "a", "--max-new-tokens", 1) == 0
    return home


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bad_input(
    case: Case,
    tiny_world: World,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    for module in ("preview", "dataset_summary"):
        monkeypatch.setattr(f"danlu.data.{module}.WorkerPool", InThisProcess)
    monkeypatch.setenv("COLUMNS", "80")
    for name, value in case.environ.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    place = Place(tmp_path, tiny_world)
    case.arrange(place)
    arguments = [place.said(argument) for argument in case.arguments]
    capsys.readouterr()
    with giving_up():
        with at_most(case.most_calls, case.max_bytes):
            code = danlu(*arguments)
        out, err = capsys.readouterr()
    assert faults(case, place, code, out, err) == [], out + err
    for part in map(place.said, case.says):  # the case would fail, were its message another
        assert faults(case, place, code, out.replace(part, "?"), err.replace(part, "?")), part
    made = {entry.name: entry for entry in (tmp_path / "run").glob("*")}
    files = {".lock", "recipe.yaml", "environment.json", "plan.json", "logs", "metrics.jsonl", "rollouts.jsonl"}
    assert made.keys() <= files
    assert "metrics.jsonl" not in made or '"loss"' not in made["metrics.jsonl"].read_text(), "something was trained"


@contextmanager
def giving_up() -> Iterator[None]:
    def hangs(number: int, frame: FrameType | None) -> None:
        raise TooMuchError("it waits for ever")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANGS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_the_tables_are_what_they_promise() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert len(CASES) >= LEAST
    for case in CASES:
        assert case.exit_code in range(1, 8) and case.says, case.name
        assert sum(map(len, case.says)) >= 25, f"{case.name}: this fits many messages"


LEAST = 150


def test_the_count_of_work_counts(tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(1000):
            abs(1)

    with at_most(2000, 1 << 20):
        work()
    with pytest.raises(TooMuchError, match="more than 500 calls"), at_most(500, 1 << 20):
        work()
    (tmp_path / "file").write_bytes(bytes(2 << 20))
    with pytest.raises(TooMuchError, match="bytes read, more than"), at_most(2000, 1 << 20):
        (tmp_path / "file").read_bytes()
