"""Answers in a form by vLLM and SGLang: the tokens that it left, computed here, against stand-ins with llguidance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.answer_forms import FORMS, has_form
from builders.chat_tokenizers import tokenizer_and_oracle
from builders.engine_models import build
from builders.reference_attention import ReferenceAttention
from builders.remote_engines import KINDS, answer_in_part, only_server, serving

from danlu.core.errors import DataError, ModelError
from danlu.inference.grammar import Grammars, after_thought, lark_grammar, shared_lark
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.models.decoder import Decoder
from danlu.remote_engines.hand_over import FolderHandOver

PROMPT = (5, 6, 7)

both = pytest.mark.parametrize("kind", sorted(KINDS))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_and_oracle("chatml")[0]


@pytest.fixture(scope="module")
def decoder(tokenizer: Any) -> Decoder:
    return build(layers=1, vocab_size=tokenizer.vocab_size + 5)


def settings_of(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Two tokens end an answer here, of which the servers know one."""
    ends = {tokenizer.eos_id, *tokenizer.end_of_turn_ids}
    assert len(ends) > 1
    return {
        "grammars": Grammars(tokenizer, vocab_size, ends),
        "decode": tokenizer.decode,
        "tokenizer": Path(tokenizer.path),
    }


def requests(tokenizer: Any, **options: Any) -> list[Request]:
    stops = frozenset({tokenizer.eos_id, *tokenizer.end_of_turn_ids})
    return [
        Request(number, PROMPT, SamplingOptions(**options), 40, 2, stops, grammar=form)
        for number, form in enumerate(FORMS.values())
    ]


def logprobs_among(decoder: Decoder, answer: Completion, *, whole: bool = False) -> list[float]:
    """The model's log-probabilities among the tokens that the answer says were left; whole: among all."""
    ids = torch.tensor([*PROMPT, *answer.tokens])
    with torch.no_grad():
        hidden = decoder(ids, torch.arange(len(ids)), ReferenceAttention((0, len(ids))))
        logits = decoder.logits(hidden[len(PROMPT) - 1 : -1])
    assert answer.support is not None
    for row, support in zip(logits, answer.support, strict=True):
        outside = np.setdiff1d(np.arange(len(row)), support.ids)
        if not whole:
            row[torch.from_numpy(outside)] = float("-inf")
    return logits.log_softmax(-1).gather(-1, ids[len(PROMPT) :, None])[:, 0].tolist()


@both
def test_log_probabilities_are_among_the_tokens_that_the_form_leaves(
    kind: str, decoder: Decoder, tokenizer: Any
) -> None:
    with serving(kind, decoder, **settings_of(tokenizer, decoder.config.vocab_size)) as (engine, _):
        answers = engine.generate(requests(tokenizer))
    for answer in answers:
        form = list(FORMS)[answer.number]
        assert answer.finish == "length" or has_form(form, answer.text), (form, answer.text)
        assert np.isnan(answer.logprobs).all()
        assert answer.drawn == pytest.approx(logprobs_among(decoder, answer), abs=1e-4)
        assert answer.drawn != pytest.approx(logprobs_among(decoder, answer, whole=True), abs=1.0)
        assert answer.support is not None
        if answer.finish == "stop":  # the servers end a form at eos alone, of the tokens that end an answer here
            assert tokenizer.eos_id in answer.support[-1] and len(answer.support[-1].ids) == 1
    assert sum(answer.finish == "stop" for answer in answers) >= 6
    assert len({answer.text for answer in answers}) > 4


@both
def test_a_token_that_the_trainers_grammar_does_not_allow_ends_the_run(
    kind: str, decoder: Decoder, tokenizer: Any
) -> None:
    """As white space that another grammar engine lets in."""
    settings = settings_of(tokenizer, decoder.config.vocab_size)
    extra = tuple(range(100, 200))
    with serving(kind, decoder, faults={"allowed_beside": extra}, **settings) as (engine, _):
        with pytest.raises(
            ModelError, match=r"reads rollout.format otherwise.*token 0 of the answer \(1\d\d\) is none"
        ):
            engine.generate([replace(requests(tokenizer)[2], max_new_tokens=4)])
        assert engine.unfinished == 0


