"""The rows of a shard after some steps: those that are left, with their texts, and an account of all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from danlu.core.errors import DataError
from danlu.curation.packages import require
from danlu.curation.rows import Row
from danlu.curation.steps import Verdict
from danlu.data.raw_rows import BadRow
from danlu.production.ledger import Decision, Fate, LedgerLine
from danlu.production.shards import RowColumns, Shard, ShardRows, bad_row_id

READING = "read"
"""The name, in accounts, of what comes before all steps."""
CANNOT_BE_READ = "cannot be read"


@dataclass(slots=True)
class _Account:
    id: str
    outcome: Fate = "kept"
    decisions: list[Decision] = field(default_factory=list)


class ShardState:
    """Rows of a shard that are left, by their number in it, and accounts of all of its rows."""

    def __init__(self, shard: Shard, rows: dict[int, Row], accounts: list[_Account]) -> None:
        self.shard, self._rows, self._accounts = shard, rows, accounts

    @property
    def rows(self) -> list[Row]:
        """The rows that are left, in order."""
        return list(self._rows.values())

    @property
    def numbers(self) -> list[int]:
        """Their numbers in the shard."""
        return list(self._rows)

    @classmethod
    def read(cls, content: ShardRows, *, skip_bad: bool) -> ShardState:
        """The rows as they came.

        Raises:
            DataError: a row cannot be read, and `skip_bad` does not say that it is dropped then.
        """
        rows, accounts = dict[int, Row](), list[_Account]()
        for number in range(content.shard.rows):
            columns = content.read(number)
            if isinstance(columns, RowColumns):
                rows[number] = columns.row
                accounts.append(_Account(rows[number].id))
                continue
            if not skip_bad:
                raise DataError(
                    f"{columns.message}\nSet on_bad_row: skip in a recipe to drop such rows, with their accounts"
                )
            decision = Decision(READING, "drop", f"{CANNOT_BE_READ}: {columns.message}")
            row_id = bad_row_id(content.shard, number, content.line(number))
            accounts.append(_Account(row_id, "dropped", [decision]))
        return cls(content.shard, rows, accounts)

    def apply(self, step: str, verdicts: Sequence[Verdict]) -> None:
        """Drops and changes rows as a step's verdicts on `rows` say, and writes the verdicts into the accounts."""
        for number, verdict in zip(self.numbers, verdicts, strict=True):
            row, account = self._rows[number], self._accounts[number]
            verdict = _without_empty_messages(row, verdict)
            if verdict.reason:
                account.decisions.append(Decision.of(step, verdict))
            if verdict.outcome == "drop":
                account.outcome = "dropped"
                del self._rows[number]
            elif verdict.texts is not None:
                account.outcome = "changed"
                self._rows[number] = row.with_texts(verdict.texts, step)

    def lines(self, where: Sequence[str]) -> list[LedgerLine]:
        """The account of each row. where: the place of each, as messages name it."""
        source, first = self.shard.source, self.shard.first
        return [
            LedgerLine(account.id, source, first + number, where[number], account.outcome, tuple(account.decisions))
            for number, account in enumerate(self._accounts)
        ]

    def changed_texts(self, number: int) -> list[str] | None:
        """The texts of a row that is left, if a step has changed them."""
        return [part.text for part in self._rows[number].parts] if self._rows[number].provenance.steps else None

    def to_bytes(self) -> bytes:
        """The state without texts that stand in the shard as they are."""
        state = {
            "accounts": [
                [each.id, each.outcome, [_decision_values(decision) for decision in each.decisions]]
                for each in self._accounts
            ],
            "changed": {
                number: [self.changed_texts(number), row.provenance.steps]
                for number, row in self._rows.items()
                if row.provenance.steps
            },
        }
        packed: bytes = require("zstandard").ZstdCompressor().compress(json.dumps(state).encode("ascii"))
        return packed

    @classmethod
    def from_bytes(cls, content: ShardRows, state: bytes) -> ShardState:
        """The state that `to_bytes` has written, of a shard with these rows."""
        stored: dict[str, Any] = json.loads(require("zstandard").ZstdDecompressor().decompress(state))
        accounts = [
            _Account(row_id, outcome, [_decision_of(values) for values in decisions])
            for row_id, outcome, decisions in stored["accounts"]
        ]
        rows = {
            number: _with_changes(content.read(number), stored["changed"].get(str(number)))
            for number, account in enumerate(accounts)
            if account.outcome != "dropped"
        }
        return cls(content.shard, rows, accounts)


def remaining_rows(state: bytes) -> list[int]:
    """The numbers in their shard of the rows that are left in a state that `ShardState.to_bytes` has written."""
    stored = json.loads(require("zstandard").ZstdDecompressor().decompress(state))
    return [number for number, (_, outcome, _) in enumerate(stored["accounts"]) if outcome != "dropped"]


def dropped_by_step(state: bytes) -> Counter[str]:
    """The rows that each step has dropped, in a state that `ShardState.to_bytes` has written."""
    stored = json.loads(require("zstandard").ZstdDecompressor().decompress(state))
    return Counter(decisions[-1][0] for _, outcome, decisions in stored["accounts"] if outcome == "dropped")


def _without_empty_messages(row: Row, verdict: Verdict) -> Verdict:
    """The verdict, or that to drop a row in which it would leave a message empty: no stage trains on such a row."""
    if verdict.texts is None or all(
        text.strip() or not part.text.strip() for part, text in zip(row.parts, verdict.texts, strict=True)
    ):
        return verdict
    return Verdict("drop", f"{verdict.reason}, and nothing else in a text", verdict.value, verdict.threshold)


def _with_changes(columns: RowColumns | BadRow, changes: Sequence[Any] | None) -> Row:
    assert isinstance(columns, RowColumns), "rows that cannot be read are dropped"
    row = columns.row
    if changes is not None:
        texts, steps = changes
        for step in steps:
            row = row.with_texts(texts, step)
    return row


def _decision_values(decision: Decision) -> list[Any]:
    each = decision
    return [each.step, each.outcome, each.reason, each.value, each.threshold, each.kept]


def _decision_of(values: Sequence[Any]) -> Decision:
    step, outcome, reason, value, threshold, kept = values
    return Decision(step, outcome, reason, value, threshold, kept and tuple(kept))


def shown_reason(decision: Decision) -> str:
    """The reason by which rows are counted: of those that cannot be read each has a message with its own place."""
    return CANNOT_BE_READ if decision.step == READING else decision.reason


def count_decisions(lines: Sequence[LedgerLine]) -> Mapping[tuple[str, str, str], int]:
    """How often each step changed or dropped a row for each reason: (step, outcome, reason) -> rows."""
    counts = dict[tuple[str, str, str], int]()
    for line in lines:
        for decision in line.decisions:
            if decision.outcome != "keep":
                key = (decision.step, decision.outcome, shown_reason(decision))
                counts[key] = counts.get(key, 0) + 1
    return counts
