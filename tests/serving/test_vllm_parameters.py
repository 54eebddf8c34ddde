"""Parameters that vLLM's clients send, and what they change in an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from builders.served import Loaded, serving
from openai import OpenAI

from danlu.inference.request import Request, SamplingOptions

PROMPT = "Once upon a time"
ASK: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def client(loaded: Loaded) -> Iterator[OpenAI]:
    with serving(loaded.served, loaded.engine()) as served:
        yield served.client()


def choice(client: OpenAI, **values: Any) -> Any:
    return client.completions.create(**{**ASK, **values}).choices[0]


def test_biases_change_what_is_drawn(client: OpenAI) -> None:
    plain = choice(client, extra_body={"return_token_ids": True})
    first = plain.model_extra["token_ids"][0]
    biased = choice(client, logit_bias={"40": 100}, extra_body={"return_token_ids": True})
    assert set(biased.model_extra["token_ids"]) == {40}
    banned = choice(client, logit_bias={str(first): -100}, extra_body={"return_token_ids": True})
    assert banned.model_extra["token_ids"][0] != first
    with pytest.raises(openai.BadRequestError, match="logit_bias: 999999 is none of the model's"):
        choice(client, logit_bias={"999999": 1})


def test_stop_texts_that_stay_and_those_that_come_too_early(client: OpenAI) -> None:
    text = choice(client).text
    stop = text[1:3]
    before = text.partition(stop)[0]
    assert choice(client, stop=stop).text == before
    for stream in (False, True):
        options: dict[str, Any] = {"stop": stop, "extra_body": {"include_stop_str_in_output": True}}
        if stream:
            chunks = client.completions.create(**{**ASK, **options}, stream=True)
            assert "".join(chunk.choices[0].text for chunk in chunks) == before + stop
        else:
            kept = choice(client, **options)
            assert (kept.text, kept.finish_reason) == (before + stop, "stop")
    late = choice(client, stop=stop, extra_body={"min_tokens": 8})
    assert late.text == text and late.finish_reason == "length"


def test_log_probabilities_of_a_prompt(client: OpenAI, loaded: Loaded) -> None:
    model = loaded.served.find("tiny")
    tokens = model.chat_tokenizer.encode_prompt(PROMPT)
    asked = Request(
        0, tuple(tokens), SamplingOptions(temperature=0), 1, adapter=model.adapter, top_logprobs=2, prompt_logprobs=True
    )
    (expected,) = loaded.engine().generate([asked])
    got = choice(client, extra_body={"prompt_logprobs": 2}).model_extra["prompt_logprobs"]
    assert got[0] is None and len(got) == len(tokens)
    assert expected.prompt_logprobs is not None and expected.prompt_top is not None
    for token, written, logprob, top in zip(
        tokens[1:], got[1:], expected.prompt_logprobs, expected.prompt_top, strict=True
    ):
        assert written[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-6)
        assert {int(other) for other in written} == {token, *(other for other, _ in top)}
        assert written[str(top[0][0])]["rank"] == 1
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert chat.model_extra is not None and chat.model_extra["prompt_logprobs"][0] is None


def test_a_prompt_alone_is_scored_without_an_answer(client: OpenAI) -> None:
    """As lm-eval asks for the likelihood of a text."""
    longer = choice(client, echo=True, logprobs=1, max_tokens=1)
    alone = choice(client, echo=True, logprobs=1, max_tokens=0)
    assert alone.text == PROMPT and alone.finish_reason == "length"
    assert alone.logprobs.token_logprobs == longer.logprobs.token_logprobs[:-1]
    assert alone.logprobs.top_logprobs == longer.logprobs.top_logprobs[:-1]
    answer = client.completions.create(**{**ASK, "echo": True, "max_tokens": 0})
    assert answer.usage is not None and answer.usage.completion_tokens == 0
