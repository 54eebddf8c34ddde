"""Grammars that answers follow: forms, masks, the record of a draw, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from builders.answer_forms import FORMS, has_form
from builders.chat_tokenizers import tokenizer_and_oracle
from builders.engine_models import build

from danlu.core.errors import DataError, ResourceError
from danlu.inference import grammar
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.grammar import Grammars, after_thought, choice_grammar, json_grammar
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.inference.support import support_matrix
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.objectives.token_logprobs import logprobs_of_logits

END = 2


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_and_oracle("chatml")[0]


def engine(decoder: Decoder, tokenizer: Any, **options: Any) -> EmbeddedEngine:
    grammars = Grammars(tokenizer, decoder.config.vocab_size, tokenizer.end_of_turn_ids)
    return EmbeddedEngine(decoder, EngineOptions(cache_gib=0.01, **options), decode=tokenizer.decode, grammars=grammars)


@pytest.fixture(scope="module")
def decoder(tokenizer: Any) -> Decoder:
    return build(vocab_size=tokenizer.vocab_size + 5)


def requests(tokenizer: Any, **values: Any) -> list[Request]:
    stops = frozenset(tokenizer.end_of_turn_ids)
    return [
        Request(number, (5, 6, 7), SamplingOptions(**values), 200, 3, stops, grammar=form)
        for number, form in enumerate(FORMS.values())
    ]


@pytest.mark.parametrize("values", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.8}])
def test_answers_follow_their_grammar(decoder: Decoder, tokenizer: Any, values: dict[str, Any]) -> None:
    samples = 1 if values == {"temperature": 0} else 3  # the likeliest tokens are the same each time
    asked = [dataclasses.replace(request, samples=samples) for request in requests(tokenizer, **values)]
    free = dataclasses.replace(asked[0], number=9, grammar=None, max_new_tokens=8)
    answers = engine(decoder, tokenizer).generate([*asked, free])
    names = [name for name in FORMS for _ in range(samples)]
    for name, answer in zip(names, answers, strict=False):
        assert answer.finish == "stop" and has_form(name, answer.text), (name, answer.text)
        assert answer.support is not None and all(
            token in support for token, support in zip(answer.tokens, answer.support, strict=True)
        )
    assert answers[-1].support is None or values.get("top_p"), "an answer beside them may be any text"
    for options in ({"draft": DraftOptions(tokens=3)}, {"sequences": 2}):
        again = engine(decoder, tokenizer, **options).generate(asked)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in answers[:-samples]]


def test_log_probabilities_are_those_that_a_trainer_computes_over_the_support(decoder: Decoder, tokenizer: Any) -> None:
    (answer,) = engine(decoder, tokenizer, exact=True).generate(
        [dataclasses.replace(requests(tokenizer, temperature=0.7)[0], samples=1)]
    )
    assert answer.support is not None
    with torch.no_grad():
        ids = torch.tensor([5, 6, 7, *answer.tokens[:-1]])
        hidden = decoder(ids, torch.arange(len(ids)), PackedAttention((0, len(ids))))
        logits = decoder.logits(hidden)[2:]
    tokens = torch.tensor(answer.tokens)
    support = torch.from_numpy(support_matrix(answer.support))
    drawn = logprobs_of_logits(logits, tokens, temperature=0.7, slice_rows=16, support=support)
    assert torch.allclose(drawn, torch.tensor(answer.drawn), atol=1e-5)
    whole = logprobs_of_logits(logits, tokens, temperature=0.7, slice_rows=16)
    assert torch.allclose(whole, torch.tensor(answer.logprobs), atol=1e-5)
    assert not torch.allclose(drawn, whole, atol=1e-2)


def test_an_answer_goes_on_after_an_interruption(decoder: Decoder, tokenizer: Any) -> None:
    asked = requests(tokenizer, temperature=1.0)
    whole = engine(decoder, tokenizer).generate(asked)
    interrupted = engine(decoder, tokenizer)
    for request in asked:
        interrupted.submit(request)
    early: list[Completion] = []
    for _ in range(4):
        early += interrupted.step()
    state = json.loads(json.dumps(interrupted.state()))
    other = engine(decoder, tokenizer)
    other.restore(state)
    while other.unfinished:
        early += other.step()
    by_key = {(answer.number, answer.sample): answer.tokens for answer in early}
    assert [by_key[answer.number, answer.sample] for answer in whole] == [answer.tokens for answer in whole]


def test_a_grammar_begins_behind_a_thought(tokenizer: Any) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [END])
    end_id = tokenizer.vocabulary["</think>"]
    assert end_id in tokenizer.special_ids
    for text, is_right in (("so </think>\n\nyes", True), ("yes", False), ("so </think>no", False)):
        matcher = grammars.matcher(after_thought(choice_grammar(["yes"]), "</think>", end_id))
        for token in tokenizer.encode(text):
            matcher.accept(token)
        matcher.accept(END)
        assert (matcher.problem is None) == is_right, text
    plain = grammars.matcher(after_thought(choice_grammar(["yes"]), "</so>"))
    for token in (*tokenizer.encode("a </s </so>\nyes"), END):
        plain.accept(token)
    assert plain.problem is None and plain.is_complete


def test_the_fewest_tokens_of_an_answer(decoder: Decoder, tokenizer: Any) -> None:
    stops = frozenset(range(0, decoder.config.vocab_size, 2))
    ask = Request(0, (5, 6), SamplingOptions(), 30, 4, stops)
    lengths = [len(answer.tokens) for answer in engine(decoder, tokenizer).generate([ask])]
    longer = engine(decoder, tokenizer).generate([dataclasses.replace(ask, min_new_tokens=12)])
    assert min(lengths) < 12 < min(len(answer.tokens) for answer in longer)
    for answer in longer:
        assert answer.support is not None and not stops & set(answer.tokens[:12]) and answer.tokens[-1] in stops
        assert not np.isin(answer.support[0].ids, list(stops)).any() and len(answer.support[12].ids) > len(stops)
    short = dataclasses.replace(ask, grammar=choice_grammar(["yes"]), min_new_tokens=30, stop_ids=frozenset([END]))
    assert {answer.text for answer in engine(decoder, tokenizer).generate([short])} == {"yes"}


def test_biases(decoder: Decoder, tokenizer: Any) -> None:
    ask = Request(0, (5, 6), SamplingOptions(biased_ids=(40, 41), biases=(100.0, 100.0)), 8, 2)
    answers = engine(decoder, tokenizer).generate([ask])
    assert all(set(answer.tokens) <= {40, 41} for answer in answers)
    assert all(min(answer.drawn) > max(answer.logprobs) for answer in answers)
    never = SamplingOptions(temperature=0, biased_ids=(answers[0].tokens[0],), biases=(-100.0,))
    assert engine(decoder, tokenizer).generate([dataclasses.replace(ask, sampling=never)])[0].tokens[0] not in (
        answers[0].tokens[0],
    )


def test_what_is_refused(decoder: Decoder, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Request(0, (5, 6), grammar=json_grammar({"enum": []}))
    with pytest.raises(DataError, match="the grammar cannot be followed: Unsatisfiable schema: anyOf is empty"):
        engine(decoder, tokenizer).generate([ask])
    with pytest.raises(DataError, match="prompt 0: this engine has no tokenizer, so answers can follow no grammar"):
        EmbeddedEngine(decoder, EngineOptions(cache_gib=0.01)).generate([ask])
    outside = SamplingOptions(biased_ids=(9999999,), biases=(1.0,))
    with pytest.raises(DataError, match="biased_ids: token 9999999 is not in the model's vocabulary"):
        engine(decoder, tokenizer).generate([Request(0, (5, 6), outside)])
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ResourceError, match=r"needs the package llguidance, .* pip install 'danlu\[serve\]'"):
        grammar.require_llguidance()
