"""A model of this machine that makes data: draws by keys alone, ends of answers, log-probabilities, magpie's header."""

from __future__ import annotations

import pytest
from builders.tiny_world import World

from danlu.production.synthesis.local_model import LocalModel
from danlu.production.synthesis.models import answerer_of
from danlu.production.synthesis.requests import Answered, Key, Message, Request
from danlu.recipe.sections.synthesis import AnsweringModel

TEXTS = ["Tom", "Who is Ann?", "Tell me more about the garden.", "Why?"]


@pytest.fixture(scope="module")
def model(tiny_world: World) -> LocalModel:
    section = AnsweringModel(path=str(tiny_world.base), precision="fp32", device="cpu")
    answerer = answerer_of(section, threads=1)
    assert isinstance(answerer, LocalModel)
    return answerer


def requests(seed: int = 0, top_logprobs: int = 0) -> list[Request]:
    return [
        Request(Key(seed, 0, text, 0), (Message("user", text),), max_new_tokens=12, top_logprobs=top_logprobs)
        for text in TEXTS
    ]


def texts(answered: list[Answered]) -> list[str]:
    """The answers in the order of TEXTS."""
    by_key = {each.request.key.row: each.completion.text for each in answered}
    return [by_key[text] for text in TEXTS]


def test_answers_hang_on_their_keys_alone(model: LocalModel) -> None:
    """Not on the order of requests, nor on those that are answered with them."""
    together = texts(list(model.generate(requests())))
    model.in_flight = 1
    alone = texts(list(model.generate(reversed(requests()))))
    model.in_flight = 256
    assert together == alone and len(set(together)) > 1
    assert texts(list(model.generate(requests(seed=1)))) != together


def test_ends_tokens_and_logprobs(model: LocalModel) -> None:
    for answered in model.generate(requests(top_logprobs=3)):
        completion = answered.completion
        assert completion.finish in ("stop", "length") and 0 < completion.completion_tokens <= 12
        assert (completion.finish == "length") == (completion.completion_tokens == 12) or completion.finish == "stop"
        assert completion.top is not None and len(completion.top) == completion.completion_tokens
        assert all(len(top) == 3 and top[0][1] >= top[1][1] >= top[2][1] for top in completion.top)
        assert completion.prompt_tokens > 3
    # A prompt that is longer than the context is refused by itself, and the others are answered.
    long = Request(Key(0, 0, "long", 0), (Message("user", "garden " * 300),))
    ends = {each.request.key.row: each.completion for each in model.generate([long, *requests()])}
    assert ends["long"].finish == "refused" and "the model sees" in ends["long"].detail
    assert {ends[text].finish for text in TEXTS} <= {"stop", "length"}


def test_the_header_of_a_user_is_that_of_the_chat_template(model: LocalModel) -> None:
    rendered = model.chat_tokenizer.render_chat([{"role": "user", "content": "Hello"}], begins_turn=False)
    assert rendered.startswith(f"{model.user_header}Hello") and model.user_header
    answer = next(iter(model.generate([Request(Key(0, 0, "", 0), prompt=model.user_header, max_new_tokens=8)])))
    assert answer.completion.prompt_tokens == len(model.chat_tokenizer.tokenizer.encode(model.user_header))
