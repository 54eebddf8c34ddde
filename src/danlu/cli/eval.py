"""`danlu eval`: how well a model predicts a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from danlu.cli.eval_request import DEFAULT_MAX_LENGTH, KEYS, Request, request_of
from danlu.cli.model_flags import (
    MODEL_HELP,
    Base,
    CacheGib,
    ChatTemplate,
    Device,
    Draft,
    Dtype,
    Quantization,
    Seed,
    check_flags,
    engine_flags,
)
from danlu.core.errors import RecipeError

if TYPE_CHECKING:
    from danlu.inference.engine import EngineOptions


def eval(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Only --rewards with --answers goes without."),
    ] = None,
    *,
    data: Annotated[str, typer.Option(help="File, folder or data set in any row format; path#N takes N rows.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="data.KEY=VALUE",
            help="How rows are read, as in a recipe: data.max_length=512 data.train_on=last data.on_bad_row=skip ...",
        ),
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option(help="With a reward model, or --rewards: a new file for all scores, a line of JSON each."),
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Have the rows answered, and compare with the rows' own answers.")
    ] = False,
    pattern: Annotated[
        str | None,
        typer.Option(help="--generate: compare only what this regular expression finds last, such as '####\\s*(.+)'."),
    ] = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option(
            help="What answers are worth: a recipe with rewards, FILE.py:NAME, or {kind: math, column: answer}. May be "
            "given several times."
        ),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="--rewards: an answer is right from this reward on, for pass@k. Default 1.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Answers to each row. Default: --generate 1, --rewards 8.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token. Default: --generate 0, --rewards 1.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer. Default 256.")] = None,
    seed: Seed = 0,
    answers: Annotated[
        str | None,
        typer.Option(
            help="--generate: a new file for the answers, a line of JSON each. --rewards: the column of the rows whose "
            "answers are judged, in the place of a model's."
        ),
    ] = None,
    cache_gib: CacheGib = None,
    draft: Draft = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    chat_template: ChatTemplate = None,
    base: Base = None,
    quantization: Quantization = None,
) -> None:
    """Loss, perplexity and token accuracy of a model on a file; of plain text also bits per byte.

    Of a classifier of images: loss and accuracy on the test files of a folder, or on a file of images.

    Of a reward model: how often the chosen answer of a pair has the higher score, or a judged step is told right.

    With --generate: the share of answers that are exactly the rows' own, white space aside.

    With --rewards: the mean of each reward over sampled answers, and how likely one of k is right (pass@k).

    Of text every token is scored, of conversations the assistant's, of prompts with completions the completions.

    Rows longer than the model's context (or 2048 tokens) are cut into pieces, so that nothing is left out.

    Unlike in training, the end-of-text token after a document or completion counts only with data.append_eos=true.
    """
    given = {} if temperature is None else {"temperature": temperature}
    precision = check_flags(given, seed, dtype, device, [], quantization)
    request_for = partial(
        request_of,
        base=base,
        data=data,
        chat_template=chat_template,
        quantization=quantization,
        precision=precision,
        device=device,
        as_json=as_json,
    )
    keys = overrides or []
    if rewards or threshold is not None:
        if generate or pattern is not None or not rewards:
            raise RecipeError("--rewards judges answers by itself: leave out --generate and --pattern, or --threshold")
        from danlu.cli.eval_rollouts import RewardFlags, evaluate

        model, keys = _model_and_keys(model, keys, may_lack_model=answers is not None)
        sampling = (samples, temperature, max_new_tokens, seed)
        flags = RewardFlags(rewards, data, keys, answers, *sampling, threshold, scores, as_json)
        request = None if model is None else request_for(model, keys, may_classify=answers is not None)
        evaluate(request, flags, cache_gib, draft)
        return
    if not generate and any(flag is not None for flag in (pattern, samples, temperature, answers)):
        raise RecipeError("--pattern, --samples, --temperature and --answers are of answers: add --generate")
    if model is None:
        raise RecipeError(f"MODEL is missing: {MODEL_HELP[0].lower()}{MODEL_HELP[1:]}")
    # numpy, a tenth of a second, and below torch, more than one: for this verb, not for its --help.
    from danlu.models.hf_folder import LENET, model_type

    if model_type(model) == LENET:
        from danlu.cli.eval_images import evaluate_images

        of_text = {"--chat-template": chat_template, "--base": base, "--quantization": quantization, "--scores": scores}
        keys = [*keys, *(name for name, flag in {**of_text, "--generate": generate}.items() if flag)]
        evaluate_images(model, data, keys, as_json=as_json, precision=precision, device=device)
        return
    settings = {
        "samples": samples or 1,
        "max_new_tokens": max_new_tokens or 256,
        "temperature": temperature or 0.0,
        "seed": seed,
        "pattern": pattern,
        "target": None if answers is None else Path(answers),
    }
    _evaluate_decoder(request_for(model, keys), scores, settings if generate else None, cache_gib, draft)


def _model_and_keys(model: str | None, keys: Sequence[str], *, may_lack_model: bool) -> tuple[str | None, list[str]]:
    """MODEL and the data.KEYs behind it; where it may be left out, the first of them is in its place."""
    if may_lack_model and model is not None and model.startswith("data."):
        return None, [model, *keys]
    return model, list(keys)


def _evaluate_decoder(
    request: Request,
    scores: Path | None,
    answer_settings: Mapping[str, Any] | None,
    cache_gib: float | None,
    draft: str | None,
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
        _evaluate_answers(request, answer_settings, engine_flags(resolved, cache_gib, draft))
    else:
        from danlu.cli.eval_text import evaluate_text

        evaluate_text(request)


def _evaluate_rewards(request: Request, *, target: Path | None) -> None:
    """Evaluates the scores of a reward model, and prints their summary; written to `target`, if that is given."""
    from danlu.cli.eval_rewards import evaluate_rewards, prepared_rows, rewards_spec

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
    from danlu.cli.eval_answers import AnswerSettings, Questions, evaluate_answers

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
