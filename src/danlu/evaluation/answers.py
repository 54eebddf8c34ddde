"""`danlu eval --generate`: how many of a model's answers to the rows of a file are the rows' own."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import ExitStack
from typing import Any

from danlu.core.errors import RecipeError
from danlu.core.terminal import echo
from danlu.data.sources import read_rows
from danlu.evaluation.answer_matching import AnswerMatch, answered_rows
from danlu.evaluation.decoder import AnswerSettings, Request, answered, opened_new
from danlu.inference import request as engine_requests
from danlu.inference.engine import EngineOptions
from danlu.inference.prompt_rows import encode_rows
from danlu.recipe.sections import Source


def evaluate_answers(request: Request, settings: AnswerSettings, options: EngineOptions) -> None:
    """Asks all rows, and prints the share of answers that are the rows' own; `settings.target` gets every answer.

    Raises RecipeError for flags that make no sense together or a broken pattern, DataError with all rows that cannot be
    asked or have nothing to compare with.
    """
    if request.overrides:
        raise RecipeError(f"{request.overrides[0]}: --generate asks the rows as they are, and reads no data.KEY")
    if settings.samples > 1 and settings.temperature == 0:
        raise RecipeError(f"--samples: {settings.samples} times the likeliest answer are one; add --temperature 1")
    if settings.target is not None and settings.target.expanduser().exists():
        raise RecipeError(f"--answers: {settings.target} is there already. Name a new file, or remove it")
    try:
        match = AnswerMatch(None if settings.pattern is None else re.compile(settings.pattern))
    except re.error as error:
        raise RecipeError(f"--pattern: {settings.pattern!r} is no regular expression: {error}") from None
    resolved, tokenizer = request.resolved, request.tokenizer()
    rows = answered_rows(read_rows(Source(path=request.data)))
    references = match.references(rows)  # what is compared of each
    if any(row.prompt.turns for row in rows):
        tokenizer.require_chat_template()
    virtual_tokens = resolved.virtual_tokens_per_prompt
    prompts = encode_rows([row.prompt for row in rows], tokenizer, resolved.config, virtual_tokens=virtual_tokens)
    loaded = request.load(tokenizer, merged=True)
    sampling = engine_requests.SamplingOptions(temperature=settings.temperature, seed=settings.seed)
    requests = [
        engine_requests.Request(
            number, prompt, sampling, settings.max_new_tokens, settings.samples, stop_ids=loaded.stop_ids
        )
        for number, prompt in enumerate(prompts)
    ]
    finishes: Counter[str] = Counter()
    right = tokens = 0
    with ExitStack() as stack:
        file = None if settings.target is None else stack.enter_context(opened_new(settings.target, "--answers"))
        for answer in answered(loaded, requests, options):
            row, reference = rows[answer.number], references[answer.number]
            is_right = match.extract(answer.text) == reference
            right, tokens = right + is_right, tokens + len(answer.tokens)
            finishes[answer.finish] += 1
            if file is not None:
                said = {"sample": answer.sample, "text": answer.text, "finish": answer.finish}
                line = {"row": row.prompt.where, **row.prompt.given, **said, "reference": row.reference}
                file.write(json.dumps({**line, "right": is_right}, ensure_ascii=False) + "\n")
    values: dict[str, Any] = {
        "model": str(request.resolved.given_path),
        "data": request.data,
        "exact_match": right / sum(finishes.values()),
        "right": right,
        "answers": sum(finishes.values()),
        "rows": len(requests),
        "samples": settings.samples,
        "tokens": tokens,
        "finish": dict(sorted(finishes.items())),
    }
    if request.as_json:
        echo(json.dumps(values, ensure_ascii=False))
        return
    answers, samples = values["answers"], settings.samples
    each = "" if samples == 1 else f", {samples} to each of {len(requests):,} rows"
    echo(f"exact match  {values['exact_match']:.2%}: {values['right']:,} of {answers:,} answers{each}")
    echo(f"tokens       {values['tokens'] / answers:,.1f} an answer")
    if cut := values["finish"].get("length", 0):
        echo(f"cut          {cut:,} answers at --max-new-tokens")
    if full := values["finish"].get("context", 0):
        echo(f"cut          {full:,} answers by the model's context")
