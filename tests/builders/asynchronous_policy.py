"""A policy whose weights change as if it were trained, on rollouts that an engine beside it draws in lock-step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from builders.lock_step import LockStepEngine
from danlu.core.errors import TrainingError
from danlu.core.line_log import LineLog
from danlu.core.types import Sample
from danlu.data.prompts import Prompt
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.request import SamplingOptions
from danlu.models.decoder import Decoder
from danlu.parallel.comm import ALONE
from danlu.rewards.protocol import JudgedAnswer
from danlu.rewards.runner import RewardPart, RewardTable
from danlu.rl.asynchronous import AsynchronousEngine, AsynchronousRollouts
from danlu.rl.estimators import GroupEstimator
from danlu.rl.experience import Experience
from danlu.rl.rollout_sampler import ExperienceSettings, RolloutSampler

MODEL_SEED = 3


@dataclass
class InOrder:
    """Prompts in their order, over and over."""

    prompts: Sequence[Prompt]

    @property
    def per_epoch(self) -> int:
        return len(self.prompts)

    def at(self, number: int) -> Prompt:
        return self.prompts[number % len(self.prompts)]

    def state(self) -> dict[str, Any]:
        return {"prompts": len(self.prompts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert state == self.state()


@dataclass
class LengthRewards:
    """Rewards answers by their lengths; raises as often as `fails` says."""

    fails: int = 0
    parts: Sequence[RewardPart] = (RewardPart("length", lambda answers: [0.0]),)

    def score(self, answers: Sequence[JudgedAnswer]) -> RewardTable:
        if self.fails > 0:
            self.fails -= 1
            raise TrainingError("a judge that is gone")
        return RewardTable(np.array([[float(answer.tokens)] for answer in answers]), [])

    def close(self) -> None:
        pass


@dataclass
class AsynchronousPolicy:
    """A model whose weights change with each update by so much, and the experience that it is trained on."""

    model: Decoder
    change: float
    made: Experience
    trained: list[tuple[int, Sample]] = field(default_factory=list)

    def take(self, updates: Iterable[int]) -> None:
        """Takes the items of updates, and makes the updates."""
        per_update = self.made.settings.items_per_update
        for number in updates:
            items = [self.made.at(number * per_update + place) for place in range(per_update)]
            self.trained += [(number, item.samples[0]) for item in items]
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(self.change * torch.randn(parameter.shape, generator=generator))

    @property
    def answers(self) -> list[list[int]]:
        """Tokens of the trees by prompt."""
        return [sample.tokens.tolist() for _, sample in self.trained]

    @property
    def rows(self) -> list[str]:
        """Of the trees that were trained on."""
        return [sample.row for _, sample in self.trained]

    def use(self, engine: AsynchronousEngine, staleness: int, rollouts: int | None = None) -> None:
        """Has the rollouts drawn by an engine beside it."""
        beside = AsynchronousRollouts(engine, self.model.named_parameters, staleness, ALONE, rollouts)
        self.made.sampler.asynchronous = beside


def asynchronous_policy(
    small_decoder: Callable[..., Decoder],
    staleness: int | None = 1,
    change: float = 0.0,
    folder: Path | None = None,
    *,
    passes: Sequence[int] = (3,),
    rollouts: int | None = None,
    rewards: Any = None,
    options: EngineOptions | None = None,
    **settings: Any,
) -> AsynchronousPolicy:
    """Of a small decoder over 60 prompts, whose answers have up to 10 tokens; staleness None: synchronous."""
    prompts = [Prompt((1, 2, 3 + number % 40), {}, f"prompt {number}", f"row {number}") for number in range(60)]
    own: dict[str, Any] = {"prompts": 4, "samples": 2, "vocab_size": 61, "max_new_tokens": 10}
    own |= {"stop_ids": frozenset(range(9)), "sampling": SamplingOptions(temperature=1.0, seed=3), **settings}
    model = small_decoder(seed=MODEL_SEED)
    sampler = RolloutSampler(
        InOrder(prompts), EmbeddedEngine(model, options), rewards or LengthRewards(), ExperienceSettings(**own), ALONE
    )
    log = None if folder is None else LineLog(folder / "rollouts.jsonl")
    made = AsynchronousPolicy(model, change, Experience(sampler, GroupEstimator(scale="none"), None, log))
    if staleness is not None:  # the engine is handed the policy's weights
        made.use(LockStepEngine(EmbeddedEngine(small_decoder(seed=7), options), passes), staleness, rollouts)
    return made
