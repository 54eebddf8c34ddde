"""A server asked by OpenAI's own client: what it answers, what it refuses, and what it gives back."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from builders.adapter_folders import adapter_folder
from builders.bigram import bigram_folder
from builders.docs_scripts import TOP
from builders.served import Loaded, Served, serving, wait_until
from builders.tiny_world import World
from openai import OpenAI

from danlu.errors import ModelError
from danlu.recipe import sections
from danlu.rollout.engine import EngineOptions
from danlu.rollout.openai_api import ChatBody, CompletionBody
from danlu.rollout.request import Completion, Request, SamplingOptions

PROMPT = "Once upon a time"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
DRAWN: dict[str, Any] = {"temperature": 1, "max_tokens": 8}


@pytest.fixture(scope="module")
def loaded(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A random model with two adapters, one of which puts virtual tokens before each prompt."""
    root = tmp_path_factory.mktemp("adapters")
    lora = adapter_folder(tiny_world.base, root / "lora", sections.Lora(), seed=1, size=0.3)
    prompt = adapter_folder(tiny_world.base, root / "soft", sections.Prompt(tokens=3), seed=2, size=0.3)
    return Loaded.of(tiny_world.base, [lora, prompt], name="tiny")


@pytest.fixture(scope="module")
def served(loaded: Loaded) -> Iterator[Served]:
    with serving(loaded.served, loaded.engine()) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return served.client()


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model that never ends by itself."""
    return Loaded.of(
        bigram_folder(tmp_path_factory.mktemp("bigram") / "endless", "abcé", ends=False, context=1_000_000)
    )


def expected(loaded: Loaded, prompt: Any = PROMPT, model: str = "tiny", **changes: Any) -> list[Completion]:
    """What the engine alone answers."""
    named = loaded.served.find(model)
    tokens = prompt
    if isinstance(prompt, str):
        tokens = named.chat_tokenizer.encode_prompt(prompt)
    request = {"sampling": SamplingOptions(temperature=0), "max_new_tokens": 8, "stop_ids": named.stop_ids}
    return loaded.engine().generate([Request(0, tuple(tokens), adapter=named.adapter, **{**request, **changes})])


def token_texts(loaded: Loaded, tokens: list[int]) -> list[str]:
    """Each token's text; of one that is a part of a character its bytes."""
    texts = []
    for content in loaded.model.chat_tokenizer.tokenizer.token_bytes(tokens):
        try:
            texts.append(content.decode())
        except UnicodeDecodeError:
            texts.append("bytes:" + "".join(f"\\x{byte:02x}" for byte in content))
    return texts


# -- completions -------------------------------------------------------------------------------------------------------


def test_a_completion_is_the_engines(client: OpenAI, loaded: Loaded) -> None:
    (answer,) = expected(loaded, top_logprobs=2)
    got = client.completions.create(
        model="tiny", prompt=PROMPT, logprobs=2, extra_body={"return_token_ids": True}, **GREEDY
    )
    (choice,) = got.choices
    tokens = loaded.served.find("tiny").chat_tokenizer.encode_prompt(PROMPT)
    assert choice.text == answer.text and choice.finish_reason == {"length": "length", "stop": "stop"}[answer.finish]
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == answer.tokens and choice.model_extra["prompt_token_ids"] == tokens
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs == pytest.approx(answer.logprobs, abs=1e-6)
    assert choice.logprobs.tokens == token_texts(loaded, answer.tokens)
    assert choice.logprobs.text_offset is not None and choice.logprobs.text_offset[:2] == [
        0,
        len(choice.logprobs.tokens[0]),
    ]
    assert answer.top is not None and choice.logprobs.top_logprobs is not None
    for top, likeliest, logprob in zip(choice.logprobs.top_logprobs, answer.top, answer.logprobs, strict=True):
        assert max(top.values()) == pytest.approx(likeliest[0][1], abs=1e-6)
        assert logprob == pytest.approx(max(top.values()), abs=1e-6)  # greedy
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(tokens), len(answer.tokens))
    assert got.object == "text_completion" and got.model == "tiny"


