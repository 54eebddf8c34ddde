"""Rows to curate, and what every step that gathers must hold: partitions may come in any order, and more than once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from danlu.curation.ragged import Ragged
from danlu.curation.rows import Part, Row, document, row_of
from danlu.curation.run_steps import Curated, run_steps
from danlu.curation.steps import GatheringStep, Step, Summary


def documents(*texts: str) -> list[Row]:
    return [document(text, 0, number) for number, text in enumerate(texts)]


def conversation(row: int, *texts: str, system: str = "") -> Row:
    """A conversation of user and assistant in turns."""
    turns = [Part("user" if number % 2 == 0 else "assistant", text) for number, text in enumerate(texts)]
    return row_of([Part("system", system)] * bool(system) + turns, 0, row)


def outcomes(rows: Sequence[Row], *steps: Step) -> list[tuple[str, str]]:
    """For each row what became of it and the last reason, by place."""
    return [
        (account.outcome, account.decisions[-1][1].reason if account.decisions else "")
        for account in run_steps([rows], steps).accounts
    ]


def same_summary(left: Summary, right: Summary) -> bool:
    def arrays(summary: Summary) -> dict[str, list[np.ndarray]]:
        return {n: [c.values, c.stops] if isinstance(c, Ragged) else [c] for n, c in summary.items()}

    ours, theirs = arrays(left), arrays(right)
    return ours.keys() == theirs.keys() and all(
        np.array_equal(a, b) for name in ours for a, b in zip(ours[name], theirs[name], strict=True)
    )


def check_gathering(step: GatheringStep, rows: Sequence[Row], seed: int = 0) -> Curated:
    """Summaries and results are the same for any batches, their order and repeats. Returns the result."""
    draw = random.Random(seed)
    batches = [list(rows[at : at + 3]) for at in range(0, len(rows), 3)] + [[]]
    marks = [step.measure(batch) for batch in batches]
    conclusions = list[Summary]()
    for round in range(step.rounds):
        parts = [step.gather(batch, of_batch, conclusions) for batch, of_batch in zip(batches, marks, strict=True)]
        whole = step.merge(parts)
        repeated = [*parts, *draw.sample(parts, 2)]
        draw.shuffle(repeated)
        assert same_summary(whole, step.merge(repeated))
        assert same_summary(whole, step.merge([step.merge(repeated[2:]), step.merge(parts[:4]), *repeated[:2]]))
        assert len(parts) < 2 or not same_summary(whole, step.merge(parts[:1])) or not len(next(iter(whole.values())))
        conclusions.append(step.conclude(round, whole))
    result = run_steps(batches, [step])
    draw.shuffle(batches)
    for batch in batches:
        draw.shuffle(batch)
    for other in (run_steps(batches, [step]), run_steps([rows], [step])):
        assert other.accounts == result.accounts
        assert sorted(other.rows, key=lambda row: row.place) == result.rows
    return result
