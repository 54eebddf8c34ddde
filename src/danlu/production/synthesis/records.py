"""The fate of every row of a synthesis: rows of the data set, lines of its ledger, and the counts of its card."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from danlu.curation.rows import source_and_row
from danlu.curation.steps import Verdict
from danlu.production.ledger import Decision, Fate, LedgerLine
from danlu.production.synthesis.candidates import Candidate
from danlu.production.synthesis.choosing import MARGIN


@dataclass
class _Record:
    candidate: Candidate
    decisions: list[Decision]
    outcome: Fate = "kept"


@dataclass
class Records:
    """The account of each row that was read or made, by place.

    A row of which others are made is changed: its account says into how many.
    """

    _records: dict[int, _Record] = field(default_factory=dict)

    def add(self, candidate: Candidate) -> None:
        """Adds a row that was read or made."""
        assert candidate.row.place not in self._records, "two rows have one place"
        self._records[candidate.row.place] = _Record(candidate, [])

    def judge(self, candidate: Candidate, step: str, verdict: Verdict) -> None:
        """Adds a step's verdict on a row, if it has a reason."""
        if verdict.reason:
            self.note(candidate, Decision.of(step, verdict))

    def note(self, candidate: Candidate, decision: Decision) -> None:
        """Adds a decision on a row."""
        record = self._records[candidate.row.place]
        record.decisions.append(decision)
        if decision.outcome == "drop":
            record.outcome = "dropped"
        elif decision.outcome == "change" and record.outcome == "kept":
            record.outcome = "changed"

    def replaced(self, candidate: Candidate, step: str, rows: int) -> None:
        """A row has become others: so many."""
        if rows:
            self.note(candidate, Decision(step, "change", f"{step}.asked", float(rows)))
        else:
            self.note(candidate, Decision(step, "drop", f"{step}.no-row", 0.0, 1.0))

    def lines(self) -> Iterator[LedgerLine]:
        """The ledger, by place."""
        for place, record in sorted(self._records.items()):
            row = record.candidate.row
            source, number = source_and_row(place)
            provenance = row.provenance if row.provenance.model else None
            yield LedgerLine(
                row.id,
                source,
                number,
                record.candidate.where,
                record.outcome,
                tuple(record.decisions),
                provenance,
            )

    def reasons(self, step: str) -> list[tuple[str, int]]:
        """How many rows a step has dropped for each reason, the most frequent first."""
        counts = Counter(
            decision.reason
            for record in self._records.values()
            for decision in record.decisions
            if decision.step.partition(".")[0] == step and decision.outcome == "drop"
        )
        return sorted(counts.items(), key=lambda item: (-item[1], item[0]))

    def counts(self) -> dict[str, Any]:
        """The counts of a card: rows by fate, and decisions by step, outcome and reason."""
        outcomes = Counter(record.outcome for record in self._records.values())
        decisions = Counter(
            (each.step, each.outcome, each.reason) for record in self._records.values() for each in record.decisions
        )
        return {
            "outcomes": {fate: outcomes[fate] for fate in ("kept", "changed", "dropped")},
            "decisions": [[*key, count] for key, count in sorted(decisions.items())],
        }


def row_line(candidate: Candidate) -> bytes:
    """A row of the data set as a line of JSON: a conversation, a pair, or a prompt alone.

    Training reads its messages; its id, its origin and what steps have measured stand next to them.
    """
    messages = [{"role": part.role, "content": part.text} for part in candidate.prompt]
    columns: dict[str, Any] = {}
    if candidate.answer is None:
        columns["prompt"] = messages
    elif candidate.rejected is None:
        columns["messages"] = [*messages, {"role": "assistant", "content": candidate.answer}]
    else:
        columns["prompt"] = messages
        columns["chosen"] = [{"role": "assistant", "content": candidate.answer}]
        columns["rejected"] = [{"role": "assistant", "content": candidate.rejected}]
        columns[MARGIN] = candidate.columns[MARGIN]
    own: Mapping[str, Any] = {name: value for name, value in candidate.columns.items() if name not in columns}
    columns |= {**own, "id": candidate.row.id, "provenance": asdict(candidate.row.provenance)}
    try:
        return f"{json.dumps(columns, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:  # half of a character, which a model can write
        return f"{json.dumps(columns)}\n".encode("ascii")
