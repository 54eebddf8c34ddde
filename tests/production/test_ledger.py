"""Ledgers: what is written is read, parts end to end are a ledger, and damage is an error that names the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from danlu.core.errors import DataError
from danlu.curation.rows import Provenance, place_of
from danlu.curation.steps import Verdict
from danlu.production.ledger import Decision, LedgerLine, ledger_part, read_ledger

LINES = [
    LedgerLine("0" * 32, 0, 3, "a.jsonl:4", "kept"),
    LedgerLine(
        "1" * 32,
        1,
        7,
        "b.jsonl:8",
        "dropped",
        (
            Decision.of("language", Verdict("keep", "language: en", 0.9, 0.65)),
            Decision.of("deduplicate.exact", Verdict("drop", "exact duplicate", 1.0, 1.0, kept=place_of(0, 3))),
        ),
        Provenance(("0" * 32,), "large", 5, ("answer",)),
    ),
]


def test_parts_end_to_end_are_a_ledger(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl.zst"
    file.write_bytes(ledger_part(LINES[:1]) + ledger_part([]) + ledger_part(LINES[1:]))
    assert list(read_ledger(file)) == LINES
    line = LINES[1].as_json()
    assert (line["step"], line["reason"], line["kept"]) == ("deduplicate.exact", "exact duplicate", (0, 3))
    assert LINES[0].decisive is None and LINES[0].as_json()["step"] is None


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-3], lambda data: data[:30] + b"\0\0" + data[32:], lambda _: b"{}"]
)
def test_a_damaged_ledger_is_refused(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "ledger.jsonl.zst"
    file.write_bytes(damage(ledger_part(LINES)))
    with pytest.raises(DataError, match=r"ledger\.jsonl\.zst: damaged, or no"):
        list(read_ledger(file))
