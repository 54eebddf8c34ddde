"""Generation under LongRoPE: a text is rotated by prompt plus max_new_tokens from its first token on."""

from __future__ import annotations

import pytest
import torch
from builders.reference_attention import ReferenceAttention
from builders.rollout_requests import GREEDY, cache_of, check_same, requests

from danlu.core.errors import DataError
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.request import Request, SamplingOptions
from danlu.models.decoder import Decoder
from danlu.models.rope_config import DynamicScaling, LongRopeScaling

ORIGINAL = 16
LONGROPE = LongRopeScaling((1.0,) * 4, (1.0, 3.0, 6.0, 8.0), ORIGINAL, 8.0)
PROMPT = tuple(range(20, 30))  # 10 tokens


def decoder(small_decoder) -> Decoder:
    return small_decoder(context=128, rope_scaling=LONGROPE)


def logprobs(model: Decoder, tokens: list[int], length: int | None) -> list[float]:
    """Of each token behind the prompt, in one pass over all, rotated by `length`, or by their own number."""
    ids = torch.tensor(tokens)
    lengths = None if length is None else torch.full_like(ids, length)
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), ReferenceAttention((0, len(ids))), lengths=lengths)
        values = model.logits(hidden).log_softmax(-1)
    return [values[place - 1, tokens[place]].item() for place in range(len(PROMPT), len(tokens))]


@pytest.mark.parametrize("count", [4, 6, 7, 30])
@pytest.mark.parametrize("chunk", [4, 64])
def test_answers_are_rotated_by_prompt_plus_max_new_tokens(small_decoder, count: int, chunk: int) -> None:
    model = decoder(small_decoder)
    request = Request(0, PROMPT, SamplingOptions(seed=1), count)
    (answer,) = EmbeddedEngine(model, EngineOptions(batch_tokens=chunk)).generate([request])
    found = [*PROMPT, *answer.tokens]
    assert len(answer.tokens) == count
    total = len(PROMPT) + count
    assert answer.logprobs == pytest.approx(logprobs(model, found, total), abs=1e-4)
    other = ORIGINAL if total > ORIGINAL else ORIGINAL + 1  # the other list of factors
    assert answer.logprobs != pytest.approx(logprobs(model, found, other), abs=1e-2)


def test_a_request_may_say_how_long_its_text_gets(small_decoder) -> None:
    """As the turns of an episode do, whose text goes on behind each answer."""
    model = decoder(small_decoder)
    request = Request(0, PROMPT, SamplingOptions(seed=1), 3, rotary_length=50)
    (answer,) = EmbeddedEngine(model).generate([request])
    found = [*PROMPT, *answer.tokens]
    assert answer.logprobs == pytest.approx(logprobs(model, found, 50), abs=1e-4)
    assert answer.logprobs != pytest.approx(logprobs(model, found, None), abs=1e-2)


def test_short_and_long_texts_share_no_cache(small_decoder) -> None:
    """A prompt's keys are of other frequencies in each, so what one left is of no use to the other."""
    model = decoder(small_decoder)
    asked = [Request(number, PROMPT * 1, GREEDY, count) for number, count in enumerate((6, 30, 6, 30))]
    expected = [EmbeddedEngine(model).generate([request])[0] for request in asked]
    engine = EmbeddedEngine(model, EngineOptions(block=4))
    found = [engine.generate([request])[0] for request in asked]
    check_same(found, expected)
    assert engine.statistics.prompt_tokens_computed == 2 * len(PROMPT) + 2 * 2  # of the second ones what no block holds


def test_preempted_and_read_again_stays_what_it_was(small_decoder) -> None:
    model, asked = decoder(small_decoder), requests(GREEDY, 30)
    tight = EmbeddedEngine(model, cache_of(model, 11, block=4))
    check_same(tight.generate(asked), EmbeddedEngine(model).generate(asked))
    assert tight.statistics.preemptions > 0


def test_exact_numerics_hold_for_long_texts(small_decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic scaling is refused there, since the length that it ends with is not known beforehand."""
    monkeypatch.setattr("danlu.numerics.batch_invariant.enable", lambda: None)
    request = Request(0, PROMPT, GREEDY, 60)
    EmbeddedEngine(decoder(small_decoder), EngineOptions(exact=True)).submit(request)
    dynamic = small_decoder(context=ORIGINAL, rope_scaling=DynamicScaling(8.0))
    with pytest.raises(DataError, match="numerics: exact cannot hold"):
        EmbeddedEngine(dynamic, EngineOptions(exact=True)).submit(request)


def test_a_draft_model_is_rotated_as_long_as_its_text_gets(small_decoder) -> None:
    """The model itself, as a draft, then proposes what is drawn; rotated by what is there so far it would not."""
    model = decoder(small_decoder)
    options = EngineOptions(draft=DraftOptions(kind="model", tokens=3))
    engine = EmbeddedEngine(model, options, draft_model=model)
    asked = [Request(0, PROMPT, GREEDY, 30)]
    check_same(engine.generate(asked), EmbeddedEngine(model).generate(asked))
    statistics = engine.statistics
    assert statistics.drafts_accepted == statistics.drafts_proposed > 10