def test_prompts_in_every_form(client: OpenAI, loaded: Loaded) -> None:
    encode = loaded.served.find("tiny").chat_tokenizer.encode_prompt
    texts = [PROMPT, "The fox"]
    alone = [client.completions.create(model="tiny", prompt=text, **GREEDY).choices[0].text for text in texts]
    assert alone[0] != alone[1]
    for prompt in (texts, [encode(text) for text in texts]):
        answers = client.completions.create(model="tiny", prompt=prompt, **GREEDY).choices
        assert [answer.text for answer in answers] == alone and [answer.index for answer in answers] == [0, 1]
    assert client.completions.create(model="tiny", prompt=encode(PROMPT), **GREEDY).choices[0].text == alone[0]


def test_samples_of_several_prompts_are_in_order(client: OpenAI) -> None:
    ask = {"model": "tiny", "seed": 5, "n": 2, **DRAWN}
    both = client.completions.create(prompt=[PROMPT, PROMPT], **ask)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in both.choices]
    assert len(set(texts)) == 4
    assert [choice.text for choice in client.completions.create(prompt=PROMPT, **ask).choices] == texts[:2]


def test_the_same_seed_gives_the_same_answer_and_no_seed_another(client: OpenAI) -> None:
    def ask(**values: Any) -> str:
        return client.completions.create(model="tiny", prompt=PROMPT, **{**DRAWN, **values}).choices[0].text

    assert ask(seed=1) == ask(seed=1)
    assert len({ask(seed=1), ask(seed=2), ask(), ask()}) == 4


def test_many_clients_at_once_are_answered_as_one_by_one(client: OpenAI) -> None:
    def ask(number: int) -> list[str]:
        values: dict[str, Any] = {"seed": number, "n": 1 + number % 3, "max_tokens": 4 + number % 11, "temperature": 1}
        prompt = PROMPT[: 3 + number % 5]
        if number % 2:
            return [choice.text for choice in client.completions.create(model="lora", prompt=prompt, **values).choices]
        texts = [""] * values["n"]
        for chunk in client.completions.create(model="tiny", prompt=prompt, stream=True, **values):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        return texts

    alone = [ask(number) for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(12)))
    assert together == alone
    assert together != [ask(number + 1) for number in range(12)]


def test_what_ends_an_answer(client: OpenAI, loaded: Loaded) -> None:
    (whole,) = expected(loaded)
    stop = whole.text[2:4]

    def ask(**values: Any) -> Any:
        return client.completions.create(model="tiny", prompt=PROMPT, **{**GREEDY, **values}).choices[0]

    by_text = ask(stop=[stop, "never"])
    assert by_text.finish_reason == "stop" and by_text.text == whole.text.partition(stop)[0]
    assert ask(stop=stop).text == by_text.text != whole.text
    by_token = ask(extra_body={"stop_token_ids": [whole.tokens[2]], "return_token_ids": True})
    assert by_token.finish_reason == "stop"
    assert by_token.model_extra["token_ids"] == whole.tokens[: whole.tokens.index(whole.tokens[2]) + 1]
    assert ask(max_tokens=2).finish_reason == "length"


