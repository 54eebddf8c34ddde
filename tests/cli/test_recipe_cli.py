"""The command line's base: help, misspelt verbs, exit codes, and the verbs about recipes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.cells import cell_len

from danlu import __version__, registry
from danlu.cli.main import main
from danlu.core.errors import DataError, RecipeError
from danlu.registry import VERBS, Verb

SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb `fail` that raises what its argument names, in place of the real ones."""
    monkeypatch.setitem(registry.VERBS, "fail", Verb(f"{__name__}:fail", "Look", "fails"))
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules[fail.__module__])


def fail(how: str) -> None:
    """Raise what is asked for."""
    raise {
        "recipe": RecipeError(["a.yaml:1:1 seed: wrong", "a.yaml:2:1 steps: wrong"]),
        "data": DataError("row 3 of a.json is broken\nits brackets do not match [/red]"),
        "interrupt": KeyboardInterrupt(),
        "exit": typer.Exit(9),
    }[how]


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        for name in VERBS:
            assert f" {name} " in shown


def test_help_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    below = {"checkpoint": ["list", "verify", "prune", "export"], "recipes": ["list", "copy", "templates", "schema"]}
    pages = [[], *([name] for name in VERBS), *([name, one] for name, ones in below.items() for one in ones)]
    for page in [*([*one, "--help"] for one in pages), ["explain"], ["explain", "data"], ["explain", "adapter"]]:
        assert main(page) == 0
        out = capsys.readouterr().out
        assert out.count("\n") > 5, page
        for line in out.splitlines():
            assert cell_len(line) <= 80 and "…" not in line.replace("=value …", ""), (page, line)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"danlu {__version__}\n"


def test_python_m_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    for name in ("tokenize", "typer", "pathlib", "rich"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r})\n")
    command = [sys.executable, "-m", "danlu", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": SRC})
    assert done.returncode == 0 and "train" in done.stdout, done.stderr
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "error: No such command 'trian'. Did you mean 'train'? See `danlu --help`\n"),
        (["api"], "error: No such command 'api'. Use `danlu serve`. See `danlu --help`\n"),
        (["export"], "error: No such command 'export'. Use `danlu checkpoint export` (a checkpoint as a model) or"),
        (["chat", "--model", "x"], "No such option: --model. It is given without a flag: danlu chat MODEL. See"),
        (["dpo"], "error: No such command 'dpo'. Use `danlu recipes copy dpo`, then `danlu train`; stage: dpo in a"),
        (["grpo"], "error: No such command 'grpo'. Use `danlu recipes copy grpo`, then `danlu train`; stage: grpo in"),
        (["recipes", "lst"], "error: No such command 'lst'. Did you mean 'list'? See `danlu recipes --help`\n"),
        (["recipes", "copy"], ". See `danlu recipes copy --help`\n"),
        (["--wrong"], "error: No such option: --wrong"),
        (["train", "x", "--stpes", "3"], "error: No such option: --stpes. See `danlu train --help`\n"),
        (["train", "x", "--seed", "3"], "error: No such option: --seed. It is a key of the recipe: write seed=VALUE,"),
        (
            ["train", "x", "--learning_rate=1e-4"],
            "error: No such option: --learning_rate. danlu's key for it is optimizer.learning_rate: write "
            "optimizer.learning_rate=VALUE, without dashes. See `danlu train --help`\n",
        ),
        (
            ["train", "x", "--num_processes", "2"],
            "error: No such option: --num_processes. The flag is called --processes",
        ),
        (
            ["train", "x", "--neftune_noise_alpha=5"],
            "danlu does not have it: No noise is added to embeddings. Leave it out",
        ),
        (["explain", "seed", "seed=1"], "overrides need --recipe"),
        (["explain", "sead"], "error: no recipe has the key 'sead'. Did you mean 'seed'? `danlu explain` lists them\n"),
        (["recipes", "copy", "stf"], "error: no recipe called 'stf'. Did you mean 'sft'?"),
    ],
)
def test_misuse(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("error: ")
    assert captured.out == ""


@pytest.mark.usefixtures("verb")
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("recipe", 2, "error: a.yaml:1:1 seed: wrong\nerror: a.yaml:2:1 steps: wrong\n"),
        ("data", 3, "error: row 3 of a.json is broken\nits brackets do not match [/red]\n"),
        ("interrupt", 130, "interrupted\n"),
        ("exit", 9, ""),
    ],
)
def test_errors_become_exit_codes(capsys: pytest.CaptureFixture[str], how: str, code: int, said: str) -> None:
    assert main(["fail", how]) == code
    assert capsys.readouterr().err == said


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m danlu recipes schema | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert done.stdout in ("{141\n", "{0\n")  # 0 when the pipe held it all before head left


def test_errors_in_a_recipe_come_before_torch(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("stage: sft\nmodel: base\noutput: x\nseeed: 3\n")
    program = (
        "import sys\nfrom danlu.cli.main import main\ncode = main(sys.argv[1:])\n"
        "print(code, sorted({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "explain", "seed", "--recipe", "bad.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "2 []\n"
    assert "error: bad.yaml:4:1 seeed: unknown key. Did you mean 'seed'?\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "list"]) == 0
    assert re.search("^pretrain +Pretrain a small model from scratch", capsys.readouterr().out, re.MULTILINE)
    assert main(["recipes", "copy", "sft", "mine.yaml"]) == 0
    assert capsys.readouterr().out.startswith("mine.yaml: edit it, then danlu preview mine.yaml")
    assert main(["recipes", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "danlu recipe"


def test_explain_searches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "flash", "attention"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("'flash_attention' is a key of another tool: danlu does it by itself: The fastest")
    assert "keys of other tools\n  flash_attention" in shown and "documentation\n  docs/parallel.md, " in shown
    assert main(["explain", "long", "context"]) == 0
    assert capsys.readouterr().out.startswith("long_context\nTrain at more tokens")
    assert main(["explain", "rank"]) == 0
    assert capsys.readouterr().out.startswith("keys of the recipe\n  adapter.rank ")
    assert main(["explain", "zyzzyva", "quokka"]) == 2
    assert capsys.readouterr().err.startswith("error: nothing is about 'zyzzyva quokka'")
    assert main(["explain", "optimizer.rnak"]) == 2
    assert "Did you mean 'optimizer.rank'?" in capsys.readouterr().err


def test_explain(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text("stage: pretrain\nmodel: m\ndata: owner/rows\noutput: x\n")
    assert main(["explain", "data.max_length", "data.max_length=64", "--recipe", "r.yaml"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "takes a whole number, 1 or more default 1024 here 64 from override 'data.max_length=64'" in shown
    assert main(["explain"]) == 0
    assert "gradient_clipping" in capsys.readouterr().out
