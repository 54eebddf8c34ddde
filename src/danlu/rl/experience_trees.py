"""Answers to a prompt as a tree of tokens to be trained on: the prompt is the shared prefix, each answer is a branch.

An answer in several turns is a branch in which only the policy's tokens have weight, not the environment's. Where the
chat template rewrote its history it has another branch: the rewritten history, and the turns after it.

S tokens of a tree · M answers · K tokens of the largest support
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from danlu.core.errors import DataError
from danlu.core.types import ROTARY_LENGTH, ROUTES, Branch, Pack, Sample
from danlu.inference.episode import segments_of
from danlu.inference.recorded_routes import NO_ROUTE
from danlu.inference.request import Completion

SAMPLED, OLD, ADVANTAGE, SUPPORT = "sampled", "old", "advantage", "support"
"""Names of columns: log-probabilities under the sampling distribution, those of the trainer at the rollout's weights,
advantages, and the ids [S, K] that filters left, -1 for none; a token with -1 in its whole row was drawn from all."""


OF_ALL_BRANCHES = ("group", "fresh", ROTARY_LENGTH)
"""Facts that each branch of an answer has; others are the first one's alone, so that means are over answers."""


@dataclass(frozen=True)
class _DrawnBranch:
    """A branch of an answer: its tokens, which of them were drawn, and whether the answer begins with it."""

    answer: int
    tokens: np.ndarray  # [T] int32
    drawn: np.ndarray  # [T] bool
    is_first: bool


def _branches_of(prompt: Sequence[int], completions: Sequence[Completion]) -> tuple[int, list[_DrawnBranch]]:
    """Returns (tokens of the shared prefix, the branches after it): the prefix is common to the prompts of all
    segments."""
    segments = [segments_of(completion, prompt) for completion in completions]
    stem = len(prompt)
    for segment in (segment for of_answer in segments for segment in of_answer):
        stem = _common_length(prompt[:stem], segment.prompt)
    if stem == 0:
        raise DataError(
            "the chat template begins a conversation that goes on with another token than the prompt, so both cannot "
            "share a tree. Name another template in model.chat_template"
        )
    branches = []
    for answer, of_answer in enumerate(segments):
        for number, segment in enumerate(of_answer):
            tokens = np.array((*segment.prompt[stem:], *segment.tokens), np.int32)
            drawn = np.concatenate([np.zeros(len(segment.prompt) - stem, bool), np.array(segment.drawn, bool)])
            branches.append(_DrawnBranch(answer, tokens, drawn, number == 0))
    return stem, branches


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens in the common prefix of two sequences."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def answer_tree(
    prompt: Sequence[int], completions: Sequence[Completion], row: str, facts: Mapping[str, Sequence[float]]
) -> Pack:
    """One item: the prompt's tokens without weight, then each answer's, of which those that were drawn have weight 1.

    facts: of the answers; the stem has NaN, and so has a further branch of an answer, but for `OF_ALL_BRANCHES`.

    Raises DataError where a rewritten history shares no beginning with the prompt.
    """
    stem, behind = _branches_of(prompt, completions)
    stops = np.cumsum([stem, *(len(branch.tokens) for branch in behind)]).tolist()
    branches = (Branch(-1, 0, stem), *(Branch(0, start, stop) for start, stop in itertools.pairwise(stops)))
    tokens = np.concatenate([np.array(prompt[:stem], np.int32), *(branch.tokens for branch in behind)])
    weights = np.concatenate([np.zeros(stem, bool), *(branch.drawn for branch in behind)]).astype(np.float32)
    sampled = np.zeros(len(tokens), np.float32)
    sampled[weights > 0] = [value for completion in completions for value in completion.drawn]
    columns = {SAMPLED: sampled, OLD: sampled}
    values = {
        name: [of_answers[branch.answer] if branch.is_first or name in OF_ALL_BRANCHES else np.nan for branch in behind]
        for name, of_answers in facts.items()
    }
    return Pack(
        (
            Sample(
                tokens,
                weights,
                row,
                branches=branches,
                columns=columns,
                facts={name: np.array([np.nan, *of_branches], np.float32) for name, of_branches in values.items()},
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
        places = iter(np.flatnonzero(sample.weights > 0).tolist())  # of drawn tokens, in the order of the answers
        for completion in of_item:
            of_answer = list(itertools.islice(places, len(completion.tokens)))
            for place, support in zip(of_answer, completion.support or (), strict=False):
                own = support.ids
                column[place, : len(own)] = own
        with_column.append(with_columns(item, {SUPPORT: column}))
    return with_column


def with_routes(
    items: Sequence[Pack], completions: Sequence[Sequence[Completion]], prompts: Sequence[Sequence[int]]
) -> list[Pack]:
    """Adds the column `ROUTES` to the items of `answer_tree`, where any answer has routes: -1 for the last token of
    each branch, and for all of an answer without any. Tokens that answers share have the routes of the first answer
    that has some."""
    known = next((each.routes for of_item in completions for each in of_item if each.routes is not None), None)
    if known is None:
        return list(items)
    return [
        with_columns(item, {ROUTES: _routes_of(item.samples[0], of_item, prompt, known.shape[1:])})
        for item, of_item, prompt in zip(items, completions, prompts, strict=True)
    ]


def _routes_of(
    sample: Sample, completions: Sequence[Completion], prompt: Sequence[int], shape: Sequence[int]
) -> np.ndarray:
    """[S, *shape] int16 of a tree."""
    column = np.full((len(sample.tokens), *shape), NO_ROUTE, np.int16)
    (_, _, stem), *behind = sample.branches
    branches, stem_is_known = iter(behind), False
    for completion in completions:
        segments = segments_of(completion, prompt)
        stops = np.cumsum([segment.read for segment in segments]).tolist()
        for segment, stop in zip(segments, stops, strict=True):
            _, start, end = next(branches)
            if completion.routes is None:
                continue
            own = completion.routes[stop - segment.read : stop]
            column[start : end - 1] = own[stem:]
            if not stem_is_known:
                column[:stem], stem_is_known = own[:stem], True
    return column


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
    """Restores the items that `items_to_tensors` was given, with the rows of its samples."""
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
