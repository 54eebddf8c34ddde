"""Thoughts of answers in the harmony format, by the examples of github.com/openai/harmony, docs/format.md."""

from __future__ import annotations

import pytest

from danlu.core.types import ToolCall
from danlu.data.harmony_thoughts import HarmonyReader
from danlu.data.tool_calls import FORMS, AnswerReader

THOUGHT = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
LOOK = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "<|b"}'
BARE = ' to=functions.look<|channel|>commentary json<|message|>{"at": "<|b"}'
CASES = [
    (f"{THOUGHT}Simple.{NEXT}<|channel|>final<|message|>2 + 2 = 4.", "Simple.", "2 + 2 = 4.", 0),
    (f"{THOUGHT}Simple.{NEXT}<|channel|>final<|message|>4<|return|>", "Simple.", "4", 0),
    (f"{THOUGHT}Need to look.{NEXT}{LOOK}<|call|>", "Need to look.", "", 1),
    (f"{THOUGHT}Need to look.{NEXT}{LOOK}", "Need to look.", "", 1),
    (f"{THOUGHT}Plan{NEXT}<|channel|>commentary<|message|>I look:{NEXT}{LOOK}<|call|>", "Plan", "I look:", 1),
    (f"{THOUGHT}A{NEXT}{THOUGHT}B{NEXT}<|message|>C{NEXT}<|channel|>final<|message|>D", "A\nB", "C\nD", 0),
    (BARE, "", "", 1),
    (f"{THOUGHT}never ends <|en", "never ends <|en", "", 0),
    (f"{THOUGHT}cut{NEXT}<|channel|>fin", "cut", "", 0),
    (f"{THOUGHT}cut<|start|>assistant", "cut", "", 0),
    ("<|channel|>final<|message|>a < b <|b|> c", "", "a < b <|b|> c", 0),
    ("to=5 apples", "", "to=5 apples", 0),
    ("<|chan", "", "<|chan", 0),
    ("It is calm.", "", "It is calm.", 0),
    (f"Hm{THOUGHT}so{NEXT}<|message|>Yes", "so", "Hm\nYes", 0),
    ("<|start|>user<|message|>I<|start|>", "", "I", 0),
    ("", "", "", 0),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(("answer", "thought", "text", "calls"), CASES)
def test_whole_and_streamed(answer: str, thought: str, text: str, calls: int, size: int) -> None:
    reader, call_reader = HarmonyReader(), AnswerReader(FORMS["gpt-oss"], ())
    parts = [reader.feed(answer[at : at + size]) for at in range(0, len(answer), size)]
    parts.append(reader.finish())
    assert "".join(part.reasoning for part in parts) == thought
    behind = [*(each for part in parts for each in call_reader.feed(part.content)), *call_reader.finish()]
    texts = [each for each in behind if not isinstance(each, ToolCall)]
    assert "".join(each if isinstance(each, str) else each.text for each in texts) == text
    assert [each for each in behind if isinstance(each, ToolCall)] == [ToolCall("look", {"at": "<|b"})] * calls
    if "<|message|>" in answer and not calls:
        assert "".join(part.content for part in parts) == text, "without tools too"


def test_nothing_is_withheld_that_is_certain() -> None:
    reader = HarmonyReader()
    assert reader.feed(f"{THOUGHT}a <|en") == ("a ", "") and reader.feed("t").reasoning == "<|ent"
    assert reader.feed(f"{NEXT}<|channel|>final<|message|>So ") == ("", "So ") and reader.feed("<|") == ("", "")
