"""Who may speak with a server, what it logs, how it ends, and what curl and the page about it say."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from builders.docs_scripts import TOP
from builders.served import Loaded, Served, ask, curl, serving, wait_until
from starlette.responses import PlainTextResponse

from danlu.core.errors import RecipeError
from danlu.core.http_client import HTTPClient
from danlu.inference.request import Completion
from danlu.serving.openai_api import ChatBody, CompletionBody
from danlu.serving.server import Guard, ServerOptions

PROMPT = "Once upon a time"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def served(loaded: Loaded) -> Iterator[Served]:
    with serving(loaded.served, loaded.engine()) as served:
        yield served


def test_what_is_no_request(served: Served) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    json_type = {"Content_Type": "application/json"}
    status, answer = ask(f"{served.url}/completions", body, Content_Type="text/plain")
    assert status == 415 and "send JSON, with the header Content-Type: application/json" in answer["error"]["message"]
    assert ask(f"{served.url}/completions", b"{", **json_type)[0] == 400
    assert ask(f"{served.url}/completion", body, **json_type) == (
        404,
        {
            "error": {
                "message": "POST /v1/completion: not found",
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            }
        },
    )
    assert ask(f"{served.url}/completions")[0] == 405
    assert ask(f"{served.url}/completions", body, **json_type)[0] == 200


def test_a_page_that_calls_this_machine_by_its_own_name_is_refused(served: Served, loaded: Loaded) -> None:
    status, answer = ask(f"{served.url}/models", Host="evil.example")
    assert status == 403 and "'evil.example' is not this machine" in answer["error"]["message"]
    for host in ("localhost", "localhost:9", "LOCALHOST", "LocalHost.:9", "127.0.0.1:9", "[::1]:9", "[::1]"):
        assert ask(f"{served.url}/models", Host=host)[0] == 200, host
    with serving(loaded.served, loaded.engine(), api_key="key") as locked:
        assert ask(f"{locked.url}/models", Host="evil.example", Authorization="Bearer key")[0] == 200


def test_an_api_key(loaded: Loaded) -> None:
    with serving(loaded.served, loaded.engine(), api_key="the key") as locked:
        for wrong in ("", "the", "The key"):
            with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
                locked.client(api_key=wrong or "none").models.list()
        assert ask(f"{locked.root}/tokenize")[0] == 401
        assert ask(f"{locked.root}/health")[0] == 200
        assert [model.id for model in locked.client(api_key="the key").models.list()] == ["tiny", "lora", "soft"]
        for scheme, status in (("bearer", 200), ("BEARER ", 200), ("Basic", 401), ("", 401)):
            assert ask(f"{locked.url}/models", Authorization=f"{scheme} the key")[0] == status, scheme


def test_an_api_key_that_is_not_ascii(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients send UTF-8, danlu's own among them; the header is read as Latin-1."""
    with serving(loaded.served, loaded.engine(), api_key="schlüssel ключ") as locked:
        for sent, status in (("schlüssel ключ", 200), ("schlussel ключ", 401)):
            header = f"Bearer {sent}".encode().decode("latin-1")
            assert ask(f"{locked.url}/models", Authorization=header)[0] == status
        monkeypatch.setenv("KEY_OF_TEST", "schlüssel ключ")
        assert HTTPClient(locked.root, 20, "KEY_OF_TEST").get("/v1/models")["data"]
    monkeypatch.setenv("KEY_OF_TEST", "key\n")
    with pytest.raises(RecipeError, match="KEY_OF_TEST has a line break"):
        HTTPClient("http://localhost:1", 20, "KEY_OF_TEST")


