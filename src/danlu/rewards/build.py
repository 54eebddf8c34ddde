"""Sections of a recipe as rewards, and everything about them that can be known before the first answer."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from danlu.core.errors import DanluError, DataError, RecipeError
from danlu.core.prompt_template import PromptTemplate, PromptTemplateError
from danlu.core.spelling import did_you_mean
from danlu.recipe.sections import (
    CodeReward,
    ExactReward,
    FormatReward,
    FunctionReward,
    JudgeReward,
    LengthReward,
    MathReward,
    ModelReward,
    NumericReward,
    RewardLimits,
    RewardSection,
)
from danlu.rewards.code import Code
from danlu.rewards.function import UserFunction
from danlu.rewards.judge import Judge
from danlu.rewards.programs.sandbox import find_sandbox
from danlu.rewards.protocol import Reward
from danlu.rewards.runner import RewardPart, RewardRunner
from danlu.rewards.text import Exact, Length, Mathematical, Numeric, Pattern
from danlu.rewards.worker_pool import RewardWorkers

OWN_COLUMNS = (
    *("completion", "prompt", "tokens", "finish", "turns"),
    *("completion_ids", "trainer_state", "log_extra", "log_metric"),
)
"""The arguments of functions in addition to the columns of the row."""


ROWS_TRIED = 64
"""The number of rows with tests of programs that are tried before the first answer."""


def build_rewards(
    sections: Sequence[RewardSection], reward_model: Callable[[ModelReward], Reward] | None = None
) -> list[RewardPart]:
    """The rewards of a recipe, in its order.

    Args:
        reward_model: makes the reward of a section of kind `model`, which this room knows nothing of.

    Raises RecipeError with all that is wrong: a file that is not there, a pattern that does not compile, a template
    that cannot be read, a key that the environment lacks, a system without a sandbox for programs.
    """
    parts, problems = list[RewardPart](), list[str]()
    for number, section in enumerate(sections):
        try:
            parts.append(RewardPart(section.label, _reward(section, reward_model), section.weight))
        except DanluError as error:
            problems += [f"rewards.{number}: {line.removeprefix('rewards: ')}" for line in str(error).splitlines()]
    if problems:
        raise RecipeError(problems)
    return parts


def build_runner(parts: Sequence[RewardPart], limits: RewardLimits) -> RewardRunner:
    """Returns the runner that calls the rewards of a recipe, within its limits."""
    workers = None if limits.workers == "auto" else limits.workers
    return RewardRunner(parts, timeout_s=limits.timeout_s, workers=workers)


def check_functions(parts: Sequence[RewardPart], limits: RewardLimits) -> None:
    """Runs the files of the user's functions once, in a process that ends again: a rollout is too late for that.

    Raises RecipeError with the errors that they raise, ResourceError where the process ends or takes too long.
    """
    functions = [part.reward for part in parts if isinstance(part.reward, UserFunction)]
    workers = RewardWorkers(dict(enumerate(functions)), count=1, timeout_s=limits.timeout_s)
    try:
        workers.start()
    finally:
        workers.close()


def check_columns(parts: Sequence[RewardPart], row: Mapping[str, Any], where: str) -> None:
    """Raises DataError with the columns that rewards read and a row lacks, and with cells without a test.

    Args:
        where: the row's place, as in questions.jsonl:3.
    """
    problems = []
    for part in parts:
        for column in _columns(part.reward):
            if column not in row:
                there = ", ".join(map(repr, row)) or "none"
                hint = did_you_mean(column, list(row))
                problems.append(f"{where}: reward {part.name} reads the column {column!r}; the row has {there}.{hint}")
            elif isinstance(part.reward, Code):
                try:
                    part.reward.check_row(row)
                except DataError as error:
                    problems.append(f"{where}: reward {part.name}: {error}")
    if problems:
        raise DataError("\n".join(problems))


def check_first_tests(parts: Sequence[RewardPart], rows: Iterable[tuple[Mapping[str, Any], str]]) -> None:
    """Runs the tests of the first rows, each with its place, on the empty program; those of others when they are drawn.

    Raises DataError for a row with a test that the empty program passes: it would pass every program.
    """
    codes = [part for part in parts if isinstance(part.reward, Code)]
    for row, where in islice(rows, ROWS_TRIED) if codes else ():
        for part in codes:
            assert isinstance(part.reward, Code), "they were chosen so"
            try:
                part.reward.check_row(row, runs=True)
            except DataError as error:
                raise DataError(f"{where}: reward {part.name}: {error}") from None


def _reward(section: RewardSection, reward_model: Callable[[ModelReward], Reward] | None) -> Reward:
    match section:
        case ExactReward():
            return Exact(section.column, section.ignore_case)
        case NumericReward():
            return Numeric(section.column, section.tolerance)
        case MathReward():
            return Mathematical(section.column)
        case FormatReward():
            _check_pattern(section.pattern)
            return Pattern(section.pattern, section.whole)
        case LengthReward():
            return Length(section.fewest, section.most, section.slack)
        case CodeReward():
            find_sandbox(section.sandbox)
            return Code(section.column, section.timeout_s, section.memory_mib, section.processes, section.sandbox)
        case FunctionReward():
            function = UserFunction.read(section.path)
            function.check_text()
            return function
        case JudgeReward():
            return _judge(section)
        case ModelReward():
            assert reward_model is not None, "who builds rewards of kind model gives what loads them"
            return reward_model(section)
    raise AssertionError(f"no reward is made of {type(section).__name__}")


def _judge(section: JudgeReward) -> Judge:
    if section.pattern is not None:
        _check_pattern(section.pattern)
    try:
        template = PromptTemplate.parse(section.prompt)
    except PromptTemplateError as error:
        raise RecipeError(f"prompt: {error}") from None
    judge = Judge(
        section.url,
        section.model,
        template,
        section.pattern,
        section.bounds,
        section.max_new_tokens,
        section.temperature,
        section.api_key_variable,
        section.connections,
        section.timeout_s,
        section.retries,
    )
    _ = judge.client  # which looks at the url and for the key
    return judge


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RecipeError(f"pattern: {pattern!r} is no regular expression: {error}") from None


def _columns(reward: Reward) -> Iterator[str]:
    """The columns that a reward cannot do without."""
    match reward:
        case Exact() | Numeric() | Mathematical() | Code():
            yield reward.column
        case Judge():
            yield from (name for name in reward.template.columns if name not in ("prompt", "completion"))
        case UserFunction():
            yield from _required_parameters(reward)


def _required_parameters(function: UserFunction) -> Iterator[str]:
    """The columns among the parameters of a function that has no default for them, read off its file without running
    it; none of one that is not defined by a plain `def`."""
    try:
        statements = ast.parse(function.source).body
    except (SyntaxError, ValueError):
        return  # which running the file tells better
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name == function.name:
            if statement.decorator_list:
                return
            arguments = statement.args
            plain = [*arguments.posonlyargs, *arguments.args]
            required = plain[: len(plain) - len(arguments.defaults)]
            required += [
                name for name, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default
            ]
            own = (*OWN_COLUMNS, "prompts", "completions")
            yield from (argument.arg for argument in required if argument.arg not in own)
            return
