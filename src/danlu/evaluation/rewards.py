"""`danlu eval --rewards`: the rewards of a recipe for answers, a model's or those that rows have."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from danlu.core.errors import DataError, RecipeError
from danlu.core.prompt_template import PromptTemplate, PromptTemplateError
from danlu.core.terminal import echo, print_status
from danlu.data.prepare import DatasetSpec, prepare_prompts
from danlu.data.prompt_formats import parse_prompt
from danlu.data.prompts import Prompt, prompt_lines, shown_prompt
from danlu.data.raw_rows import BadRow
from danlu.data.sources import read_rows
from danlu.evaluation.decoder import answered, opened_new
from danlu.recipe import Recipe, load
from danlu.recipe.from_arguments import recipe_from_arguments
from danlu.recipe.sections import LengthReward, ModelReward, RewardLimits, RewardSection
from danlu.recipe.sections.rollout import SAMPLING_KEYS, Rollout
from danlu.rewards.build import build_rewards, build_runner, check_columns, check_first_tests
from danlu.rewards.protocol import JudgedAnswer, Reward
from danlu.rewards.runner import RewardFailure, RewardPart, RewardRunner, RewardTable
from danlu.rewards.summary import distinct_failures, summarise
from danlu.training.progress import RowProgress

if TYPE_CHECKING:
    from danlu.evaluation.decoder import Request
    from danlu.inference.chat_tokenizer import ChatTokenizer
    from danlu.inference.engine import EngineOptions
    from danlu.inference.load_model import LoadedModel
    from danlu.inference.resolve_model import ResolvedModel

ANSWERS_AT_A_TIME = 128
"""The number of answers that are judged together, like those of a rollout while training: functions get them as
`completions`."""
KEYS = (
    "data.columns", "data.prompt", "data.system", "data.max_length", "data.overlong", "data.on_bad_row",
    "data.bad_row_limit",
)  # fmt: skip


@dataclass(frozen=True)
class RewardFlags:
    """The flags of `danlu eval --rewards`; for None the recipe decides, or its defaults."""

    rewards: Sequence[str]
    """Recipes, FILE.py:NAME, or sections such as {kind: math, column: answer}."""
    data: str
    overrides: Sequence[str] = ()
    column: str | None = None
    """The column of answers that the rows have; None: a model answers."""
    samples: int | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    threshold: float | None = None
    target: Path | None = None
    """A new file for the rewards of each answer."""
    as_json: bool = False

    def recipe(self, context: int | None) -> Recipe:
        """The recipe with these rewards, prompts and sampling options. Raises RecipeError that explains a fault.

        context: tokens that the model sees, the default of data.max_length.
        """
        data: dict[str, Any] = {"train": self.data, "packing": "none"} | ({"max_length": context} if context else {})
        rollout: dict[str, Any] = {}
        ready, given, limits = list[RewardSection](), list[Any](), RewardLimits()
        for text in self.rewards:
            if text.endswith((".yaml", ".yml")):
                recipe = load(text).recipe
                if not recipe.rewards:
                    raise RecipeError(f"--rewards: {text} is a recipe of stage {recipe.stage} without rewards")
                ready += recipe.rewards
                limits = recipe.reward_limits
                data |= {name: getattr(recipe.data, name) for name in (key.removeprefix("data.") for key in KEYS)}
                rollout = {name: getattr(recipe.rollout, name) for name in SAMPLING_KEYS if name != "staleness"}
            else:
                try:
                    given.append(yaml.safe_load(text))  # as YAML would have it in a list
                except yaml.YAMLError:
                    raise RecipeError(f"--rewards: {text!r} is no recipe, FILE.py:NAME or {{kind: ..., ...}}") from None
        flags = {"samples": self.samples, "temperature": self.temperature, "max_new_tokens": self.max_new_tokens}
        rollout |= {name: value for name, value in flags.items() if value is not None}
        values = {"stage": "rl", "model": "none", "output": ".", "data": data, "rollout": rollout, "rewards": given}
        flagged = recipe_from_arguments(values, self.overrides, verb="danlu eval", open_keys=KEYS)
        flagged = flagged.model_copy(update={"rewards": [*ready, *(flagged.rewards or ())], "reward_limits": limits})
        labels = Counter(section.label for section in flagged.rewards or ())
        if twice := [label for label, count in labels.items() if count > 1]:
            raise RecipeError(f"--rewards: {twice[0]} is the name of two rewards. Give one a name: {{..., name: ...}}")
        if self.target is not None and self.target.expanduser().exists():
            raise RecipeError(f"--scores: {self.target} is there already. Name a new file, or remove it")
        sampling = flagged.rollout
        if self.column is None and sampling.samples > 1 and sampling.temperature == 0:
            raise RecipeError(f"--samples: {sampling.samples} times the likeliest answer are one; add --temperature 1")
        if self.column is None and context is not None and sampling.max_new_tokens >= context:
            raise RecipeError(f"--max-new-tokens: {sampling.max_new_tokens} leave no room for a prompt in {context}")
        return flagged


@dataclass(frozen=True)
class Answer:
    """An answer to a prompt, as rewards see it, and which it is."""

    prompt: int
    sample: int
    where: str
    judged: JudgedAnswer


def evaluate(
    request: Request | None, flags: RewardFlags, engine_options: Callable[[ResolvedModel], EngineOptions]
) -> None:
    """Runs the whole verb. request: the model; None where rows have the answers and no tokens are counted.

    All faults of flags, rewards, rows and their columns are raised before a language model is loaded.
    """
    if request is None and flags.column is None:
        raise RecipeError(
            "MODEL is missing: name the model that answers, or with --answers the column of given answers"
        )
    options = None if request is None else engine_options(request.resolved)
    recipe = flags.recipe(None if request is None else request.context)
    tokenizer = None if request is None else request.tokenizer()
    answers, prompts = list[Answer](), tuple[Prompt, ...]()
    if flags.column is not None:
        answers = given_answers(recipe, flags.column, tokenizer)
    elif request is not None:
        folder, most = str(request.resolved.tokenizer_folder), recipe.rollout.max_new_tokens
        spec = DatasetSpec(
            recipe.data,
            "rl",
            folder,
            request.chat_template,
            seed=0,
            max_new_tokens=most,
            template_kwargs=request.template_kwargs,
        )
        with closing(RowProgress(sys.stderr)) as progress:
            read = prepare_prompts(spec, progress=progress)
        for line in prompt_lines("data", read.statistics)[1:]:
            print_status(f"note: {line}")
        prompts = read.train
    parts = build_rewards(recipe.rewards or (), partial(_reward_model, request))
    rows = [(each.judged.row, each.where) for each in answers] or [(each.row, each.where) for each in prompts]
    for row, where in rows:
        check_columns(parts, row, where)
    check_first_tests(parts, rows)
    with build_runner(parts, recipe.reward_limits) as runner:
        runner.start()
        if request is not None and options is not None and flags.column is None:
            answers = drawn_answers(request.load(tokenizer, merged=True), prompts, recipe.rollout, options, flags.seed)
        model = None if request is None else str(request.resolved.given_path)
        evaluate_rollouts(runner, answers, flags, model=model)


def drawn_answers(
    loaded: LoadedModel, prompts: Sequence[Prompt], rollout: Rollout, options: EngineOptions, seed: int
) -> list[Answer]:
    """The model's answers, by prompt and sample."""
    from danlu.inference.grammar import prompt_grammar
    from danlu.inference.request import Request, SamplingOptions

    answers, form = list[Answer](), rollout.format
    sampling = SamplingOptions(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p, seed=seed)
    requests = [
        Request(
            number,
            prompt.tokens,
            sampling,
            rollout.max_new_tokens,
            rollout.samples,
            stop_ids=loaded.stop_ids,
            stop_strings=tuple(rollout.stop_strings),
            grammar=None
            if form is None
            else prompt_grammar(form.kinds, loaded.chat_tokenizer.tokenizer, prompt.tokens),
        )
        for number, prompt in enumerate(prompts)
    ]
    for said in answered(loaded, requests, options):
        prompt = prompts[said.number]
        judged = JudgedAnswer(said.text, prompt.row, prompt.prompt, len(said.tokens), said.finish)
        answers.append(Answer(said.number, said.sample, prompt.where, judged))
    return sorted(answers, key=lambda answer: (answer.prompt, answer.sample))


