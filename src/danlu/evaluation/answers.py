"""`danlu eval --generate`: how many of a model's answers to the rows of a file are the rows' own."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.core.errors import RecipeError
from danlu.core.terminal import echo
from danlu.data.sources import read_rows
from danlu.evaluation.reward_model import opened_new
from danlu.inference.load_engine import engine_of, with_room_for
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.recipe.sections import Source
from danlu.rl.answer_matching import AnsweredRow, AnswerMatch, answered_rows
from danlu.rl.prompt_rows import encode_rows
from danlu.training.progress import RowProgress

if TYPE_CHECKING:
    from danlu.inference.chat_tokenizer import ChatTokenizer
    from danlu.inference.embedded import EmbeddedEngine
    from danlu.inference.engine import EngineOptions
    from danlu.inference.load_model import LoadedModel
    from danlu.inference.resolve_model import ResolvedModel


@dataclass(frozen=True)
class AnswerSettings:
    """Settings by which the answers are drawn and compared."""

    samples: int = 1
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    pattern: str | None = None
    target: Path | None = None
    """A new file for the answers, a line of JSON each."""

    def match(self) -> AnswerMatch:
        """Makes the comparison of answers. Raises RecipeError for flags that make no sense together, or a broken
        pattern."""
        if self.samples > 1 and self.temperature == 0:
            raise RecipeError(f"--samples: {self.samples} times the likeliest answer are one; add --temperature 1")
        if self.target is not None and self.target.expanduser().exists():
            raise RecipeError(f"--answers: {self.target} is there already. Name a new file, or remove it")
        try:
            return AnswerMatch(None if self.pattern is None else re.compile(self.pattern))
        except re.error as error:
            raise RecipeError(f"--pattern: {self.pattern!r} is no regular expression: {error}") from None


@dataclass(frozen=True)
class Questions:
    """The rows of a file, ready to be asked."""

    rows: list[AnsweredRow]
    references: list[str]  # what is compared of each
    prompts: list[tuple[int, ...]]

    @classmethod
    def read(cls, data: str, match: AnswerMatch, resolved: ResolvedModel, chat_tokenizer: ChatTokenizer) -> Questions:
        """Raises DataError with all rows that cannot be asked or have nothing to compare with."""
        rows = answered_rows(read_rows(Source(path=data)))
        references = match.references(rows)
        if any(row.prompt.turns for row in rows):
            chat_tokenizer.require_chat_template()
        virtual_tokens = resolved.virtual_tokens_per_prompt
        prompts = encode_rows(
            [row.prompt for row in rows], chat_tokenizer, resolved.config, virtual_tokens=virtual_tokens
        )
        return cls(rows, references, prompts)


def evaluate_answers(
    loaded: LoadedModel,
    questions: Questions,
    settings: AnswerSettings,
    match: AnswerMatch,
    options: EngineOptions,
    *,
    model: Path,
    data: str,
    as_json: bool,
) -> None:
    """Asks all rows, and prints the share of answers that are right; with `settings.target` writes every answer."""
    sampling = SamplingOptions(temperature=settings.temperature, seed=settings.seed)
    requests = [
        Request(number, prompt, sampling, settings.max_new_tokens, settings.samples, stop_ids=loaded.stop_ids)
        for number, prompt in enumerate(questions.prompts)
    ]
    finishes: Counter[str] = Counter()
    right = tokens = 0
    with ExitStack() as stack:
        file = None if settings.target is None else stack.enter_context(opened_new(settings.target, "--answers"))
        engine = engine_of(loaded, with_room_for(loaded, requests, options))
        for answer in _answers(engine, requests):
            row, reference = questions.rows[answer.number], questions.references[answer.number]
            is_right = match.extract(answer.text) == reference
            right, tokens = right + is_right, tokens + len(answer.tokens)
            finishes[answer.finish] += 1
            if file is not None:
                said = {"sample": answer.sample, "text": answer.text, "finish": answer.finish}
                line = {"row": row.prompt.where, **row.prompt.given, **said, "reference": row.reference}
                file.write(json.dumps({**line, "right": is_right}, ensure_ascii=False) + "\n")
    values: dict[str, Any] = {
        "model": str(model),
        "data": data,
        "exact_match": right / sum(finishes.values()),
        "right": right,
        "answers": sum(finishes.values()),
        "rows": len(requests),
        "samples": settings.samples,
        "tokens": tokens,
        "finish": dict(sorted(finishes.items())),
    }
    if as_json:
        echo(json.dumps(values, ensure_ascii=False))
    else:
        _show(values)


def _answers(engine: EmbeddedEngine, requests: list[Request]) -> Iterator[Completion]:
    """The answers as they are completed."""
    for request in requests:
        engine.submit(request)
    done, total = 0, engine.unfinished
    with closing(RowProgress(sys.stderr, doing="answering", units="answers")) as progress:
        while engine.unfinished:
            completions = engine.step()
            yield from completions
            done += len(completions)
            progress(done, total)


def _show(values: dict[str, Any]) -> None:
    answers, rows, samples = values["answers"], values["rows"], values["samples"]
    each = "" if samples == 1 else f", {samples} to each of {rows:,} rows"
    echo(f"exact match  {values['exact_match']:.2%}: {values['right']:,} of {answers:,} answers{each}")
    echo(f"tokens       {values['tokens'] / answers:,.1f} an answer")
    if cut := values["finish"].get("length", 0):
        echo(f"cut          {cut:,} answers at --max-new-tokens")
    if full := values["finish"].get("context", 0):
        echo(f"cut          {full:,} answers by the model's context")
