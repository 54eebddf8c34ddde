"""The plan of a run next to its measured memory and seconds, part by part, as plain data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from danlu.core.errors import DataError
from danlu.core.run_files import PLAN
from danlu.core.small_files import parse_json, read_small
from danlu.report.plan_text import PARTS, aligned_rows
from danlu.report.run_record import RunRecord

FORMAT = 1
"""The format of plan.json; a change of a key's meaning raises it."""
_KEYS = ("machine", "layout", "batch", "memory", "stages", "seconds", "training", "assumptions")
_GIB, _MIB = 2**30, 2**20


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Returns the plan that a run has written at its start; None where there is none.

    Raises DataError for a torn file, and for one of another format.
    """
    file = folder / PLAN
    try:
        values = parse_json(read_small(file))
        if not isinstance(values, dict):
            raise ValueError("no JSON object")
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}, and this danlu reads {FORMAT}")
        missing = [key for key in _KEYS if key not in values]
        if missing or not isinstance(values["memory"]["parts"], dict):
            raise ValueError(f"without {', '.join(missing) or 'parts of the memory'}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"without {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or error
        raise DataError(
            f"{file}: not the plan of a run, or torn ({reason}). The run writes it when it starts"
        ) from None
    return dict(values)


def compared(
    plan: Mapping[str, Any], memory: Mapping[str, int] | None, seconds: float | None
) -> dict[str, Mapping[str, Any]]:
    """Returns what was expected and what was measured: of the memory by part, and of the seconds of a step.

    memory: bytes by part as they were counted in training; None where they were not. seconds: of a step.
    """
    expected = plan["memory"]["parts"]
    parts = {part: {"expected": count, "measured": (memory or {}).get(part)} for part, count in expected.items()}
    whole = {"expected": sum(expected.values()), "measured": None if memory is None else sum(memory.values())}
    planned = plan["seconds"]
    return {
        "memory": {**parts, "all": whole},
        "seconds": {"expected": None if planned is None else planned["total"], "measured": seconds},
    }


def plan_of_record(plan: Mapping[str, Any], record: RunRecord) -> dict[str, Mapping[str, Any]]:
    """Returns `compared` of a run as far as it has got: parts of the memory are known when it has ended."""
    memory = record.summary.get("memory")
    curve = [seconds for _, seconds in sorted(record.steps.get("step_s", {}).items())]
    return compared(plan, memory if isinstance(memory, dict) else None, median(curve[1:] or curve) if curve else None)


def comparison_rows(comparison: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Returns headings, and below them a line of cells for each part of the memory and for the seconds."""
    memory, seconds = comparison["memory"], comparison["seconds"]
    rows = [["", "expected", "measured", "difference"]]
    unit, divisor = (
        ("GiB", _GIB) if max(memory["all"]["expected"], memory["all"]["measured"] or 0) >= _GIB else ("MiB", _MIB)
    )
    for part, pair in memory.items():
        if pair["expected"] or pair["measured"]:
            rows.append([PARTS.get(part, part), *_cells(pair, unit, divisor)])
    if seconds["expected"] is not None or seconds["measured"] is not None:
        rows.append(["seconds of a step", *_cells(seconds, "s", 1)])
    return rows


def _cells(pair: Mapping[str, float | None], unit: str, divisor: float) -> Sequence[str]:
    expected, measured = pair["expected"], pair["measured"]
    shown = ["unknown" if value is None else f"{value / divisor:,.4g} {unit}" for value in (expected, measured)]
    return [*shown, f"{expected / measured - 1:+.1%}" if expected is not None and measured else ""]


def comparison_lines(comparison: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the rows of `comparison_rows` as lines."""
    return aligned_rows(comparison_rows(comparison))
