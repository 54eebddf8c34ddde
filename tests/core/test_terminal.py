"""Other people's text on a terminal, and in a pipe."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World

from danlu.core import terminal
from danlu.core.terminal import echo, print_status, print_status_early, printable, wrap_line

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "danlu"


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("short", ["short"]),
        ("error: one two three four five", ["error: one two three", "  four five"]),
        ("  indented words that are many", ["  indented words that", "    are many"]),
        ("run `danlu train a.yaml b=1` now", ["run", "  `danlu train a.yaml b=1`", "  now"]),
        ("/a/path/that/is/longer/than/that there", ["/a/path/that/is/longer/than/that", "  there"]),
        ("丹炉丹炉丹炉丹炉丹 丹炉", ["丹炉丹炉丹炉丹炉丹", "  丹炉"]),
        ("a  b   c" + " d" * 8, ["a  b   c d d d d d d d", "  d"]),
    ],
)
def test_lines_break_between_words(line: str, lines: list[str]) -> None:
    assert wrap_line(line, 22) == lines
    assert wrap_line(line, 200) == [line]


def test_only_a_terminal_gets_its_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = "words " * 20 + "end"
    print_status(text)
    assert capsys.readouterr().err == text + "\n"
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    print_status(text)
    assert max(map(len, screen.getvalue().splitlines())) <= 40 and screen.getvalue().split() == text.split()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("one\rtwo\x08", r"one\x0dtwo\x08"),
        ("\x9b31m \x85 \x7f", r"\u009b31m \u0085 \u007f"),
        ("user\u202etxt.exe \u2066x\u2069", r"user\u202etxt.exe \u2066x\u2069"),
        ("\ud800 \udce9", r"\ud800 \udce9"),
        ("tab\tand\nnewline, é 丹炉 👩\u200d👩 \u200fעברית", "tab\tand\nnewline, é 丹炉 👩\u200d👩 \u200fעברית"),
    ],
    ids=["escape", "cursor", "C1", "direction", "surrogates", "stays"],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_no_control_character_passes() -> None:
    every = [chr(code) for code in range(sys.maxunicode + 1)]
    passed = set(printable("".join(every)))  # escapes are of characters that pass
    assert {c for c in passed if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")} == {"\t", "\n"}
    turning = {c for c in every if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI")}
    assert turning and not turning & passed


def test_printable_json_is_the_same_json() -> None:
    value = "".join(map(chr, range(0x300))) + "\u202e\u2028\ud800"
    shown = printable(json.dumps(value, ensure_ascii=False))
    assert json.loads(shown) == value
    assert "\x9b" not in shown and "\x7f" not in shown


def test_a_pipe_gets_the_text_and_a_terminal_what_it_can_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo("\x1b[2Ja", end="")
    print_status("\x1b[2Jb")
    assert capsys.readouterr() == ("\x1b[2Ja", "\\x1b[2Jb\n")
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", screen)
    echo("\x1b[2Ja")
    assert screen.getvalue() == "\\x1b[2Ja\n"


def test_through_a_real_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        echo("\x1b]0;title\x07 丹")
        assert os.read(master, 100).decode() == "\\x1b]0;title\\x07 丹\r\n"
    os.close(master)


def test_a_verb_says_what_it_does_only_where_libraries_are_still_to_be_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    print_status_early("reading a")
    monkeypatch.delitem(sys.modules, "torch")
    print_status_early("reading \x1b")
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", "reading \\x1b\n")


@pytest.mark.slow
def test_generate_says_what_it_reads_before_it_reads_it(tiny_world: World) -> None:
    """In a process of its own, to which a pipe is no terminal: the line comes first, and stdout has the text alone."""
    watch = "import sys; from danlu.cli import main; import danlu.cli.generate as g; real = g.print_status_early\n"
    watch += "g.print_status_early = lambda text: (real(text), print('torch' in sys.modules))\n"
    watch += f"sys.exit(main.main(['generate', {str(tiny_world.base)!r}, '--prompt', 'a', '--max-new-tokens', '1']))"
    done = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.splitlines()[0] == f"reading {tiny_world.base}", done.stderr
    assert done.stdout.startswith("False\n")


OWN_COLOURS = {("cli/demo.py", "print")}
"""Whose text is printable before colours are added."""


def raw_writes(source: str, name: str) -> list[str]:
    """Calls of print and typer.echo, which show text as it is."""
    if not re.search(r"\b(print|echo|secho)\(", source):
        return []
    return [
        f"{name}:{node.lineno}: {ast.unparse(node.func)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("print", "typer.echo", "typer.secho")
        and (name, ast.unparse(node.func)) not in OWN_COLOURS
    ]


def test_danlu_writes_through_these_functions_alone() -> None:
    """`print` would show what it is given as it is: use `echo` for results and `print_status` for remarks."""
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    found = [
        line
        for file in files
        for line in raw_writes(file.read_text(encoding="utf-8"), file.relative_to(PACKAGE).as_posix())
    ]
    assert found == []
    assert raw_writes("def f(x):\n    print(x)\n    typer.echo(x)\n", "a.py") == ["a.py:2: print", "a.py:3: typer.echo"]


LASTING = """
import os, sys
from danlu.core.terminal import drop_failed_writes
drop_failed_writes("stderr", "stdout")
file = sys.argv[1]
if file == "pipe":
    reading, writing = os.pipe()
    os.close(reading)
else:
    writing = os.open(file, os.O_WRONLY)
os.dup2(writing, 1)
os.dup2(writing, 2)
for stream in (sys.stdout, sys.stderr):
    print("a line of a library", file=stream)
    stream.write("x" * 100_000)
    stream.flush()
"""


def test_what_a_pipe_or_a_full_disk_does_not_take_is_dropped() -> None:
    running = [subprocess.Popen([sys.executable, "-c", LASTING, file]) for file in ("pipe", "/dev/full")]
    assert [process.wait() for process in running] == [0, 0]  # Python itself would end with 120 at the last flush


def test_a_write_waits_where_a_terminal_takes_nothing_for_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with terminal._UnfailingFile(writing, "wb") as file, ThreadPoolExecutor(1) as thread:
        while os.get_blocking(writing) or select.select([], [writing], [], 0)[1]:
            os.write(writing, b"x" * 4096)  # until it is full
        waiting, real = threading.Event(), select.select

        def noted(*arguments: Any) -> Any:
            waiting.set()
            return real(*arguments)

        monkeypatch.setattr(select, "select", noted)
        waits = thread.submit(file.write, b"later")
        assert waiting.wait(timeout=10)
        read = b""
        while not read.endswith(b"later"):
            read += os.read(reading, 4096)
        assert waits.result() == 5
    os.close(reading)


def test_streams_of_others_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        for stream in (io.StringIO(), file):
            monkeypatch.setattr(sys, "stderr", stream)
            terminal.drop_failed_writes("stderr")
            assert sys.stderr is stream
    monkeypatch.setattr(sys, "stdout", None)  # `danlu train >&-`
    terminal.drop_failed_writes("stdout")
    print("nowhere", file=sys.stdout)
    sys.stdout.close()
