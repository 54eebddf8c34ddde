"""The ledger of a data set: a line for each row that came, with its fate, in `ledger.jsonl.zst`.

A ledger is made of parts (zstandard frames), each with whole lines. Parts end to end are a ledger, so every shard makes
its own part, and the bytes do not depend on who makes which.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from danlu.core.errors import DataError
from danlu.curation.packages import require
from danlu.curation.rows import Provenance, source_and_row
from danlu.curation.steps import Outcome, Verdict
from danlu.data.file_formats import open_decompressed, reading_errors

LEDGER = "ledger.jsonl.zst"
_LEVEL = 3

Fate = Literal["kept", "changed", "dropped"]


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict of a step on a row, without texts.

    Attributes:
        reason: the rule that decided.
        value: the measured value that the rule compares; None where it compares none.
        threshold: the bound that it compares with; None where there is none.
        kept: the source and the row (from 0) that stay in place of a duplicate.
    """

    step: str
    outcome: Outcome
    reason: str
    value: float | None = None
    threshold: float | None = None
    kept: tuple[int, int] | None = None

    @classmethod
    def of(cls, step: str, verdict: Verdict) -> Decision:
        """The decision that a step's verdict is."""
        kept = None if verdict.kept is None else source_and_row(verdict.kept)
        return cls(step, verdict.outcome, verdict.reason, verdict.value, verdict.threshold, kept)


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """The account of a row.

    Attributes:
        id: as `danlu.curation.rows.Row` has it.
        source: the number of its source in the recipe, from 0.
        row: its number in the source, from 0.
        where: its place as messages name it, such as "crawl.jsonl:17"; of a row that was written, who wrote it.
        decisions: those of all steps that gave a reason, in order.
        provenance: what a row was made of; None for a row that was read.
    """

    id: str
    source: int
    row: int
    where: str
    outcome: Fate
    decisions: tuple[Decision, ...] = ()
    provenance: Provenance | None = None

    @property
    def decisive(self) -> Decision | None:
        """The decision that its outcome comes from: the last one that changed or dropped it."""
        return next((each for each in reversed(self.decisions) if each.outcome != "keep"), None)

    def as_json(self) -> dict[str, Any]:
        """The line as an object: the decisive decision's step, reason, value, threshold and kept row stand in it."""
        decision = self.decisive or Decision("", "keep", "")
        line = {
            "id": self.id,
            "source": self.source,
            "row": self.row,
            "where": self.where,
            "outcome": self.outcome,
            "step": decision.step or None,
            "reason": decision.reason or None,
            "value": decision.value,
            "threshold": decision.threshold,
            "kept": decision.kept,
            "decisions": [asdict(each) for each in self.decisions],
        }
        return line if self.provenance is None else {**line, "provenance": asdict(self.provenance)}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> LedgerLine:
        """The line that `as_json` has written. Raises KeyError or TypeError for any other object."""
        decisions = tuple(
            Decision(**{**each, "kept": each["kept"] and tuple(each["kept"])}) for each in line["decisions"]
        )
        origin = line.get("provenance")
        provenance = origin and Provenance(
            tuple(origin["parents"]), origin["model"], origin["seed"], tuple(origin["steps"])
        )
        place = (line["id"], line["source"], line["row"], line["where"])
        return cls(*place, line["outcome"], decisions, provenance or None)


def ledger_part(lines: Iterable[LedgerLine]) -> bytes:
    """Lines as a part of a ledger; the same lines give the same bytes (with the same version of zstandard)."""
    text = "".join(f"{json.dumps(line.as_json(), allow_nan=False)}\n" for line in lines)
    part: bytes = require("zstandard").ZstdCompressor(level=_LEVEL, write_checksum=True).compress(text.encode("ascii"))
    return part


def read_ledger(file: Path) -> Iterator[LedgerLine]:
    """The lines of a ledger in order.

    Raises:
        DataError: there is no such file, it is damaged, or it is no ledger.
    """
    number = 0
    try:
        with reading_errors(file, str(file)), open_decompressed(file) as lines:
            for line in lines:
                entry = LedgerLine.from_json(json.loads(line))
                number += 1
                yield entry
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: damaged, or no ledger, behind line {number}: {error}") from error
