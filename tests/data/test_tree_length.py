"""Rows that are too long: what of prompt and answers is left, and that what is shared stays shared."""

from __future__ import annotations

import numpy as np
import pytest

from danlu.core.types import Branch
from danlu.data.message_spans import Reason
from danlu.data.render import RenderedSample
from danlu.data.tree_length import ANSWER_CUT, PROMPT_SHORTENED, fit_answers
from danlu.data.trees import path_lengths

BOS = 1
# Turns of a prompt, with the number of tokens of each, its header of one token included: system, user, assistant, user.
TURNS = ((Reason.SYSTEM, 4), (Reason.USER, 6), (Reason.ASSISTANT, 6), (Reason.USER, 8))


def tree(answers: tuple[int, ...] = (5, 7), *, system: bool = True, chain: bool = False) -> RenderedSample:
    """A BOS, the turns, a header of two tokens, and answers of so many tokens. Tokens count up from 10."""
    reasons: list[int] = [Reason.TEMPLATE]
    turns = [0]
    for turn, (reason, length) in enumerate(TURNS if system else TURNS[1:]):
        reasons += [Reason.TEMPLATE] + [reason] * (length - 1)
        turns += [turn] * length
    last = turns[-1] + 1
    stem = len(reasons) + 2
    reasons += [Reason.TEMPLATE] * 2 + [Reason.ASSISTANT] * sum(answers)
    turns += [last] * (2 + sum(answers))
    weights = np.zeros(len(reasons), np.float32)
    weights[stem:] = 1
    borders = np.cumsum([stem, *answers]).tolist()
    parents = range(len(answers)) if chain else [0] * len(answers)
    tokens = np.arange(10, 10 + len(reasons), dtype=np.int32)
    tokens[0] = BOS
    return RenderedSample(
        tokens,
        weights,
        np.array(reasons, np.uint8),
        np.array(turns, np.int32),
        "rows.jsonl:1",
        (Branch(-1, 0, stem), *map(Branch, parents, borders, borders[1:])),
        {"label": np.array([np.nan, *range(len(answers))], np.float32)},
    )


def parts(sample: RenderedSample) -> list[list[int]]:
    return [sample.tokens[branch.start : branch.stop].tolist() for branch in sample.branches]


def fitted(sample: RenderedSample, max_length: int, overlong: str = "truncate") -> tuple[RenderedSample, str | None]:
    shorter, what = fit_answers(sample, max_length, overlong, BOS)  # type: ignore[arg-type]
    assert shorter is not None and max(path_lengths(shorter.branches)) <= max_length
    assert shorter.branches[0].start == 0 and shorter.branches[-1].stop == len(shorter.tokens)
    return shorter, what


def test_what_fits_stays_as_it_is() -> None:
    whole = tree()
    assert fit_answers(whole, 27 + 7, "truncate", BOS) == (whole, None)


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_whole_earlier_turns_are_left_out_first_behind_the_system_message(overlong: str) -> None:
    whole = tree()
    shorter, what = fitted(whole, 27 + 7 - 12, overlong)  # both earlier turns have 12 tokens
    stem, *answers = parts(whole)
    assert what == PROMPT_SHORTENED and parts(shorter) == [[*stem[:5], *stem[17:]], *answers]
    assert fitted(whole, 27 + 7 - 1)[0].tokens.tolist() == shorter.tokens.tolist()  # not 1 token: a whole question


def test_the_system_message_goes_where_that_is_enough_and_nothing_else_is() -> None:
    whole = tree()
    stem, *answers = parts(whole)
    shorter, _ = fitted(whole, 27 + 7 - 14)
    assert parts(shorter) == [[BOS, *stem[17:]], *answers]


def test_else_single_tokens_are_left_out_from_the_beginning_the_same_for_all_answers() -> None:
    whole = tree(system=False)
    stem, *answers = parts(whole)
    shorter, what = fitted(whole, 23 + 7 - 17)  # of the last question 3 tokens are left, and the header
    assert what == PROMPT_SHORTENED and parts(shorter) == [[BOS, *stem[18:]], *answers]
    least, _ = fitted(whole, 1 + 2 + 7, "drop")
    assert parts(least) == [[BOS, *stem[-2:]], *answers]  # what heads the answer stays


def test_only_an_answer_that_does_not_fit_alone_loses_its_end() -> None:
    whole = tree((5, 40))
    stem, chosen, rejected = parts(whole)
    assert fitted(whole, 1 + 2 + 40)[1] == PROMPT_SHORTENED  # control: it does fit
    shorter, what = fitted(whole, 42)
    assert what == ANSWER_CUT and parts(shorter) == [[BOS, *stem[7:]], chosen, rejected[:21]]
    assert shorter.weights[shorter.branches[1].start :].all()
    assert fit_answers(whole, 42, "drop", BOS) == (None, "dropped")


def test_answers_that_become_alike_are_left_out() -> None:
    whole = tree((40, 40))
    start = whole.branches[1].start
    whole.tokens[start + 40 :] = whole.tokens[start : start + 40]
    whole.tokens[-1] = 5
    assert fit_answers(whole, 30, "truncate", BOS) == (None, ANSWER_CUT)
    whole.tokens[start] = 6
    assert fit_answers(whole, 30, "truncate", BOS)[0] is not None


def test_steps_are_left_out_whole() -> None:
    whole = tree((10, 10, 10), chain=True)
    shorter, what = fitted(whole, 30)  # the prompt keeps 15: a step of 10 fits, and half of the next does not
    assert what == ANSWER_CUT and [len(part) for part in parts(shorter)] == [15, 10]
    assert [branch.parent for branch in shorter.branches] == [-1, 0] and len(shorter.facts["label"]) == 2
    assert fit_answers(whole, 12, "truncate", BOS)[0] is None
