"""Which rows hold an answer, and which answers are the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import write_rows

from danlu.core.errors import DataError
from danlu.data.sources import read_file_rows
from danlu.evaluation.answer_matching import AnsweredRow, AnswerMatch, answered_rows

HELLO, HI = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}


def read(folder: Path, *rows: Any) -> list[AnsweredRow]:
    return answered_rows(read_file_rows(write_rows(folder / "rows.jsonl", rows)))


def test_the_last_answer_is_the_reference(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": [HELLO, HI, {"role": "user", "content": "2 + 2?"}, {**HI, "content": "4"}]})
    assert row.reference == "4" and row.prompt.text is None
    assert row.prompt.turns == [HELLO, HI, {"role": "user", "content": "2 + 2?"}]
    (row,) = read(tmp_path, {"prompt": "2 + 2 =", "completion": " 4"})
    assert (row.prompt.text, row.reference) == ("2 + 2 =", " 4")
    (row,) = read(tmp_path, {"question": "2 + 2?", "answer": "4"})
    assert row.prompt.turns == [{"role": "user", "content": "2 + 2?"}] and row.reference == "4"
    (row,) = read(tmp_path, {"conversations": [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "4"}]})
    assert row.prompt.given == {"messages": [{"role": "user", "content": "2?"}]} and row.reference == "4"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [HELLO, HI, HELLO]}, "rows.jsonl:2: the conversation does not end with an answer to compare"),
        ({"messages": [HELLO]}, "rows.jsonl:2: no assistant message"),
        ({"text": "a"}, "rows.jsonl:2: no column 'messages', which rows of format messages have"),
        ('{"messages": ', "rows.jsonl:2:14: broken JSON: "),
    ],
)
def test_rows_without_an_answer(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        read(tmp_path, {"messages": [HELLO, HI]}, row)
    assert str(error.value).startswith(message)


def test_rows_of_text_have_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rows.jsonl:1: rows of format text have no answers to compare with") as error:
        read(tmp_path, {"text": "a"}, {"text": "b"})
    assert "rows.jsonl:2: " in str(error.value)


def test_white_space_aside(tmp_path: Path) -> None:
    match = AnswerMatch()
    assert match.extract(" four\n apples ") == "four apples" == match.extract("four apples")
    assert match.extract("four apple") != match.extract("four apples") != match.extract("Four apples")
    assert match.extract("") == ""


def test_what_a_pattern_finds_last(tmp_path: Path) -> None:
    match = AnswerMatch(re.compile(r"####\s*(.+)"))
    assert match.extract("2 + 2 #### 5\nno: ####  4 ") == "4" != match.extract("2 + 2 = 4")
    assert match.extract("2 + 2 = 4") is None
    assert AnswerMatch(re.compile(r"\d+")).extract("2 + 2 = 4") == "4"
    assert AnswerMatch(re.compile(r"a(b)?")).extract("a") == ""
    rows = read(tmp_path, *({"question": "?", "answer": answer} for answer in ("#### 4", "4", "5")))
    with pytest.raises(DataError) as error:
        match.references(rows)
    shown = json.dumps("####\\s*(.+)").replace('"', "'")
    assert str(error.value).split("\n  ") == [
        f"rows.jsonl:{line}: the answer has nothing like --pattern {shown}" for line in (2, 3)
    ]
    assert match.references(rows[:1]) == ["4"]