def test_a_real_model_tells_the_story_that_was_published_with_it(shared_data: Path) -> None:
    page = (shared_data / "weights" / "stories260K-llama2c" / "reference_sample.md").read_text(encoding="utf-8")
    story = page.split("-t 0.0\n", 1)[1].split("\n```", 1)[0]
    stories = Loaded.of(shared_data / "weights" / "stories260K-hf")
    with serving(stories.served, stories.engine()) as served:
        ask: dict[str, Any] = {"model": "stories260K-hf", "prompt": "", "temperature": 0, "max_tokens": 256}
        stream = served.client().completions.create(**ask, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == story
        assert served.client().completions.create(**ask).choices[0].text == story


def test_allowed_tokens_are_the_only_ones(client: OpenAI) -> None:
    allowed = [30, 31, 32]
    extra = {"allowed_token_ids": allowed, "return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt=PROMPT, extra_body=extra, **DRAWN).choices[0]
    assert answer.model_extra is not None and set(answer.model_extra["token_ids"]) <= set(allowed)


def test_each_adapter_answers_by_its_name(client: OpenAI, loaded: Loaded) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "lora", "soft"]
    logprobs = []
    for name in ("tiny", "lora", "soft"):
        (choice,) = client.completions.create(model=name, prompt=PROMPT, logprobs=0, **GREEDY).choices
        (answer,) = expected(loaded, model=name)
        assert choice.text == answer.text and choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(answer.logprobs, abs=1e-5), name
        logprobs.append(answer.logprobs[:2])
    for index, other in ((0, 1), (0, 2), (1, 2)):
        assert logprobs[index] != pytest.approx(logprobs[other], abs=1e-3)
    card = client.models.retrieve("soft")
    assert card.id == "soft" and card.model_extra == {"max_model_len": 125}


# -- chats -------------------------------------------------------------------------------------------------------------


def test_a_chat_is_the_engines(client: OpenAI, loaded: Loaded) -> None:
    tokens = loaded.served.find("tiny").chat_tokenizer.encode_chat(HELLO)
    (answer,) = expected(loaded, tokens, top_logprobs=3)
    got = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=3, **GREEDY)
    (choice,) = got.choices
    assert choice.message.role == "assistant" and choice.message.content == answer.text
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [token.logprob for token in choice.logprobs.content] == pytest.approx(answer.logprobs, abs=1e-6)
    assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
    written = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert written.decode(errors="replace").startswith(answer.text.rstrip("\ufffd"))
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert (
        client.chat.completions.create(model="tiny", messages=parts, **GREEDY).choices[0].message.content == answer.text
    )
    other: Any = [{"role": "user", "content": "Bye"}]
    bye = client.chat.completions.create(model="tiny", messages=other, logprobs=True, **GREEDY).choices[0].logprobs
    assert (
        bye is not None
        and bye.content is not None
        and bye.content[0].logprob != pytest.approx(answer.logprobs[0], 1e-4)
    )


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_context(client: OpenAI) -> None:
    got = client.chat.completions.create(model="soft", messages=HELLO, extra_body={"ignore_eos": True}, seed=1)
    assert got.usage is not None and got.usage.total_tokens == 125 and got.choices[0].finish_reason == "length"


def test_tools_that_the_template_does_not_show_are_refused(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError, match="the chat template of tiny shows the model no tools"):
        client.chat.completions.create(model="tiny", messages=HELLO, tools=tools, **GREEDY)
    plain = client.chat.completions.create(model="tiny", messages=HELLO, **GREEDY).choices[0].message.content
    answer = client.chat.completions.create(model="tiny", messages=HELLO, tools=tools, tool_choice="none", **GREEDY)
    assert answer.choices[0].message.content == plain


def test_without_a_chat_template_texts_are_continued_and_chats_refused(tiny_world: World, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_world.base, tmp_path / "plain"))
    (folder / "chat_template.jinja").unlink()
    plain = Loaded.of(folder)
    with serving(plain.served, plain.engine()) as served:
        client = served.client()
        assert client.completions.create(model="plain", prompt=PROMPT, **GREEDY).choices[0].text
        with pytest.raises(openai.BadRequestError, match="plain: no chat template that says who speaks"):
            client.chat.completions.create(model="plain", messages=HELLO, **GREEDY)


# -- streams -----------------------------------------------------------------------------------------------------------


def test_the_chunks_of_a_completion_are_the_whole(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "lora", "prompt": [PROMPT, "A"], "n": 2, "seed": 3, "logprobs": 1, **DRAWN}
    whole = client.completions.create(**ask, extra_body={"return_token_ids": True})
    stream = client.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}
    )
    texts, tokens, logprobs, finishes = [""] * 4, [[], [], [], []], [[], [], [], []], {}  # type: ignore[var-annotated]
    *chunks, last = list(stream)
    for chunk in chunks:
        (choice,) = chunk.choices
        assert chunk.usage is None and chunk.id == last.id and choice.model_extra is not None
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.model_extra.get("token_ids", [])
        logprobs[choice.index] += choice.logprobs.token_logprobs if choice.logprobs is not None else []
        if choice.finish_reason is not None:
            finishes[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.model_extra["token_ids"] for choice in whole.choices if choice.model_extra]
    assert logprobs == [choice.logprobs.token_logprobs for choice in whole.choices if choice.logprobs]
    assert finishes == {choice.index: choice.finish_reason for choice in whole.choices}
    assert last.choices == [] and last.usage == whole.usage


