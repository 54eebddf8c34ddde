"""The thought of an answer and what is said behind it."""

from __future__ import annotations

import pytest

from danlu.data.thoughts import ThoughtReader, opened_thought

CASES = [
    ("<think>\nA fox.\n</think>\n\nYes.", None, "A fox.", "Yes."),
    ("A fox.\n</think>\n\nYes.", "<think>", "A fox.", "Yes."),
    ("[THINK]so[/THINK]Yes [/THINK]", None, "so", "Yes [/THINK]"),
    ("<|channel>thought\nso\n<channel|>Yes", None, "so", "Yes"),
    ("  <think></think>Yes", None, "", "Yes"),
    ("<think> a < b </thin </think> c", None, "a < b </thin", "c"),
    ("Yes. <think>no</think>", None, "", "Yes. <think>no</think>"),
    (" <thin> is text", None, "", " <thin> is text"),
    ("never ends \n", "<think>", "never ends \n", ""),
    ("", "<think>", "", ""),
    (" <th", None, "", " <th"),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), CASES)
def test_whole_and_streamed(text: str, opened: str | None, reasoning: str, content: str, size: int) -> None:
    reader = ThoughtReader(opened)
    parts = [reader.feed(text[at : at + size]) for at in range(0, len(text), size)]
    parts.append(reader.finish())
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.content for part in parts) == content


def test_nothing_is_withheld_that_is_certain() -> None:
    reader = ThoughtReader("<think>")
    assert reader.feed("a < b </th").reasoning == "a < b" and reader.feed("is").reasoning == " </this"
    assert reader.feed("</think>x") == ("", "x") and reader.feed(" </think>") == ("", " </think>")
    assert ThoughtReader().feed("Yes") == ("", "Yes")


def test_prompts_that_open_a_thought() -> None:
    assert opened_thought("a <think>\n") == "<think>" and opened_thought("b [THINK]") == "[THINK]"
    assert opened_thought("<think>\n\n</think>\n\n") is None and opened_thought("") is None
