"""The lengths of the documents that a recipe trains on, as far as they are known before the run. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from danlu.core.errors import DataError
from danlu.core.small_files import parse_json


@dataclass(frozen=True)
class Lengths:
    """Tokens of each document, and where they are known from."""

    documents: tuple[int, ...] | None
    """Tokens of each row that is trained on; None: packs of `data.max_length` tokens, each of one document."""
    source: Literal["token cache", "file", "full packs"]


FULL_PACKS = Lengths(None, "full packs")


def read_lengths(file: Path) -> Lengths:
    """Reads lengths from a file with one number a line, or from JSON lines: numbers, objects with `tokens` or `length`
    (a number, or a list of token ids), or the rollouts.jsonl of a run, of which each answer's tokens count.

    Raises DataError with the line of what is none of these.
    """
    documents: list[int] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    documents += _lengths_of(line, f"{file}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--lengths {file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not documents:
        raise DataError(f"--lengths {file}: no lengths. Give one number of tokens a line, or a run's rollouts.jsonl")
    return Lengths(tuple(documents), "file")


def _lengths_of(line: str, where: str) -> list[int]:
    try:
        value = parse_json(line)
    except ValueError:
        raise DataError(f"{where}: {line.strip()!a:.40} is neither a number of tokens nor JSON") from None
    if isinstance(value, dict):
        answers = value.get("answers")
        values = answers if isinstance(answers, list) else [value]
        entries = [entry.get("tokens", entry.get("length")) if isinstance(entry, dict) else entry for entry in values]
    else:
        entries = [value]
    lengths: list[int] = []
    for entry in entries:
        length: Any = len(entry) if isinstance(entry, list) else entry
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise DataError(
                f"{where}: {length!r} is no number of tokens. Give whole numbers from 1 up, objects with tokens or "
                "length, or a run's rollouts.jsonl"
            )
        lengths.append(length)
    return lengths
