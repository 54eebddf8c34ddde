"""POST /v1/responses, asked by OpenAI's own client, beside the same chat completion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from builders.served import Loaded, serving
from openai import OpenAI
from pydantic import BaseModel

from danlu.serving import responses

ASK: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def client(loaded: Loaded) -> Iterator[OpenAI]:
    with serving(loaded.served, loaded.engine()) as served:
        yield served.client()


class Kind(BaseModel, extra="forbid"):
    kind: Literal["fox", "hen"]


def test_a_response_is_the_chat_completion(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_completion_tokens=12)
    response = client.responses.create(input="Hello", instructions="Be brief", **ASK)
    assert response.output_text == chat.choices[0].message.content and chat.usage is not None
    assert response.status == {"length": "incomplete", "stop": "completed"}[chat.choices[0].finish_reason]
    assert response.usage is not None and response.usage.input_tokens == chat.usage.prompt_tokens
    parts: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    assert client.responses.create(input=parts, instructions="Be brief", **ASK).output_text == response.output_text
    longer = client.responses.create(input="Hello", instructions="Be very brief", **ASK)
    assert longer.usage is not None and longer.usage.input_tokens != response.usage.input_tokens


def test_a_stream_of_events(client: OpenAI) -> None:
    whole = client.responses.create(input="Hello", **ASK)
    text, kinds = "", []
    with client.responses.stream(input="Hello", **ASK) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
    assert text == whole.output_text and kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    raw = list(client.responses.create(input="Hello", stream=True, **ASK))
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    assert raw[-1].response.output_text == whole.output_text  # type: ignore[union-attr]


def test_a_conversation_goes_on_with_a_response_that_is_stored(client: OpenAI) -> None:
    first = client.responses.create(input="Hello", instructions="Be brief", **ASK)
    whole: list[Any] = [{"role": "user", "content": "Hello"}, *first.output, {"role": "user", "content": "And?"}]
    asked = client.responses.create(input=whole, **ASK)
    with client.responses.stream(input="And?", previous_response_id=first.id, **ASK) as stream:
        *_, last = stream
    continued = last.response  # type: ignore[union-attr]
    assert continued.output_text == asked.output_text and continued.usage == asked.usage, "without the instructions"
    third = client.responses.create(input="Hm", previous_response_id=continued.id, store=False, **ASK)
    counted = client.responses.input_tokens.count(model="tiny", input="Hm", previous_response_id=continued.id)
    assert third.usage is not None and third.usage.input_tokens == counted.input_tokens > asked.usage.input_tokens  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="previous_response_id: no response") as refused:
        client.responses.create(input="Hm", previous_response_id=third.id, **ASK)
    assert refused.value.code == "previous_response_not_found"


def test_only_so_much_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "STORED_RESPONSES", 2)
    monkeypatch.setattr(responses, "STORED_CHARACTERS", 100)
    stored = responses.StoredResponses()
    for name, size in (("a", 10), ("b", 10), ("c", 10), ("d", 85)):
        stored.put(name, ["x" * size])
        assert stored.find(name) == ["x" * size]
    assert list(stored._items) == list(stored._sizes) == ["c", "d"]
    stored.put("e", ["x" * 20])
    assert list(stored._items) == ["e"]


def test_a_response_in_a_form(client: OpenAI) -> None:
    pytest.importorskip("llguidance")
    response = client.responses.parse(input="Hello", text_format=Kind, **{**ASK, "max_output_tokens": 60})
    assert response.output_parsed is not None and response.output_parsed.kind in ("fox", "hen")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input": []}, "input: expected a text, or a list of items"),
        (
            {"input": [{"type": "item_reference", "id": "a"}]},
            "input: item 0 is of type item_reference; read are message",
        ),
        ({"input": [{"type": "function_call"}]}, "input: item 0 is a call, which needs call_id, name and arguments"),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
            "input: item 0 is the output of 'a', and no function_call before it is that",
        ),
        ({"input": [{"content": "a"}]}, "input: item 0 has no role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input: item 0 has content that is no text",
        ),
        ({"input": "a", "previous_response_id": "x"}, "previous_response_id: no response 'x' is stored here"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, r"tools\[0\].type: input should be 'function'"),
        ({"input": "a", "tool_choice": {"type": "allowed_tools"}}, "tool_choice: give auto, none, required"),
        ({"input": "a", "background": True}, "background: no parameter of this server"),
        ({"input": "a", "temperature": -1}, "temperature: -1"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format: schema: belongs to"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"enum": []}}}},
            "text.format: the grammar cannot be followed",
        ),
        ({"input": "a " * 200, "max_output_tokens": 9}, "input: has 2.* tokens, but the model sees"),
    ],
)
def test_what_is_refused(client: OpenAI, values: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**{"model": "tiny", **values})
