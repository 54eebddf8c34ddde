"""Templates of prompts: columns, braces, and what is no template."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danlu.core.prompt_template import PromptTemplate, PromptTemplateError


@pytest.mark.parametrize(
    ("template", "row", "prompt"),
    [
        ("{question}", {"question": "2 + 2?"}, "2 + 2?"),
        ("{Body} {Question}", {"Body": "a", "Question": "b", "Answer": 3}, "a b"),
        ("{n}{n} is {x}\n", {"n": 1, "x": 0.5}, "11 is 0.5\n"),
        ("Write {{{a}}} and {{}}.", {"a": "x"}, "Write {x} and {}."),
        ("{a column}", {"a column": "{b}", "b": "never"}, "{b}"),
        ("{a.b}{a[0]}{a!r}", {"a.b": 1, "a[0]": 2, "a!r": 3, "a": 4}, "123"),
        ("no column", {}, "no column"),
    ],
)
def test_fills_columns(template: str, row: dict[str, Any], prompt: str) -> None:
    assert PromptTemplate.parse(template).fill(row) == prompt


@given(text=st.text(), value=st.text())
def test_braces_and_values_are_taken_as_they_are(text: str, value: str) -> None:
    escaped = text.replace("{", "{{").replace("}", "}}")
    assert PromptTemplate.parse(f"{escaped}{{q}}{escaped}").fill({"q": value}) == f"{text}{value}{text}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{question", "a '{' without its partner at character 1. Write '{{' for a brace"),
        ("{a} b}", "a '}' without its partner at character 6. Write '}}' for a brace"),
        ("{{question}", "a '}' without its partner at character 11"),
        ("{}", "{} names no column. Write its name, as in {question}, or {{}} for braces"),
        ("{ }", "{} names no column"),
    ],
)
def test_what_is_no_template(template: str, message: str) -> None:
    with pytest.raises(PromptTemplateError) as error:
        PromptTemplate.parse(template)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"q": "a", "answer": 1}, "the template names the column 'question', and the row has 'q', 'answer'"),
        ({}, "the row has none"),
        ({"question": None}, "the column 'question' of the template holds nothing (null), not a text or a number"),
        ({"question": ["a"]}, "holds a list, not a text"),
        ({"question": True}, "holds a bool, not a text"),
    ],
)
def test_rows_that_lack_a_column(row: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptTemplateError) as error:
        PromptTemplate.parse("{question}").fill(row)
    assert message in str(error.value)