def given_answers(recipe: Recipe, column: str, tokenizer: ChatTokenizer | None) -> list[Answer]:
    """The answers that rows have in a column: a text, or a list of several to the same prompt.

    tokenizer: counts their tokens, which are 0 without it. Raises DataError for a row without the column.
    """
    if tokenizer is None and any(isinstance(section, LengthReward) for section in recipe.rewards or ()):
        raise RecipeError("--rewards: length counts tokens. Name the MODEL with the tokenizer that counts them")
    try:
        template = None if recipe.data.prompt is None else PromptTemplate.parse(recipe.data.prompt)
    except PromptTemplateError as error:
        raise RecipeError(f"data.prompt: {error}") from None
    answers, without_prompt = list[Answer](), list[str]()
    source = recipe.data.train[0]
    for number, row in enumerate(read_rows(source, recipe.data.columns)):
        if isinstance(row.value, BadRow):
            raise DataError(row.value.message)
        columns = row.columns
        texts = columns.get(column)
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            there = ", ".join(map(repr, columns)) or "none"
            raise DataError(f"{row.where}: --answers {column}: no text, or list of texts; the row has {there}")
        prompt: Any = ""
        try:
            read = row.value if template is None else columns
            prompt = shown_prompt(parse_prompt(read, template, source.format, row.where))
        except DataError:
            if template is not None:
                raise
            without_prompt.append(row.where)
        for sample, text in enumerate(texts):
            tokens = 0 if tokenizer is None else len(tokenizer.tokenizer.encode(text))
            answers.append(Answer(number, sample, row.where, JudgedAnswer(text, columns, prompt, tokens)))
    if without_prompt:
        print_status(f"note: rewards see an empty prompt of {len(without_prompt):,} rows: data.prompt may name one")
    return answers


