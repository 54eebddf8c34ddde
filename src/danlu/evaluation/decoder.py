"""An evaluation of a decoder: the loss of its predictions, its answers, or the scores of a reward model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.core.errors import RecipeError
from danlu.evaluation.request import DEFAULT_MAX_LENGTH, KEYS, Request

if TYPE_CHECKING:
    from danlu.inference.engine import EngineOptions
    from danlu.inference.resolve_model import ResolvedModel


def evaluate_decoder(
    request: Request,
    scores: Path | None,
    answer_settings: Mapping[str, Any] | None,
    engine_options: Callable[[ResolvedModel], EngineOptions],
) -> None:
    """Evaluates a language model's predictions of the rows, or its answers to them; or a reward model's scores.

    scores: a new file for these. answer_settings: those of `AnswerSettings`, where the rows are to be answered.
    """
    resolved = request.resolved
    if resolved.config.task != "causal-lm":
        if answer_settings is not None:
            raise RecipeError(f"--generate: {resolved.given_path} is a reward model, which scores answers")
        _evaluate_rewards(request, target=scores)
        return
    if scores is not None:
        raise RecipeError(f"--scores: {resolved.given_path} is a language model; scores are of reward models")
    if answer_settings is not None:
        _evaluate_answers(request, answer_settings, engine_options(resolved))
    else:
        from danlu.evaluation.text import evaluate_text

        evaluate_text(request)


def _evaluate_rewards(request: Request, *, target: Path | None) -> None:
    """Evaluates the scores of a reward model, and prints their summary; written to `target`, if that is given."""
    from danlu.evaluation.reward_model import evaluate_rewards, prepared_rows, rewards_spec

    resolved, length = request.resolved, min(request.context, DEFAULT_MAX_LENGTH)
    spec = rewards_spec(resolved, request.data, request.overrides, request.chat_template, max_length=length, keys=KEYS)
    rows = prepared_rows(spec)
    evaluate_rewards(
        request.load(),
        spec,
        rows,
        given_path=resolved.given_path,
        data=request.data,
        as_json=request.as_json,
        target=target,
    )


def _evaluate_answers(request: Request, settings: Mapping[str, Any], options: EngineOptions) -> None:
    """Evaluates how many of a language model's answers are the rows' own."""
    from danlu.evaluation.answers import AnswerSettings, Questions, evaluate_answers

    if request.overrides:
        raise RecipeError(f"{request.overrides[0]}: --generate asks the rows as they are, and reads no data.KEY")
    answer_settings = AnswerSettings(**settings)
    match, tokenizer = answer_settings.match(), request.tokenizer()
    questions = Questions.read(request.data, match, request.resolved, tokenizer)
    evaluate_answers(
        request.load(tokenizer, merged=True),
        questions,
        answer_settings,
        match,
        options,
        model=request.resolved.given_path,
        data=request.data,
        as_json=request.as_json,
    )
