"""A stage of pairs over samples in memory, with every kind of reference, and its first step without a run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import yaml

from builders.tiny_world import World
from builders.tree_pairs import VOCABULARY, TreePairReader, tree_pair
from danlu.core.types import Branch, Loss, Pack, Sample
from danlu.data.batch import empty_like
from danlu.data.samples import Samples
from danlu.data.tokenizer_info import TokenizerInfo
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe, load
from danlu.run import train as run
from danlu.stages.builder import DecoderBuilder
from danlu.stages.placed import PlacedDecoder
from danlu.stages.preference import preference, reference_columns, reference_models
from danlu.stages.protocols import Stage, StageData, StoredRows

PAIRS = 16
TOKENIZER = TokenizerInfo(400, None, None, None, ())


def pair(number: int, seed: int) -> Sample:
    """A pair with a third branch, an answer behind the prompt of another row, whose tokens carry no weight."""
    sample, other = (tree_pair(1000 * seed + n).samples[0] for n in (number, number + 500))
    stem = sample.branches[0]
    answer = other.tokens[other.branches[1].start : other.branches[1].stop]
    end = len(sample.tokens)
    return replace(
        sample,
        tokens=np.concatenate([sample.tokens, answer]),
        weights=np.concatenate([sample.weights, np.zeros(len(answer), np.float32)]),
        branches=(*sample.branches, Branch(0, end, end + len(answer))),
        facts={"label": np.append(sample.facts["label"], np.float32(np.nan))},
        row=f"pairs.jsonl row {number} (prompt of {stem.stop} tokens)",
    )


@dataclass(frozen=True)
class PairSamples:
    """Satisfies `data.samples.Samples`."""

    count: int = PAIRS
    seed: int = 0

    def __len__(self) -> int:
        return self.count

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(self.sample(number).tokens) for number in range(self.count)], np.int32)

    @property
    def row_numbers(self) -> np.ndarray:
        return np.arange(self.count)

    def sample(self, number: int) -> Sample:
        return pair(number, self.seed)

    def reasons(self, number: int) -> np.ndarray:
        return np.zeros(len(self.sample(number).tokens), np.uint8)

    def digest(self) -> str:
        return f"{self.count} pairs of seed {self.seed}"


@dataclass(frozen=True)
class ShuffledPairs:
    """Item n of a run: in each epoch another order of the samples."""

    samples: Samples

    def at(self, n: int) -> Pack:
        epoch, place = divmod(n, len(self.samples))
        order = np.random.default_rng(epoch).permutation(len(self.samples))
        return Pack((self.samples.sample(int(order[place])),))

    def state(self, number: int) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert state == {}


class ReferenceReader(TreePairReader):
    """Reads pairs from memory."""

    def read(self, stream: TextIO) -> StageData:
        return self.stage_data(PairSamples(), PairSamples(3, seed=1))

    def stage_data(self, train: Samples, held_out: Samples | None) -> StageData:
        assert held_out is not None
        return StageData(
            ShuffledPairs(train),
            len(train),
            [Pack((held_out.sample(number),)) for number in range(len(held_out))],
            [],
            empty=empty_like(train.sample(0)),
            tokenizer=TOKENIZER,
            stored=StoredRows(train, held_out, partial(self.stage_data)),
        )


STAGE = Stage(
    ReferenceReader,
    DecoderBuilder,
    preference,
    reference_models,
    columns=reference_columns,
)


def recipe_file(world: World, folder: Path, name: str, **changes: Any) -> str:
    """A recipe of stage preference in float32 that trains on the base's folder, 4 pairs a step."""
    values = world.values(
        folder / name,
        stage="preference",
        objective=[{"kind": "sigmoid"}],
        data={"cache": str(folder / "cache"), "eval": 3},
        steps=6,
        evaluation={"every": 3},
        checkpoint={"every": 3},
    )
    values |= {"model": {"path": str(world.base)}, "batch": {"rows": 4, "micro": 1}}
    for key, change in changes.items():
        values[key] = {**values[key], **change} if key in ("model", "data", "batch") else change
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values))
    return str(file)


def place_stage(recipe: Recipe, stage: Stage = STAGE) -> tuple[PlacedDecoder, StageData]:
    """The models of a new run on this process, and its rows with their columns."""
    builder, device = DecoderBuilder(recipe, stage), torch.device("cpu")
    builder.check(None)
    stage_data = builder.with_columns(Ranks(), device, stage.reader(recipe).read(io.StringIO()), io.StringIO())
    policy = builder.place(Ranks(), device, None, stage_data).policy
    assert isinstance(policy, PlacedDecoder)
    return policy, stage_data


def loss_of(placed: PlacedDecoder, stage_data: StageData, count: int = 4) -> tuple[float, float]:
    """(mean loss, largest margin of a pair) of the first items, without dropout."""
    learner = placed.learner(count)
    items = [stage_data.source.at(number) for number in range(count)]
    assert all(isinstance(item, Pack) for item in items)
    totals = learner.totals(items)  # type: ignore[arg-type]
    margins = []
    loss: Loss
    for item in items:
        loss = learner.assess(learner.collate([item]), totals)  # type: ignore[list-item]
        margins.append(abs(float(loss.metrics["margin"].sum)))
    loss = learner.assess(learner.collate(items), totals)  # type: ignore[arg-type]
    return float(loss.total) / totals.weight, max(margins)


def train(files: Sequence[str], stage: Stage = STAGE) -> list[int]:
    """Trains each recipe; the exit code of each."""
    torch.set_num_threads(1)
    return [
        run.train(load(Path(file)), log=lambda line: None, stream=io.StringIO(), stage=stage).exit_code
        for file in files
    ]


assert TOKENIZER.vocab_size >= VOCABULARY
