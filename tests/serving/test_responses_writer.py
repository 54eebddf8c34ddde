"""Items of a conversation as messages of a chat, and answers as items, validated by the types of OpenAI's client."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from builders.chat_tokenizers import tokenizer_and_oracle
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from danlu.data.thoughts import ThoughtReader
from danlu.data.tool_calls import ReadCalls
from danlu.inference.request import Completion, Finish, NewToken, Request
from danlu.serving.openai_api import ApiError, ChatBody, parse_body
from danlu.serving.responses import ResponsesWriter
from danlu.serving.responses_body import ResponsesBody, messages_of

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOOK = {"type": "function", "name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "🦊é"}}\n</tool_call>'
ARGUMENTS = '{"at": "🦊é"}'
ANSWER = f"<think>\nA fox?\n</think>\n\nI look.\n{CALL}\n{CALL}"


def writer() -> tuple[ResponsesWriter, dict[str, list[Any]]]:
    asked = parse_body(ResponsesBody, json.dumps({"input": "Hello", "tools": [LOOK]}).encode())
    chat = parse_body(ChatBody, json.dumps(asked.chat_values()).encode())
    kept: dict[str, list[Any]] = {}
    reading = ReadCalls("hermes", False, tuple(chat.tools))
    tokenizer = tokenizer_and_oracle("chatml")[0]
    requests = [Request(0, (1, 2))]
    return ResponsesWriter(
        asked, kept.__setitem__, chat, "tiny", requests, tokenizer, reading, partial(ThoughtReader, None)
    ), kept


def completion(text: str, finish: Finish = "stop") -> Completion:
    tokens = tokenizer_and_oracle("chatml")[0].encode(text)
    values = [0.0] * len(tokens)
    return Completion(0, 0, tokens, values, values, None, [0] * len(tokens), text, finish)


def streamed(text: str, size: int, finish: Finish = "stop") -> tuple[list[Any], dict[str, list[Any]]]:
    """The events of a stream, as the client has them, and the items that are kept."""
    answers, kept = writer()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    events = answers.opening()
    for piece in pieces[:-1]:  # the last is withheld
        events += answers.chunks(NewToken(0, 0, 0, 0.0, piece))
    events += answers.closings(completion(text, finish))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return [EVENT.validate_python(event) for event in events], kept


def shown(output: list[Any]) -> list[tuple[str, str]]:
    """Kind and text of each item, without white space around a text."""
    return [
        (item.type, item.arguments if item.type == "function_call" else item.content[0].text.strip()) for item in output
    ]


ITEMS = [("reasoning", "A fox?"), ("message", "I look."), ("function_call", ARGUMENTS), ("function_call", ARGUMENTS)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_thoughts_messages_and_calls_are_items(size: int) -> None:
    answers, _ = writer()
    whole = Response.model_validate(answers.whole([completion(ANSWER)]))
    assert (shown(whole.output), whole.status) == (ITEMS, "completed")
    events, kept = streamed(ANSWER, size)
    last = events[-1].response
    assert (shown(last.output), last.status, events[-1].type) == (ITEMS, "completed", "response.completed")
    assert kept == {last.id: [item.model_dump(exclude_unset=True) for item in last.output]}
    texts: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    assert [text.strip() for _, text in sorted(texts.items())] == [text for _, text in ITEMS]
    for index, item in enumerate(last.output):
        ours = [event for event in events if getattr(event, "output_index", None) == index]
        assert {event.item_id for event in ours[1:-1]} == {item.id}
        assert ours[0].type == "response.output_item.added" and ours[0].item.status == "in_progress"
        assert ours[-1].type == "response.output_item.done" and ours[-1].item == item
    kinds = [event.type.removeprefix("response.") for event in events if getattr(event, "output_index", None) == 2]
    assert kinds[1:-1] == ["function_call_arguments.delta", "function_call_arguments.done"]


def test_an_answer_that_is_cut_is_incomplete() -> None:
    for text, items in (
        ("<think>\nA f", [("reasoning", "A f")]),
        ("I l", [("message", "I l")]),
        ("", [("message", "")]),
    ):
        answers, _ = writer()
        whole = Response.model_validate(answers.whole([completion(text, "length")]))
        events, _ = streamed(text, 2, "length")
        for response in (whole, events[-1].response):
            assert (shown(response.output), response.status) == (items, "incomplete")
            assert response.output[-1].status == "incomplete" and response.incomplete_details is not None
    events, kept = streamed("I l", 2, "abort")
    assert (events[-1].type, events[-1].response.error.code, kept) == ("response.failed", "server_error", {})


def test_a_stream_that_fails_raises_in_the_client() -> None:
    event = writer()[0].failure(ApiError("too late", status=504))
    assert EVENT.validate_python(event).message == event["error"]["message"] == "too late"


def test_items_become_the_messages_of_a_chat() -> None:
    """As the client's examples function_call_inputs.py and function_calling_migration.py have them."""
    answers, _ = writer()
    output = answers.whole([completion(ANSWER)])["output"]
    first, second = (item["call_id"] for item in output[2:])
    results = [
        {"type": "function_call_output", "call_id": name, "output": f"{at}"} for at, name in enumerate((first, second))
    ]
    messages = messages_of(
        [{"role": "user", "content": "Hello"}], [*output, *results, {"role": "developer", "content": "B"}]
    )
    function = {"name": "look", "arguments": ARGUMENTS}
    assert messages == [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "A fox?",
            "tool_calls": [{"id": name, "type": "function", "function": function} for name in (first, second)],
        },
        {"role": "tool", "tool_call_id": first, "name": "look", "content": "0"},
        {"role": "tool", "tool_call_id": second, "name": "look", "content": "1"},
        {"role": "developer", "content": "B"},
    ]
    hidden = {"type": "reasoning", "id": "a", "summary": [], "encrypted_content": "b"}
    assert messages_of([], [hidden, {"role": "user", "content": "A"}]) == [{"role": "user", "content": "A"}]
    two = [{"role": "assistant", "content": "A"}, {"type": "reasoning", "summary": [{"text": "B"}]}]
    assert [message["content"] for message in messages_of([], two)] == ["A", ""], "a thought begins a message"