def test_a_line_for_each_request(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(loaded.served, loaded.engine(), quiet=False) as served:
        served.client().completions.create(model="lora", prompt=PROMPT, **GREEDY)
        ask(f"{served.root}/health")
        ask(f"{served.root}/nowhere")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"{served.url} answers with tiny, lora, soft  (Ctrl-C ends)"
    assert lines[1].startswith("POST  /v1/completions  200  lora  ") and " tokens  " in lines[1]
    assert [line.split("  ")[:3] for line in lines[2:]] == [["GET", "/nowhere", "404"]]
    with serving(loaded.served, loaded.engine(), quiet=True) as served:
        ask(f"{served.root}/nowhere")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_line_break_in_a_path_makes_no_line_of_its_own(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    guard = Guard(PlainTextResponse("x"), ServerOptions(0), local=True)
    for forged in ("/a\nPOST  /v1/completions  200", "/a\r\n\x1b[2J", "/a\u2028b"):
        scope = {"type": "http", "method": "GET", "path": forged, "headers": []}

        async def ask_once(scope: Any = scope) -> None:
            async def send(message: Any) -> None:
                pass

            await guard(scope, None, send)  # type: ignore[arg-type]

        asyncio.run(ask_once())
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("GET  /a\\")
    ask(f"{served.root}/a%0APOST%20%20/v1/completions")  # nor as clients send it


def test_streams_are_closed_when_the_server_ends(endless: Loaded) -> None:
    reasons: list[Any] = []
    with serving(endless.served, endless.engine()) as served:
        client, name = served.client(), endless.served.names[0]
        begun = threading.Event()

        def read() -> None:
            for chunk in client.chat.completions.create(model=name, messages=HELLO, stream=True):
                begun.set()
                reasons.append(chunk.choices[0].finish_reason)

        def wait() -> None:
            with pytest.raises(openai.InternalServerError, match="the server is ending"):
                client.chat.completions.create(model=name, messages=HELLO)
            reasons.append("refused")

        threads = [threading.Thread(target=work, daemon=True) for work in (read, wait)]
        for thread in threads:
            thread.start()
        assert begun.wait(20)
        wait_until(lambda: served.server.engine.statistics.running == 2)
    for thread in threads:
        thread.join(20)
    assert reasons.count("abort") == 1 and reasons.count("refused") == 1
    assert served.failure is None


def test_a_second_ctrl_c_does_not_wait_for_a_long_step(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    engine, is_over = loaded.engine(), threading.Event()

    def long_step() -> list[Completion]:
        is_over.wait(60)
        return []

    engine.step = long_step  # type: ignore[method-assign]
    try:
        with serving(loaded.served, engine) as served:

            def give_up() -> None:
                with pytest.raises(openai.APIError):
                    served.client().completions.create(model="tiny", prompt="a")

            threading.Thread(target=give_up, daemon=True).start()
            wait_until(lambda: engine.unfinished > 0)
            served.server.should_exit = True
            said = ""

            def has_said() -> bool:
                nonlocal said
                said += capsys.readouterr().err
                return "ending after this step of the engine; Ctrl-C again ends at once" in said

            wait_until(has_said)
            served.server.force_exit = True
    finally:
        is_over.set()


# -- by curl, and by what the page says --------------------------------------------------------------------------------


def test_a_stream_by_curl(served: Served) -> None:
    body = {"model": "lora", "messages": HELLO, "max_tokens": 4, "seed": 1}
    post = (f"{served.url}/chat/completions", "-H", "Content-Type: application/json", "-d")
    answer = json.loads(curl(*post, json.dumps(body)))
    assert answer["model"] == "lora" and answer["usage"]["completion_tokens"] == 4
    events = curl("-N", *post, json.dumps({**body, "stream": True})).removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]" and all(event.startswith("data: {") for event in events[:-1])
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-1]]
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == answer["choices"][0]["message"]["content"] and text
    said = curl(f"{served.url}/completions", "-d", json.dumps(body))
    assert "Content-Type is application/x-www-form-urlencoded: send JSON" in json.loads(said)["error"]["message"]


@pytest.fixture(scope="module")
def page(served: Served) -> str:
    """docs/serving.md, about the server of these tests."""
    text = (TOP / "docs" / "serving.md").read_text(encoding="utf-8")
    changes = {"http://127.0.0.1:8000/v1": served.url, '"fox"': '"tiny"'}
    for written, meant in changes.items():
        assert written in text
        text = text.replace(written, meant)
    return text


def test_the_pages_program_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^(    from openai import OpenAI\n(?:(?:    .*)?\n)+)", page, re.MULTILINE)
    exec(compile(textwrap.dedent(program), "serving.md", "exec"), {})
    assert len(capsys.readouterr().out) > 20


def test_the_pages_curls_run(page: str) -> None:
    commands = re.findall(r"^    curl (.*)$", page, re.MULTILINE)
    answers = [curl(*shlex.split(command)) for command in commands]
    assert [model["id"] for model in json.loads(answers[0])["data"]] == ["tiny", "lora", "soft"]
    assert json.loads(answers[1])["choices"][0]["text"]
    assert answers[2].startswith("data: {") and answers[2].endswith("data: [DONE]\n\n")


def test_the_page_has_every_parameter_and_option(page: str) -> None:
    from danlu.cli.main import command
    from danlu.registry import VERBS

    listed = set(re.findall(r"`([\w.]+)`", page))
    parameters = {*CompletionBody.model_fields, *ChatBody.model_fields}
    assert parameters - listed == {"prompt", "messages", "stream_options"} - listed
    options = {name for parameter in command("serve", VERBS["serve"].target).params for name in parameter.opts}
    assert {name for name in options if name.startswith("--")} - set(re.findall(r"--[\w-]+", page)) == set()
    assert "no_such_parameter" not in listed