def test_the_chunks_of_a_chat_are_the_whole(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": HELLO, "n": 2, "seed": 3, **DRAWN}
    whole = client.chat.completions.create(**ask, logprobs=True)
    texts, bytes_, roles = ["", ""], [0, 0], ["", ""]
    for chunk in client.chat.completions.create(**ask, logprobs=True, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role or ""
        bytes_[choice.index] += len(choice.logprobs.content or ()) if choice.logprobs else 0
    assert texts == [choice.message.content for choice in whole.choices]
    assert bytes_ == [len(choice.logprobs.content or ()) for choice in whole.choices if choice.logprobs]
    assert roles == ["assistant", "assistant"]


def test_a_stream_is_in_whole_characters(endless: Loaded) -> None:
    with serving(endless.served, endless.engine()) as served:
        chunks = served.client().completions.create(
            model=endless.served.names[0], prompt="a", max_tokens=20, stream=True
        )
        texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == "bcéa" * 4
    assert all(text in ("b", "c", "é", "a", "") for text in texts) and texts.count("") <= 1


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind", "param", "message"),
    [
        ({"model": "tinny"}, openai.NotFoundError, "model", "model: no 'tinny' here; there are tiny, lora, soft"),
        ({"prompt": [1, 999]}, openai.BadRequestError, "prompt", "prompt: has token 999, but the model's vocabulary"),
        ({"prompt": [1] * 128}, openai.BadRequestError, "prompt", "prompt: has 128 tokens, but the model sees 128"),
        ({"prompt": ["a", [1] * 128]}, openai.BadRequestError, "prompt", "prompt: has 128 tokens"),
        (
            {"prompt": [1] * 125, "model": "soft"},
            openai.BadRequestError,
            "prompt",
            "prompt: has 125 tokens and the adapter 3, but the model sees 128 tokens",
        ),
        ({"best_of": 4}, openai.BadRequestError, "best_of", "best_of: 4 is not supported; leave it out"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "temperature: -1.0 is out of range"),
    ],
)
def test_requests_that_are_refused(
    client: OpenAI, values: dict[str, Any], kind: type[openai.APIStatusError], param: str, message: str
) -> None:
    with pytest.raises(kind) as refused:
        client.completions.create(**{"model": "tiny", "prompt": PROMPT, **GREEDY, **values})
    body: Any = refused.value.body
    assert body["param"] == param and body["message"].startswith(message)
    with pytest.raises(kind):
        client.completions.create(**{"model": "tiny", "prompt": PROMPT, "stream": True, **GREEDY, **values})


def ask(url: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of an answer, asked by hand."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, body, named)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            status, text = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    return status, json.loads(text) if text.startswith(b"{") else text.decode()


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
    for host in ("localhost", "localhost:9", "127.0.0.1:9", "[::1]:9", "[::1]"):
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


def test_a_cache_that_is_too_small(loaded: Loaded) -> None:
    engine = loaded.engine(EngineOptions(cache_gib=24 * 2 * 2 * 2 * 8 * 4 / 2**30, block=8))
    assert engine.longest < 128
    with serving(loaded.served, engine) as served:
        client = served.client()
        with pytest.raises(
            openai.BadRequestError, match="that the server's cache holds: ask for fewer, or start it with"
        ):
            client.completions.create(model="tiny", prompt=[1] * 10, max_tokens=50)
        whole = client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"ignore_eos": True})
        assert whole.usage is not None and whole.usage.total_tokens == engine.longest


# -- clients that leave, engines that fail, servers that end -----------------------------------------------------------


def test_a_client_that_leaves_a_stream_gives_its_blocks_back(
    endless: Loaded, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(endless.served, endless.engine(), quiet=False) as served:
        client, name = served.client(), endless.served.names[0]
        stream = client.completions.create(model=name, prompt="a", max_tokens=5000, n=3, stream=True)
        next(iter(stream))
        wait_until(lambda: served.blocks_used > 0)
        stream.close()
        wait_until(lambda: served.blocks_used == 0)
        assert served.server.engine.statistics.running == 0
        assert client.completions.create(model=name, prompt="a", max_tokens=2).choices[0].text == "bc"
    lines = [line.split("  ")[:4] for line in capsys.readouterr().err.splitlines()[1:]]
    assert lines == [["POST", "/v1/completions", said, name] for said in ("client left", "200")]


def test_a_client_that_gives_up_waiting_gives_its_blocks_back(endless: Loaded) -> None:
    with serving(endless.served, endless.engine()) as served:
        name = endless.served.names[0]
        with pytest.raises(openai.APITimeoutError):
            served.client(timeout=0.3).chat.completions.create(model=name, messages=HELLO)
        wait_until(lambda: served.server.engine.statistics.generated_tokens > 0)
        wait_until(lambda: served.blocks_used == 0)


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


class Broken:
    """Makes the steps of an engine fail from now on, or only the next one."""

    def __init__(self, engine: Any, error: Exception) -> None:
        self.error: Exception | None = None
        self.for_good = False
        step = engine.step

        def failing_step() -> list[Completion]:
            if self.error is None:
                return step()
            error, self.error = self.error, self.error if self.for_good else None
            raise error

        engine.step = failing_step
        self.kind = error

    def break_down(self, *, for_good: bool) -> None:
        self.for_good, self.error = for_good, self.kind


def test_a_step_that_fails_costs_its_requests_and_no_more(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    engine = loaded.engine()
    broken = Broken(engine, ModelError("the model's output is not finite"))
    with serving(loaded.served, engine) as served:
        client = served.client()
        broken.break_down(for_good=False)
        with pytest.raises(openai.InternalServerError, match="the engine failed: the model's output is not finite"):
            client.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
        broken.break_down(for_good=False)
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(client.completions.create(model="tiny", prompt=PROMPT, stream=True, **GREEDY))
        assert client.completions.create(model="tiny", prompt=PROMPT, **GREEDY).choices[0].text
        assert served.blocks_used == 0 and ask(f"{served.root}/health")[0] == 200
    said = capsys.readouterr().err
    assert "error: the engine failed, and 1 unfinished requests with it: the model's output is not finite" in said


def test_an_engine_that_fails_for_good_ends_the_server(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    engine = loaded.engine()
    broken = Broken(engine, ModelError("broken"))
    with serving(loaded.served, engine) as served:
        broken.break_down(for_good=True)
        with pytest.raises(openai.InternalServerError):
            served.client().completions.create(model="tiny", prompt=PROMPT, **GREEDY)
        wait_until(lambda: served.failure is not None)
    assert isinstance(served.failure, ModelError)


# -- by curl, and by what the page says --------------------------------------------------------------------------------


def curl(*arguments: str) -> str:
    """What curl prints."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not here")
    command = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "20", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


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


# -- the other endpoints -----------------------------------------------------------------------------------------------


def test_tokens_of_texts_and_conversations(served: Served, loaded: Loaded) -> None:
    json_type = {"Content_Type": "application/json"}
    chat_tokenizer = loaded.served.find("tiny").chat_tokenizer

    def tokenize(**body: Any) -> Any:
        return ask(f"{served.root}/tokenize", json.dumps(body).encode(), **json_type)[1]

    tokens = chat_tokenizer.encode_prompt(PROMPT)
    answer = tokenize(prompt=PROMPT, return_token_strs=True)
    assert answer["tokens"] == tokens and answer["count"] == len(tokens) and answer["max_model_len"] == 128
    assert "".join(answer["token_strs"]).endswith(PROMPT)
    assert tokenize(messages=HELLO)["tokens"] == chat_tokenizer.encode_chat(HELLO)
    body = json.dumps({"tokens": tokens}).encode()
    assert ask(f"{served.root}/detokenize", body, **json_type)[1]["prompt"].endswith(PROMPT)
    assert ask(f"{served.root}/detokenize", b'{"tokens": [400]}', **json_type)[0] == 400


def test_metrics(served: Served, client: OpenAI) -> None:
    def value(name: str) -> int:
        text = ask(f"{served.root}/metrics")[1]
        assert f"# TYPE danlu_{name} " in text
        return int(next(line.split()[1] for line in text.splitlines() if line.startswith(f"danlu_{name} ")))

    before = value("tokens_generated_total")
    answer = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
    assert answer.usage is not None
    assert value("tokens_generated_total") == before + answer.usage.completion_tokens
    assert value("requests_running") == value("cache_blocks_used") == 0 < value("cache_blocks")


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