@both
def test_an_answer_in_a_form_that_is_interrupted_begins_again(
    kind: str, decoder: Decoder, tokenizer: Any, tmp_path: Any
) -> None:
    """Since a server reads a grammar from the first token of its own answer on."""
    settings = settings_of(tokenizer, decoder.config.vocab_size)
    asked = [replace(requests(tokenizer)[1], samples=2)]
    with serving(kind, decoder, **settings) as (engine, _):
        expected = engine.generate(asked)
    hand_over = FolderHandOver(decoder.config, tmp_path, 1)
    with serving(kind, decoder, hand_over=hand_over, **settings) as (engine, stand_in):
        only_server(engine).labels_tokens = False  # a replacement of weights aborts what is under way
        engine.submit(asked[0])
        answer_in_part(engine, stand_in)
        engine.update(1, decoder.named_parameters())
        stand_in.served.stop_after = None
        answers: list[Completion] = []
        while engine.unfinished:
            answers += engine.step()
        answers.sort(key=lambda answer: answer.sample)
        prompts = [body.get("prompt", body.get("input_ids")) for _, _, body in stand_in.calls if "seed" in str(body)]
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert {version for answer in answers for version in answer.versions} == {1}
    assert len(prompts) == 4 and all(prompt == list(PROMPT) for prompt in prompts)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "vllm",
            {"structured_outputs": {"backend": "auto"}},
            "--structured-outputs-config.backend auto, whose.*guidance",
        ),
        ("vllm", {"structured_outputs": {"reasoning_parser": "qwen3"}}, "started with --reasoning-parser qwen3"),
        (
            "sglang",
            {"grammar_backend": "xgrammar"},
            "--grammar-backend xgrammar, whose .* --grammar-backend llguidance",
        ),
        ("sglang", {"reasoning_parser": "qwen3"}, "started with --reasoning-parser qwen3"),
    ],
)
def test_a_server_with_other_grammars_is_refused(
    kind: str, settings: dict[str, Any], message: str, decoder: Decoder, tokenizer: Any
) -> None:
    own = settings_of(tokenizer, decoder.config.vocab_size)
    with pytest.raises(ModelError, match=message), serving(kind, decoder, **own, **settings):
        pass
    with serving(kind, decoder, **settings) as (engine, _):  # control: no form is asked for
        assert engine.generate([Request(0, PROMPT, SamplingOptions(), 2)])
    if "structured_outputs" in settings and "reasoning_parser" in settings["structured_outputs"]:
        settings["structured_outputs"]["enable_in_reasoning"] = True
        with serving(kind, decoder, **own, **settings) as (engine, _):
            assert engine.recomputes_supports


def test_likeliest_tokens_and_a_tokenizer_without_an_end_are_refused(
    decoder: Decoder, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tokenizer, decoder.config.vocab_size)
    likeliest = [replace(requests(tokenizer)[0], top_logprobs=2)]
    refusal = pytest.raises(DataError, match="leave top_logprobs at 0")
    with serving("vllm", decoder, **settings) as (engine, _), refusal:
        engine.generate(likeliest)
    monkeypatch.setattr(tokenizer, "eos_id", None)
    with (
        pytest.raises(DataError, match="has no eos_token, at which vLLM and SGLang"),
        serving("vllm", decoder, **settings),
    ):
        pass


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("end_id", [None, 3])
def test_a_grammar_behind_a_thought_is_one_text_for_servers(tokenizer: Any, form: str, end_id: int | None) -> None:
    own = after_thought(FORMS[form], "</so>", end_id)
    text = shared_lark(own)
    assert text.startswith("%llguidance {}\nstart:") and "@answer" not in text and "x-guidance" not in text
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_id])
    thought = tokenizer.encode("hm</so>") if end_id is None else [*tokenizer.encode("hm"), end_id]
    answer = {"json": '{"kind": "fox", "age": 3}', "regex": "ababcd/4", "choice": "yes", "rules": "<b>"}[form]
    for grammar in (own, lark_grammar(text)):
        for tokens, is_right in (([*thought, *tokenizer.encode(answer)], True), (tokenizer.encode(answer), False)):
            matcher = grammars.matcher(grammar)
            for token in (*tokens, tokenizer.eos_id):
                matcher.accept(token)
            assert (matcher.problem is None) == is_right, (grammar, tokens)
