"""Answers that have to be calls of tools: the grammar that makes a model write them, in the form of its family.

Families with calls in another form than JSON write Hermes's here, and are read so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from danlu.data.tokenizer import Tokenizer
from danlu.inference.grammar import json_rule, lark_grammar, literal, special_token


@dataclass(frozen=True)
class CallText:
    """The text around calls in JSON.

    Attributes:
        opened, closed: before and after each call, or all of them where `is_list`.
        arguments: the key of the arguments.
        between: between two calls; None where an answer has one at most.
    """

    opened: str
    arguments: str
    closed: str
    between: str | None
    is_list: bool = False


HERMES = "hermes"
CALL_TEXTS = {
    HERMES: CallText("<tool_call>\n", "arguments", "\n</tool_call>", "\n"),
    "llama-3": CallText("", "parameters", "", None),
    "mistral": CallText("[TOOL_CALLS][", "arguments", "]", ", ", is_list=True),
}
"""The text of each form, by its name in `data.tool_calls.FORMS`."""


def forced_form(form: str | None) -> str:
    """The form in which a family that writes `form` is made to call tools."""
    return form if form in CALL_TEXTS else HERMES


def forced_calls_grammar(form: str, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, several: bool) -> str:
    """The grammar of answers that call one of some tools. form: of `forced_form`. several: whether there may be more
    than one call."""
    text = CALL_TEXTS[form]
    opened, closed = _marked(text.opened, tokenizer), _marked(text.closed, tokenizer)
    calls = [f"call{place}" for place in range(len(tools))]
    rules = [f"call: {' | '.join(calls)}", *map(_call_rule, calls, tools, [text.arguments] * len(tools))]
    written = "call" if text.is_list else " ".join(filter(None, (opened, "call", closed)))
    repeated = f"{written} ({literal(text.between)} {written})*" if several and text.between is not None else written
    start = " ".join(filter(None, (opened, repeated, closed))) if text.is_list else repeated
    return lark_grammar("\n".join([f"start: {start}", *rules]))


def _call_rule(name: str, tool: Mapping[str, Any], arguments: str) -> str:
    function = tool["function"]
    head = f'{{"name": {literal(function["name"])}, "{arguments}": '
    return f"{name}: {literal(head)} {json_rule(function.get('parameters') or {'type': 'object'})} {literal('}')}"


def _marked(text: str, tokenizer: Tokenizer) -> str:
    """A text as a part of a rule, its special tokens as tokens."""
    parts: list[str] = []
    while text:
        places = [
            (place, -len(written), token)
            for token, written in tokenizer.added_texts.items()
            if token in tokenizer.special_ids and written and (place := text.find(written)) >= 0
        ]
        if not places:
            return " ".join([*parts, literal(text)])
        place, length, token = min(places)
        parts += [literal(text[:place])] if place else []
        parts.append(special_token(token))
        text = text[place - length :]
    return " ".join(parts)
