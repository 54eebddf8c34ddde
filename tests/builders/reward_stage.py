"""Stage reward over rows that are made of their numbers, without files, tokenizer and rendering: runs in any layout."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from builders.reward_rows import NAN, chain, pair
from danlu.core.types import Pack
from danlu.data.batch import empty_like
from danlu.recipe import Recipe, load
from danlu.run import train as run
from danlu.stages.protocols import StageData
from danlu.stages.table import STAGES


@dataclass(frozen=True)
class RewardRows:
    """Row n is a function of n: a pair whose chosen answer counts up, or a chain whose right steps do."""

    steps: bool = False

    def at(self, n: int) -> Pack:
        random = np.random.default_rng([7, n])

        def run_of(direction: int) -> list[int]:
            start, length = int(random.integers(10, 50)), int(random.integers(3, 9))
            return [start + direction * place for place in range(length)]

        prompt = [1, *run_of(1)[: int(random.integers(1, 5))]]
        if not self.steps:
            return pair(prompt, run_of(1), run_of(-1), NAN if n % 3 else 0.5)
        labels = [int(random.integers(0, 2)) for _ in range(int(random.integers(1, 4)))]
        return chain(
            prompt, [run_of(2 * label - 1) for label in labels], [*labels[:-1], NAN if n % 5 == 4 else labels[-1]]
        )

    def state(self, number: int) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert state == {}


@dataclass(frozen=True)
class RewardReader:
    recipe: Recipe
    items: str = "pairs"
    counted: str = "tokens"

    def read(self, stream: TextIO) -> StageData:
        assert self.recipe.objective is not None
        rows = RewardRows(self.recipe.objective[0].kind == "stepwise")
        held_out = [rows.at(1000 + number) for number in range(8)]
        return StageData(rows, 40, held_out, ["data: 40 rows"], empty=empty_like(rows.at(0).samples[0]))

    def amount(self, items: int) -> str:
        return f"{items} rows"

    def targets(self, items: int) -> int:
        return items * self.recipe.data.max_length


def train(files: Sequence[str]) -> list[int]:
    """Trains each recipe of stage reward on rows that are made up; the exit code of each."""
    torch.set_num_threads(1)
    stage = replace(STAGES["reward"], reader=RewardReader)
    return [
        run.train(load(Path(file)), log=lambda line: None, stream=io.StringIO(), stage=stage).exit_code
        for file in files
    ]
