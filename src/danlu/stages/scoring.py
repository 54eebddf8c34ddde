"""A reward model over rows: its scores of each answer, or of each step, and how often they are right.

M branches · P pairs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from danlu.core.errors import ModelError
from danlu.core.types import Pack, Sample
from danlu.inference.load_model import LoadedModel
from danlu.objectives.branches import CHOSEN, REJECTED
from danlu.parallel.batch_sharding import shard_by_tokens
from danlu.stages.learner import DecoderLearner

MICRO_BATCH_TOKENS = 4096  # per forward pass, however many rows that are


@dataclass(frozen=True)
class ScoredRow:
    """A row, and the head's scores at the last token of each of its branches."""

    sample: Sample
    scores: np.ndarray  # [M] or [M, labels] float32; M is 1 for a sample that is no tree

    @property
    def labels(self) -> np.ndarray:
        """[M] float32: 1 for a chosen answer or a right step, 0 for the opposite, NaN for one that is not labelled."""
        return self.sample.facts.get("label", np.full(len(self.scores), np.nan, np.float32))

    @property
    def pair(self) -> tuple[float, float] | None:
        """Returns (score of the chosen answer, of the rejected one); None for a row that has no two answers."""
        labels = self.labels
        if not ((labels == CHOSEN).sum() == (labels == REJECTED).sum() == 1):
            return None
        return float(self.scores[labels == CHOSEN][0]), float(self.scores[labels == REJECTED][0])


def scoring_learner(loaded: LoadedModel) -> DecoderLearner:
    """A reward model as a learner, which makes micro-batches and applies its head."""
    assert loaded.score_head is not None, "a language model has no score head"
    return DecoderLearner(
        model=loaded.model,
        model_forward=loaded.model,
        device=loaded.model.embed_tokens.weight.device,
        dtype=loaded.dtype,
        micro=1,
        adapters=None if loaded.stacks is None else loaded.stacks.adapters,
        score_head=loaded.score_head,
    )


def scored_rows(
    learner: DecoderLearner, packs: Sequence[Pack], progress: Callable[[int, int], None] = lambda done, count: None
) -> Iterator[ScoredRow]:
    """Yields the samples of all packs with their scores, in their order; `progress` is called with (packs done, packs).

    Raises ModelError for scores that are not finite.
    """
    # In the order of the rows a range at a time, so that what is kept is bounded; within it by length, without padding.
    for start in range(0, len(packs), 1024):
        part = packs[start : start + 1024]
        scored: dict[int, list[ScoredRow]] = {}
        for numbers in shard_by_tokens([pack.tokens for pack in part], 0, 1, MICRO_BATCH_TOKENS):
            samples = [sample for number in numbers for sample in part[number].samples]
            with torch.no_grad():
                batch = learner.collate([part[number] for number in numbers])
                scores = learner.outputs(batch, 1.0)["policy"].scores().cpu().numpy()
            if not np.isfinite(scores).all():
                dtype = str(learner.dtype).removeprefix("torch.")
                raise ModelError(f"{samples[0].row}: a score is not finite: the model leaves {dtype}'s range; try fp32")
            counts = [len(sample.branches) or 1 for sample in samples]
            rows = iter(map(ScoredRow, samples, np.split(scores, np.cumsum(counts)[:-1])))
            for number in numbers:
                scored[number] = [next(rows) for _ in part[number].samples]
            progress(start + len(scored), len(packs))
        for number in range(len(part)):
            yield from scored[number]


def row_values(row: ScoredRow, *, steps: bool) -> dict[str, Any]:
    """A row as a line of JSON: the scores of its answers, or the probability that each of its steps is right."""
    if steps:
        right = _right_probabilities(row.scores)
        of_steps = slice(1, None) if row.sample.branches else slice(None)  # the first branch is the prompt
        labels = [None if np.isnan(label) else int(label) for label in row.labels[of_steps].tolist()]
        return {"row": row.sample.row, "steps": right[of_steps].tolist(), "labels": labels}
    if (pair := row.pair) is not None:
        return {"row": row.sample.row, "chosen": pair[0], "rejected": pair[1], "margin": pair[0] - pair[1]}
    return {"row": row.sample.row, "score": float(row.scores[-1])}


@dataclass
class ScoreSummary:
    """The summary of a file's rows: means over its pairs, its labelled steps, or answers that are not compared."""

    steps: bool  # of a process reward model: its head has two labels
    rows: int = 0
    _pairs: list[tuple[float, float]] = field(default_factory=list)
    _answers: list[float] = field(default_factory=list)
    _steps: list[tuple[float, float]] = field(default_factory=list)  # (probability that it is right, label)

    def add(self, row: ScoredRow) -> None:
        """Takes up one more row."""
        self.rows += 1
        if self.steps:
            judged = ~np.isnan(row.labels)
            self._steps += zip(_right_probabilities(row.scores)[judged].tolist(), row.labels[judged], strict=True)
        elif row.pair is not None:
            self._pairs.append(row.pair)
        else:
            self._answers.append(float(row.scores[-1]))

    def values(self) -> dict[str, float]:
        """The numbers by name, those that there are rows for."""
        values: dict[str, float] = {"rows": self.rows}
        if self._pairs:
            chosen, rejected = np.array(self._pairs).T  # [P] each
            margins = chosen - rejected
            values |= {
                "pairs": len(margins),
                "accuracy": float((margins > 0).mean()),
                "loss": float(np.logaddexp(0, -margins).mean()),
                "margin": float(margins.mean()),
                "chosen_score": float(chosen.mean()),
                "rejected_score": float(rejected.mean()),
            }
        if self._steps:
            right, labels = np.array(self._steps).T  # [steps] each
            likelihoods = np.where(labels == 1, right, 1 - right)
            values |= {
                "steps": len(labels),
                "accuracy": float(((right > 0.5) == (labels == 1)).mean()),
                "loss": float(-np.log(likelihoods.clip(min=np.finfo(np.float64).tiny)).mean()),
                "right_steps": float(labels.mean()),
            }
        if self._answers:
            values |= {"score": float(np.mean(self._answers)), "score_std": float(np.std(self._answers))}
        return values


def _right_probabilities(scores: np.ndarray) -> np.ndarray:
    """[M] float64: the probability of label 1 of scores [M, 2]."""
    difference = scores[:, 1].astype(np.float64) - scores[:, 0]
    probabilities: np.ndarray = np.exp(-np.logaddexp(0, -difference))
    return probabilities
