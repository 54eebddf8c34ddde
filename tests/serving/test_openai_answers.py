"""Answers of chats with tools: their calls apart from their text, whole and as a stream."""

from __future__ import annotations

from typing import Any

import pytest
from builders.chat_tokenizers import tokenizer_and_oracle

from danlu.data.harmony_thoughts import HarmonyReader
from danlu.data.tool_calls import ReadCalls
from danlu.inference.request import Completion, Finish, NewToken, Request
from danlu.serving.openai_answers import ChatWriter
from danlu.serving.openai_api import ChatBody

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "integer"}}}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 7}}\n</tool_call>'
HELLO = [{"role": "user", "content": "Hello"}]


def writer(read_calls: ReadCalls | None, thoughts: Any = None) -> ChatWriter:
    body = ChatBody.model_validate({"messages": HELLO, "tools": TOOLS})
    return ChatWriter(body, "tiny", [Request(0, (1, 2))], tokenizer_and_oracle("chatml")[0], read_calls, thoughts)


def completion(text: str, finish: Finish = "stop") -> Completion:
    tokens = tokenizer_and_oracle("chatml")[0].encode(text)
    values = [0.0] * len(tokens)
    return Completion(0, 0, tokens, values, values, None, [0] * len(tokens), text, finish)


def streamed(text: str, size: int, read_calls: ReadCalls | None, finish: Finish = "stop") -> tuple[str, list[Any], str]:
    """The text, the calls and the reason of the end that chunks have together."""
    answers = writer(read_calls)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    chunks = [answers.chunk(NewToken(0, 0, 0, 0.0, piece)) for piece in pieces[:-1]]  # the last is withheld
    chunks.append(answers.closing(completion(text, finish)))
    choices = [choice for chunk in chunks if chunk is not None for choice in chunk["choices"]]
    assert all(choice["delta"] for choice in choices[:-1]), "a chunk says something"
    said = "".join(choice["delta"].get("content", "") for choice in choices)
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    return said, calls, choices[-1]["finish_reason"]


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_calls_are_apart_from_the_text(size: int) -> None:
    reading = ReadCalls("hermes", False, tuple(TOOLS))
    said, calls, reason = streamed(f"I look. {CALL}{CALL}", size, reading)
    (whole,) = writer(reading).whole([completion(f"I look. {CALL}{CALL}")])["choices"]
    assert (said, reason, whole["finish_reason"]) == ("I look. ", "tool_calls", "tool_calls")
    assert whole["message"]["content"] == "I look." and [call["index"] for call in calls] == [0, 1]
    for call in (*calls, *whole["message"]["tool_calls"]):
        assert call["function"] == {"name": "look", "arguments": '{"at": 7}'} and len(call["id"]) == 9
    assert len({call["id"] for call in calls}) == 2
    assert streamed(f"I look. {CALL}", size, None) == (f"I look. {CALL}", [], "stop"), "without tools it is text"


@pytest.mark.parametrize("text", ["It is <b>.", "<tool_call>{</tool_call> Hm.", f"<think>{CALL}</think>No."])
def test_what_is_no_call_is_text(text: str) -> None:
    reading = ReadCalls("hermes", False, tuple(TOOLS))
    assert streamed(text, 1, reading) == (text, [], "stop")
    (whole,) = writer(reading).whole([completion(text)])["choices"]
    assert whole["message"] == {"role": "assistant", "content": text} and whole["finish_reason"] == "stop"


def test_an_answer_that_was_cut_says_so() -> None:
    reading = ReadCalls("hermes", False, tuple(TOOLS))
    assert streamed(CALL + CALL[:20], 3, reading, "length")[2] == "length"


HARMONY = (
    "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
    '<|constrain|>json<|message|>{"at": 7}'
)


def test_a_thought_of_gpt_oss_is_there_with_its_call() -> None:
    (whole,) = writer(ReadCalls("gpt-oss", False), HarmonyReader).whole([completion(HARMONY)])["choices"]
    message = whole["message"]
    assert (message["reasoning"], message["content"], whole["finish_reason"]) == ("I look.", None, "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 7}'}
    answers = writer(ReadCalls("gpt-oss", False), HarmonyReader)
    chunks = [answers.chunk(NewToken(0, 0, 0, 0.0, letter)) for letter in HARMONY]
    chunks.append(answers.closing(completion(HARMONY)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk is not None]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "I look."
    assert [call["function"] for delta in deltas for call in delta.get("tool_calls", ())] == [
        message["tool_calls"][0]["function"]
    ]
    assert not any(delta.get("content") for delta in deltas)
