"""Completion: what Tab offers, by the protocol that the shells' scripts speak, and in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from danlu.cli import completion
from danlu.cli.completion import SCRIPTS, answer, candidates, split
from danlu.cli.main import main
from danlu.recipe.explanation import keys
from danlu.registry import VERBS

SRC = Path(__file__).resolve().parents[2] / "src"


def offered(line: str) -> list[str]:
    return [one.text for one in candidates(split(line)[1:])]


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("danlu ", {*VERBS}),
        ("danlu t", {"train"}),
        ("danlu --", {"--version", "--install-completion", "--show-completion", "--help"}),
        ("danlu --show-completion ", {"bash", "zsh", "fish"}),
        ("danlu train r.yaml --", {"--resume", "--processes", "--help"}),
        ("danlu train r.yaml --resume n", {"never"}),
        ("danlu train r.yaml opt", {"optimizer=", "optimizer."}),
        ("danlu train r.yaml --processes 2 ste", {"steps="}),
        ("danlu train r.yaml seed=1 optimizer.lea", {"optimizer.learning_rate="}),
        ("danlu train r.yaml optimizer.momen", {"optimizer.momentum="}),
        ("danlu train r.yaml memory.recompute.b", {"memory.recompute.budget="}),
        ("danlu train r.yaml optimizer.kind=adam", {"optimizer.kind=adamw", "optimizer.kind=adamw8bit"}),
        ("danlu train r.yaml quantization=n", {"quantization=nf4", "quantization=null"}),
        ("danlu train r.yaml rollout.dr", {"rollout.draft=", "rollout.draft."}),
        ("danlu train r.yaml rollout.engine=", {"rollout.engine=vllm", "rollout.engine=sglang"}),
        ("danlu train r.yaml rollout.draft=n", {"rollout.draft=ngram", "rollout.draft=null"}),
        ("danlu train r.yaml compile=", {"compile=true", "compile=false"}),
        ("danlu preview r.yaml data.pack", {"data.packing=", "data.packing."}),
        ("danlu eval m --data x data.max", {"data.max_length="}),
        ("danlu explain sch", {"schedule", "schedule."}),
        ("danlu study r.yaml --vary adapter.ra", {"adapter.rank=", "adapter.rank_pattern=", "adapter.rate_ratio="}),
        ("danlu checkpoint ", {"list", "verify", "prune", "export"}),
        ("danlu recipes copy s", {"sft"}),
        ("danlu generate m --dtype b", {"bf16"}),
        ("danlu nosuch ", set()),
        ("danlu train r.yaml nosuch.key", set()),
        ("danlu train r.yaml nosuch=", set()),
    ],
)
def test_what_is_offered(line: str, some: set[str]) -> None:
    found = offered(line)
    assert some <= set(found)
    assert len(found) == len(set(found))
    assert all(one.startswith(split(line)[-1]) for one in found)
    if not some:
        assert found == []


def test_every_key_of_a_recipe_is_reached() -> None:
    """Level by level; what lies in lists needs a number, which nobody knows before the file is read."""
    reached, waiting = set(), [""]
    while waiting:
        above = waiting.pop()
        for one in offered(f"danlu train r.yaml {above}"):
            waiting += [one] if one.endswith(".") else []
            reached |= {one.removesuffix("=")} if one.endswith("=") else set()
    lists = ("data.train.", "data.eval.", "model.tokens.", "objective.", "rewards.", "teacher.", "long_context.stages.")
    assert reached == {key for key in keys() if not key.startswith(lists)}


def test_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("a.yaml", "b c.yml", "rows.jsonl", ".hidden.yaml", "ev\x1bil.yaml", "runs/r.yaml"):
        (tmp_path / name).touch()
    assert offered("danlu train ") == ["a.yaml", "b c.yml", "runs/"]
    assert offered("danlu train .h") == [".hidden.yaml"]
    assert offered("danlu train runs/") == ["runs/r.yaml"]
    assert offered("danlu eval m --data ro") == ["rows.jsonl"]
    assert offered("danlu train no/where/") == []
    assert answer({"_DANLU_COMPLETE": "bash", "_DANLU_LINE": "danlu train b"}) == "'b c.yml'\n"
    monkeypatch.setattr(completion, "MAX_PATHS", 1)
    assert offered("danlu train ") == ["a.yaml"]


def test_each_shell_is_answered_in_its_way() -> None:
    line = "danlu train r.yaml optimizer.kind=mu"
    assert answer({"_DANLU_COMPLETE": "bash", "_DANLU_LINE": line}) == "muon\n"  # behind bash's word break
    for shell in ("zsh", "fish"):
        assert answer({"_DANLU_COMPLETE": shell, "_DANLU_LINE": line}) == "optimizer.kind=muon\t\n"
    told = answer({"_DANLU_COMPLETE": "fish", "_DANLU_LINE": "danlu trai"})
    assert told == f"train\t{VERBS['train'].about}\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", [""]),
        ("danlu", ["danlu"]),
        ("danlu ", ["danlu", ""]),
        ("danlu train 'my rec", ["danlu", "train", "my rec"]),
        ('danlu train "a b" st', ["danlu", "train", "a b", "st"]),
    ],
)
def test_lines_are_split_as_shells_do(line: str, words: list[str]) -> None:
    assert split(line) == words


def test_words_of_options_are_those_that_the_verbs_take() -> None:
    from danlu.cli.model_flags import QUANTIZATIONS
    from danlu.inference.generation_config import DEVICES, PRECISIONS

    assert completion.CHOICES["device"] == tuple(DEVICES)
    assert completion.CHOICES["dtype"] == tuple(PRECISIONS)
    assert completion.CHOICES["quantization"] == (*QUANTIZATIONS, "none")
    assert completion.CHOICES["install-completion"] == tuple(SCRIPTS)


def test_the_protocol_of_a_new_process_and_no_torch() -> None:
    program = (
        "import sys\nfrom danlu.cli.main import main\ncode = main([])\n"
        "print(code, sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    environ = {**os.environ, "PYTHONPATH": str(SRC), "_DANLU_COMPLETE": "zsh", "_DANLU_LINE": "danlu train r.yaml ste"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "steps=\tOptimizer steps, instead of epochs\n0 []\n"


def bash(tmp_path: Path, line: str) -> list[str]:
    """What a bash that has sourced the script would put on the line."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    program = tmp_path / "bin" / "danlu"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m danlu "$@"\n')
    program.chmod(0o755)
    script = (
        "source <(danlu --show-completion bash)\n"
        f"COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}\n"
        "_danlu_completion danlu\n"
        'printf "%s\\n" "${COMPREPLY[@]}"; complete -p danlu'
    )
    environ = {**os.environ, "PYTHONPATH": str(SRC), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=environ, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    *found, registered = done.stdout.splitlines()
    assert registered == "complete -F _danlu_completion danlu", done.stderr
    return found


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_in_a_bash_that_has_sourced_it(tmp_path: Path) -> None:
    assert bash(tmp_path, "danlu train r.yaml optimizer.kind=adam") == ["adamw", "adamw8bit"]
    assert bash(tmp_path, "danlu pre") == ["preview"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_right_by_their_own_shell(shell: str, tmp_path: Path) -> None:
    """Its syntax, where that shell is here."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "script").write_text(completion.script(shell))
    subprocess.run([shell, "--no-execute" if shell == "fish" else "-n", str(tmp_path / "script")], check=True)


def test_installing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").write_text("alias ll='ls -l'")
    for _ in range(2):  # the second time changes nothing
        assert main(["--install-completion", "bash"]) == 0
    file = tmp_path / ".local/share/danlu/completion.bash"
    assert file.read_text() == SCRIPTS["bash"]
    line = f"[ -f {file} ] && source {file}  # danlu's completion"
    assert (tmp_path / ".bashrc").read_text() == f"alias ll='ls -l'\n{line}\n"
    assert f"{file} written, which {tmp_path}/.bashrc reads: open a new bash" in capsys.readouterr().out
    assert main(["--install-completion", "fish"]) == 0
    assert (tmp_path / ".config/fish/completions/danlu.fish").read_text() == SCRIPTS["fish"]
    assert main(["--install-completion", "zsh"]) == 0
    assert "completion.zsh ] && source " in (tmp_path / ".zshrc").read_text()
    capsys.readouterr()
    assert main(["--show-completion", "tcsh"]) == 2
    assert "'tcsh': there are scripts for bash, zsh, fish" in capsys.readouterr().err
    shutil.rmtree(tmp_path / ".local/share/danlu")
    (tmp_path / ".local/share/danlu").write_text("mine")
    assert main(["--install-completion", "bash"]) == 6
    assert f"error: {tmp_path}/.local/share/danlu: cannot be written: File exists" in capsys.readouterr().err
