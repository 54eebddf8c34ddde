"""The examples of OpenAI's own client (github.com/openai/openai-python, README.md and examples/), against this server.

Models, questions and prints are shortened; the calls are those of the examples. A random model decides on no call by
itself, so its text is given by a grammar where an example leaves the choice to the model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from enum import StrEnum
from typing import Any

import openai
import pytest
from builders.chat_templates import QWEN3
from builders.served import Served, model_with, serving
from builders.tiny_world import World
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from danlu.inference.engine import EngineOptions

pytest.importorskip("llguidance")

HELLO: list[Any] = [{"role": "system", "content": "You are a tutor."}, {"role": "user", "content": "solve 8x + 31 = 2"}]
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SHORT: dict[str, Any] = {"model": "qwen", "seed": 3, "max_completion_tokens": 300}
BRIEF: dict[str, Any] = {"model": "qwen", "max_output_tokens": 300}


class Level(StrEnum):
    low = "low"
    high = "high"


class Answer(BaseModel):
    level: Level
    is_sure: bool


class GetWeather(BaseModel):
    city: Level
    at: Level


@pytest.fixture(scope="module")
def served(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    loaded = model_with(QWEN3, tiny_world.base, tmp_path_factory.mktemp("examples") / "qwen")
    with serving(loaded.served, loaded.engine(EngineOptions(cache_gib=0.05))) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return served.client()


def says(*lines: str) -> dict[str, Any]:
    """The further parameters of a request with a given answer."""
    return {"extra_body": {"structured_outputs": {"choice": ["\n".join(lines)]}}}


def call_text(**arguments: Any) -> str:
    return (
        f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
    )


def test_module_client_and_streaming(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """module_client.py, demo.py and streaming.py, and their asynchronous forms."""
    monkeypatch.setattr(openai, "api_key", "none")
    monkeypatch.setattr(openai, "base_url", served.url + "/")
    monkeypatch.setattr(openai, "default_headers", {"x-foo": "true"})
    stream = openai.chat.completions.create(model="qwen", messages=HELLO, max_tokens=5, seed=1, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    ask: dict[str, Any] = {"model": "qwen", "prompt": "1,2,3,", "max_tokens": 5, "temperature": 0}
    response = openai.completions.create(**ask, stream=True)
    texts = [next(response).choices[0].text, *(data.choices[0].text for data in response)]
    assert "".join(texts) == openai.completions.create(**ask).choices[0].text

    async def text_of(stream: AsyncIterator[Any]) -> str:
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_async() -> tuple[str, str]:
        async with AsyncOpenAI(base_url=served.url, api_key="none") as client:
            chunks = await client.chat.completions.create(
                model="qwen", messages=HELLO, max_tokens=5, seed=1, stream=True
            )
            text = await text_of(chunks)
            written = ""
            async with client.responses.stream(model="qwen", input="Write a haiku.", max_output_tokens=5) as events:
                async for event in events:
                    written += event.delta if event.type == "response.output_text.delta" else ""
            return text, written

    text, written = asyncio.run(ask_async())
    assert text == said and written


def test_a_developer_is_a_system_where_the_template_knows_none(client: OpenAI) -> None:
    """The first chat of README.md: QWEN3 shows no role that it does not know, so the instruction was lost."""
    question = {"role": "user", "content": "How?"}
    tokens = []
    for role in ("developer", "system", "critic"):
        messages: list[Any] = [{"role": role, "content": "Talk like a pirate."}, question]
        usage = client.chat.completions.create(model="qwen", messages=messages, max_tokens=1).usage
        assert usage is not None
        tokens.append(usage.prompt_tokens)
    assert tokens[0] == tokens[1] > tokens[2]


def test_parsing(client: OpenAI) -> None:
    """parsing.py, parsing_stream.py, responses/structured_outputs.py and responses/streaming.py."""
    message = client.chat.completions.parse(messages=HELLO, response_format=Answer, **SHORT).choices[0].message
    assert message.parsed and isinstance(message.parsed.level, Level)
    written, parsed = "", None
    with client.chat.completions.stream(messages=HELLO, response_format=Answer, **SHORT) as stream:
        for event in stream:
            if event.type == "content.delta":
                written += event.delta
            elif event.type == "content.done":
                parsed = event.parsed
    final = stream.get_final_completion().choices[0].message
    assert written == message.content and parsed == final.parsed == message.parsed
    response = client.responses.parse(input="solve 8x + 31 = 2", text_format=Answer, **BRIEF)
    assert isinstance(response.output_parsed, Answer)
    with client.responses.stream(input="solve 8x + 31 = 2", text_format=Answer, **BRIEF) as events:
        done = [event for event in events if event.type == "response.output_text.done"]
    assert done[0].parsed == events.get_final_response().output_parsed is not None


def test_parsing_tools(client: OpenAI) -> None:
    """parsing_tools.py and parsing_tools_stream.py."""
    tools: list[Any] = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    answer = says(call_text(city="low", at="high"))
    message = client.chat.completions.parse(messages=HELLO, tools=tools, **SHORT, **answer).choices[0].message
    wanted = [GetWeather(city=Level.low, at=Level.high)]
    assert [call.function.parsed_arguments for call in message.tool_calls or ()] == wanted
    done = []
    with client.chat.completions.stream(
        messages=HELLO, tools=tools, parallel_tool_calls=True, **SHORT, **answer
    ) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.done":
                done.append(event.parsed_arguments)
    final = stream.get_final_completion().choices[0]
    assert [call.function.parsed_arguments for call in final.message.tool_calls or ()] == done == wanted
    assert final.finish_reason == "tool_calls"


def test_arguments_with_characters_of_several_tokens(client: OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "get_weather"}}]
    city = "東🦊👩‍👧"
    answer = {"model": "qwen", "messages": HELLO, "tools": tools, **says(call_text(city=city))}
    (call,) = client.chat.completions.create(**answer).choices[0].message.tool_calls or ()
    streamed = [
        call for chunk in client.chat.completions.create(**answer, stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
    ]  # fmt: skip
    for each in (call, *streamed):
        assert json.loads(each.function.arguments) == {"city": city}
    assert len(streamed) == 1


def test_tools_of_responses(client: OpenAI) -> None:
    """responses/structured_outputs_tools.py, responses/streaming_tools.py and responses_input_tokens.py."""
    tools: list[Any] = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
    ask: dict[str, Any] = {"input": "look up", "tools": tools, **BRIEF, "tool_choice": "required"}
    ask["parallel_tool_calls"] = False
    response = client.responses.parse(**ask)
    (call,) = response.output
    assert call.type == "function_call" and isinstance(call.parsed_arguments, GetWeather)
    assert response.tool_choice == "required" and response.tools[0].name == "get_weather"  # type: ignore[union-attr]
    with client.responses.stream(**ask) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
    final = stream.get_final_response()
    assert isinstance(final.output[0].parsed_arguments, GetWeather)  # type: ignore[union-attr]
    assert kinds[2:6] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"
    ]  # fmt: skip
    named: Any = {"type": "function", "name": "get_weather"}
    plain: list[Any] = [
        {"type": "function", "name": name, "parameters": NOTHING} for name in ("get_time", "get_weather")
    ]
    called = client.responses.create(**{**ask, "tools": plain, "tool_choice": named})
    assert [item.name for item in called.output if item.type == "function_call"] == ["get_weather"]
    counts = [
        client.responses.input_tokens.count(model="qwen", input="look up", tools=tools).input_tokens
        for tools in (plain, [])
    ]
    assert called.usage is not None and called.usage.input_tokens == counts[0] > counts[1]


def test_a_loop_of_calls(client: OpenAI) -> None:
    """responses/tool_call_loop.py, which goes on by `previous_response_id`, and function_calling_migration.py, which
    gives the items back."""
    tools: list[Any] = [{"type": "function", "name": "calculate", "parameters": NOTHING}]
    first = client.responses.create(
        input="7 weeks?", tools=tools, tool_choice="required", parallel_tool_calls=False, **BRIEF
    )
    calls = [item for item in first.output if item.type == "function_call"]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "4233600"} for call in calls
    ]
    ask: dict[str, Any] = {"tools": tools, "temperature": 0, **BRIEF, "max_output_tokens": 9}
    stored = client.responses.create(input=results, previous_response_id=first.id, **ask)
    whole: list[Any] = [{"role": "user", "content": "7 weeks?"}, *first.output, *results]
    given = client.responses.create(input=whole, **ask)
    assert calls and stored.output_text == given.output_text != "" and stored.usage == given.usage
    other = [{**result, "output": "0"} for result in results]
    assert client.responses.create(input=[*whole[: -len(results)], *other], **ask).usage != given.usage


def test_error_handling(client: OpenAI) -> None:
    """error_handling.py, except that its temperature of 99 is allowed here, as with vLLM."""
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("this-model-does-not-exist")
    assert isinstance(missing.value.body, dict) and "this-model-does-not-exist" in missing.value.body["message"]
    with pytest.raises(openai.BadRequestError, match="temperature: -99"):
        client.chat.completions.create(model="qwen", messages=HELLO, temperature=-99.0)


def test_a_conversation_has_its_thoughts_again(client: OpenAI) -> None:
    """An answer's `reasoning` that a client gives back is shown to the template by the name that it knows."""
    counts = []
    for thought in ({}, {"reasoning": "A fox."}, {"reasoning_content": "A fox."}):
        message: Any = {"role": "assistant", "content": "Yes", **thought}
        usage = client.chat.completions.create(model="qwen", messages=[*HELLO, message], max_tokens=1).usage
        assert usage is not None
        counts.append(usage.prompt_tokens)
    assert counts[0] < counts[1] == counts[2]


def test_files_of_the_examples_that_are_not_there(client: OpenAI) -> None:
    """audio.py, picture.py and the images of README.md: refused by name."""
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(openai.BadRequestError, match="'image_url'; only parts of type text can be read"):
        client.chat.completions.create(model="qwen", messages=[{"role": "user", "content": [part]}])  # type: ignore[misc, list-item]
    with pytest.raises(openai.NotFoundError, match="POST /v1/images/generations: not found"):
        client.images.generate(prompt="A fox")
