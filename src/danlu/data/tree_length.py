"""Trees of tokens cut to a length: prompts lose their beginning first, answers their end only if that is not enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from danlu.core.types import Branch
from danlu.data.message_spans import Reason
from danlu.data.render import RenderedSample
from danlu.data.trees import path_lengths

PROMPT_SHORTENED = "prompt shortened"
ANSWER_CUT = "answer cut"


def shorten_prompt(tree: RenderedSample, max_length: int, bos_id: int | None) -> RenderedSample | None:
    """Returns the tree with the beginning of its prompt left out, so that every path has at most `max_length` tokens.

    All paths lose the same tokens. A beginning-of-text token and the answer's header stay. Whole earlier turns are left
    out where that is enough, after the system message if possible; else as many tokens as are too many. None if the
    answers alone are too long.
    """
    excess = max(path_lengths(tree.branches)) - max_length
    cut = _cut_of_prompt(tree, excess, bos_id)
    return None if cut is None else _without(tree, *cut)


def cut_answers(tree: RenderedSample, max_length: int, bos_id: int | None) -> RenderedSample | None:
    """The tree with answers that lose their end where a path is longer than `max_length`.

    A prompt that is longer than half of `max_length` keeps no more of its end. A step of several is left out whole,
    for it is judged at its end. None if an answer would have no trained token left, or the two of a pair become alike.
    """
    stem = _stem_length(tree)
    if (excess := stem - max_length // 2) > 0 and (cut := _cut_of_prompt(tree, excess, bos_id, by_turns=False)):
        tree = _without(tree, *cut)
    is_chain = any(branch.parent > 0 for branch in tree.branches)
    kept: list[np.ndarray] = []
    branches: list[Branch] = []
    lengths: list[int] = []  # of paths
    end = 0
    for parent, start, stop in tree.branches:
        before = lengths[parent] if parent >= 0 else 0
        length = min(stop - start, max_length - before)
        if is_chain and length < stop - start:
            break
        if length <= 0 or ((parent >= 0 or not stem) and not tree.weights[start : start + length].any()):
            return None
        kept.append(np.arange(start, start + length))
        branches.append(Branch(parent, end, end + length))
        lengths.append(before + length)
        end += length
    if len(branches) < 2 and len(tree.branches) > 1:
        return None
    facts = {name: values[: len(branches)] for name, values in tree.facts.items()}
    shorter = replace(tree.taken(np.concatenate(kept)), branches=tuple(branches), facts=facts)
    return None if _are_alike(shorter) else shorter


def fit_answers(
    tree: RenderedSample, max_length: int, overlong: Literal["truncate", "split", "drop"], bos_id: int | None
) -> tuple[RenderedSample | None, str | None]:
    """Returns (tree, how it was shortened); each path of it has at most `max_length` tokens. No tree: it is dropped.

    With `overlong` drop, a row is left out only if shortening its prompt is not enough.
    """
    if max(path_lengths(tree.branches)) <= max_length:
        return tree, None
    if (shorter := shorten_prompt(tree, max_length, bos_id)) is not None:
        return shorter, PROMPT_SHORTENED
    if overlong == "drop":
        return None, "dropped"
    return cut_answers(tree, max_length, bos_id), ANSWER_CUT


def _stem_length(tree: RenderedSample) -> int:
    """Returns the number of tokens that all answers share; 0 where they are separate documents."""
    return tree.branches[0].stop if len(tree.branches) > 1 and tree.branches[1].parent == 0 else 0


def _cut_of_prompt(
    tree: RenderedSample, excess: int, bos_id: int | None, *, by_turns: bool = True
) -> tuple[int, int] | None:
    """(start, stop) of at least `excess` tokens of the stem to leave out; None if it has not as many to spare."""
    stem = _stem_length(tree)
    turns, reasons = tree.turns[:stem], tree.reasons[:stem]
    begin = int(stem > 0 and (tree.tokens[0] == bos_id or reasons[0] == Reason.BOS))
    # What heads the answer belongs to the answer's turn; of a prompt without turns the last token stays.
    heads = 0 if not stem or turns[-1] < 0 else int(np.count_nonzero(turns == turns[-1]))
    of_answer = heads if stem and (reasons[turns == turns[-1]] == Reason.TEMPLATE).all() else 0
    last = stem - max(1, of_answer)
    if by_turns:
        turn_starts = np.flatnonzero(np.diff(turns, prepend=turns[:1])) if stem else np.empty(0, np.int64)
        users = np.unique(turns[reasons == Reason.USER])
        starts = turn_starts[np.isin(turns[turn_starts], users[users >= 0])]
        after_system = [int(starts[0])] if len(starts) and (reasons[: starts[0]] == Reason.SYSTEM).any() else []
        for keep in (*after_system, begin):
            far_enough = starts[(starts > keep) & (starts - keep >= excess)]
            if len(far_enough):
                return keep, int(far_enough[0])
    return (begin, begin + excess) if begin + excess <= last else None


def _without(tree: RenderedSample, start: int, stop: int) -> RenderedSample:
    """The tree without tokens `start` to `stop` of its first branch."""
    removed = stop - start
    first, *rest = tree.branches
    branches = (
        Branch(first.parent, 0, first.stop - removed),
        *(Branch(branch.parent, branch.start - removed, branch.stop - removed) for branch in rest),
    )
    kept = np.r_[0:start, stop : len(tree.tokens)]
    return replace(tree.taken(kept), branches=branches)


def _are_alike(tree: RenderedSample) -> bool:
    """Whether two sibling answers have the same tokens."""
    parents = [branch.parent for branch in tree.branches]
    if len(set(parents[-2:])) > 1 or len(parents) < 2:
        return False
    first, second = (tree.tokens[branch.start : branch.stop] for branch in tree.branches[-2:])
    return bool(np.array_equal(first, second))
