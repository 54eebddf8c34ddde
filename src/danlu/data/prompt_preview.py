"""Prompts of stage `rl` token by token, as the policy gets them and `danlu preview` shows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice

import numpy as np

from danlu.data.message_spans import Reason
from danlu.data.preview import PreviewRow, PreviewSample, missing_places, rows_at, token_texts
from danlu.data.prompts import Prompt, PromptSettings, PromptSpec, render_prompts
from danlu.data.raw_rows import RawRow
from danlu.data.sources import read_rows
from danlu.data.tokenizer import Tokenizer
from danlu.data.tokenizer_folder import template_date
from danlu.data.tokenizing import TokenizerJob
from danlu.data.worker_pool import WorkerPool

PromptRowsTask = tuple[int, PromptSettings, Sequence[RawRow]]


def render_prompt_examples(spec: PromptSpec, *, rows: int, places: Sequence[str] = ()) -> list[PreviewRow]:
    """Rows of every source as prompts: the first `rows` of each, or the ones at `places` (see `render_examples`).

    Raises DataError where a source, the tokenizer or the chat template cannot be used at all, and RecipeError where no
    row is at one of the places. A bad row is no error here.
    """
    data = spec.data
    sources = [*data.train, *(data.eval if isinstance(data.eval, list) else [])]
    tasks: list[PromptRowsTask] = []
    for number, source in enumerate(sources):
        raw = read_rows(source)
        chosen = rows_at(raw, places) if places else list(islice(raw, rows))
        tasks.append((number, spec.settings(source.format), chosen))
    missing_places(places, [row for _, _, chosen in tasks for row in chosen], sources)
    date = template_date(spec.tokenizer_path, spec.chat_template, spec.date)
    with WorkerPool(TokenizerJob(spec.tokenizer_path, spec.chat_template, date, preview_prompts), 1) as workers:
        return [row for of_source in workers.map(tasks) for row in of_source]


def preview_prompts(tokenizer: Tokenizer, task: PromptRowsTask) -> list[PreviewRow]:
    """Returns the outcome of each row of a source, by the same steps as for a run.

    task: the number of the source, the settings and the rows.
    """
    source, settings, rows = task
    return [_preview_prompt(tokenizer, settings, source, row) for row in rows]


def _preview_prompt(tokenizer: Tokenizer, settings: PromptSettings, source: int, row: RawRow) -> PreviewRow:
    chunk = render_prompts(tokenizer, (settings, [row]))
    has_columns = bool(chunk.bad) and isinstance(row.value, dict)
    return PreviewRow(
        source,
        row.index,
        row.where,
        samples=tuple(_sample(tokenizer, prompt) for prompt in chunk.prompts),
        bad="".join(chunk.bad),
        columns=json.dumps(row.value, ensure_ascii=False, default=str) if has_columns else "",
        dropped="".join(chunk.statistics.dropped),
        shortened="".join(chunk.statistics.shortened),
    )


def _sample(tokenizer: Tokenizer, prompt: Prompt) -> PreviewSample:
    """Returns the prompt as context: only the policy's answers are trained."""
    tokens = np.array(prompt.tokens, np.int32)
    special = np.array([token in tokenizer.special_ids for token in prompt.tokens], bool)
    texts = tuple(token_texts(tokenizer.token_bytes(prompt.tokens)))
    reasons = np.full(len(tokens), Reason.PROMPT, np.uint8)
    return PreviewSample(tokens, np.zeros(len(tokens), np.float32), reasons, special, texts)
