"""The account of one row of a data set, in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from danlu.core.errors import DataError
from danlu.production.data_set import read_card
from danlu.production.ledger import LEDGER, Decision, LedgerLine, read_ledger

_MOST = 20  # accounts that are shown of rows with one beginning of an id


def find_rows(folder: Path, name: str) -> list[LedgerLine]:
    """The accounts of the rows with an id, with the beginning of one, or at a place such as "crawl.jsonl:17".

    Raises:
        DataError: the folder has no ledger, or no such row.
    """
    if read_card(folder) is None:
        raise DataError(f"{folder}: no data set of danlu: there is no data-card.json in it")
    lines = list[LedgerLine]()
    for line in read_ledger(folder / LEDGER):
        if line.id.startswith(name.lower()) or line.where == name:
            lines.append(line)
            if len(lines) == _MOST:
                break
    if not lines:
        raise DataError(f"{folder}: no row has the id or the place {name!r} (`crawl.jsonl:17` is a place)")
    return lines


def explain_row(line: LedgerLine) -> Iterator[str]:
    """Lines that say what became of a row, and by which steps."""
    yield f"{line.id} ({line.where}, row {line.row + 1} of source {line.source + 1}): {line.outcome}"
    if (origin := line.provenance) is not None:
        parents = f" of {', '.join(origin.parents)}" if origin.parents else ""
        yield f"  written by {origin.model}{parents}, steps {', '.join(origin.steps)}, seed {origin.seed}"
    for decision in line.decisions:
        yield f"  {decision.step}: {_OUTCOMES[decision.outcome]}, {decision.reason}{_compared(decision)}"
    if not line.decisions:
        yield "  no step had anything to say"


_OUTCOMES = {"keep": "kept", "drop": "dropped", "change": "changed"}


def _compared(decision: Decision) -> str:
    numbers = ""
    if decision.value is not None:
        numbers = f" ({decision.value:.6g}"
        numbers += ")" if decision.threshold is None else f", threshold {decision.threshold:.6g})"
    if decision.kept is None:
        return numbers
    source, row = decision.kept
    return f"{numbers}; row {row + 1} of source {source + 1} stays"
