"""What a worker process does with a chunk of rows: parse, render, cut to length, count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from danlu.data import render, rows
from danlu.data.samples import Block
from danlu.data.sources import RawRow
from danlu.data.statistics import Statistics
from danlu.data.tokenizer import Tokenizer, load_tokenizer
from danlu.errors import DataError
from danlu.recipe.sections import Data

CHUNK_ROWS = 256
CHUNK_CHARACTERS = 2_000_000


@dataclass(frozen=True)
class Settings:
    """Everything besides the rows and the tokenizer that decides what a row becomes; part of the cache's key."""

    stage: Literal["pretrain", "sft"]
    format: str
    max_length: int | None  # None: documents are joined and cut by the packing
    overlong: Literal["truncate", "split", "drop"]
    train_on: Literal["all", "assistant", "last"]
    system: str | None
    append_eos: bool

    @classmethod
    def of(cls, data: Data, stage: Literal["pretrain", "sft"], format: str) -> Settings:
        joined = data.packing.kind == "concatenate"
        return cls(
            stage=stage,
            format=format,
            max_length=None if joined else data.max_length,
            overlong=data.overlong,
            train_on=data.train_on,
            system=data.system,
            append_eos=data.append_eos,
        )


@dataclass(frozen=True)
class TokenizerFacts:
    """What the rest of a run needs to know of the tokenizer without loading it."""

    size: int  # ids go from 0 to size - 1
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    end_of_turn_ids: tuple[int, ...]  # where generation stops


@dataclass(frozen=True)
class Tokenised:
    """A chunk of rows as samples."""

    block: Block
    statistics: Statistics
    bad: tuple[str, ...]  # a message for each row that could not be read
    tokenizer: TokenizerFacts


@dataclass(frozen=True)
class Tokenising:
    """The job of a worker process (`danlu.data.workers.Job`)."""

    tokenizer_path: str
    chat_template: str | None

    def start(self) -> Callable[[tuple[Settings, list[RawRow]]], Tokenised]:
        return partial(tokenise, load_tokenizer(self.tokenizer_path, self.chat_template))


def chunks(raw: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    """Rows in lists of a size worth sending to another process: by number, and by length where rows are long."""
    chunk: list[RawRow] = []
    characters = 0
    for row in raw:
        chunk.append(row)
        characters += _characters(row.value)
        if len(chunk) == CHUNK_ROWS or characters > CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def tokenise(tokenizer: Tokenizer, task: tuple[Settings, list[RawRow]]) -> Tokenised:
    """Rows as samples; rows that cannot be read are reported, never raised."""
    settings, raw = task
    statistics = Statistics(rows=len(raw))
    numbers, parsed, bad = _parse(raw, settings)
    rendered, failed = _render(parsed, tokenizer, settings)
    statistics.bad_rows = len(bad) + len(failed)
