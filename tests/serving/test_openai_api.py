"""Which requests are taken, and what is said of those that are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from danlu.serving.openai_api import (
    IGNORED,
    WITHOUT_EFFECT,
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)

USER = {"role": "user", "content": "Hello"}
CHAT = {"messages": [USER]}
TEXT = {"prompt": "Once"}


def completion(**values: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({**TEXT, **values}).encode())


def chat(**values: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({**CHAT, **values}).encode())


def test_defaults_are_those_of_openai() -> None:
    body = completion()
    options = body.sampling_options({}, 7, 100)
    assert (body.n, body.max_new_tokens, body.top_logprobs_count, body.stream) == (1, 16, None, False)
    assert (options.temperature, options.top_p, options.top_k, options.seed) == (1.0, 1.0, 0, 7)
    assert chat().max_new_tokens is None


def test_log_probabilities_of_a_prompt_are_wanted_where_it_is_echoed_with_them() -> None:
    assert completion(echo=True, logprobs=0).wants_prompt_logprobs
    assert not completion(echo=True).wants_prompt_logprobs and not completion(logprobs=0).wants_prompt_logprobs
    assert chat(echo=False) == chat() and not chat(logprobs=True).wants_prompt_logprobs
    with pytest.raises(ApiError, match=r"^echo: not in a stream, since the client has the prompt"):
        completion(echo=True, stream=True)
    with pytest.raises(ApiError, match=r"^echo: input should be False, found true"):
        chat(echo=True)


def test_null_is_left_out() -> None:
    names = {*CompletionBody.model_fields, "logit_bias", "whatever"} - {"prompt"}
    assert completion(**dict.fromkeys(names)) == completion()
    assert completion(n=2) != completion()


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_describes_a_request_is_ignored(name: str) -> None:
    assert completion(**{name: "x"}) == completion()


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_what_would_change_an_answer_is_refused_by_name(name: str) -> None:
    assert completion(**{name: WITHOUT_EFFECT[name][0]}) == completion()
    with pytest.raises(ApiError, match=f"^{name}: .* is not supported; leave it out$") as refused:
        completion(**{name: {"another": 3}})
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),
    ],
)
def test_prompts(given: Any, prompts: Any) -> None:
    assert completion(prompt=given).prompt == prompts


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"prompt": []}, "prompt", "prompt: expected a text, a list of texts, token ids"),
        ({"prompt": [[]]}, "prompt", "prompt: expected a text"),
        ({"prompt": [1, "a"]}, "prompt", "prompt: expected a text"),
        ({"prompt": [True]}, "prompt", "prompt: expected a text"),
        ({"prompt": [-1]}, "prompt", "prompt: expected a text"),
        ({"prompt": None}, "prompt", "prompt: is required"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens: input should be greater than or equal to 0, found -1"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: 0 has a meaning with echo or prompt_logprobs only"),
        ({"min_tokens": 17}, "min_tokens", "min_tokens: 17 are more than the 16 that may come"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a.[key]", "logit_bias.a.[key]: string should match pattern"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "logit_bias.1: input should be less than or equal to 100"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "prompt_logprobs: not in a stream"),
        ({"structured_outputs": {}}, "structured_outputs", "structured_outputs: give one of json, json_object, regex"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "structured_outputs.jsn: no parameter of this"),
        ({"guided_choice": []}, "guided_choice", "guided_choice: list should have at least 1 item"),
        ({"guided_json": "{"}, "guided_json", "guided_json: the schema is no JSON"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_choice: an answer has one form, and"),
        ({"max_tokens": 2.5}, "max_tokens", "max_tokens: input should be a valid integer, found 2.5"),
        ({"n": True}, "n", "n: input should be a valid integer, found true"),
        ({"n": 129}, "n", "n: input should be less than or equal to 128, found 129"),
        ({"temperature": "hot"}, "temperature", "temperature: input should be a valid number, found 'hot'"),
        ({"temprature": 1}, "temprature", "temprature: no parameter of this server. Did you mean 'temperature'?"),
        ({"stop": ["a", ""]}, "stop[1]", "stop[1]: string should have at least 1 character, found ''"),
        ({"logprobs": 21}, "logprobs", "logprobs: input should be less than or equal to 20, found 21"),
        ({"logprobs": True}, "logprobs", "logprobs: input should be a valid integer, found true"),
        ({"prompt": ["a"] * 129, "n": 128}, "prompt", "prompt: 129 prompts x 128 answers are more than 16384"),
        ({"stream_options": {}}, "stream_options", "stream_options: has a meaning with stream: true only"),
        ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "stream_options.usage: no param"),
        ({"n": 0, "seed": "x"}, "n", "n: input should be greater than or equal to 1, found 0; seed: input should be"),
    ],
)
def test_completions_that_are_refused(values: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        completion(**values)
    error = refused.value.body["error"]
    assert error["message"].startswith(message)
    assert (error["param"], error["type"], refused.value.status) == (param, "invalid_request_error", 400)


TOOL = {"type": "function", "function": {"name": "listen"}}
CALL_LOOK = {"type": "function", "function": {"name": "look"}}
IMAGE = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"messages": []}, "messages", "messages: list should have at least 1 item"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role: is required"),
        ({"messages": [USER, "a"]}, "messages[1]", "messages[1]: input should be"),
        ({"messages": [IMAGE]}, "messages[0].content", "messages[0].content: part 1 is 'image_url'; only parts of"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs: has a meaning with logprobs: true only"),
        (
            {"tool_choice": "required"},
            "tool_choice",
            "tool_choice: 'required' needs a tool to call, and there are none",
        ),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice: give auto, none, required or"),
        (
            {"tool_choice": CALL_LOOK, "tools": [TOOL]},
            "tool_choice",
            "tool_choice: 'look' needs a tool to call, and there",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0]", "tools[0]: a tool is {"),
        ({"tools": [TOOL, {"type": "custom", **CALL_LOOK["function"]}]}, "tools[1]", "tools[1]: a tool is {"),  # type: ignore[dict-item]
        (
            {"tool_choice": "required", "tools": [{"function": {"name": "a", "parameters": 7}}]},
            "tools[0]",
            "tools[0]: parameters of a function are a JSON schema",
        ),
        ({"response_format": {"type": "json"}}, "response_format.type", "response_format.type: input should be 'text'"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "response_format: json_schema: belongs to type",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens: input should be greater"),
    ],
)
def test_chats_that_are_refused(values: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**values)
    assert refused.value.param == param
    assert refused.value.message.startswith(message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the request's body is no JSON in UTF-8"),
        (b"\xff", "the request's body is no JSON in UTF-8"),
        (b"[1]", "the request's body is a list of 1; expected a JSON object"),
        (b'{"prompt": "\\ud800"}', "the request's body is no JSON in UTF-8: 'utf-8' codec can't encode"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature: input should be a finite number"),
        (b"[" * 100_000, "the request's body is no JSON in UTF-8"),
    ],
)
def test_bodies_that_are_no_requests(body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(CompletionBody, body)
    assert refused.value.message.startswith(message)


def test_halves_of_surrogate_pairs_that_belong_together_are_taken() -> None:
    assert parse_body(CompletionBody, b'{"prompt": "\\ud83c\\udf88"}').prompt == ["🎈"]


def test_sampling_options_come_from_the_request_then_from_the_model() -> None:
    advised = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    options = completion(temperature=0.2, top_k=-1, min_p=0.1, seed=3).sampling_options(advised, 7, 100)
    assert (options.temperature, options.top_p, options.top_k, options.min_p, options.seed) == (0.2, 0.9, 0, 0.1, 3)
    penalties = chat(presence_penalty=0.5, frequency_penalty=-2).sampling_options(advised, 7, 100)
    assert (penalties.presence_penalty, penalties.frequency_penalty) == (0.5, -2.0)
    assert completion(allowed_token_ids=[5, 3, 5]).sampling_options({}, 0, 100).allowed_ids == (3, 5)


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "temperature: -1.0 is out of range; it must be 0 (greedy) or"),
        ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty: 2.5 is out of range; it must be between -2"),
        (
            {"temperature": 1e-40},
            "temperature",
            "temperature: 1e-40 is out of range; it must be 0 (greedy) or a number",
        ),
        ({"repetition_penalty": 1e-40}, "repetition_penalty", "repetition_penalty: 1e-40 is out of range"),
        ({"repetition_penalty": 1e38}, "repetition_penalty", "repetition_penalty: 1e+38 is out of range"),
        ({"top_p": 0}, "top_p", "top_p: 0.0 is out of range"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids: () is out of range"),
        ({"allowed_token_ids": [100]}, "allowed_token_ids", "allowed_token_ids: 100 is none of the model's 100"),
    ],
)
def test_sampling_options_that_make_no_sense(values: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        completion(**values).sampling_options({}, 0, 100)
    assert refused.value.param == param
    assert refused.value.message.startswith(message)


@pytest.mark.parametrize(
    ("kind", "values", "code"),
    [
        (CompletionBody, {**TEXT, "mood": 1}, "unknown_parameter"),
        (CompletionBody, {**TEXT, "best_of": 4}, "unsupported_parameter"),
        (CompletionBody, {}, "missing_required_parameter"),
        (CompletionBody, {**TEXT, "max_tokens": "a"}, "invalid_type"),
        (CompletionBody, {**TEXT, "max_tokens": -1}, "integer_below_min_value"),
        (CompletionBody, {**TEXT, "n": 129}, "integer_above_max_value"),
        (CompletionBody, {**TEXT, "seed": 2**63}, "integer_above_max_value"),
        (CompletionBody, {**TEXT, "stop": ["a"] * 65}, "array_above_max_length"),
        (ChatBody, {"messages": []}, "empty_array"),
        (ChatBody, {**CHAT, "tool_choice": "required"}, "invalid_value"),
    ],
)
def test_errors_have_openai_s_codes(kind: type[Any], values: dict[str, Any], code: str) -> None:
    """Those that its API answers with, as clients have published them (openai-python's issues, recorded responses)."""
    with pytest.raises(ApiError) as refused:
        parse_body(kind, json.dumps(values).encode())
    assert refused.value.code == code and refused.value.body["error"]["code"] == code


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"temperature": -0.5}, "decimal_below_min_value"),
        ({"top_p": 1.5}, "decimal_above_max_value"),
        ({"presence_penalty": 2.5}, "decimal_above_max_value"),
        ({"top_k": -2}, "integer_below_min_value"),
        ({"allowed_token_ids": [100]}, "invalid_value"),
    ],
)
def test_sampling_options_out_of_range_have_openai_s_codes(values: dict[str, Any], code: str) -> None:
    with pytest.raises(ApiError) as refused:
        completion(**values).sampling_options({}, 0, 100)
    assert refused.value.code == code


