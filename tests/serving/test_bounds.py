"""What is too much is refused before it is worked on, and nothing that takes long is done by the event loop."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from builders.served import Loaded, Served, ask, serving

from danlu.core.errors import DataError, ResourceError
from danlu.data.chat_template import ChatTemplate
from danlu.data.template_process import TemplateProcess, template_process
from danlu.data.tokenizer import Tokenizer
from danlu.serving import api_endpoints
from danlu.serving.openai_answers import CompletionWriter

JSON_TYPE = {"Content_Type": "application/json"}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def served(loaded: Loaded) -> Iterator[Served]:
    with serving(loaded.served, loaded.engine()) as served:
        yield served


def post(served: Served, path: str, **body: Any) -> tuple[int, Any]:
    return ask(f"{served.root}{path}", json.dumps(body).encode(), **JSON_TYPE)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "X"}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "X"]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "X"}]}, "messages"),
        ("/v1/chat/completions", {"messages": [*HELLO, {"role": "user", "content": ["X"]}]}, "messages"),
        ("/tokenize", {"prompt": "X"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "X"}]}, "messages"),
    ],
)
def test_a_text_longer_than_the_context_times_the_longest_token_is_not_tokenized(
    served: Served, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    tokenizer = loaded.served.find(None).chat_tokenizer.tokenizer
    longest = 128 * tokenizer.longest_token
    assert tokenizer.longest_token == max(map(len, tokenizer.vocabulary))
    asked: list[int] = []
    encode = Tokenizer.encode

    def recording(self: Tokenizer, text: str) -> list[int]:
        asked.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", recording)

    def send(characters: int) -> tuple[int, Any]:
        written = json.dumps(body).replace('["X"]', '[{"type": "text", "text": "X"}]')
        return ask(f"{served.root}{path}", written.replace("X", "x" * characters).encode(), **JSON_TYPE)

    status, answer = send(longest + 1)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["param"] == param and "characters are more than" in answer["error"]["message"]
    assert all(length <= longest for length in asked)
    asked.clear()
    send(longest)  # control: it is, and refused by its tokens
    assert any(length >= longest for length in asked) or param == "messages"


def test_more_messages_than_tokens_fit_are_not_rendered(served: Served) -> None:
    status, answer = post(served, "/v1/chat/completions", messages=[{"role": "user"}] * 129)
    assert status == 400 and "129 messages and tools are more than the 128 tokens" in answer["error"]["message"]
    status, answer = post(served, "/v1/chat/completions", messages=[{"role": "user"}] * 128)
    assert "messages and tools are more" not in json.dumps(answer)


def test_stops_are_at_most_64_of_together_256_tokens(served: Served, loaded: Loaded) -> None:
    tokenizer = loaded.served.find(None).chat_tokenizer.tokenizer
    few = {"prompt": "Once", "max_tokens": 2}
    status, answer = post(served, "/v1/completions", **few, stop=[f"{number}" for number in range(65)])
    assert status == 400 and answer["error"]["param"] == "stop" and "at most 64 items" in answer["error"]["message"]
    status, answer = post(served, "/v1/completions", **few, stop=["x" * (256 * tokenizer.longest_token + 1)])
    assert status == 400 and "characters are more than 256 tokens" in answer["error"]["message"]
    one = "\u4f60" * 40  # of several tokens each
    tokens = len(tokenizer.encode(one))
    status, answer = post(served, "/v1/completions", **few, stop=[one] * (256 // tokens + 1))
    assert status == 400 and "tokens together are more than 256" in answer["error"]["message"]
    assert post(served, "/v1/completions", **few, stop=[one] * (256 // tokens))[0] == 200
    assert post(served, "/v1/completions", **few, stop=[f"{number}" for number in range(64)])[0] == 200


def test_ids_that_become_text_are_at_most_65536(served: Served) -> None:
    assert post(served, "/detokenize", tokens=[5] * 65_536)[0] == 200
    assert post(served, "/detokenize", tokens=[5] * 65_537)[0] == 400
    status, answer = post(served, "/detokenize", tokens=[5] * 2_000_000)  # which is read to its end
    assert status == 400 and "longer than 1,048,576 bytes" in answer["error"]["message"]


def test_nothing_that_takes_long_is_done_by_the_event_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, str] = {}

    def record(owner: Any, name: str) -> None:
        work: Callable[..., Any] = getattr(owner, name)

        def recording(*arguments: Any, **named: Any) -> Any:
            threads[name] = threading.current_thread().name.partition("_")[0]
            return work(*arguments, **named)

        monkeypatch.setattr(owner, name, recording)

    record(api_endpoints, "parse_body")
    record(api_endpoints, "split_stops")
    record(CompletionWriter, "whole")
    record(Tokenizer, "encode")
    record(Tokenizer, "token_bytes")
    record(TemplateProcess, "render")
    post(served, "/v1/completions", prompt="Once", max_tokens=1, metadata={"a": "x" * 70_000})
    assert threads == {
        "parse_body": "parsing",
        "split_stops": "tokenizing",
        "whole": "writing",
        "encode": "tokenizing",
    }
    post(served, "/tokenize", messages=HELLO, return_token_strs=True)
    assert threads["render"] == threads["token_bytes"] == "tokenizing"
    record(Tokenizer, "decode")
    post(served, "/detokenize", tokens=[5])
    assert threads["decode"] == "tokenizing"
    assert threads["parse_body"] not in ("parsing", "tokenizing")  # control: what is short is read at once


def test_deeply_nested_messages_are_the_clients_error(served: Served) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    status, answer = post(
        served, "/v1/chat/completions", messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}]
    )
    assert status == 400 and "arguments of a tool call are no JSON" in answer["error"]["message"]
    half = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "\ud800"})}}
    status, answer = post(
        served, "/v1/chat/completions", messages=[{"role": "assistant", "tool_calls": [half]}, *HELLO]
    )
    assert status in (200, 400), answer  # as the template shows it, or does not
    for depth in (100, 400, 900):
        deep: Any = "a"
        for _ in range(depth):
            deep = [deep]
        arguments = {"type": "function", "function": {"name": "f", "arguments": json.dumps(deep)}}
        for extra in ({"extra": deep}, {"tool_calls": [arguments]}):
            status, _ = post(served, "/v1/chat/completions", messages=[{"role": "user", **extra}], max_tokens=1)
            assert status in (200, 400), (depth, list(extra))


# -- the process of chat templates -------------------------------------------------------------------------------------


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, (), "test")


DOUBLING = "{% for i in range(40) %}{% set n.text = n.text ~ n.text %}{% endfor %}"
GROWING = "{% set n = namespace(text=messages[0].content) %}" + DOUBLING


def test_the_limit_of_memory_is_the_process_of_the_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*limits: Any) -> None:
        raise AssertionError("the limit is of this whole process")

    hello = template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    growing = template(GROWING)
    monkeypatch.setattr(resource, "setrlimit", refuse)
    process = TemplateProcess(2**26)
    try:
        assert process.render(hello, HELLO) == "<s>Hello"
        with pytest.raises(DataError, match="needs more than 0.0625 GiB of memory"):
            process.render(growing, [{"role": "user", "content": "x"}])
        assert process.render(hello, HELLO, prompt=True) == "<s>Hello"  # it goes on
    finally:
        process.close()
    with pytest.raises(DataError, match="the limit is of this whole process"):  # control
        hello.render(HELLO)


def test_a_process_that_is_killed_is_one_conversations_error() -> None:
    process = TemplateProcess()
    try:
        hello = template("{{ messages[0].content }}")
        assert process.render(hello, HELLO) == "Hello"
        os.kill(process._pool._processes[-1].id, signal.SIGKILL)
        with pytest.raises(ResourceError, match="ended early.*by a chat template"):
            process.render(hello, HELLO)
        assert process.render(hello, HELLO) == "Hello"
        nested: list[Any] = []
        for _ in range(100_000):
            nested = [nested]
        processes = list(process._pool._processes)
        with pytest.raises(DataError, match="nested too deeply to be rendered"):
            process.render(hello, [{"role": "user", "content": nested}])
        assert process.render(hello, HELLO) == "Hello"
        assert process._pool._processes == processes, "what could not be sent has cost its process"
    finally:
        process.close()


def test_what_it_renders_is_what_the_template_renders(loaded: Loaded) -> None:
    own = loaded.served.find(None).chat_tokenizer.tokenizer.template()
    for turns in (HELLO, [*HELLO, {"role": "assistant", "content": "Hi"}, *HELLO]):
        for prompt in (True, False):
            assert template_process().render(own, turns, prompt=prompt) == own.render(turns, prompt=prompt)
    assert template_process().takes_tools(own) == own.takes_tools
    with pytest.raises(DataError, match="refuses this conversation: .*no"):
        template_process().render(template("{{ raise_exception('no') }}"), HELLO)


def test_token_bytes_reads_the_table_of_added_tokens_once(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(loaded.served.find(None).chat_tokenizer.tokenizer._pretrained, "test", {})
    calls = []

    class Counting:
        def __init__(self, fast: Any) -> None:
            self.fast = fast

        def __getattr__(self, name: str) -> Any:
            if name == "get_added_tokens_decoder":
                calls.append(name)
            return getattr(self.fast, name)

    monkeypatch.setattr(tokenizer, "fast", Counting(tokenizer.fast))
    every = [tokenizer.token_bytes([token]) for token in range(tokenizer.vocab_size)]
    assert len(calls) == 1
    assert every == [[content] for content in tokenizer.token_bytes(range(tokenizer.vocab_size))]
