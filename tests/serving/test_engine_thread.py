"""Clients that leave give their blocks back; engines that fail cost no more than they must."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from builders.served import Loaded, ask, serving, wait_until

from danlu.core.errors import ModelError
from danlu.inference.engine import EngineOptions
from danlu.inference.request import Completion

PROMPT = "Once upon a time"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


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


def test_those_who_stay_are_not_disturbed_by_those_who_leave(loaded: Loaded) -> None:
    """In a cache with room for a few answers, so that some wait and others make room."""
    block_bytes = 8 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, width, bytes
    engine = loaded.engine(EngineOptions(cache_gib=20 * block_bytes / 2**30, block=8))

    def read(number: int, *, leave: bool) -> str:
        values: dict[str, Any] = {
            "temperature": 1,
            "seed": number,
            "max_tokens": 60,
            "extra_body": {"ignore_eos": True},
        }
        name = ("tiny", "lora", "soft")[number % 3]
        stream = client.completions.create(model=name, prompt=PROMPT, stream=True, **values)
        text = ""
        for count, chunk in enumerate(stream):
            text += chunk.choices[0].text
            if leave and count == number:
                stream.close()
                break
        return text

    with serving(loaded.served, engine) as served:
        client = served.client()
        alone = [read(number, leave=False) for number in range(0, 12, 2)]
        with ThreadPoolExecutor(12) as pool:
            together = list(pool.map(lambda number: read(number, leave=number % 2 == 1), range(12)))
        wait_until(lambda: served.blocks_used == 0)
        assert served.server.engine.statistics.preemptions > 0
    assert together[::2] == alone
    assert together[1::2] != alone


def test_a_client_that_gives_up_waiting_gives_its_blocks_back(endless: Loaded) -> None:
    with serving(endless.served, endless.engine()) as served:
        name = endless.served.names[0]
        with pytest.raises(openai.APITimeoutError):
            served.client(timeout=1.0).chat.completions.create(model=name, messages=HELLO)
        wait_until(lambda: served.server.engine.statistics.generated_tokens > 0)
        wait_until(lambda: served.blocks_used == 0)


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


def test_a_request_that_fails_costs_the_others_nothing(endless: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    """While others grow beside it: its own error reaches it, whole or as a stream, and no other answer changes."""
    weight = endless.model.model.embed_tokens.weight
    encode = endless.served.find(None).chat_tokenizer.encode_prompt
    bad = next(token for token in range(len(weight)) if token not in encode("abcé"))
    kept = weight[bad].clone()
    with serving(endless.served, endless.engine()) as served, torch.no_grad():
        client, name = served.client(), endless.served.names[0]
        ask: dict[str, Any] = {"model": name, "max_tokens": 60, "temperature": 0, "stop": ["c"]}
        expected = client.completions.create(model=name, prompt="a", max_tokens=2, temperature=0).choices[0].text
        stream = client.completions.create(model=name, prompt="a", max_tokens=5000, temperature=0, stream=True)
        next(iter(stream))
        try:
            weight[bad] = float("nan")
            for wanted in ({}, {"n": 3}):
                with pytest.raises(openai.InternalServerError, match="not finite at position"):
                    client.completions.create(prompt=[bad], **ask, **wanted)
            with pytest.raises(openai.APIError, match="not finite at position"):
                list(client.completions.create(prompt=[bad], stream=True, **ask))
        finally:
            weight[bad] = kept
        said = client.completions.create(model=name, prompt="a", max_tokens=2, temperature=0)
        assert said.choices[0].text == expected
        stream.close()
    assert capsys.readouterr().err.count("error: a request failed, and the others go on: the model's output") == 3


def test_an_engine_that_fails_for_good_ends_the_server(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> None:
    engine = loaded.engine()
    broken = Broken(engine, ModelError("broken"))
    with serving(loaded.served, engine) as served:
        broken.break_down(for_good=True)
        with pytest.raises(openai.InternalServerError):
            served.client().completions.create(model="tiny", prompt=PROMPT, **GREEDY)
        wait_until(lambda: served.failure is not None)
    assert isinstance(served.failure, ModelError)