def test_seeds_below_zero_are_seeds_of_their_own() -> None:
    seeds = [completion(seed=seed).sampling_options({}, 0, 100).seed for seed in (-1, -2, 1, 2**63 - 2)]
    assert len(set(seeds)) == 4 - 1 and seeds[0] == 2**63 - 1 and seeds[1] == seeds[3]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_bounds_that_are_there_before_work() -> None:
    """64 stops, 65,536 ids, a million values: one more is refused."""
    assert len(completion(stop=["a"] * 64).stop) == 64
    many = json.dumps({"tokens": [1] * 65_537}).encode()
    with pytest.raises(ApiError, match="tokens: list should have at most 65536 items"):
        parse_body(DetokenizeBody, many)
    assert len(parse_body(DetokenizeBody, json.dumps({"tokens": [1] * 65_536}).encode()).tokens) == 65_536
    with pytest.raises(ApiError, match="1,048,577 commas: more than 1,048,576 values are not read"):
        parse_body(CompletionBody, b'{"prompt": [' + b"1," * (2**20 + 1) + b"1]}")


def test_arguments_of_tool_calls_that_are_nested_without_end() -> None:
    call = {"function": {"name": "look", "arguments": "[" * 100_000}}
    with pytest.raises(ApiError, match="arguments of a tool call are no JSON") as refused:
        _ = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages[0].turn
    assert refused.value.status == 400


