"""Answers to a prompt as a tree of tokens to be trained on: the prompt is the stem, each answer is a branch.

S tokens of a tree · M answers · K tokens of the largest support
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from danlu.rollout.request import Completion
from danlu.types import Branch, Pack, Sample

SAMPLED, OLD, ADVANTAGE, SUPPORT = "sampled", "old", "advantage", "support"
"""Columns: log-probabilities under what was drawn from, those of the trainer at the rollout's weights, advantages, and
the ids [S, K] that filters left, -1 for none; a token whose whole row is -1 was drawn from all."""


def answer_tree(
    prompt: Sequence[int], completions: Sequence[Completion], row: str, facts: Mapping[str, Sequence[float]]
) -> Pack:
    """One item: the prompt's tokens without weight, then each answer's with weight 1.

    facts: of the answers; the stem has NaN.
    """
    lengths = [len(prompt), *(len(completion.tokens) for completion in completions)]
    stops = np.cumsum(lengths).tolist()
    branches = tuple(
        Branch(-1 if number == 0 else 0, stop - length, stop)
        for number, (length, stop) in enumerate(zip(lengths, stops, strict=True))
    )
    tokens = np.concatenate(
        [np.array(prompt, np.int32), *(np.array(completion.tokens, np.int32) for completion in completions)]
    )
    weights = np.ones(len(tokens), np.float32)
    weights[: len(prompt)] = 0
    sampled = np.concatenate(
        [np.zeros(len(prompt)), *(np.array(completion.drawn) for completion in completions)]
    ).astype(np.float32)
    columns = {SAMPLED: sampled, OLD: sampled}
    return Pack(
        (
            Sample(
                tokens,
                weights,
                row,
                branches=branches,
                columns=columns,
                facts={name: np.array([np.nan, *values], np.float32) for name, values in facts.items()},
            ),
        )
    )


def with_supports(items: Sequence[Pack], completions: Sequence[Sequence[Completion]]) -> list[Pack]:
    """The items with the column of supports, all of one width K, where any answer has supports."""
    ids = [[support.ids for completion in of_item for support in completion.support or ()] for of_item in completions]
    if all(completion.support is None for of_item in completions for completion in of_item):
        return list(items)
    widest = max((len(row) for of_item in ids for row in of_item), default=0)
    with_column = []
    for item, of_item in zip(items, completions, strict=True):
        (sample,) = item.samples
        column = np.full((len(sample.tokens), widest), -1, np.int32)
        place = sample.branches[0].stop
        for completion in of_item:
            for offset, support in enumerate(completion.support or ()):
                own = support.ids
                column[place + offset, : len(own)] = own
            place += len(completion.tokens)
        with_column.append(with_columns(item, {SUPPORT: column}))
    return with_column


def with_columns(item: Pack, columns: Mapping[str, np.ndarray]) -> Pack:
    """The item with more columns, or others in their place."""
    (sample,) = item.samples
    return Pack((replace(sample, columns={**sample.columns, **columns}),))


def with_facts(item: Pack, facts: Mapping[str, np.ndarray]) -> Pack:
    """The item with more facts, or others in their place."""
    (sample,) = item.samples
    return Pack((replace(sample, facts={**sample.facts, **facts}),))


def items_to_tensors(items: Sequence[Pack]) -> dict[str, Tensor]:
    """Items as a few flat tensors, for a checkpoint; their rows are text, and kept elsewhere."""
    samples = [item.samples[0] for item in items]
    arrays = {
        "lengths": np.array([len(sample.tokens) for sample in samples], np.int64),
        "branch_counts": np.array([len(sample.branches) for sample in samples], np.int64),
        "tokens": np.concatenate([sample.tokens for sample in samples]),
        "weights": np.concatenate([sample.weights for sample in samples]),
        "branches": np.array([branch for sample in samples for branch in sample.branches], np.int64),
    }
    for name in samples[0].columns:
        arrays[f"column.{name}"] = np.concatenate([sample.columns[name] for sample in samples])
    for name in samples[0].facts:
        arrays[f"fact.{name}"] = np.concatenate([sample.facts[name] for sample in samples])
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def items_from_tensors(tensors: Mapping[str, Tensor], rows: Sequence[str]) -> list[Pack]:
    """What `items_to_tensors` was given, with the rows of its samples."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    stops, branch_stops = np.cumsum(arrays["lengths"]), np.cumsum(arrays["branch_counts"])
    items = []
    for number, row in enumerate(rows):
        own = slice(stops[number] - arrays["lengths"][number], stops[number])
        branches = slice(branch_stops[number] - arrays["branch_counts"][number], branch_stops[number])
        parts: dict[str, dict[str, np.ndarray]] = {"column": {}, "fact": {}}
        for name, array in arrays.items():
            kind, _, short = name.partition(".")
            if kind in parts:
                parts[kind][short] = array[own if kind == "column" else branches]
        sample = Sample(
            arrays["tokens"][own],
            arrays["weights"][own],
            row,
            branches=tuple(Branch(*branch) for branch in arrays["branches"][branches].tolist()),
            columns=parts["column"],
            facts=parts["fact"],
        )
        items.append(Pack((sample,)))
    return items
