"""Answers in a form, as OpenAI's own client asks for them: by a schema, an expression, choices, and calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from builders.chat_templates import QWEN3
from builders.served import Loaded, Served, model_with, serving
from builders.tiny_world import World
from openai import OpenAI
from pydantic import BaseModel

from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.serving.served_models import served_models

pytest.importorskip("llguidance")

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
DRAWN: dict[str, Any] = {"temperature": 1, "seed": 3, "max_completion_tokens": 300}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
TOOLS: list[Any] = [WEATHER, CLOCK]
THINKS = QWEN3 + "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}"


class Event(BaseModel, extra="forbid"):
    day: Literal["Mon", "Tue"]
    guests: Literal[1, 2, 3]
    is_open: bool


def engine(loaded: Loaded) -> EmbeddedEngine:
    return loaded.engine(EngineOptions(cache_gib=0.05))


@pytest.fixture(scope="module")
def served(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    loaded = model_with(QWEN3, tiny_world.base, tmp_path_factory.mktemp("forms") / "qwen")
    with serving(loaded.served, engine(loaded)) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return served.client()


def text_of(client: OpenAI, **values: Any) -> str:
    answer = client.chat.completions.create(model="qwen", messages=HELLO, **{**DRAWN, **values}).choices[0]
    assert answer.message.content is not None
    return answer.message.content


# -- forms -------------------------------------------------------------------------------------------------------------


def test_the_client_parses_what_it_has_asked_for(client: OpenAI) -> None:
    """The example of structured outputs in OpenAI's documentation."""
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="qwen", messages=HELLO, response_format=Event, **{**DRAWN, "seed": seed}
        )
        assert answer.choices[0].message.parsed is not None and answer.choices[0].finish_reason == "stop"
    with pytest.raises(ValueError):
        Event.model_validate_json(text_of(client, max_completion_tokens=20))


def test_every_way_to_ask_for_a_form(client: OpenAI) -> None:
    schema = Event.model_json_schema()
    bodies: list[dict[str, Any]] = [
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"structured_outputs": {"json": schema}},
    ]
    for body in bodies:
        Event.model_validate_json(text_of(client, extra_body=body))
    assert isinstance(json.loads(text_of(client, response_format={"type": "json_object"}, max_tokens=1000)), dict)
    for body in ({"guided_regex": r"\d{3}-[ab]+z"}, {"structured_outputs": {"regex": r"\d{3}-[ab]+z"}}):
        assert re.fullmatch(r"\d{3}-[ab]+z", text_of(client, extra_body=body))
    texts = [text_of(client, extra_body={"guided_choice": ["yes", "no"]}, seed=seed) for seed in range(8)]
    assert set(texts) == {"yes", "no"}
    assert text_of(client, extra_body={"structured_outputs": {"choice": ["a b"]}}) == "a b"
    rules = 'start: "sum: " /[0-9]/ ("+" /[0-9]/)+'
    assert re.fullmatch(r"sum: \d(\+\d)+", text_of(client, extra_body={"structured_outputs": {"grammar": rules}}))
    plain = text_of(client, max_completion_tokens=8)
    assert text_of(client, response_format={"type": "text"}, max_completion_tokens=8) == plain