def test_messages_become_turns() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    body = chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "c", "tool_call_id": "1"},
        ]
    )
    parsed = {**call, "function": {"name": "look", "arguments": {"at": 1}}}
    assert [message.turn for message in body.messages] == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [parsed]},
        {"role": "tool", "content": "c", "tool_call_id": "1"},
    ]


def test_a_thought_has_the_names_of_all_templates() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for name in ("reasoning", "reasoning_content", "thinking"):
        message = {"role": "assistant", "content": "", name: "So"}
        turn = chat(messages=[message]).messages[0].turn
        assert turn["reasoning_content"] == turn["thinking"] == "So"
        turn = chat(messages=[{**message, "content": "a", "tool_calls": [call]}]).messages[0].turn
        assert turn["reasoning_content"] == "So" and ("thinking" in turn) == (name == "thinking")
    assert chat(messages=[{"role": "assistant", "content": "a"}]).messages[0].turn.keys() == {"role", "content"}


def test_arguments_of_tool_calls_have_to_be_json() -> None:
    call = {"function": {"name": "look", "arguments": "{"}}
    with pytest.raises(ApiError, match="arguments of a tool call are no JSON"):
        _ = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages[0].turn


def test_tokenizing_takes_a_text_or_a_conversation() -> None:
    for values in ({}, {**TEXT, **CHAT}):
        with pytest.raises(ApiError, match="prompt: give either prompt or messages"):
            parse_body(TokenizeBody, json.dumps(values).encode())
    with pytest.raises(ApiError, match="tokens\\[0\\]: input should be greater than or equal to 0, found -1"):
        parse_body(DetokenizeBody, b'{"tokens": [-1]}')
