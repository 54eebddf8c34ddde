"""A stage of pairs that are trees: a shared stem with a chosen and a rejected answer, judged by DPO's loss."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from builders.pair_stage import PAIRS
from danlu.core.types import Branch, Pack, Sample
from danlu.data.batch import empty_like
from danlu.objectives.preference import preference_objective
from danlu.recipe import Recipe, load
from danlu.recipe.sections import Sigmoid
from danlu.run import train as run
from danlu.stages.protocols import Stage, StageData

VOCABULARY = 64


def tree_pair(number: int, *, label: float = 1.0) -> Pack:
    """Pair `number`: counting upwards is preferred to random tokens behind a stem that the two share.

    label: of the first answer; NaN, and the same of the second, makes a pack that has no pair.
    """
    random = np.random.default_rng(number)
    stem, chosen, rejected = random.integers(2, 7, 3).tolist()
    start = int(random.integers(0, VOCABULARY))
    tokens = np.arange(start, start + stem + chosen) % VOCABULARY
    tokens = np.concatenate([tokens, random.integers(0, VOCABULARY, rejected)]).astype(np.int32)
    weights = np.ones(len(tokens), np.float32)
    weights[:stem] = 0
    branches = (Branch(-1, 0, stem), Branch(0, stem, stem + chosen), Branch(0, stem + chosen, len(tokens)))
    facts = {"label": np.array([np.nan, label, 1 - label], np.float32)}
    return Pack((Sample(tokens, weights, f"pairs.jsonl row {number}", branches=branches, facts=facts),))


class TreePairs:
    """Pairs by number; satisfies `train.position.ItemSource`."""

    def at(self, n: int) -> Pack:
        return tree_pair(n)

    def state(self, number: int) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert state == {}


@dataclass(frozen=True)
class TreePairReader:
    recipe: Recipe
    items: str = "pairs"
    counted: str = "tokens"

    def read(self, stream: TextIO) -> StageData:
        held_out = [tree_pair(100 + number) for number in range(3)]
        empty = empty_like(held_out[0].samples[0])
        return StageData(TreePairs(), 20, held_out, ["data: 20 pairs"], empty=empty)

    def amount(self, items: int) -> str:
        return f"{items} pairs"

    def targets(self, items: int) -> int:
        return items * self.recipe.data.max_length


TREE_PAIRS: Stage = replace(
    PAIRS, reader=TreePairReader, objective=lambda recipe: preference_objective([Sigmoid()], has_reference=True)
)


def train(files: Sequence[str]) -> list[int]:
    """Trains each recipe as a stage of pairs that are trees; the exit code of each."""
    torch.set_num_threads(1)
    return [
        run.train(load(Path(file)), log=lambda line: None, stream=io.StringIO(), stage=TREE_PAIRS).exit_code
        for file in files
    ]