def evaluate_rollouts(
    runner: RewardRunner, answers: Sequence[Answer], flags: RewardFlags, *, model: str | None
) -> None:
    """Judges the answers, and prints a summary; with `flags.target`, writes each with its rewards."""
    values, unjudged, failures = list[np.ndarray](), list[np.ndarray](), list[RewardFailure]()
    with ExitStack() as stack:
        file = None if flags.target is None else stack.enter_context(opened_new(flags.target, "--scores"))
        progress = stack.enter_context(closing(RowProgress(sys.stderr, doing="judging", units="answers")))
        for start in range(0, len(answers), ANSWERS_AT_A_TIME):
            part = answers[start : start + ANSWERS_AT_A_TIME]
            table = runner.score([answer.judged for answer in part])
            values.append(table.values)
            unjudged.append(table.unjudged)
            failures += [replace(each, answer=start + each.answer) for each in table.failures]
            if file is not None:
                file.writelines(_lines(runner.parts, part, table))
            progress(start + len(part), len(answers))
    left_out = np.concatenate(unjudged)
    prompts = np.array([answer.prompt for answer in answers])
    result = {
        **({} if model is None else {"model": model}),
        "data": flags.data,
        "rewards": summarise(runner.parts, np.concatenate(values), prompts, flags.threshold, unjudged=left_out),
        "rows": len(np.unique(prompts)),
        "answers": len(answers),
        "tokens": sum(answer.judged.tokens for answer in answers),
        "finish": dict(sorted(Counter(answer.judged.finish for answer in answers).items())),
        "failures": dict(Counter(failure.reward for failure in failures)),
        "unjudged": int(left_out.sum()),
    }
    if flags.as_json:
        echo(json.dumps(result, ensure_ascii=False))
    else:
        _show(result)
    places = ((answers[failure.answer].where, f"reward {failure.reward}: {failure.reason}") for failure in failures)
    for reason in distinct_failures(places):
        print_status(f"note: {reason}")


