"""Rows that compare or judge answers: every form in use, and what is wrong with the others."""

from __future__ import annotations

import math
from typing import Any

import pytest

from danlu.core.errors import DataError
from danlu.data.messages import Conversation
from danlu.data.preference_rows import JudgedAnswer, Pair, StepwiseAnswer, answers_of, parse_answers
from danlu.data.rows import Completion
from danlu.recipe.sections.base import RowType

Q, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Hello"), ("assistant", "No"))
)
SYSTEM = {"role": "system", "content": "S"}
GPT = {"from": "gpt", "value": "Hello"}
PROMPT = [("user", "Hi")]
EARLIER = [("user", "A"), ("assistant", "a"), ("user", "Hi")]

PAIRS: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    ({"prompt": [Q], "chosen": [GOOD], "rejected": [BAD]}, PROMPT),
    ({"prompt": [Q], "chosen": "Hello", "rejected": "No"}, PROMPT),
    ({"prompt": "Hi", "chosen": [GOOD], "rejected": [BAD]}, PROMPT),
    ({"prompt": "whatever", "chosen": [Q, GOOD], "rejected": [Q, BAD]}, PROMPT),
    ({"chosen": [Q, GOOD], "rejected": [Q, BAD]}, PROMPT),
    ({"chosen": [SYSTEM, Q, GOOD], "rejected": [SYSTEM, Q, BAD]}, [("system", "S"), *PROMPT]),
    ({"conversations": [{"from": "human", "value": "Hi"}], "chosen": GPT, "rejected": {**GPT, "value": "No"}}, PROMPT),
    ({"messages": [Q], "chosen": GOOD, "rejected": BAD}, PROMPT),
    ({"instruction": "Hi", "chosen": "Hello", "rejected": "No"}, PROMPT),
    ({"instruction": "Hi", "history": [["A", "a"]], "chosen": "Hello", "rejected": "No"}, EARLIER),
    ({"instruction": "Add.", "input": "2, 3", "chosen": "Hello", "rejected": "No"}, [("user", "Add.\n2, 3")]),
    ({"question": "Hi", "system": "S", "chosen": "Hello", "rejected": "No"}, [("system", "S"), *PROMPT]),
    ({"messages": [Q, GOOD], "rejected_response": "No"}, PROMPT),
    ({"messages": [Q, GOOD], "rejected_messages": [Q, BAD]}, PROMPT),
    ({"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: No"}, PROMPT),
    (
        {
            "chosen": "\n\nHuman: A\n\nAssistant: a\n\nHuman: Hi\n\nAssistant: Hello",
            "rejected": "\n\nHuman: A\n\nAssistant: a\n\nHuman: Hi\n\nAssistant: No",
        },
        EARLIER,
    ),
]  # fmt: skip


def parsed(value: dict[str, Any], row_type: RowType = "preference") -> Any:
    return parse_answers(value, "auto", row_type, "rows.jsonl:3")


@pytest.mark.parametrize(("value", "prompt"), PAIRS)
def test_pairs_in_every_form(value: dict[str, Any], prompt: list[tuple[str, str]]) -> None:
    row = parsed(value)
    assert isinstance(row, Pair) and row.margin is None
    for answer, text in ((row.chosen, "Hello"), (row.rejected, "No")):
        assert isinstance(answer, Conversation)
        said = [(message.role, message.content) for message in answer.messages]
        assert said == [*prompt, ("assistant", text)]
        assert [m.is_context for m in answer.messages if m.role != "system"][-2:] == [True, False]
    assert parsed({**value, "margin": 2}).margin == 2


def test_strings_are_no_conversation() -> None:
    row = parsed({"prompt": "2 +", "chosen": " 3", "rejected": " 4", "margin": "0.5"})
    assert row == Pair(Completion("2 +", " 3"), Completion("2 +", " 4"), 0.5)


def test_whole_conversations_that_part_in_the_middle() -> None:
    more = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    row = parsed({"chosen": [Q, GOOD, *more], "rejected": [Q, BAD, *more]})
    for answer in answers_of(row):
        assert isinstance(answer, Conversation)
        assert [message.is_context for message in answer.messages] == [True, False, False, False]


@pytest.mark.parametrize(
    ("verdict", "is_desirable"), [(True, True), (False, False), (1, True), (0, False), (-1, False), ("true", True)]
)
@pytest.mark.parametrize("column", ["label", "kto_tag", "is_desirable"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [Q, GOOD]},
        {"conversations": [Q, GOOD]},
        {"prompt": [Q], "completion": [GOOD]},
        {"instruction": "Hi", "output": "Hello"},
        {"question": "Hi", "answer": "Hello"},
    ],
)
def test_judged_answers(row: dict[str, Any], column: str, verdict: Any, is_desirable: bool) -> None:
    judged = parsed({**row, column: verdict}, "unpaired")
    assert isinstance(judged, JudgedAnswer) and judged.is_desirable is is_desirable
    assert isinstance(judged.answer, Conversation)
    assert [(m.role, m.content, m.is_context) for m in judged.answer.messages] == [
        ("user", "Hi", True), ("assistant", "Hello", False)
    ]  # fmt: skip


