"""The endpoint of agents: what it answers OpenAI's client, what it refuses and why, whom it lets ask."""

from __future__ import annotations

import json
import selectors
import socket
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from builders.tiny_world import tiny_world

from danlu.data.tokenizer import load_tokenizer
from danlu.data.tool_calls import ReadCalls
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.serving import agent_endpoint
from danlu.serving.agent_endpoint import AgentEndpoint, call_id, check_trained_as_drawn
from danlu.serving.openai_answers import chat_message
from danlu.serving.openai_api import ApiError, ChatBody

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "door", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "door", "arguments": {"n": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def endpoint():
    endpoint = AgentEndpoint("127.0.0.1", 0, SamplingOptions(), load_tokenizer(str(tiny_world().tokenizer)))
    endpoint.start()
    yield endpoint
    endpoint.close()


@pytest.fixture
def client(endpoint):
    api_key = endpoint.open((3, 1))
    with openai.OpenAI(base_url=endpoint.base_url, api_key=api_key, timeout=60, max_retries=0) as client:
        yield client
    endpoint.shut(api_key)


def taken(endpoint):
    """The next question."""
    with selectors.DefaultSelector() as selector:
        endpoint.register(selector)
        while not (requests := endpoint.take()):
            selector.select(1)
    (request,) = requests
    return request


def answered(endpoint, client, text, **parameters):
    """What the client gets for an answer with a text."""
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(lambda: client.chat.completions.create(model="policy", **parameters))
        request = taken(endpoint)
        tokens = endpoint._tokenizer.encode(text)
        values = [-0.5] * len(tokens)
        completion = Completion(9, 0, tokens, values, values, None, [0] * len(tokens), text, "stop")
        message = endpoint.answer(request, Request(9, (1, 2, 3)), completion)
        return asking.result(60), request, message


def test_an_answer_is_that_of_a_chat_completion(endpoint, client):
    answer, request, message = answered(endpoint, client, "a door", messages=HELLO, logprobs=True, stop=["x"])
    assert (request.key, request.messages, request.tools) == ((3, 1), tuple(HELLO), ())
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("a door", "stop")
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5] * answer.usage.completion_tokens
    assert answer.usage.prompt_tokens == 3 and message == {"role": "assistant", "content": "a door"}
    assert [model.id for model in client.models.list()] == ["policy"]


def test_an_answer_is_streamed_as_a_whole(endpoint, client):
    more = {"stream": True, "stream_options": {"include_usage": True}}
    stream, *_ = answered(endpoint, client, "a door", messages=HELLO, **more)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "a door"
    assert chunks[-1].usage.completion_tokens > 0
    stream, *_ = answered(endpoint, client, CALL, messages=HELLO, tools=TOOLS, stream=True)
    *_, last = stream
    assert last.choices[0].finish_reason == "tool_calls"
    assert json.loads(last.choices[0].delta.tool_calls[0].function.arguments) == {"n": 1}


def test_calls_are_apart_from_the_text_where_there_are_tools(endpoint, client):
    answer, _, message = answered(endpoint, client, f"Let me look. {CALL}", messages=HELLO, tools=TOOLS)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason, call.function.name) == ("Let me look.", "tool_calls", "door")
    assert message["tool_calls"][0]["function"] == {"name": "door", "arguments": {"n": 1}}
    assert len(call.id) == 9 and call.id == call_id("9/0/3", 0)
    without, *_ = answered(endpoint, client, CALL, messages=HELLO, tools=TOOLS, tool_choice="none")  # control
    assert without.choices[0].message.content == CALL and not without.choices[0].message.tool_calls
    broken = "<tool_call>{</tool_call>"
    assert chat_message(broken, ReadCalls(), str)["content"] == broken


def test_thoughts_of_gpt_oss_are_apart_and_what_was_drawn_is_the_same(endpoint, client, monkeypatch):
    thought, text = "<|channel|>analysis<|message|>A door?<|end|>", "<|start|>assistant<|channel|>final<|message|>No."
    raw, _, turn = answered(endpoint, client, thought + text, messages=HELLO, extra_body={"return_token_ids": True})
    assert turn == {"role": "assistant", "content": thought + text}, "other templates have it as it is"
    monkeypatch.setattr(agent_endpoint, "ANALYSIS", endpoint._tokenizer.template().source[:9])
    answer, _, turn = answered(endpoint, client, thought + text, messages=HELLO, extra_body={"return_token_ids": True})
    message = answer.choices[0].message
    assert (message.content, message.model_extra["reasoning"]) == ("No.", "A door?") and turn["thinking"] == "A door?"
    assert answer.choices[0].model_extra["token_ids"] == raw.choices[0].model_extra["token_ids"]
    with ThreadPoolExecutor(1) as pool:
        chunks = pool.submit(lambda: list(client.chat.completions.create(model="policy", messages=HELLO, stream=True)))
        completion = Completion(9, 0, [1], [0.0], [0.0], None, [0], thought + text, "stop")
        endpoint.answer(taken(endpoint), Request(9, (1, 2, 3)), completion)
    deltas = [chunk.choices[0].delta for chunk in chunks.result(60)]
    assert [delta.content for delta in deltas if delta.content] == ["No."]
    assert [delta.model_extra["reasoning"] for delta in deltas if delta.model_extra] == ["A door?"]


def test_who_has_no_episode_is_refused(endpoint, client):
    with pytest.raises(openai.AuthenticationError, match="episode"):
        client.with_options(api_key="wrong").chat.completions.create(model="policy", messages=HELLO)
    with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions"):
        client.completions.create(model="policy", prompt="hello")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="policy", messages=HELLO, temperature=0.5)


def test_an_agent_that_leaves_is_noticed(endpoint, client):
    address = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    body = json.dumps({"messages": HELLO})
    with socket.create_connection((address[0], int(address[1]))) as connection:
        head = f"Authorization: Bearer {client.api_key}\r\nContent-Type: application/json\r\nHost: here\r\n"
        text = f"POST /v1/chat/completions HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n{body}"
        connection.sendall(text.encode())
        request = taken(endpoint)
        assert not request.has_left
    with selectors.DefaultSelector() as selector:
        endpoint.register(selector)
        while not request.has_left:
            selector.select(0.1)
            endpoint.take()


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"temperature": 0.7}, "temperature: 0.7, and answers that are trained on are drawn with rollout.temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"repetition_penalty": 1.1}, "always 1"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"n": 2}, "n: more than one answer"),
        ({"seed": 1}, "seed"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"stream": True, "logprobs": True}, "not in a stream"),
        ({"model": "gpt"}, "the policy is called 'policy'"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "a"}]}, "the last is the assistant's"),
    ],
)
def test_what_would_not_be_trained_as_it_is_drawn_is_refused(parameters, said):
    with pytest.raises(ApiError, match=said):
        check_trained_as_drawn(ChatBody.model_validate({"messages": HELLO, **parameters}), SamplingOptions())


@pytest.mark.parametrize(
    "parameters",
    [{"temperature": 0.5, "top_p": 0.9}, {"top_k": -1}, {"presence_penalty": 0.0}, {"n": 1, "stop": "x"}],
)
def test_what_the_recipe_says_too_is_taken(parameters):
    sampling = SamplingOptions(temperature=0.5, top_p=0.9)
    check_trained_as_drawn(ChatBody.model_validate({"messages": HELLO, **parameters}), sampling)
