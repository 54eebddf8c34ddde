"""What is drawn under LongRoPE is trained with the factors that it was drawn with, by the recorded length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.small_config import small_config
from builders.tiny_world import World

from danlu.assembly.parallelize import Placed, Subject
from danlu.core.types import ROTARY_LENGTH, Pack, Sample
from danlu.data.batch import collate
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.request import Request, SamplingOptions
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.rope_config import LongRopeScaling
from danlu.parallel.parallel_context import ParallelContext
from danlu.recipe import load
from danlu.rl.on_policy_rows import OnPolicyRows, OnPolicySettings
from danlu.stages.learner import DecoderLearner
from danlu.stages.policy_logprobs import policy_logprobs

LONGROPE = LongRopeScaling((1.0,) * 4, (1.0, 3.0, 6.0, 8.0), 16, 8.0)  # long factors above 16 tokens
STOP = 60
PROMPTS = (tuple(range(20, 30)), (3, 9, 4), tuple(range(5, 17)))
CLOSE = {"rel": 1e-4, "abs": 1e-5}


@pytest.fixture
def model() -> Decoder:
    decoder = Decoder(small_config(vocab_size=61, max_position_embeddings=128, rope_scaling=LONGROPE))
    initialize(decoder, 0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return decoder


def by_own_length(model: Decoder, prompt: Any, answer: Any) -> list[float]:
    """The log-probabilities of an answer in a text that is rotated by the tokens that it has."""
    weights = np.repeat(np.float32([0, 1]), [len(prompt), len(answer)])
    batch = collate([Pack((Sample(np.int32([*prompt, *answer]), weights, "row"),))])
    outputs = DecoderLearner(model, model, torch.device("cpu"), torch.float32, 1).outputs(batch, 1.0)["policy"]
    values: list[float] = outputs.logprobs().logprobs.tolist()
    return values


@pytest.mark.usefixtures("tokenising_here")
def test_log_probabilities_of_samples(model: Decoder, tiny_world: World, tmp_path: Path) -> None:
    """Answers of three tokens that might have had thirty."""
    asked = [Request(number, prompt, SamplingOptions(seed=1), 30) for number, prompt in enumerate(PROMPTS)]
    whole = EmbeddedEngine(model).generate(asked)
    answers = [completion.tokens[:3] for completion in whole]
    drawn = [completion.logprobs[:3] for completion in whole]
    recipe = load(tiny_world.recipe(tmp_path / "run")).recipe
    rows = [(*prompt, *answer) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    placed = Placed(Subject(model), ParallelContext())
    found = policy_logprobs(recipe, placed, rows, list(map(len, PROMPTS)), max_new_tokens=30)
    for own, want, prompt, answer in zip(found, drawn, PROMPTS, answers, strict=True):
        assert own == pytest.approx(want, **CLOSE)
        assert by_own_length(model, prompt, answer) != pytest.approx(want, abs=1e-3)  # the control


class Rows:
    """Prompts with answers of two tokens that nobody has drawn."""

    def at(self, number: int) -> Pack:
        prompt = PROMPTS[number % len(PROMPTS)]
        weights = np.repeat(np.float32([0, 1]), [len(prompt), 2])
        return Pack((Sample(np.int32([*prompt, 7, 8]), weights, f"row {number}"),))

    def state(self, number: int) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("is_told", [True, False], ids=["", "control"])
def test_rows_that_the_policy_answers(model: Decoder, is_told: bool) -> None:
    """Own answers, and in the same micro-batch rows that keep theirs, which are rotated by their own lengths."""
    settings = OnPolicySettings(0.5, 8, SamplingOptions(seed=2), 30, 100, frozenset(range(30, 61)), seed=2)
    settings = replace(settings, rotary_length=(lambda tokens: min(tokens, 128)) if is_told else None)
    items = OnPolicyRows(Rows(), EmbeddedEngine(model), settings, lambda ids: "")  # type: ignore[arg-type]
    packs = [items.at(number) for number in range(8)]
    own = [settings.answers(number) for number in range(8)]
    assert 0 < sum(own) < 8
    learner = DecoderLearner(model, model, torch.device("cpu"), torch.float32, 8)
    outputs = learner.outputs(learner.collate(packs), 1.0)["policy"]
    values = iter(outputs.logprobs().logprobs.tolist())
    asked = [items._request(number, Rows().at(number).samples[0]) for number in range(8)]
    drawn = {each.number: each for each in EmbeddedEngine(model).generate(asked)}
    short = []
    for number, (pack, is_own) in enumerate(zip(packs, own, strict=True)):
        sample = pack.samples[0]
        prompt = len(asked[number].prompt)
        found = [next(values) for _ in range(len(sample.tokens) - prompt)]
        if not is_own:
            assert found == pytest.approx(by_own_length(model, sample.tokens[:prompt], sample.tokens[prompt:]), **CLOSE)
            continue
        assert sample.tokens[prompt:].tolist() == drawn[number].tokens
        if len(sample.tokens) <= 16:  # which ended long before the length that it is rotated by
            short.append(found == pytest.approx(drawn[number].logprobs, **CLOSE))
    assert short and all(short) == is_told and any(short) == is_told
    assert all((ROTARY_LENGTH in pack.samples[0].facts) == is_told for pack in packs)
