"""`danlu eval --generate` on a model that always says the same, and on a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import write_rows

from danlu.cli.main import main

CHANT = "丹炉é🎈"


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", [chat("a", CHANT), chat("b", f" {CHANT}\n"), chat("c", "other")])


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["eval", *map(str, arguments), "--generate", "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def test_the_share_of_exact_matches(chanting, rows, tmp_path, capsys):
    target = tmp_path / "answers.jsonl"
    values = evaluated(capsys, chanting, "--data", rows, "--answers", target)
    assert values["exact_match"] == pytest.approx(2 / 3)
    assert (values["right"], values["answers"], values["rows"], values["samples"]) == (2, 3, 3, 1)
    assert values["finish"] == {"stop": 3} and values["tokens"] == 3 * (len(CHANT.encode()) + 1)
    lines = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert sorted((line["row"], line["right"]) for line in lines) == [
        ("rows.jsonl:1", True), ("rows.jsonl:2", True), ("rows.jsonl:3", False),
    ]  # fmt: skip
    assert {line["text"] for line in lines} == {CHANT}
    assert lines[0]["messages"] == [{"role": "user", "content": lines[0]["messages"][0]["content"]}]
    assert main(["eval", str(chanting), "--data", str(rows), "--generate"]) == 0
    out = capsys.readouterr().out
    assert out == "exact match  66.67%: 2 of 3 answers\ntokens       13.0 an answer\n"


def test_answers_that_were_cut_are_told(chanting, rows, capsys):
    assert main(["eval", str(chanting), "--data", str(rows), "--generate", "--max-new-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("exact match  0.00%: 0 of 3 answers\n")
    assert out.endswith("cut          3 answers at --max-new-tokens\n")


def test_only_what_the_pattern_finds_is_compared(chanting, tmp_path, capsys):
    file = write_rows(tmp_path / "rows.jsonl", [chat("a", "x🎈"), chat("b", "y🎈"), chat("c", "炉")])
    assert evaluated(capsys, chanting, "--data", f"{file}#2", "--pattern", "(🎈|炉)")["exact_match"] == 1
    assert evaluated(capsys, chanting, "--data", file, "--pattern", "(🎈|炉)")["exact_match"] == pytest.approx(2 / 3)
    assert evaluated(capsys, chanting, "--data", file)["exact_match"] == 0  # control
    assert main(["eval", str(chanting), "--data", str(file), "--generate", "--pattern", "🎈"]) == 3
    assert "rows.jsonl:3: the answer has nothing like --pattern '🎈'" in capsys.readouterr().err


def test_several_samples_are_a_mean_over_all(stories, tmp_path, capsys):
    greedy = ["--max-new-tokens", "6"]
    target = tmp_path / "first.jsonl"
    completions = [{"prompt": "Lily and Tom", "completion": "x"}, {"prompt": "The", "completion": "x"}]
    asked = write_rows(tmp_path / "asked.jsonl", completions)
    assert evaluated(capsys, stories, "--data", asked, *greedy, "--answers", target)["exact_match"] == 0
    said = {row["prompt"]: row["text"] for row in map(json.loads, target.read_text(encoding="utf-8").splitlines())}
    right = write_rows(tmp_path / "right.jsonl", [{**row, "completion": said[row["prompt"]]} for row in completions])
    assert evaluated(capsys, stories, "--data", right, *greedy)["exact_match"] == 1
    drawn = ["--samples", "4", "--temperature", "0.3", "--seed", "1", "--draft", "ngram"]
    values = evaluated(capsys, stories, "--data", right, *greedy, *drawn)
    assert values["answers"] == 8 and values["exact_match"] == values["right"] / 8 > 0
    assert values == evaluated(capsys, stories, "--data", right, *greedy, *drawn)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--generate", "--samples", "2"], 2, "--samples: 2 times the likeliest answer are one; add --temperature 1"),
        (["--generate", "--pattern", "("], 2, "--pattern: '(' is no regular expression: missing )"),
        (["--pattern", "a"], 2, "--pattern, --samples, --temperature and --answers are of answers: add --generate"),
        (["--generate", "data.max_length=9"], 2, "data.max_length=9: --generate asks the rows as they are"),
        (["--generate", "--temperature", "-1"], 2, "--temperature: -1.0 is out of range"),
        (["--generate", "--cache-gib", "-1"], 2, "--cache-gib: -1 is out of range; it must be above 0"),
    ],
)
def test_misuse(chanting, rows, capsys, monkeypatch, flags, code, message):
    monkeypatch.setattr("danlu.inference.load_model.load", lambda *args, **options: pytest.fail("weights were read"))
    assert main(["eval", str(chanting), "--data", str(rows), *flags]) == code
    out = capsys.readouterr()
    assert message in out.err and out.out == ""


def test_rows_that_cannot_be_asked(chanting, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("danlu.inference.load_model.load", lambda *args, **options: pytest.fail("weights were read"))
    file = write_rows(tmp_path / "rows.jsonl", [chat("a", "b"), chat("long " * 600, "b"), {"messages": []}])
    assert main(["eval", str(chanting), "--data", str(file), "--generate"]) == 3
    assert "rows.jsonl:3: " in capsys.readouterr().err
    assert main(["eval", str(chanting), "--data", f"{file}#2", "--generate"]) == 3
    assert "rows.jsonl:2: the prompt has 30" in capsys.readouterr().err
    (tmp_path / "there").touch()
    asked = ["eval", str(chanting), "--data", f"{file}#1", "--generate", "--answers", str(tmp_path / "there")]
    assert main(asked) == 2
    assert f"--answers: {tmp_path / 'there'} is there already" in capsys.readouterr().err
