"""Steps over batches of rows in memory: the rows that are left, and an account of every row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from danlu.curation.rows import Row
from danlu.curation.steps import GatheringStep, Marks, Step, Summary, Verdict, join_parts, parts_of_round


@dataclass(slots=True)
class Account:
    """The fate of a row.

    Attributes:
        decisions: the step and its verdict, of each step that gave a reason, in order; the last one of a dropped row is
            the one that dropped it.
    """

    id: str
    place: int
    outcome: Literal["kept", "changed", "dropped"]
    decisions: list[tuple[str, Verdict]]


@dataclass(frozen=True)
class Curated:
    """The rows that are left, in the batches that they came in, and an account of each row that came, by place."""

    batches: list[list[Row]]
    accounts: list[Account]

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.batches for row in batch]


def run_steps(batches: Iterable[Sequence[Row]], steps: Sequence[Step]) -> Curated:
    """Every step over all rows that the steps before have left. The result depends neither on how rows are batched nor
    on the order of the batches.

    Raises:
        DanluError: a step lacks a package, or cannot read what it compares rows with.
    """
    remaining = [list(batch) for batch in batches]
    accounts = {row.place: Account(row.id, row.place, "kept", []) for batch in remaining for row in batch}
    assert len(accounts) == sum(map(len, remaining)), "two rows have one place"
    for step in steps:
        marks = [step.measure(batch) for batch in remaining]
        summary = gather_summary(step, remaining, marks) if isinstance(step, GatheringStep) else {}
        remaining = [
            apply_verdicts(step.name, batch, step.decide(batch, measured, summary), accounts)
            for batch, measured in zip(remaining, marks, strict=True)
        ]
    return Curated(remaining, [accounts[place] for place in sorted(accounts)])


def gather_summary(step: GatheringStep, batches: Sequence[Sequence[Row]], marks: Sequence[Marks]) -> Summary:
    """The conclusion of a step's last round over all batches; empty where there is no batch."""
    conclusions = list[Summary]()
    for round in range(step.rounds if batches else 0):
        of_parts = list[Summary]()
        for earlier in parts_of_round(step, round, conclusions):
            summaries = [step.gather(rows, of_rows, earlier) for rows, of_rows in zip(batches, marks, strict=True)]
            of_parts.append(step.conclude(round, step.merge(summaries)))
        conclusions.append(join_parts(step, round, of_parts))
    return conclusions[-1] if conclusions else {}


def apply_verdicts(
    step: str, rows: Sequence[Row], verdicts: Sequence[Verdict], accounts: dict[int, Account]
) -> list[Row]:
    """The rows that the verdicts of a step leave, changed where they say so; writes the verdicts into the accounts."""
    remaining = []
    for row, verdict in zip(rows, verdicts, strict=True):
        account = accounts[row.place]
        if verdict.reason:
            account.decisions.append((step, verdict))
        if verdict.outcome == "drop":
            account.outcome = "dropped"
            continue
        if verdict.outcome == "change":
            account.outcome = "changed"
            assert verdict.texts is not None, "a change has texts"
            row = row.with_texts(verdict.texts, step)
        remaining.append(row)
    return remaining
