"""Answers chosen among those to a prompt: pairs by a judge's scores, the best, and those that rewards accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from danlu.curation.steps import KEEP, Verdict
from danlu.production.synthesis.candidates import Candidate, drop

SCORE = "score"
"""The column with the mean of a judge's marks; null where none could be read."""
MARGIN = "margin"
"""The column of a pair with the difference of its scores."""
Judged = tuple[Candidate, Verdict]
"""A candidate and what becomes of it."""


def in_groups(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Candidates by the prompt that they answer; those of one follow each other."""
    return [list(group) for _, group in groupby(candidates, key=lambda each: each.group)]


def pairs(candidates: Sequence[Candidate], margin: float) -> list[Judged]:
    """The best answer to each prompt with the worst as its rejected one, where their scores differ by the margin.

    Of answers with the same score the first counts. Answers without a score are never in a pair.
    """
    judged = list[Judged]()
    for group in in_groups(candidates):
        scored = [each for each in group if each.columns[SCORE] is not None]
        if not scored:
            judged += [(each, drop("pairs.unread", 0, 1)) for each in group]
            continue
        best = max(scored, key=lambda each: each.columns[SCORE])
        worst = min(scored, key=lambda each: each.columns[SCORE])
        difference = best.columns[SCORE] - worst.columns[SCORE]
        for each in group:
            if each.columns[SCORE] is None:
                judged.append((each, drop("pairs.unread", 0, 1)))
            elif difference < margin or worst.answer == best.answer:
                judged.append((each, drop("pairs.margin", difference, margin)))
            elif each is best:
                columns = {**each.columns, MARGIN: difference}
                judged.append((replace(each, rejected=worst.answer, columns=columns), KEEP))
            else:
                reason = "pairs.rejected" if each is worst else "pairs.between"
                judged.append((each, drop(reason, each.columns[SCORE], best.columns[SCORE])))
    return judged


def best(candidates: Sequence[Candidate], at_least: float) -> list[Judged]:
    """The answer with the highest score to each prompt, the first of several, if that is high enough."""
    judged = list[Judged]()
    for group in in_groups(candidates):
        scored = [each for each in group if each.columns[SCORE] is not None]
        chosen = max(scored, key=lambda each: each.columns[SCORE], default=None)
        for each in group:
            score = each.columns[SCORE]
            if score is None:
                judged.append((each, drop("best.unread", 0, 1)))
            elif score < at_least:
                judged.append((each, drop("best.low", score, at_least)))
            elif each is not chosen:
                assert chosen is not None, "a score is there"
                judged.append((each, drop("best.lower", score, chosen.columns[SCORE])))
            else:
                judged.append((each, KEEP))
    return judged


def accepted(
    candidates: Sequence[Candidate],
    rewards: Callable[[Sequence[Candidate]], Sequence[float | None]],
    at_least: float,
    most: int,
) -> list[Judged]:
    """Rejection sampling: the answers with a reward that is high enough, of each prompt the first `most` of them.

    rewards: of answers; None where a reward has no number, which is no 0.
    """
    judged, counts = list[Judged](), dict[str, int]()
    for each, reward in zip(candidates, rewards(candidates), strict=True):
        if reward is None:
            judged.append((each, drop("rejection.unjudged", 0, 1)))
        elif reward < at_least:
            judged.append((each, drop("rejection.reward", reward, at_least)))
        elif counts.setdefault(each.group, 0) == most:
            judged.append((each, drop("rejection.enough", most + 1, most)))
        else:
            counts[each.group] += 1
            judged.append((replace(each, columns={**each.columns, "reward": reward}), KEEP))
    return judged