def test_the_answer_that_is_judged_follows_the_last_question() -> None:
    judged = parsed({"messages": [Q, GOOD, Q, GOOD], "label": True}, "unpaired")
    assert [message.is_context for message in judged.answer.messages] == [True, True, True, False]
    strings = parsed({"prompt": "2 +", "completion": " 3", "label": False}, "unpaired")
    assert strings == JudgedAnswer(Completion("2 +", " 3"), False)


def test_steps() -> None:
    value = {"prompt": "2 + 3?", "completions": ["2 + 3", "= 5", "done"], "labels": [True, 0, None]}
    row = parsed(value, "stepwise")
    assert isinstance(row, StepwiseAnswer) and isinstance(row.answer, Completion)
    assert row.labels[:2] == (1, 0) and math.isnan(row.labels[2])
    text, stops = row.answer.completion, row.answer.step_stops
    assert [text[start:stop] for start, stop in zip((0, *stops), stops, strict=False)] == ["2 + 3\n", "= 5\n", "done"]
    chat = parsed({**value, "prompt": [Q]}, "stepwise")
    assert isinstance(chat.answer, Conversation) and chat.answer.messages[-1].content == text


WRONG: list[tuple[RowType, dict[str, Any], str]] = [
    ("preference", {"prompt": [Q], "chosen": [GOOD], "rejected": [GOOD]}, "are the same answer"),
    ("preference", {"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same answer"),
    ("preference", {"prompt": " ", "chosen": "b", "rejected": "c"}, "the prompt is empty"),
    ("preference", {"prompt": [], "chosen": [GOOD], "rejected": [BAD]}, "the prompt is empty"),
    ("preference", {"prompt": [SYSTEM], "chosen": [GOOD], "rejected": [BAD]}, "starts with the assistant"),
    ("preference", {"prompt": [{**Q, "content": ""}], "chosen": "a", "rejected": "b"}, "the prompt is empty"),
    ("preference", {"prompt": "a", "chosen": "", "rejected": "c"}, "'chosen' is empty"),
    ("preference", {"prompt": [Q], "chosen": [GOOD], "rejected": [{**BAD, "content": " "}]}, "answer is empty"),
    ("preference", {"prompt": [Q], "chosen": [GOOD, Q], "rejected": [BAD]}, "must end with the assistant's answer"),
    ("preference", {"chosen": [GOOD], "rejected": [BAD]}, "starts with the assistant"),
    ("preference", {"chosen": [Q, GOOD], "rejected": [{**Q, "content": "x"}, BAD]}, "no message in common"),
    ("preference", {"chosen": "a", "rejected": "b"}, "no transcript of turns"),
    ("preference", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": True}, "'margin' must be a number"),
    ("preference", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": math.inf}, "'margin' must be a number"),
    ("preference", {"messages": [Q, GOOD]}, "these are rows of format messages, which are for stage sft"),
    ("preference", {"messages": [Q, GOOD], "label": True}, "which are for stage kto"),
    ("preference", {"prompt": "a", "completions": ["b"], "labels": [1]}, "for stage reward with objective stepwise"),
    ("unpaired", {"prompt": "a", "chosen": "b", "rejected": "c"}, "which are for stage dpo"),
    ("unpaired", {"messages": [Q, GOOD]}, "which are for stage sft"),
    ("unpaired", {"messages": [Q, GOOD], "label": "greeting"}, "which are for stage sft"),
    ("unpaired", {"messages": [Q, GOOD, Q], "label": True}, "must end with the assistant's answer"),
    ("unpaired", {"prompt": "", "completion": "b", "label": True}, "the prompt is empty"),
    ("stepwise", {"prompt": "a", "chosen": "b", "rejected": "c"}, "which are for stage dpo"),
    ("stepwise", {"prompt": "a", "completions": ["b", "c"], "labels": [True]}, "has 2 steps and 'labels' 1"),
    ("stepwise", {"prompt": "a", "completions": [], "labels": []}, "'completions' is empty"),
    ("stepwise", {"prompt": "a", "completions": ["b", " "], "labels": [1, 0]}, "step 2 of 'completions' is empty"),
    ("stepwise", {"prompt": "a", "completions": ["b"], "labels": ["+"]}, "must be true, false or null"),
    ("stepwise", {"prompt": "a", "completions": "b", "labels": [1]}, "'completions' must be a list"),
    ("stepwise", {"completions": ["b"], "labels": [1]}, "no column 'prompt'"),
]  # fmt: skip


@pytest.mark.parametrize(("row_type", "value", "message"), WRONG)
def test_what_is_wrong_is_told_with_its_place(row_type: RowType, value: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"^rows\.jsonl:3.*{message}"):
        parsed(value, row_type)
