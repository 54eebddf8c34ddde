"""The content of a data set's report: counts and examples by reason, sources, and histograms of what was measured."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from danlu.core.errors import DanluError, DataError
from danlu.curation.rows import WRITTEN
from danlu.data.raw_rows import BadRow
from danlu.data.row_texts import placed_texts
from danlu.data.rows import detect_format
from danlu.data.sources import read_rows
from danlu.production.data_set import WORK, read_card
from danlu.production.ledger import LEDGER, Decision, LedgerLine, read_ledger
from danlu.production.marks import Histogram, histograms
from danlu.production.shard_state import shown_reason
from danlu.recipe.sections import Source

EXAMPLES, MAX_CHARACTERS = 3, 600


@dataclass(frozen=True)
class Example:
    """A row that a step has changed or dropped, as it came; text: "" where its source cannot be read any more."""

    where: str
    id: str
    compared: str
    text: str


@dataclass
class Reason:
    """The rows that a step has changed or dropped for one reason."""

    step: str
    outcome: str
    reason: str
    rows: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass(frozen=True)
class SetReport:
    """The content of a report, of a data set in a folder with a card."""

    folder: Path
    card: Mapping[str, Any]
    reasons: list[Reason]
    histograms: list[Histogram]
    missing_sources: tuple[str, ...]


def report_of_set(folder: Path) -> SetReport:
    """Reads the ledger, the marks that are kept, and of the sources the rows that are examples.

    Raises:
        DataError: the folder has no card, or its ledger is damaged.
    """
    card = read_card(folder)
    if card is None:
        raise DataError(f"{folder}: no data set of danlu: there is no data-card.json in it")
    reasons, chosen = _reasons(read_ledger(folder / LEDGER))
    texts, missing = _texts(card, chosen)
    for reason, examples in chosen.items():
        for line, decision in examples:
            text = texts.get((line.source, line.row), "")
            reasons[reason].examples.append(Example(line.where, line.id, _compared(decision), text))
    order = {(step, outcome, reason): n for n, (step, outcome, reason, _) in enumerate(card.get("decisions", []))}
    listed = [reasons[key] for key in sorted(reasons, key=lambda key: order.get(key, len(order)))]
    drawn = list(histograms(folder / WORK, card.get("bounds", {})))
    return SetReport(folder, card, listed, drawn, tuple(missing))


_Key = tuple[str, str, str]
_Chosen = dict[_Key, list[tuple[LedgerLine, Decision]]]


def _reasons(lines: Iterator[LedgerLine]) -> tuple[dict[_Key, Reason], _Chosen]:
    """The reasons with their counts, and for each some rows: those with the smallest ids, which are drawn by chance."""
    reasons = dict[_Key, Reason]()
    smallest = dict[_Key, list[tuple[int, int, LedgerLine, Decision]]]()
    for number, line in enumerate(lines):
        for decision in line.decisions:
            if decision.outcome == "keep":
                continue
            key = (decision.step, decision.outcome, shown_reason(decision))
            reasons.setdefault(key, Reason(*key)).rows += 1
            heap = smallest.setdefault(key, [])
            heapq.heappush(heap, (-int(line.id, 16), number, line, decision))
            if len(heap) > EXAMPLES:
                heapq.heappop(heap)
    return reasons, {key: [(line, each) for _, _, line, each in sorted(heap)] for key, heap in smallest.items()}


def _texts(card: Mapping[str, Any], chosen: _Chosen) -> tuple[dict[tuple[int, int], str], list[str]]:
    """The beginnings of chosen rows, by source and row, and the sources that cannot be read any more."""
    wanted = {(line.source, line.row) for examples in chosen.values() for line, _ in examples}
    recipe = card.get("recipe")
    sources = recipe.get("data", []) if isinstance(recipe, dict) and card.get("stage") == "curate" else []
    texts, missing = dict[tuple[int, int], str](), list[str]()
    for number, section in enumerate(sources):
        rows = {row for source, row in wanted if source == number}
        if not rows:
            continue
        try:
            source = Source.model_validate_json(json.dumps(section))
            for raw in read_rows(source):
                if raw.index in rows:
                    texts[number, raw.index] = _text(raw.value, raw.where, source)
                    rows.discard(raw.index)
                if not rows:
                    break
        except DanluError:
            missing.append(str(section.get("path")))
    return texts, missing


def _text(value: dict[str, Any] | BadRow, where: str, source: Source) -> str:
    if isinstance(value, BadRow):
        return value.message
    format = detect_format(value, where) if source.format == "auto" else source.format
    try:
        placed = placed_texts(value, format)
    except (KeyError, TypeError, AttributeError, IndexError):  # a row that was refused for its form
        return json.dumps(value, ensure_ascii=False, default=str)[:MAX_CHARACTERS]
    text = "\n".join(each.text for each in placed if each.role in WRITTEN)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"


def _compared(decision: Decision) -> str:
    """The value and the bound of a decision: "0.31, bound 0.3"."""
    if decision.value is None:
        return ""
    bound = "" if decision.threshold is None else f", bound {decision.threshold:.4g}"
    return f"{decision.value:.4g}{bound}"
