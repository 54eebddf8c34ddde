"""The last net: an exception that nobody raises on purpose ends in a message, a code and a file with its traceback."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from danlu import registry
from danlu.cli import crash, main
from danlu.core.errors import InternalError
from danlu.data.worker_pool import UnexpectedError
from danlu.registry import VERBS, Verb

Crash = Callable[[BaseException], tuple[int, str]]


def fail(how: str) -> None:
    """Raise what a test wants raised."""
    raise RAISED[0]


RAISED: list[BaseException] = []


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Crash:
    """Runs a verb that raises; the exit code, and what stderr was told."""
    monkeypatch.setitem(registry.VERBS, "fail", Verb(f"{__name__}:fail", "Look", "fails"))
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules[fail.__module__])
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(error: BaseException) -> tuple[int, str]:
        RAISED[:] = [error]
        code = main.main(["fail", "a b"])
        out, said = capsys.readouterr()
        assert out == "" and "Traceback" not in said.partition("no file could be written")[0]
        return code, said

    return run


def nested(depth: int = 0) -> None:
    nested(depth + 1)


def recursion() -> RecursionError:
    try:
        nested()
    except RecursionError as error:
        return error
    raise AssertionError


TRACE = "Traceback (most recent call last):"
BUG = "This is a bug of danlu, not a mistake of yours."


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ZeroDivisionError("ours"), 70, f"error: ZeroDivisionError: ours. {BUG}\n"),
        (KeyError("a\x1b[2J"), 70, rf"error: KeyError: 'a\x1b[2J'. {BUG}" + "\n"),
        (AssertionError(), 70, f"error: AssertionError. {BUG}\n"),
        (ValueError("first\nsecond"), 70, f"error: ValueError: first. {BUG}\n"),
        (
            UnexpectedError("Traceback (most recent call last):\n  x\nKeyError: 'w'"),
            70,
            "UnexpectedError: KeyError: 'w'",
        ),
        (recursion(), 70, "Something is nested too deeply to be read: look for brackets in brackets in a row, a JSON"),
        (MemoryError(), 6, "error: memory ran out (MemoryError). Lower batch.micro or data.max_length"),
        (
            type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2 GiB"),
            6,
            "error: memory ran out (OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB)",
        ),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            6,
            "error: memory ran out (RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate",
        ),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/b"),
            6,
            "error: /a/b: No space left on device. Free some space, or name another place.\n",
        ),
        (OSError(errno.EBADF, os.strerror(errno.EBADF)), 70, f"error: OSError: [Errno 9] Bad file descriptor. {BUG}"),
        (
            ModuleNotFoundError("No module named 'pandas'", name="pandas"),
            6,
            "error: the package pandas cannot be imported: No module named 'pandas'. Install danlu again",
        ),
        (
            OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "xxx"),
            6,
            "error: xxx: File name too long. Give a path that can be.\n",
        ),
        (ModuleNotFoundError("No module named 'danlu.x'", name="danlu.x"), 70, "ModuleNotFoundError: No module named"),
        (
            InternalError(f"rank 0: KeyError: 'a'. {BUG[:-1]}\n{TRACE}\n  x"),
            70,
            f"error: rank 0: KeyError: 'a'. {BUG}\n",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_message_the_code_and_the_file(
    crashing: Crash, tmp_path: Path, error: BaseException, code: int, said: str
) -> None:
    got, told = crashing(error)
    assert (got, said in told) == (code, True), told
    words = "Report it with" if "bug of danlu" in said or code == 70 else "More is in"
    reported = re.search(rf"\n{words} (\S+), which holds the traceback, the command and the versions\n$", told)
    assert reported, told
    file = Path(reported[1])
    assert file.parent == tmp_path / ".cache/danlu/crashes"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    assert text.startswith("danlu ") and "command: danlu fail 'a b'\n" in text
    assert "Traceback (most recent call last):" in text
    if not isinstance(error, InternalError):
        assert f"{type(error).__name__}" in text.splitlines()[-1] or "second" in text or "KeyError: 'w'" in text


def test_a_mistake_of_the_user_writes_no_file(crashing: Crash, tmp_path: Path) -> None:
    code, told = crashing(RuntimeError("Could not determine home directory."))
    assert code == 2
    assert told == "error: a path begins with '~' and the name of no user of this machine. Write it in full\n"
    assert not (tmp_path / ".cache").exists()


def test_the_place_in_danlu_is_named(crashing: Crash, monkeypatch: pytest.MonkeyPatch) -> None:
    from danlu.recipe import library

    monkeypatch.setattr(library, "shipped", lambda: {}["x"])
    monkeypatch.setattr(library, "shipped_folder", lambda: 1 / 0)
    try:
        library.copy("sft", Path("x"))
    except Exception as error:
        _, told = crashing(error)
    assert re.search(r"error: \w+: .* \(danlu/recipe/library.py:\d+\)\. This is a bug", told), told


def test_the_exception_is_never_lost(crashing: Crash, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no file can be written, what it would hold is on stderr."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(crash, "FOLDERS", (tmp_path / "file" / "in", Path("~nosuchuser/x")))
    code, told = crashing(ZeroDivisionError("ours"))
    assert code == 70
    assert f"error: ZeroDivisionError: ours. {BUG}\nReport it with what follows (no file could be written):\n" in told
    assert "command: danlu fail 'a b'" in told and told.endswith("ZeroDivisionError: ours\n")
    monkeypatch.setattr(crash, "FOLDERS", (tmp_path / "file" / "in", tmp_path / "second"))
    assert str(tmp_path / "second" / "danlu-crash-") in crashing(ZeroDivisionError("ours"))[1]


def test_every_verb_is_under_the_net(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    real = main.resolve

    def broken(target: str) -> object:
        real(target)
        raise ZeroDivisionError(target)

    monkeypatch.setattr(main, "resolve", broken)
    for name, verb in VERBS.items():
        assert main.main([name, "--help"]) == 70
        assert f"ZeroDivisionError: {verb.target}" in capsys.readouterr().err
