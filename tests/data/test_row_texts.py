"""Texts of rows by their places: which there are, and other texts in the same places."""

from __future__ import annotations

import json
from typing import Any

import pytest

from danlu.core.errors import DataError
from danlu.data.row_texts import check_row, placed_texts, with_texts
from danlu.data.rows import detect_format

TURNS = [
    {"role": "system", "content": "S"},
    {"from": "human", "value": "Q"},
    {
        "role": "assistant",
        "reasoning_content": "T",
        "content": [{"type": "text", "text": "A"}],
        "tool_calls": [{"function": {"name": "find", "arguments": '{"who": "W", "n": 3}'}}],
    },
    {"role": "tool", "content": "R"},
    {"role": "assistant", "content": "B"},
]
PAIR = {"prompt": "Q", "chosen": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
ROWS: list[tuple[dict[str, Any], str]] = [
    ({"text": "D", "url": "u"}, "text=D"),
    ({"system": "S", "instruction": "Q", "input": "I", "output": "A", "history": [["q", "a"]]},
     "system=S user=q assistant=a user=Q user=I assistant=A"),
    ({"prompt": "Q", "completion": "A"}, "user=Q assistant=A"),
    ({"question": "Q", "answer": "A"}, "user=Q assistant=A"),
    ({"messages": TURNS}, "system=S user=Q assistant=T assistant=A tool=W tool=R assistant=B"),
    ({"conversations": json.dumps(TURNS)}, "system=S user=Q assistant=T assistant=A tool=W tool=R assistant=B"),
    ({**PAIR, "rejected": [PAIR["chosen"][0], {"role": "assistant", "content": "X"}]},  # type: ignore[dict-item]
     "user=Q repeated=Q assistant=A repeated=Q assistant=X"),
    ({"prompt": "Q", "chosen": "A", "rejected": "X"}, "user=Q assistant=A assistant=X"),
    ({"messages": TURNS, "rejected_response": "X"},
     "system=S user=Q assistant=T assistant=A tool=W tool=R assistant=B assistant=X"),
    ({"prompt": "Q", "completions": ["A", "B"], "labels": [True, False]}, "user=Q assistant=A assistant=B"),
    ({"question": "Q", "answer": "A", "label": True}, "user=Q assistant=A"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "shown"), ROWS)
def test_texts_and_their_places(row: dict[str, Any], shown: str) -> None:
    format = detect_format(row)
    check_row(row, format, "row")
    before = json.dumps(row)
    places = placed_texts(row, format)
    assert " ".join(f"{place.role}={place.text}" for place in places) == shown
    assert with_texts(row, places, [place.text for place in places]) == row
    changed = with_texts(row, places, [f"{place.text} and é" for place in places])
    assert [place.text for place in placed_texts(changed, format)] == [f"{place.text} and é" for place in places]
    assert json.dumps(row) == before and changed.keys() == row.keys()
    check_row(changed, format, "row")
    assert isinstance(changed.get("conversations", ""), str)  # JSON in a column stays JSON


def test_rows_without_texts_are_refused() -> None:
    with pytest.raises(DataError, match="f:1: rows of tokens"):
        check_row({"input_ids": [1]}, "tokenized", "f:1")
