"""The page of a data set's card, README.md: counts by step and reason, and a head that `datasets` and the hub read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

HEAD = """---
configs:
- config_name: default
  data_files: rows/*.jsonl
---
"""


def card_page(name: str, card: Mapping[str, Any]) -> str:
    """The page of a card.

    Args:
        name: of the data set.
        card: `stage` says what made it; `outcomes` are counts of rows by fate, `decisions` lists of step, outcome,
            reason and count; both may be missing.
    """
    return HEAD + "\n".join(_lines(name, card)) + "\n"


def _lines(name: str, card: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {name}"
    rows = sum(file.get("rows", 0) for file in card["files"].values())
    yield f"\n{rows:,} rows, written by danlu {card['danlu']} (stage: {card['stage']}). The account of every row is in"
    yield "`ledger.jsonl.zst`: `danlu data explain ID .` and `danlu data report .` read it."
    if outcomes := card.get("outcomes"):
        yield "\n| rows | |\n|---|---|"
        yield from (f"| {outcome} | {count:,} |" for outcome, count in outcomes.items())
    if decisions := card.get("decisions"):
        yield "\n| step | outcome | reason | rows |\n|---|---|---|---|"
        for step, outcome, reason, count in decisions:
            escaped = reason.replace("|", "\\|")
            yield f"| {step} | {outcome} | {escaped} | {count:,} |"
