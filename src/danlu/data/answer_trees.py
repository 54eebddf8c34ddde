"""Rows of judged answers as trees of tokens: their shared prefix is one branch, and each completion another.

Each path (prompt and answer) is rendered as one text, so its tokens are those of a chat. The shared prefix is the
longest common sequence of tokens before the first trained one: a common beginning of the texts could end inside a
token. Other tokens of a prompt stand in each branch as context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from danlu.core.errors import DataError
from danlu.core.types import Branch
from danlu.data.preference_rows import AnswerRow, JudgedAnswer, StepwiseAnswer, answers_of
from danlu.data.render import Remarks, RenderedSample, RenderSettings, render_rows
from danlu.data.rows import Row
from danlu.data.tokenizer import Tokenizer


def render_answers(
    rows: Sequence[AnswerRow], wheres: Sequence[str], tokenizer: Tokenizer, rendering: RenderSettings
) -> list[RenderedSample | DataError]:
    """Returns the tree of each row, or the error that refuses it. Only answers are trained, whatever
    `rendering.train_on` says.

    Raises:
        DataError: every row needs something that the tokenizer lacks (a chat template, an end-of-text token).
    """
    paths: list[Row] = []
    path_wheres: list[str] = []
    for row, where in zip(rows, wheres, strict=True):
        paths += answers_of(row)
        path_wheres += [where] * len(answers_of(row))
    outcomes = iter(render_rows(paths, path_wheres, tokenizer, replace(rendering, train_on="assistant")))
    trees: list[RenderedSample | DataError] = []
    for row, where in zip(rows, wheres, strict=True):
        rendered = [next(outcomes) for _ in answers_of(row)]
        try:
            if problem := next((outcome for outcome in rendered if isinstance(outcome, DataError)), None):
                raise problem
            paths_of_row = [outcome[0] for outcome in rendered if isinstance(outcome, list)]
            trees.append(replace(_tree(row, paths_of_row, where), remarks=Remarks.of(paths_of_row)))
        except DataError as error:
            trees.append(error)
    return trees


def _tree(row: AnswerRow, paths: Sequence[RenderedSample], where: str) -> RenderedSample:
    """Builds the tree of a row from its rendered answers, `paths`."""
    for path in paths:
        if not path.weights.any():
            raise DataError(f"{where}: no token of an answer would be trained; look at the row with `danlu preview`")
    if isinstance(row, StepwiseAnswer):
        return _chain(paths[0], row.labels, where)
    if isinstance(row, JudgedAnswer):
        return _fork(paths, [float(row.is_desirable)])
    chosen, rejected = paths
    if np.array_equal(chosen.tokens, rejected.tokens):
        raise DataError(f"{where}: chosen and rejected are the same {len(chosen.tokens)} tokens; remove the row")
    return _fork(paths, [1.0, 0.0], margin=math.nan if row.margin is None else row.margin)


def _fork(paths: Sequence[RenderedSample], labels: Sequence[float], **facts: float) -> RenderedSample:
    """Builds a shared prefix with a branch for each path; paths that have no token in common are separate roots.

    facts: facts of the answers, besides their labels.
    """
    stem = min(_common_length(paths), *(int(np.flatnonzero(path.weights)[0]) for path in paths))
    parts = [paths[0].part(0, stem), *(path.taken(slice(stem, None)) for path in paths)]
    of_stem = [math.nan]
    if not stem:
        parts, of_stem = parts[1:], []
    stops = np.cumsum([len(part.tokens) for part in parts]).tolist()
    starts = [0, *stops[:-1]]
    parents = [-1, *[0 if stem else -1] * (len(parts) - 1)]
    return _joined(
        parts,
        tuple(map(Branch, parents, starts, stops)),
        {
            "label": np.array([*of_stem, *labels], np.float32),
            **{name: np.array([*of_stem, *[value] * len(paths)], np.float32) for name, value in facts.items()},
        },
    )


def _chain(path: RenderedSample, labels: Sequence[float], where: str) -> RenderedSample:
    """The prompt, then each step as a branch of the one before. Steps are numbered by `turns`, the last ones of all."""
    first = int(path.turns[-1]) - len(labels) + 1
    starts = [int(np.flatnonzero(path.weights)[0])]
    for number in range(1, len(labels)):
        of_step = np.flatnonzero(path.turns == first + number)
        if not len(of_step):
            raise DataError(f"{where}: step {number + 1} of 'completions' has no token of its own; join it to another")
        starts.append(int(of_step[0]))
    borders = [0, *starts, len(path.tokens)]
    branches = tuple(Branch(number - 1, *borders[number : number + 2]) for number in range(len(borders) - 1))
    return replace(path, branches=branches, facts={"label": np.array([math.nan, *labels], np.float32)})


def _common_length(paths: Sequence[RenderedSample]) -> int:
    """How many first tokens all paths have in common; of a single one, all of them."""
    shortest = min(len(path.tokens) for path in paths)
    differs = np.zeros(shortest, bool)
    for path in paths[1:]:
        differs |= path.tokens[:shortest] != paths[0].tokens[:shortest]
    return int(differs.argmax()) if differs.any() else shortest


def _joined(
    parts: Sequence[RenderedSample], branches: tuple[Branch, ...], facts: Mapping[str, np.ndarray]
) -> RenderedSample:
    tokens, weights, reasons, turns = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "weights", "reasons", "turns")
    )
    return RenderedSample(tokens, weights, reasons, turns, parts[0].where, branches, facts)
