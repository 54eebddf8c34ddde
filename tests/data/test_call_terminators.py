"""Tokens that close an answer with calls, where they are not those that close any other answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.chat_templates import CALLS_IN_TURN, GEMMA, NO_TERMINATOR, QWEN3
from builders.chat_tokenizers import MARKS, SPECIALS, WrongMask, check_sample, make_tokenizer, pretrained
from builders.rendering import render

from danlu.data.chat_template import ChatTemplate
from danlu.data.message_spans import Reason
from danlu.data.messages import Conversation, turn_of
from danlu.data.render import RenderedSample, RenderSettings
from danlu.data.rows import parse_row
from danlu.data.tokenizer import Tokenizer, load_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
# A template that closes answers, and its calls with nothing.
UNCLOSED_CALLS = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name + '</tool_call>' }}{%- endfor %}"
    "{%- if not message.tool_calls %}"
    "{{- message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# A template that shows one call of an answer, behind which it stops (gpt-oss's way).
ONE_CALL = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}{%- if message.tool_calls %}"
    "{{- message.tool_calls[0].function.name + '<|eot_id|>' }}{%- else %}{{- message.content + '<|im_end|>\n' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def call(number: int, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}


def asks(*calls: dict[str, Any], content: str = "", **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **keys}


def result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"call0000{number}"}


QUESTION, ANSWER = {"role": "user", "content": "Where?"}, {"role": "assistant", "content": "There."}
FIRST, SECOND = call(1, at="Brest"), call(2, at="é 😀")
SHOWN = '<tool_call>look{"at": "Brest"}</tool_call>'
SHOWN_SECOND = '<tool_call>look{"at": "é 😀"}</tool_call>'
# By name: the messages, and what is trained of each sample.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "a call at the end": ([QUESTION, asks(FIRST)], [f"{SHOWN}<|end|>"]),
    "a call and its result": ([QUESTION, asks(FIRST), result(1, "here"), ANSWER], [f"{SHOWN}<|end|>There.<|im_end|>"]),
    "two calls at once": (
        [QUESTION, asks(FIRST, SECOND), result(1, "here"), result(2, "there"), ANSWER],
        [f"{SHOWN}{SHOWN_SECOND}<|end|>There.<|im_end|>"],
    ),
    "two calls in turn": (
        [QUESTION, asks(FIRST), result(1, "here"), asks(SECOND), result(2, "there"), ANSWER, QUESTION, ANSWER],
        [f"{SHOWN}<|end|>{SHOWN_SECOND}<|end|>There.<|im_end|>There.<|im_end|>"],
    ),
    # The text stands behind the results once there are any, so the call is trained as it is written.
    "a call with a text": (
        [QUESTION, asks(FIRST, content="I look."), result(1, "here"), ANSWER],
        ["There.<|im_end|>", f"{SHOWN}I look.<|end|>"],
    ),
    "a call with a thought": (
        [QUESTION, asks(FIRST, reasoning_content="In Brest?"), result(1, "here"), ANSWER],
        [f"[THINK]In Brest?[/THINK]{SHOWN}<|end|>There.<|im_end|>"],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("calls"), CALLS_IN_TURN, "metaspace")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return pretrained(folder)


def rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> tuple[Conversation, list[RenderedSample]]:
    row = parse_row({"messages": messages, "tools": TOOLS}, "auto", "row")
    assert isinstance(row, Conversation)
    return row, render(row, "row", tokenizer, RenderSettings())


def appended(sample: RenderedSample, token: int) -> RenderedSample:
    """The sample with an end of text that is trained, as for an answer that nothing closes."""
    more: dict[str, Any] = {"tokens": token, "weights": 1.0, "reasons": Reason.TERMINATOR, "turns": sample.turns[-1]}
    columns: dict[str, Any] = {name: np.append(getattr(sample, name), value) for name, value in more.items()}
    return replace(sample, **columns)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_call_is_trained_with_the_token_that_closes_it(name: str, tokenizer: Tokenizer, oracle: Any) -> None:
    messages, trained = CONVERSATIONS[name]
    row, samples = rendered(tokenizer, messages)
    turns = [turn_of(message) for message in row.messages]
    assert [tokenizer.decode(sample.tokens[sample.weights > 0].tolist()) for sample in samples] == trained
    closing = {tokenizer.encode(mark)[-1] for mark in ("<|end|>", "<|im_end|>")}
    for sample in samples:
        check_sample(oracle, turns, row.tools, sample, "<|im_end|>")
        is_closing = np.isin(sample.tokens, list(closing)) & (sample.weights > 0)
        assert (sample.reasons[is_closing] == Reason.TERMINATOR).all()
        assert not (sample.reasons[~is_closing] == Reason.TERMINATOR).any()
        with pytest.raises(WrongMask):  # control
            check_sample(oracle, turns, row.tools, appended(sample, oracle.eos_token_id), "<|im_end|>")


def test_a_thought_ends_with_its_own_mark(tokenizer: Tokenizer) -> None:
    _, (sample,) = rendered(tokenizer, CONVERSATIONS["a call with a thought"][0])
    assert tokenizer.decode(sample.tokens[sample.reasons == Reason.REASONING].tolist()) == "[THINK]In Brest?[/THINK]"
    _, (sample,) = rendered(tokenizer, [QUESTION, {"role": "assistant", "content": "As in a[/THINK]b."}])
    assert not (sample.reasons == Reason.REASONING).any()  # control: no thought is opened


CLOSED_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "results in the turn": (CALLS_IN_TURN, ("<|end|>",)),
    "one call alone": (ONE_CALL, ("<|eot_id|>",)),
    "as any answer": (QWEN3, ("<|im_end|>",)),
    "not closed": (UNCLOSED_CALLS, ("<|im_end|>",)),
    "no calls": (GEMMA, ("<end_of_turn>",)),
    "nothing closes answers": (NO_TERMINATOR, ()),
}


@pytest.mark.parametrize("name", CLOSED_BY)
def test_what_closes_a_call(name: str) -> None:
    source, closing = CLOSED_BY[name]
    template = ChatTemplate(source, SPECIALS, (*SPECIALS.values(), *MARKS), "t")
    assert template.call_terminators == closing


def test_generation_stops_at_what_closes_a_call(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def stops(tokenizer: Tokenizer) -> list[str]:
        return [tokenizer.decode([token]) for token in tokenizer.end_of_turn_ids]

    assert stops(tokenizer) == ["<|im_end|>", "<|end|>", "</s>"]
    assert stops(load_tokenizer(str(make_tokenizer(tmp_path, QWEN3)))) == ["<|im_end|>", "</s>"]
