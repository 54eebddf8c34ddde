"""The data of a recipe: sources of rows, and how they become tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import PositiveInt, Section


class Source(Section):
    """One file or data set of rows."""

    short = "path"

    path: str
    """A json, jsonl, csv, parquet, arrow or txt file (compressed too, as rows.jsonl.gz), a folder of them, or a hub
    data set id. For stage classify a folder with idx files of images and labels, or such a file of images. `path#500`
    takes the first 500 rows."""
    rows: PositiveInt | None = None
    """Take only this many rows from the front (the same as `path#N`)."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the mixture, relative to the other sources. Without weights every row of every source is used once
    an epoch."""
    format: Literal[
        "auto", "text", "alpaca", "sharegpt", "messages", "prompt-completion", "tokenized", "preference", "stepwise"
    ] = "auto"
    """How to read a row; auto recognises it from the columns."""
    split: str = "train"
    """Split of a hub data set; of a folder of images, train or test."""


class Packing(Section):
    """How samples are packed into sequences. Attention never crosses samples, whatever the kind."""

    short = "kind"
    switch = ("best-fit", "none")

    kind: Literal["best-fit", "concatenate", "none"] = "best-fit"
    """best-fit fills packed sequences of max_length with whole samples; concatenate (text only) joins documents with an
    end-of-text token and cuts every max_length tokens; none makes each sample a sequence of its own (no padding)."""
    window: PositiveInt = 4096
    """Samples looked at together when packing; larger packs tighter, smaller keeps the shuffled order closer."""


class Data(Section):
    """The rows to train on, and how they become tokens."""

    short = "train"

    train: list[Source]
    """One or more sources."""
    eval: list[Source] | Annotated[float, Field(gt=0, lt=1)] | PositiveInt | None = None
    """Held-out rows: a share (0.02), a number of rows (200), or sources of its own."""
    prompt: str | None = None
    """Stage rl: a template of the prompt over the columns of a row, such as "{Body} {Question}"; {{ and }} are braces.
    By default the column `prompt` (a text, or messages), the messages before the last answer, or the question of other
    known rows.
    """
    max_length: PositiveInt = 1024
    """Longest sample, and length of a packed sequence, in tokens."""
    packing: Packing = Packing()
    """How samples are packed into sequences: true or best-fit, false or none, or concatenate."""
    overlong: Literal["truncate", "split", "drop"] = "truncate"
    """The treatment of a row longer than max_length; counted and shown in every case."""
    train_on: Literal["all", "assistant", "last"] = "assistant"
    """The label mask of conversations: which messages carry loss, every one, every assistant turn, or only the last
    assistant turn."""
    system: str | None = None
    """System prompt for conversations that have none."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be read: stop with its file and line, or count and skip it."""
    bad_row_limit: PositiveInt = 100
    """The number of bad rows after which on_bad_row: skip stops."""
    share_stem: bool = True
    """Compute the prompt that several answers share once for all of them; false gives each answer a copy of its own.
    The result is the same. Models with rotary factors that depend on the length always repeat the prompt of longer
    rows."""
    append_eos: bool = True
    """Close each plain-text document and each prompt/completion pair with the end-of-text token."""
    streaming: bool = False
    """Read rows while training, for data larger than memory; needs `steps`. Rows are shuffled within a buffer."""
    shuffle_buffer: PositiveInt = 10_000
    """Rows held while streaming, from which the next is drawn."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Processes that tokenise; auto takes one per core."""
    cache: str = "~/.cache/danlu"
    """The folder of tokenised data, keyed by content, template and settings."""
