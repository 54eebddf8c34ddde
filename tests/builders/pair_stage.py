"""A stage that is no part of danlu: pairs of answers, a reward head of its own, and a second model that is frozen.

It is what a new stage takes: a file with a reader and an objective, and a row (`PAIRS`).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from builders.tiny_run import SyntheticPacks
from builders.tiny_world import CONFIG
from danlu.core.types import Batch, Loss, Metric, Outputs, Pack, Role, Totals
from danlu.recipe import Recipe, load
from danlu.recipe.roles import ModelSpec
from danlu.run import train as run
from danlu.stages.builder import DecoderBuilder
from danlu.stages.protocols import RoleSpec, Stage, StageData


class Pairs:
    """Pair n is two documents of counting numbers, a function of n."""

    def at(self, n: int) -> Pack:
        samples = [
            sample for pack in (SyntheticPacks().at(2 * n), SyntheticPacks().at(2 * n + 1)) for sample in pack.samples
        ]
        return Pack((samples[0], samples[-1]))

    def state(self, number: int) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert state == {}


@dataclass(frozen=True)
class PairReader:
    recipe: Recipe
    items: str = "pairs"
    counted: str = "tokens"

    def read(self, stream: TextIO) -> StageData:
        return StageData(Pairs(), 20, [Pairs().at(100 + number) for number in range(3)], ["data: 20 pairs"])

    def amount(self, items: int) -> str:
        return f"{items} pairs"

    def targets(self, items: int) -> int:
        return items * self.recipe.data.max_length


class PairObjective(nn.Module):
    """Bradley-Terry loss of a reward head, plus DPO's loss against the frozen reference."""

    needs = frozenset({"hidden", "logprobs"})

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.reward = nn.Linear(CONFIG["hidden_size"], 1, bias=False)
        self.register_buffer("pairs_seen", torch.zeros((), dtype=torch.float64))

    def forward(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        ends = torch.tensor(batch.boundaries[1:])[: (len(batch.boundaries) - 1) // 2 * 2] - 1
        rewards = self.reward(outputs["policy"].hidden()[ends].float()).view(-1, 2)  # [pairs, 2]
        ratios = outputs["policy"].logprobs().logprobs - outputs["reference"].logprobs().logprobs  # [N]
        documents = torch.bucketize(batch.logits_indices, torch.tensor(batch.boundaries[1:]), right=True)
        by_document = torch.zeros(len(batch.boundaries) - 1).index_add(0, documents, ratios)
        margins = rewards.diff(dim=1).squeeze(1) + 0.1 * by_document[: len(ends)].view(-1, 2).diff(dim=1).squeeze(1)
        scale = totals.weight / (len(totals.document_lengths) / 2)  # the loss is a mean over pairs, not over tokens
        if torch.is_grad_enabled():  # a running statistic, the same on every process
            self.pairs_seen.fill_(len(totals.document_lengths) // 2)
        return Loss(
            F.softplus(margins).sum() * scale, {"accuracy": Metric((margins < 0).float().sum(), float(len(margins)))}
        )


def frozen_reference(recipe: Recipe) -> Mapping[Role, RoleSpec]:
    """The model that the run starts from, once more."""
    return {"reference": ModelSpec("reference", recipe.model, recipe.quantization)}


PAIRS = Stage(PairReader, DecoderBuilder, PairObjective, frozen_reference)


class PerMicroBatch(PairObjective):
    """A mistake: the mean over the pairs of a micro-batch, which is none over the step's."""

    def forward(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        pairs = Totals(totals.weight, 0, 0, (0,) * max(2, (len(batch.boundaries) - 1) // 2 * 2))
        return super().forward(outputs, batch, pairs)


def train(files: Sequence[str], wrong: bool = False, objective_rate: float = 1.0) -> list[int]:
    """Trains each recipe as a stage of pairs; the exit code of each."""
    torch.set_num_threads(1)
    objective = PerMicroBatch if wrong else PairObjective
    stage = Stage(PairReader, DecoderBuilder, objective, PAIRS.models, objective_rate=lambda recipe: objective_rate)
    return [
        run.train(load(Path(file)), log=lambda line: None, stream=io.StringIO(), stage=stage).exit_code
        for file in files
    ]


def trained_tensors(folder: Path) -> dict[str, Tensor]:
    """What the last checkpoint of a run has of model and objective, by name."""
    from danlu.training.checkpoints.loading import read_group

    return read_group(max((folder / "checkpoints").glob("step-*")), "model")
