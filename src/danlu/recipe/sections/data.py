"""The data of a recipe: sources of rows, and how they become tokens."""

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import OF_RL, OF_TOKENS, NotReadWith, PositiveInt, ReadWith, Section, default_section

_OF_TEXTS = NotReadWith("stage", "classify", "not read with stage {value}")
COLUMN_NAMES = (
    "text", "instruction", "input", "output", "context", "system", "history", "conversations", "messages", "tools",
    "prompt", "completion", "query", "response", "question", "answer", "chosen", "rejected", "rejected_response",
    "rejected_messages", "margin", "completions", "labels", "label", "kto_tag", "is_desirable", "input_ids",
    "completion_mask", "assistant_masks", "loss_mask", "attention_mask",
)  # fmt: skip
"""The columns that row formats read."""
TAG_NAMES = (
    "role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag"
)  # fmt: skip
"""LLaMA-Factory's names for the keys of a message and for the values of its role."""
Columns = dict[str, str | None]


class Source(Section):
    """One file or data set of rows."""

    short = "path"

    path: str
    """A json, jsonl, csv, parquet, arrow or txt file (compressed too, as rows.jsonl.gz), a folder of them, or a hub
    data set id. For stage classify a folder with idx files of images and labels, or such a file of images. `path#500`
    takes the first 500 rows."""
    rows: PositiveInt | None = None
    """Take only this many rows from the front (the same as `path#N`)."""
    weight: Annotated[Annotated[float, Field(gt=0)] | None, _OF_TEXTS] = None
    """Share of the mixture, relative to the other sources. Without weights every row of every source is used once
    an epoch."""
    format: Annotated[
        Literal[
            "auto", "text", "alpaca", "sharegpt", "messages", "prompt-completion", "tokenized", "preference", "stepwise"
        ],
        _OF_TEXTS,
    ] = "auto"
    """How to read a row; auto recognises it from the columns."""
    columns: Annotated[Columns | None, _OF_TEXTS] = None
    """The columns of this source, as in `data.columns`, and in its place."""
    subset: Annotated[str | None, _OF_TEXTS] = None
    """Configuration of a hub data set (a language, a task), as the hub and `datasets` name it, or of a folder whose
    README.md lists `configs`; an error names those that there are where one is needed."""
    split: str = "train"
    """Split of a hub data set, or of a folder with several splits that `datasets` has written; of a folder of images,
    train or test."""


class Packing(Section):
    """How samples are packed into sequences. Attention never crosses samples, whatever the kind."""

    short = "kind"
    switch = ("best-fit", "none")

    kind: Literal["best-fit", "concatenate", "none"] = "best-fit"
    """best-fit fills packed sequences of max_length with whole samples; concatenate (text only) joins documents with an
    end-of-text token and cuts every max_length tokens; none makes each sample a sequence of its own (no padding)."""
    window: Annotated[
        PositiveInt, ReadWith("kind", "best-fit", "only best-fit packing has a window; this is {value}")
    ] = 4096
    """Samples looked at together when packing; larger packs tighter, smaller keeps the shuffled order closer."""


class Data(Section):
    """The rows to train on, and how they become tokens."""

    short = "train"

    train: list[Source]
    """One or more sources."""
    eval: list[Source] | Annotated[float, Field(gt=0, lt=1)] | PositiveInt | None = None
    """Held-out rows: a share (0.02), a number of rows (200), or sources of its own. 0 turns evaluation off, with
    early_stop, metric and checkpoint.keep_best."""
    columns: Annotated[Columns | None, OF_TOKENS] = None
    """The names of row formats, and the column of the file that each is: {prompt: ques, completion: resp}. A text with
    braces is a template over columns, such as "{title}\\n{text}" ({{ and }} are braces); null hides a column. The keys
    role_tag, content_tag, user_tag, assistant_tag, observation_tag, function_tag and system_tag name the keys of a
    message and the values of its role. By default the columns that LLaMA-Factory's dataset_info.json next to a file
    names, or else the file's own; {} takes the file's own."""
    prompt: Annotated[str | None, OF_RL] = None
    """Stage rl: a template of the prompt over the columns of a row, such as "{Body} {Question}"; {{ and }} are braces.
    By default the column `prompt` (a text, or messages), the messages before the last answer, or the question of other
    known rows.
    """
    max_length: Annotated[PositiveInt, OF_TOKENS] = 1024
    """Longest sample, and length of a packed sequence, in tokens."""
    packing: Annotated[Packing, OF_TOKENS] = default_section(Packing)
    """How samples are packed into sequences: true or best-fit, false or none, or concatenate."""
    overlong: Annotated[Literal["truncate", "split", "drop"], OF_TOKENS] = "truncate"
    """The treatment of a row longer than max_length; counted and shown in every case."""
    train_on: Annotated[Literal["all", "assistant", "last"], OF_TOKENS] = "assistant"
    """The label mask of conversations: which messages carry loss, every one, every assistant turn, or only the last
    assistant turn."""
    system: Annotated[
        str | None,
        OF_TOKENS,
        NotReadWith("stage", "pretrain", "pretraining has no system prompt: it is for stage sft"),
    ] = None
    """System prompt for conversations that have none."""
    on_bad_row: Annotated[Literal["error", "skip"], OF_TOKENS] = "error"
    """A row that cannot be read: stop with its file and line, or count and skip it."""
    bad_row_limit: Annotated[PositiveInt, OF_TOKENS, ReadWith("data.on_bad_row", "skip")] = 100
    """The number of bad rows after which on_bad_row: skip stops."""
    share_stem: bool = True
    """Compute the prompt that several answers share once for all of them; false gives each answer a copy of its own.
    The result is the same. Models with rotary factors that depend on the length always repeat the prompt of longer
    rows."""
    append_eos: Annotated[
        bool,
        OF_TOKENS,
        NotReadWith("stage", "rl", "not read with stage rl: answers end where the policy ends them. Leave it out"),
    ] = True
    """Close each plain-text document and each prompt/completion pair with the end-of-text token."""
    streaming: Annotated[bool, OF_TOKENS] = False
    """Read rows while training, for data larger than memory; needs `steps`. Rows are shuffled within a buffer."""
    shuffle_buffer: Annotated[PositiveInt, OF_TOKENS, ReadWith("data.streaming", True)] = 10_000
    """Rows held while streaming, from which the next is drawn."""
    workers: Annotated[PositiveInt | Literal["auto"], OF_TOKENS] = "auto"
    """Processes that tokenise; auto takes one per core."""
    cache: Annotated[str, OF_TOKENS] = "~/.cache/danlu"
    """The folder of tokenised data, keyed by content, template and settings."""
