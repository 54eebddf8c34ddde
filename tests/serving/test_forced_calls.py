"""Grammars of calls that have to be, by the forms of families, and what reads them."""

from __future__ import annotations

from typing import Any

import pytest
from builders.chat_tokenizers import tokenizer_and_oracle

from danlu.core.types import ToolCall
from danlu.data.tool_calls import FORMS, AnswerReader
from danlu.inference.grammar import Grammars
from danlu.serving.forced_calls import CALL_TEXTS, HERMES, forced_calls_grammar, forced_form

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "integer"}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait"}},
]
LOOK, WAIT = ToolCall("look", {"at": 7}), ToolCall("wait", {"s": "a"})
ONE = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"at": 7}}\n</tool_call>',
    "llama-3": '{"name": "look", "parameters": {"at": 7}}',
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"at": 7}}]',
}
TWO = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "wait", "arguments": {"s": "a"}}\n</tool_call>',
    "mistral": ONE["mistral"][:-1] + ', {"name": "wait", "arguments": {"s": "a"}}]',
}


def follows(form: str, text: str, *, several: bool = True, tools: list[Any] = TOOLS) -> bool:
    tokenizer = tokenizer_and_oracle("chatml")[0]
    (end,) = tokenizer.end_of_turn_ids[:1]
    grammar = forced_calls_grammar(form, tools, tokenizer, several=several)
    matcher = Grammars(tokenizer, tokenizer.vocab_size, [end]).matcher(grammar)
    for token in (*tokenizer.encode(text), end):
        matcher.accept(token)
    return matcher.problem is None and matcher.is_complete


@pytest.mark.parametrize("form", sorted(CALL_TEXTS))
def test_a_call_is_written_as_its_family_reads_it(form: str) -> None:
    assert follows(form, ONE[form]) and follows(form, ONE[form], several=False)
    assert AnswerReader.whole(ONE[form], FORMS[form], TOOLS)[1] == [LOOK]
    if form in TWO:
        assert follows(form, TWO[form]) and not follows(form, TWO[form], several=False)
        assert AnswerReader.whole(TWO[form], FORMS[form], TOOLS)[1] == [LOOK, WAIT]
    for wrong in ("", "I look.", ONE[form].replace("7", '"7"'), ONE[form].replace("look", "sit"), ONE[form][:-1]):
        assert not follows(form, wrong), wrong
    assert not follows(form, ONE[form], tools=TOOLS[1:])


def test_families_without_json_write_hermes_calls() -> None:
    assert {name: forced_form(name) for name in FORMS if name not in CALL_TEXTS} == {
        name: HERMES for name in FORMS if name not in CALL_TEXTS
    }
    assert forced_form(None) == HERMES and forced_form("mistral") == "mistral"


def test_marks_that_are_special_tokens_are_written_as_tokens() -> None:
    tokenizer = tokenizer_and_oracle("chatml")[0]
    special = next(text for token, text in tokenizer.added_texts.items() if token in tokenizer.special_ids)
    from danlu.serving.forced_calls import _marked

    written = _marked(f"a{special}b", tokenizer)
    assert written == f'"a" <[{tokenizer.vocabulary[special]}]> "b"' and _marked("ab", tokenizer) == '"ab"'
