"""The lengths of the documents that a recipe trains on, as far as they are known before the run. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from danlu.core.errors import DataError
from danlu.core.small_files import parse_json

if TYPE_CHECKING:
    from danlu.planning.row_batches import RowTrees


@dataclass(frozen=True)
class Lengths:
    """Tokens of each document, and where they are known from."""

    documents: tuple[int, ...] | None
    """Tokens of each row that is trained on; None: packs of `data.max_length` tokens, each of one document."""
    source: Literal["token cache", "file", "full packs"]
    trees: RowTrees | None = None
    """The rows with compared or judged answers, in the order of training; None where rows are no trees, or unknown."""
    assumption: str = ""
    """A sentence on what was assumed of their lengths."""


_MOST_TOKENS = 1 << 40
FULL_PACKS = Lengths(None, "full packs")


def read_lengths(file: Path) -> Lengths:
    """Reads lengths from a file with one number a line, or from JSON lines: numbers, objects with `tokens` or `length`
    (a number, or a list of token ids), or the rollouts.jsonl of a run, of which each answer's tokens count.

    Raises DataError with the line of what is none of these.
    """
    documents = [length for value, where in _lines(file) for length in _lengths_of(value, where)]
    if not documents:
        raise DataError(f"--lengths {file}: no lengths. Give one number of tokens a line, or a run's rollouts.jsonl")
    return Lengths(tuple(documents), "file")


def read_row_lengths(file: Path, *, shared: bool) -> Lengths:
    """Reads the lengths of rows with two answers, or with one that is judged, from a file.

    A line has a row, as {"prompt_tokens": 64, "answer_tokens": [120, 87]}, or the number of tokens of one: then a third
    of them are the prompt and each of two answers. shared: whether the answers to a prompt share it.

    Raises DataError with the line of what is neither.
    """
    from danlu.planning.row_batches import RowTrees

    rows, numbers = [], 0
    for value, where in _lines(file):
        if isinstance(value, dict) and "answer_tokens" in value:
            prompt, answers = value.get("prompt_tokens", 0), value["answer_tokens"]
            answers = answers if isinstance(answers, list) else [answers]
            rows.append((_count(prompt, where, least=0), [_count(tokens, where) for tokens in answers]))
            if not answers:
                raise DataError(f"{where}: answer_tokens has no answer")
        elif isinstance(value, dict):
            raise DataError(f'{where}: a row has the form {{"prompt_tokens": 64, "answer_tokens": [120, 87]}}')
        else:
            third, rest = divmod(_count(value, where), 3)
            rows.append((third, [max(1, third), max(1, third + rest)]))
            numbers += 1
    if not rows:
        raise DataError(f'--lengths {file}: no lengths. A line has {{"prompt_tokens": 64, "answer_tokens": [120, 87]}}')
    trees = RowTrees.of(rows, shared=shared)
    said = f"of {numbers} rows with a number of tokens alone the prompt and each of two answers have a third"
    return Lengths(tuple(trees.tokens.tolist()), "file", trees, said if numbers else "")


def _lines(file: Path) -> Iterator[tuple[Any, str]]:
    """Yields (value, place) of each line of JSON that is not empty."""
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file}:{number}"
                if line.strip():
                    try:
                        yield parse_json(line), where
                    except ValueError:
                        said = f"{line.strip()!a:.40} is neither a number of tokens nor JSON"
                        raise DataError(f"{where}: {said}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--lengths {file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _lengths_of(value: Any, where: str) -> list[int]:
    if isinstance(value, dict):
        answers = value.get("answers")
        values = answers if isinstance(answers, list) else [value]
        entries = [entry.get("tokens", entry.get("length")) if isinstance(entry, dict) else entry for entry in values]
    else:
        entries = [value]
    return [_count(len(entry) if isinstance(entry, list) else entry, where) for entry in entries]


def _count(length: Any, where: str, *, least: int = 1) -> int:
    if isinstance(length, bool) or not isinstance(length, int) or not least <= length <= _MOST_TOKENS:
        raise DataError(
            f"{where}: {length!r} is no number of tokens. Give whole numbers from 1 up, objects with tokens or "
            "length, or a run's rollouts.jsonl"
        )
    return length