def _reward_model(request: Request | None, section: ModelReward) -> Reward:
    """A reward model, with the precision and on the device that the flags say."""
    from danlu.inference.quantization_choice import quantization_section
    from danlu.stages.reward_model import load_reward_model
    from danlu.stages.role_configs import resolve_reward_model

    resolved = resolve_reward_model(section.path)
    quantization = quantization_section(None, resolved)
    if request is None:
        return load_reward_model(resolved, quantization=quantization)
    return load_reward_model(resolved, precision=request.precision, device=request.device, quantization=quantization)


def _lines(parts: Sequence[RewardPart], answers: Sequence[Answer], table: RewardTable) -> Iterator[str]:
    """A line of JSON for each answer."""
    reasons: dict[int, dict[str, str]] = {}
    for failure in table.failures:
        reasons.setdefault(failure.answer, {})[failure.reward] = failure.reason
    verdicts: dict[int, dict[str, Any]] = {}
    for (number, part), verdict in table.verdicts.items():
        verdicts.setdefault(number, {})[parts[part].name] = verdict.as_json()
    for number, (answer, of_answer) in enumerate(zip(answers, table.values.tolist(), strict=True)):
        judged = answer.judged
        line = {
            "row": answer.where,
            "sample": answer.sample,
            "text": judged.text,
            "tokens": judged.tokens,
            "finish": judged.finish,
            "rewards": {
                part.name: None if np.isnan(value) else value for part, value in zip(parts, of_answer, strict=True)
            },
        }
        failed = {"failures": reasons[number]} if number in reasons else {}
        explained = {"verdicts": verdicts[number]} if number in verdicts else {}
        yield json.dumps({**line, **failed, **explained}, ensure_ascii=False) + "\n"


def _show(result: dict[str, Any]) -> None:
    width = max(map(len, (*result["rewards"], "answers")))
    for name, summary in result["rewards"].items():
        if summary["mean"] is None:
            echo(f"{name:<{width}}  not given to any answer")
            continue
        error = "" if summary["standard_error"] is None else f" ± {summary['standard_error']:.4f}"
        passed, best = summary.get("pass_at", {}), summary["best_at"]
        # 1, 2, 4, ... and all of them.
        shown = [k for k in best if k & (k - 1) == 0 or k == max(best)]
        rates = "".join(f"  pass@{k} {passed[k]:.2%}" for k in shown if passed)
        # Of rewards that are 0 or 1 the highest of k is what pass@k says.
        highest = "" if passed else "".join(f"  best@{k} {best[k]:.4f}" for k in shown if k > 1)
        echo(f"{name:<{width}}  {summary['mean']:.4f}{error}{rates}{highest}")
    answers, tokens = result["answers"], result["tokens"]
    length = f", {tokens / answers:,.1f} tokens each" if tokens else ""
    echo(f"{'answers':<{width}}  {answers:,} to {result['rows']:,} rows{length}")
    for finish, why in (("length", "at --max-new-tokens"), ("context", "by the model's context")):
        if cut := result["finish"].get(finish, 0):
            echo(f"{'cut':<{width}}  {cut:,} answers {why}")
    if result["failures"]:
        missing = ", ".join(f"{name} {count:,}" for name, count in result["failures"].items())
        echo(f"{'missing':<{width}}  {missing}; {result['unjudged']:,} answers without a sum")
