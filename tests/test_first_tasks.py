"""The commands of docs/first_tasks.md print what the page says, with a base hardly trained and fewer rows."""

from __future__ import annotations

import re
import shlex
import subprocess
from ast import literal_eval
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from builders.docs_scripts import TOP
from builders.served import Served, serving
from builders.tiny_world import InThisProcess, World, danlu

from danlu.data import preview
from danlu.demo import demo
from danlu.demo.demo_recipes import Size
from danlu.inference.engine import EngineOptions
from danlu.inference.load_engine import engine_of
from danlu.inference.load_model import load_chat_tokenizer, load_model
from danlu.inference.resolve_model import resolve_model
from danlu.serving.served_models import served_models

PAGE = (TOP / "docs" / "first_tasks.md").read_text(encoding="utf-8")
SMALLER = {
    "steps: 150": "steps: 1",
    "#3000": "#50",
    "#400": "#24",
    "#200": "#24",
    "head -100": "head -12",
    "] * 50": "]",
}
"""Texts of the page that make its tasks large, and those in their place."""
SHELL = ("cat > ", "cp ", "sed ", "head ", "tail ")
NOT_RUN = ("echo ", "python -m http.server")
"""Commands that read from a pipe, or go on for ever."""
ADDRESS = "http://127.0.0.1:8000/v1"


@dataclass
class Task:
    """Commands of a page, each with the here-document behind it, and the lines that the page shows of their output."""

    commands: list[tuple[str, str]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)

    @property
    def shows_text_of_a_model(self) -> bool:
        """Whether all that is shown is what a program or `danlu generate` prints: a model that was trained less says
        something else."""
        return all(line.startswith(("python - ", "danlu generate ")) for line, _ in self.commands)


def tasks(page: str) -> Iterator[Task]:
    """The tasks of a page: its indented blocks, where one that begins with no command is the output of those before."""
    lines, task, begins, is_output = iter(page.splitlines()), Task(), True, False
    for line in lines:
        if not line.startswith("    "):
            begins = True
            continue
        text = line.removeprefix("    ")
        if begins:
            is_output = not text.startswith((*SHELL, *NOT_RUN, "danlu ", "python "))
            if not is_output and task.shown:
                yield task
                task = Task()
        begins = False
        if is_output:
            task.shown.append(text)
        else:
            ends = iter(lambda: next(lines), "    END") if text.endswith("<<'END'") else ()
            document = "".join(f"{each.removeprefix('    ')}\n" for each in ends)
            task.commands.append((text.partition("  #")[0], document))
    yield task


def shape(text: str) -> str:
    """A text without what differs from run to run: numbers, and white space that aligns them."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.:]*", "0", text)).strip()


def is_printed(shown: str, printed: str) -> bool:
    """Whether a line that a page shows, with `...` where something is left out, was printed, numbers aside."""
    return re.search(".*".join(map(re.escape, map(str.strip, shape(shown).split("...")))), shape(printed)) is not None


def served(folder: str, *flags: str) -> AbstractContextManager[Served]:
    """What `danlu serve` starts, in a thread of this process and on a free port."""
    named = dict(zip(flags[::2], flags[1::2], strict=True))
    assert named.keys() == {"--name", "--chat-template"}
    resolved = resolve_model(folder)
    template = Path(named["--chat-template"])
    model = load_model(resolved, load_chat_tokenizer(resolved.tokenizer_folder, template, model=resolved.folder))
    models = served_models(resolved, model, named["--name"], template)
    return serving(models, engine_of(model, EngineOptions(cache_gib=0.01)))


class Shell:
    """Runs the commands of a page in this process; servers go on until it is closed."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self._open = ExitStack()
        self._url = ADDRESS

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    def run(self, line: str, document: str) -> tuple[str, int]:
        """All that a command prints, and its exit code."""
        words, code = shlex.split(line), 0
        if words[:2] == ["danlu", "serve"]:
            self._url = self._open.enter_context(served(*words[2:])).url
        elif words[0] == "danlu":
            code = danlu(*words[1:])
        elif words[0] == "python":
            exec(compile(document.replace(ADDRESS, self._url), "docs/first_tasks.md", "exec"), {})
        elif words[0] == "cat":
            Path(words[2]).write_text(document, encoding="utf-8")
        else:
            code = subprocess.run(line, shell=True, check=True).returncode
        out, err = self._capfd.readouterr()
        return (out + err).replace(self._url, ADDRESS), code


@pytest.fixture
def shell(
    tiny_world: World,
    tokenising_here: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Shell]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # of the caches
    monkeypatch.setattr(preview, "WorkerPool", InThisProcess)
    monkeypatch.setattr(demo, "Size", lambda: Size(documents=300, conversations=300, bare_sums=300))
    with Shell(capfd) as shell:
        yield shell


def test_the_page_shows_what_its_commands_print(shell: Shell) -> None:
    page = PAGE
    for large, small in SMALLER.items():
        assert large in page
        page = page.replace(large, small)
    codes, texts = [], []
    for task in tasks(page):
        printed = ""
        for line, document in (each for each in task.commands if not each[0].startswith(NOT_RUN)):
            text, code = shell.run(line, document)
            assert code == 0 or "error: " in text, text
            codes.append(code)
            printed += text
        if task.shows_text_of_a_model:
            texts.append(printed)
        else:
            assert [line for line in task.shown if not is_printed(line, printed)] == [], printed
    assert len(codes) > 30 and [code for code in codes if code] == [3, 3], "no columns are named, no template is there"
    generated, call, form, notebook = texts
    assert generated
    assert call.startswith("Function(") and "name='add'" in call
    assert set(literal_eval(form)) == {"animal", "lives", "tame"}
    assert re.search(r"^10 \d", notebook, re.MULTILINE)


def test_a_line_that_is_not_printed_is_noticed() -> None:
    assert is_printed("step 7/7 loss 0.643 ...", "step 1/1 loss 9.1 grad 2\nfinished")
    assert is_printed("a: ... c", "a: b c") and not is_printed("a: ... d", "a: b c")
    assert not is_printed("finished after step 3: runs/chat", "finished after step 3: runs/dpo")
    (task,) = tasks("    danlu a\n\n    cat > f <<'END'\n    x\n\n    y\n    END\n\ntext\n\n    shown\n")
    assert task == Task([("danlu a", ""), ("cat > f <<'END'", "x\n\ny\n")], ["shown"])
