"""Stage rl against the textbook: its gradients are the exact ones on average, and it finds the best policy there is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from builders.preference_samples import preference_learner, step_gradients
from builders.tiny_world import danlu, write_rows
from builders.token_mdp import (
    STARTS,
    STOP,
    TURNS,
    WORDS,
    optimal_return,
    reward_file,
    unrolled,
    walk_return,
    write_words,
)
from textbook.planning import value_iteration
from torch import Tensor

from danlu.core.types import Pack
from danlu.data.prompts import Prompt
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.request import SamplingOptions
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.loading import build, load
from danlu.models.presets import from_scratch
from danlu.models.saving import save
from danlu.objectives.policy import PolicyGradient, PolicyGradientSettings
from danlu.parallel.comm import ALONE
from danlu.recipe import sections
from danlu.rewards.protocol import JudgedAnswer
from danlu.rewards.runner import RewardPart, RewardTable
from danlu.rl.estimators import GroupEstimator
from danlu.rl.experience import Experience
from danlu.rl.experience_trees import ADVANTAGE, SUPPORT, with_columns
from danlu.rl.rollout_sampler import ExperienceSettings, RolloutSampler
from danlu.stages.learner import DecoderLearner

SAMPLES, GROUPS, CHUNK = 4, 1024, 8
"""Answers to a prompt, prompts of the rollout, and prompts whose gradient is computed at once: one draw of many."""
ERRORS = 4.0
"""Standard errors that an estimate may be off."""
FILTERS = {"temperature": 0.7, "top_p": 0.8}


def walker(seed: int = 1, contrast: float = 3.0) -> Decoder:
    """A random decoder over the words of the process; with more contrast its answers are further from alike."""
    config = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "tie_word_embeddings": False,
    }  # fmt: skip
    model = build(from_scratch(sections.Model(config=config, tokenizer="none"), len(WORDS), None, STOP))
    initialize(model, seed)
    with torch.no_grad():
        assert model.lm_head is not None
        model.lm_head.weight.mul_(contrast)
    return model


@dataclass
class BothPrompts:
    """Harbour and island in turn."""

    def at(self, number: int) -> Prompt:
        start = STARTS[number % 2]
        return Prompt((start,), {"start": start}, WORDS[start], f"prompts.jsonl:{number % 2 + 1}")

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: object) -> None: ...


class Returns:
    """Answers are worth what their walk earns."""

    parts = (RewardPart("walk", None, 1.0),)  # type: ignore[arg-type]

    def score(self, answers: Sequence[JudgedAnswer]) -> RewardTable:
        said = [[int(token) for token in answer.text.split()] for answer in answers]
        values = [[walk_return(answer.row["start"], tokens)] for answer, tokens in zip(answers, said, strict=True)]
        return RewardTable(np.array(values), [])

    def close(self) -> None: ...


def rollout(
    model: Decoder, estimator: GroupEstimator, sampling: SamplingOptions, *, greedy: bool = False
) -> list[Pack]:
    """One rollout of many groups."""
    engine = EmbeddedEngine(model, decode=lambda ids: " ".join(map(str, ids)))
    settings = ExperienceSettings(
        GROUPS, SAMPLES, sampling, TURNS, stop_ids=frozenset({STOP}), greedy=greedy, vocab_size=len(WORDS)
    )
    experience = Experience(RolloutSampler(BothPrompts(), engine, Returns(), settings, ALONE), estimator)
    items = [experience.at(number) for number in range(GROUPS)]
    experience.close()
    return items


def learner_of(model: Decoder, items: Sequence[Pack], temperature: float) -> DecoderLearner:
    """Of the sum over tokens, divided by a constant: no length bias."""
    settings = PolicyGradientSettings(
        normalise="constant", constant_tokens=TURNS, temperature=temperature, single_update=True
    )
    return preference_learner(model, None, PolicyGradient(settings), items, CHUNK)


def estimates(model: Decoder, items: Sequence[Pack], temperature: float) -> Tensor:
    """[GROUPS / CHUNK, parameters] float64: independent estimates of the gradient of the expected return."""
    learner = learner_of(model, items, temperature)
    chunks = []
    for start in range(0, len(items), CHUNK):
        _, gradients = step_gradients(learner, items[start : start + CHUNK])
        chunks.append(torch.cat([gradient.double().flatten() for gradient in gradients.values()]))
    return -TURNS * torch.stack(chunks)


def exact_gradient(model: Decoder, temperature: float, top_p: float) -> Tensor:
    """[parameters] float64, by the policy gradient theorem over all prefixes."""
    exact, prefixes = copy.deepcopy(model).double(), unrolled()
    gradients = prefixes.gradient(prefixes.preferences(exact, temperature=temperature, top_p=top_p), exact)
    return torch.cat([gradient.flatten() for gradient in gradients])


def deviations(estimated: Tensor, exact: Tensor) -> Tensor:
    """How many standard errors the mean estimate is off: along the exact gradient, and along fifteen other ways."""
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(15, len(exact), generator=generator, dtype=torch.float64)
    directions = torch.cat([exact[None], others])
    projected = estimated @ directions.T  # [chunks, 16]
    error = projected.std(0) / len(projected) ** 0.5
    return (projected.mean(0) - directions @ exact).abs() / error


CASES = {
    "no baseline": (GroupEstimator("none", "none"), 1.0, {}),
    "leave-one-out": (GroupEstimator("leave-one-out", "none"), 1.0, {}),
    # An answer is in the mean of its own group, which takes a share of 1 / samples of the gradient away.
    "group": (GroupEstimator("group", "none"), (SAMPLES - 1) / SAMPLES, {}),
    "batch": (GroupEstimator("batch", "none"), 1 - 1 / (SAMPLES * GROUPS), {}),
    "greedy": (GroupEstimator("greedy", "none"), 1.0, {}),
    "filtered": (GroupEstimator("leave-one-out", "none"), 1.0, FILTERS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_estimated_policy_gradient_is_the_exact_one(name: str) -> None:
    estimator, share, filters = CASES[name]
    model, sampling = walker(), SamplingOptions(seed=5, **filters)
    items = rollout(model, estimator, sampling, greedy=estimator.baseline == "greedy")
    estimated = estimates(model, items, sampling.temperature)
    exact = share * exact_gradient(model, sampling.temperature, sampling.top_p)
    assert deviations(estimated, exact).max() < ERRORS
    assert deviations(estimated, (SAMPLES - 1) / SAMPLES * exact).max() > ERRORS  # control: a share too little


def divided_by_deviation(items: list[Pack]) -> list[Pack]:
    """A mistake here: rewards of a group divided by their deviation are no longer those of the process."""
    changed = []
    for item in items:
        rewards = item.samples[0].facts["reward"][1:]
        changed.append(_scaled(item, [1 / (float(rewards.std()) + 1e-4)] * SAMPLES))
    return changed


def one_with_the_wrong_sign(items: list[Pack]) -> list[Pack]:
    """A mistake: the first answer of each group."""
    return [_scaled(item, [-1, *[1] * (SAMPLES - 1)]) for item in items]


def without_supports(items: list[Pack]) -> list[Pack]:
    """A mistake: as if tokens had been drawn from the whole vocabulary."""
    return [with_columns(item, {SUPPORT: np.full_like(item.samples[0].columns[SUPPORT], -1)}) for item in items]


def _scaled(item: Pack, factors: Sequence[float]) -> Pack:
    (sample,) = item.samples
    advantages = sample.columns[ADVANTAGE].copy()
    for branch, factor in zip(sample.branches[1:], factors, strict=True):
        advantages[branch.start : branch.stop] *= factor
    return with_columns(item, {ADVANTAGE: advantages})


MISTAKES = {
    "deviation": (divided_by_deviation, 0.7),
    "sign": (one_with_the_wrong_sign, 0.7),
    "support": (without_supports, 0.7),
    "temperature": (lambda items: items, 1.0),
}


@pytest.mark.slow
def test_estimates_with_a_mistake_are_told_from_the_exact_gradient() -> None:
    model, sampling = walker(), SamplingOptions(seed=5, **FILTERS)
    items = rollout(model, GroupEstimator("leave-one-out", "none"), sampling)
    exact = exact_gradient(model, sampling.temperature, sampling.top_p)
    off = {
        name: float(deviations(estimates(model, changed(items), temperature), exact).max())
        for name, (changed, temperature) in MISTAKES.items()
    }
    assert all(errors > 2 * ERRORS for errors in off.values()), off


@pytest.mark.parametrize("filters", [{}, FILTERS])
def test_the_exact_gradient_is_that_of_the_mean_over_all_answers(filters: dict[str, float]) -> None:
    model, prefixes = walker().double(), unrolled()
    preferences = prefixes.preferences(model, **filters)
    logprobs = {prefix: row.log_softmax(-1) for prefix, row in zip(prefixes.tokens, preferences, strict=True)}
    expected = torch.zeros((), dtype=torch.float64)
    for prefix, row in logprobs.items():
        before = sum((logprobs[prefix[:place]][prefix[place]] for place in range(1, len(prefix))), torch.zeros(()))
        for token in range(len(WORDS)):
            if (token == STOP or len(prefix) == TURNS) and row[token].isfinite() and before.isfinite():
                answer = [*prefix[1:], *([] if token == STOP else [token])]
                expected = expected + (before + row[token]).exp() * walk_return(prefix[0], answer) / len(STARTS)
    assert prefixes.value(preferences) == pytest.approx(expected.item(), rel=1e-12)
    gradients = torch.autograd.grad(expected, list(model.parameters()), retain_graph=True)
    for exact, gradient in zip(prefixes.gradient(preferences, model), gradients, strict=True):
        torch.testing.assert_close(exact, gradient, rtol=1e-10, atol=1e-13)
    best = value_iteration(prefixes.process).values
    assert float(prefixes.start @ best) == pytest.approx(optimal_return())
    assert prefixes.value(preferences) < 0.5 * optimal_return()  # there is something to learn


# -- whole runs


def recipe_file(folder: Path, **changes: Any) -> Path:
    """A recipe whose policy is a random decoder over the words, and whose rewards are what walks earn."""
    write_words(folder / "words")
    save(walker(contrast=1.0), folder / "policy", tokenizer_from=folder / "words")
    write_rows(folder / "prompts.jsonl", [{"question": WORDS[start], "start": start} for start in STARTS] * 4)
    values = {
        "model": {"path": str(folder / "policy")},
        "data": {"train": str(folder / "prompts.jsonl"), "prompt": "{question}", "max_length": 16, "workers": 1},
        "rollout": {"samples": 32, "max_new_tokens": TURNS},
        "rewards": [f"{reward_file(folder)}:walk"],
        "batch": {"prompts": 8},
        "optimizer": {"kind": "adamw", "learning_rate": 0.01, "weight_decay": 0},
        "schedule": {"kind": "cosine", "warmup": 2},
        "steps": 100,
        "precision": "fp32",
        "threads": 1,
        "checkpoint": {"every": 1000},
        "log": {"tensorboard": False},
        "output": str(folder / "run"),
        **changes,
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


# The bonus keeps the policy from taking the first walk that pays for the best one.
LEARNERS = {
    "grpo": {"stage": "grpo", "objective": {"entropy": 0.05}},
    "ppo": {
        "stage": "ppo",
        "batch": {"prompts": 8, "updates": 2, "passes": 2},
        "steps": 200,
        "value": {"rate_ratio": 2.0},
        # A walk of three tokens is at its end: nothing is earned behind it.
        "objective": {"kl": None, "bootstrap_truncated": False, "entropy": 0.05},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_a_run_finds_the_best_policy(tmp_path: Path, name: str) -> None:
    assert danlu("train", recipe_file(tmp_path, **LEARNERS[name])) == 0
    prefixes = unrolled()
    before, after = (
        prefixes.value(prefixes.preferences(load(folder, dtype=torch.float32).double()))
        for folder in (tmp_path / "policy", tmp_path / "run" / "model")
    )
    assert after >= 0.99 * optimal_return()
    assert before < 0.5 * optimal_return()  # control