def test_a_form_of_completions_and_streams(client: OpenAI) -> None:
    ask: dict[str, Any] = {"prompt": "Once", "model": "qwen", "max_tokens": 300, "seed": 1, "n": 3}
    ask["extra_body"] = {"guided_json": Event.model_json_schema(), "ignore_eos": True}
    whole = [choice.text for choice in client.completions.create(**ask).choices]
    assert all(Event.model_validate_json(text) for text in whole)
    texts = ["", "", ""]
    for chunk in client.completions.create(**ask, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == whole


def test_forms_that_no_answer_can_have_are_refused(client: OpenAI, served: Served) -> None:
    large = {"enum": ["x" * 64 + str(number) for number in range(15_000)]}
    assert len(json.dumps(large)) > 2**20
    for form, message in (
        ({"guided_json": {"enum": []}}, "guided_json: the grammar cannot be followed: Unsatisfiable schema"),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex: the grammar allows no answer: no token of this model"),
        ({"guided_regex": "(a"}, "guided_regex: the grammar cannot be followed: .*invalid regex"),
        ({"structured_outputs": {"grammar": "begin: a"}}, "structured_outputs: the grammar cannot be followed"),
        ({"guided_json": {"type": "strin"}}, "guided_json: the grammar cannot be followed: Invalid type: strin"),
        ({"guided_json": large}, "guided_json: the grammar has 1,.* characters; more than 262,144 are not compiled"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            text_of(client, extra_body=form)
    assert served.blocks_used == 0


def test_an_answer_that_leaves_its_grammar_fails_alone(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    from danlu.inference.grammar import TokenMatcher

    monkeypatch.setattr(TokenMatcher, "problem", property(lambda self: "no token is left"))
    with pytest.raises(openai.InternalServerError, match="the grammar allows no token at position .*no token is left"):
        text_of(client, extra_body={"guided_choice": ["a"]})
    assert text_of(client, max_completion_tokens=4)


# -- tools -------------------------------------------------------------------------------------------------------------


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def test_a_call_that_is_required(client: OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model="qwen", messages=HELLO, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
            **{**DRAWN, "seed": seed + 5},
        ).choices[0]  # fmt: skip
        ((name, arguments),) = calls_of(answer.message)
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        assert arguments == {} if name == "get_time" else arguments.keys() == {"city", "unit"}
    free = client.chat.completions.create(model="qwen", messages=HELLO, tools=TOOLS, **DRAWN).choices[0]
    assert free.message.tool_calls is None, "a model that was never shown calls writes none by itself"


def test_a_call_of_one_tool_whole_and_streamed(client: OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    ask: dict[str, Any] = {"model": "qwen", "messages": HELLO, "tools": TOOLS, "tool_choice": choice, **DRAWN}
    ((name, arguments),) = calls_of(client.chat.completions.create(**ask).choices[0].message)
    assert name == "get_weather" and arguments["unit"] in "CF"
    written = []
    for chunk in client.chat.completions.create(**ask, stream=True):
        written += chunk.choices[0].delta.tool_calls or []
        assert not chunk.choices[0].delta.content
    ((streamed, given),) = [(call.function.name, json.loads(call.function.arguments)) for call in written]
    assert (streamed, given) == (name, arguments)


def test_one_call_at_most_where_several_are_not_wanted(client: OpenAI) -> None:
    calls = {}
    for several in (True, False):
        answer = client.chat.completions.create(
            model="qwen", messages=HELLO, tools=[CLOCK], tool_choice="required", parallel_tool_calls=several,
            logit_bias={}, **{**DRAWN, "seed": 4, "max_completion_tokens": 400},
        )  # fmt: skip
        calls[several] = len(answer.choices[0].message.tool_calls or ())
    assert calls[False] == 1 <= calls[True]


def test_a_schema_of_a_tool_that_cannot_be_kept_to_is_named(client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "not": {}}}}
    with pytest.raises(openai.BadRequestError, match='tools: the grammar cannot be followed: .*"not"'):
        client.chat.completions.create(model="qwen", messages=HELLO, tools=[tool], tool_choice="required", **DRAWN)  # type: ignore[list-item]


# -- thoughts ----------------------------------------------------------------------------------------------------------


def test_thoughts_are_apart_and_a_form_is_that_of_the_text_behind(tiny_world: World, tmp_path: Path) -> None:
    loaded = model_with(THINKS, tiny_world.base, tmp_path / "qwen")
    form: Any = {"type": "json_schema", "json_schema": {"name": "event", "schema": Event.model_json_schema()}}
    ask: dict[str, Any] = {"model": "qwen", "messages": HELLO, "response_format": form, "temperature": 1, "seed": 3}
    with serving(loaded.served, engine(loaded)) as served:
        client = served.client()
        message = client.chat.completions.create(**ask, max_completion_tokens=9).choices[0].message
        assert message.content is None and message.model_extra is not None
        assert message.model_extra["reasoning"] == message.model_extra["reasoning_content"] != ""
        thought, said = "", ""
        for chunk in client.chat.completions.create(**ask, max_completion_tokens=9, stream=True):
            delta = chunk.choices[0].delta
            thought += (delta.model_extra or {}).get("reasoning", "")
            said += delta.content or ""
        assert (thought, said) == (message.model_extra["reasoning"], "")
        hidden = client.chat.completions.create(
            **ask, max_completion_tokens=9, extra_body={"include_reasoning": False}
        ).choices[0]
        assert hidden.message.content is None and "reasoning" not in (hidden.message.model_extra or {})
    together = served_models(loaded.resolved, loaded.model, reasoning=False)
    with serving(together, engine(loaded)) as served:
        content = served.client().chat.completions.create(**ask, max_completion_tokens=9).choices[0].message.content
        assert content is not None and content.strip() == thought
