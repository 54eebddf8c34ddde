"""The micro-batches of rows with compared or judged answers, as steps deal them out. Imports no torch.

A row is a tree: a prompt with its answers. A step has a number of rows, however long they are, and its data ranks deal
them out by their tokens (`parallel.batch_sharding.shard_by_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from danlu.core.token_buckets import padding_to_bucket
from danlu.parallel.batch_sharding import shard_by_tokens
from danlu.planning.batch_shape import Document, DocumentRun

_STEPS_TRIED = 32
"""Steps that are dealt out to find the largest micro-batch: those with most tokens for each."""


@dataclass(frozen=True, eq=False)
class RowTrees:
    """The trees of all rows that are trained on, in their order, as flat arrays."""

    runs: np.ndarray
    """[runs, 2] int64: the tokens of each prompt or answer, and those of its path before them; 0 in front of a
    document."""
    offsets: np.ndarray
    """[rows + 1] int64: of each row's first run."""
    targets: np.ndarray
    """[rows] int64: tokens of answers that a loss is computed from."""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, Sequence[int]]], *, shared: bool) -> RowTrees:
        """The trees of rows, (tokens of the prompt, of each answer). shared: whether the answers share the prompt."""
        runs = [list(_runs(prompt, answers, shared=shared)) for prompt, answers in rows]
        return cls(
            np.array([run for row in runs for run in row], np.int64).reshape(-1, 2),
            np.cumsum([0, *map(len, runs)]),
            np.array([sum(answers) for _, answers in rows], np.int64),
        )

    def __len__(self) -> int:
        return len(self.targets)

    @cached_property
    def tokens(self) -> np.ndarray:
        """[rows] int64: the tokens of each row."""
        return np.add.reduceat(self.runs[:, 0], self.offsets[:-1])

    def documents(self, rows: Sequence[int]) -> tuple[Document, ...]:
        """The documents of some rows: each has its prompt and the answers to it."""
        documents: list[list[DocumentRun]] = []
        for row in rows:
            for tokens, before in self.runs[self.offsets[row] : self.offsets[row + 1]].tolist():
                if not before:
                    documents.append([])
                documents[-1].append(DocumentRun(tokens, before))
        return tuple(map(tuple, documents))


def _runs(prompt: int, answers: Sequence[int], *, shared: bool) -> Iterator[tuple[int, int]]:
    if not prompt or (len(answers) > 1 and not shared):
        yield from ((prompt + tokens, 0) for tokens in answers)
        return
    yield prompt, 0
    yield from ((tokens, prompt) for tokens in answers)


class RowBatch(NamedTuple):
    """A micro-batch of rows on one data rank."""

    documents: tuple[Document, ...]
    targets: int
    """Tokens with a loss."""


@dataclass(frozen=True)
class RowBatches:
    """The micro-batches of a run's rows on one of several data ranks."""

    trees: RowTrees
    rows: int
    """Rows of a step, on all ranks."""
    steps: int | None
    """Steps of the run; None: as many as an epoch has."""
    ranks: int
    """Data ranks."""
    max_length: int
    """Tokens of a packed sequence: micro-batches are counted in such."""
    least: int = 1
    """Micro-batches of each rank, where the rows of a step are enough."""

    @property
    def step_tokens(self) -> int:
        """Tokens of the mean step, on all ranks."""
        return round(self.rows * float(self.trees.tokens.mean()))

    def micro_batches(self, sequences: int) -> int:
        """Micro-batches of a rank in the mean step; sequences: packed sequences with the tokens that one may have."""
        return max(self._least, -(-self.step_tokens // (sequences * self.max_length * self.ranks)))

    def largest(self, sequences: int) -> RowBatch:
        """The micro-batch with most tokens in an epoch, with the padding of its tokens to a bucket."""
        return _largest(self, sequences)

    def mean(self, sequences: int) -> RowBatch:
        """A micro-batch of the mean step with the mix of lengths of all rows; without padding."""
        count = max(1, round(self.rows / (self.ranks * self.micro_batches(sequences))))
        by_tokens = np.argsort(self.trees.tokens, kind="stable")
        places = ((np.arange(count) + 0.5) * len(by_tokens) / count).astype(np.int64)
        rows = by_tokens[places % len(by_tokens)]
        return RowBatch(self.trees.documents(rows.tolist()), int(self.trees.targets[rows].sum()))

    @property
    def _least(self) -> int:
        return min(self.least, -(-self.rows // self.ranks))

    def steps_with_most(self, sequences: int) -> list[np.ndarray]:
        """[rows] int64 each: the row numbers of the steps with most tokens for each of their micro-batches."""
        numbers = np.arange(len(self.trees))
        count = max(1, min(len(self.trees) // self.rows, self.steps or len(self.trees)))
        by_step = np.resize(numbers, count * self.rows).reshape(count, self.rows)
        tokens = self.trees.tokens[by_step]
        rounds = np.maximum(self._least, -(-tokens.sum(1) // (sequences * self.max_length * self.ranks)))
        of_each = np.maximum(tokens.max(1), tokens.sum(1) // (rounds * self.ranks))
        return [by_step[number] for number in np.argsort(-of_each, kind="stable")[:_STEPS_TRIED]]


@lru_cache(maxsize=64)
def _largest(batches: RowBatches, sequences: int) -> RowBatch:
    trees, capacity = batches.trees, sequences * batches.max_length
    largest, most = np.zeros(0, np.int64), -1
    for rows in batches.steps_with_most(sequences):
        tokens = trees.tokens[rows].tolist()
        for numbers in shard_by_tokens(tokens, 0, batches.ranks, capacity, least=batches._least):
            if (total := sum(tokens[number] for number in numbers)) > most:
                largest, most = rows[numbers], total
    documents, targets = trees.documents(largest.tolist()), int(trees.targets[largest].sum())
    if padding := padding_to_bucket(most):
        documents = (*documents, (DocumentRun(padding),))
    return RowBatch(documents, targets + padding_to_bucket(targets))
