"""Verbs on a real terminal: nothing that a row, a recipe or a model says moves a cursor or sets a title."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders.tiny_world import InThisProcess, World, danlu, write_rows

from danlu.inference.answer import Answer
from danlu.inference.stopping import TextStream

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\rgone\u202e"
SAFE = r"\x1b]0;title\x07\x1b[2J\u009b31m\x0dgone\u202e"
# What rich and danlu's own bar write: colours, and moving about within the lines they draw.
OWN = re.compile(rb"\r\x1b\[K|\x1b\[[0-9;]*[mKAG]|\x1b\[\?25[lh]")

Screen = Callable[..., tuple[int, bytes]]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Screen]:
    """Runs a command line with stdout and stderr on a terminal; the exit code, and the bytes that it was sent."""
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    for module in ("preview", "dataset_summary"):
        monkeypatch.setattr(f"danlu.data.{module}.WorkerPool", InThisProcess)

    def run(*arguments: object) -> tuple[int, bytes]:
        sent: list[bytes] = []
        end = b"-- that was all --"

        def read() -> None:
            while end not in b"".join(sent[-2:]):
                sent.append(os.read(master, 65536))

        reader = threading.Thread(target=read)
        reader.start()
        with (
            monkeypatch.context() as patch,
            open(slave, "w", encoding="utf-8", closefd=False) as out,
            open(slave, "w", encoding="utf-8", closefd=False) as err,
        ):
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            code = danlu(*arguments)
        os.write(slave, end)
        reader.join()
        return code, b"".join(sent).removesuffix(end)

    yield run
    os.close(master)
    os.close(slave)


def dangerous(sent: bytes) -> list[str]:
    """Control characters in what a terminal was sent, apart from colours and line ends."""
    text = OWN.sub(b"", sent).decode()
    return re.findall("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]", text) + re.findall("\r(?!\r*\n|$)", text)


def test_the_check_finds_what_it_looks_for() -> None:
    assert dangerous(f"\x1b[1mbold\x1b[0m\r\n{SAFE}\r\n".encode()) == []
    assert len(dangerous(HOSTILE.encode())) == 6


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the model says, it reads as hostile text."""
    completion = Answer.completion
    monkeypatch.setattr(TextStream, "push", lambda self, token, *, may_stop=True: HOSTILE)
    monkeypatch.setattr(Answer, "completion", lambda self: replace(completion(self), text=HOSTILE))


@pytest.mark.usefixtures("talking")
def test_what_a_model_says(tiny_world: World, screen: Screen, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("generate", tiny_world.base, "--prompt", "a", "--max-new-tokens", 2)
    code, sent = screen(*asked)
    assert code == 0 and dangerous(sent) == []
    assert SAFE in sent.decode()
    assert danlu(*asked) == 0
    out = capsys.readouterr().out  # as in a pipe: byte for byte
    assert out == HOSTILE * (len(out) // len(HOSTILE)) + "\n"


@pytest.mark.usefixtures("talking")
def test_what_a_model_says_in_a_chat(
    tiny_world: World, screen: Screen, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("chat", tiny_world.base, "--max-new-tokens", 2)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    code, sent = screen(*asked)
    assert code == 0 and dangerous(sent) == []
    assert SAFE in sent.decode()
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert danlu(*asked) == 0
    assert HOSTILE in capsys.readouterr().out


@pytest.mark.usefixtures("tokenising_here")
def test_what_rows_and_recipes_say(tiny_world: World, screen: Screen, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}]}] * 3
    file = write_rows(tmp_path / f"ro{HOSTILE[:10]}ws.jsonl".replace("/", ""), rows)
    data = {"train": str(file), "cache": str(tmp_path / "cache"), "max_length": 128}
    recipe = tiny_world.recipe(tmp_path / "run", data=data)
    for arguments in (
        ("preview", recipe),
        ("explain", "output", f"output={HOSTILE}", "--recipe", recipe),
        ("explain", HOSTILE),
        ("train", recipe, f"{HOSTILE}=1"),
        ("train", recipe, f"precision={HOSTILE[1:]}"),
        ("train", HOSTILE),
        (HOSTILE,),
        ("recipes", "copy", HOSTILE),
        ("checkpoint", "list", HOSTILE),
        ("generate", HOSTILE, "--prompt", "a"),
        ("eval", tiny_world.base, "--data", HOSTILE),
    ):
        code, sent = screen(*arguments)
        assert dangerous(sent) == [], (arguments, sent)
        assert sent and b"Traceback" not in sent and code in (0, 2, 3, 4, 5), sent


@pytest.mark.usefixtures("tokenising_here")
def test_what_a_run_shows_while_it_goes(tiny_world: World, screen: Screen, tmp_path: Path, talking: None) -> None:
    samples = {"prompts": [HOSTILE], "max_new_tokens": 2}
    recipe = tiny_world.recipe(
        tmp_path / f"r{HOSTILE[:4]}n", tmp_path / "r.yaml", steps=2, evaluation={"every": 1, "samples": samples}
    )
    code, sent = screen("train", recipe, "schedule.warmup=0")
    assert code == 0, sent
    assert dangerous(re.sub(rb"\r\x1b\[[0-9]*[KA]", b"", sent).replace(b"\r", b"\r\n")) == [], sent
    assert SAFE.encode()[:12] in sent
