"""The lengths of a rollout's prompts and answers, as far as they are known before the run. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.core.errors import DataError
from danlu.recipe import Recipe
from danlu.recipe.policy_scores import objective_section

_FORM = (
    'Each line is {"prompt_tokens": 64, "answer_tokens": [120, 87]}, the tokens of one answer, or a line of a run\'s '
    "rollouts.jsonl"
)


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt with the lengths of its answers, in tokens."""

    tokens: int
    """Tokens of the prompt, virtual ones included."""
    answers: tuple[int, ...]
    """Tokens of each answer, the one that ends it included."""


@dataclass(frozen=True)
class RolloutLengths:
    """The prompts of one rollout, with the lengths of their answers."""

    prompts: tuple[AskedPrompt, ...]
    assumption: str
    """A sentence on where the lengths are from."""

    @classmethod
    def longest(cls, recipe: Recipe) -> RolloutLengths:
        """The prompts of a rollout of which every answer is as long as it may be."""
        tokens, length = recipe.rollout.max_new_tokens, _longest_prompt(recipe)
        prompt = AskedPrompt(length, (tokens,) * answers_to_a_prompt(recipe))
        return cls(
            (prompt,) * prompts_of_a_rollout(recipe),
            f"every answer has rollout.max_new_tokens ({tokens}) tokens, and every prompt the {length} that "
            "data.max_length leaves it; --lengths FILE has them as they are",
        )

    @classmethod
    def of_file(cls, recipe: Recipe, file: Path) -> RolloutLengths:
        """The prompts of a rollout with lengths as in a file: those of evenly spaced lines.

        Answers are as many as the recipe draws, and none is longer than it may be. Raises DataError for a file that
        cannot be read, and for a line without lengths.
        """
        lines = [_line(content, f"{file}:{number}") for number, content in enumerate(_read(file), 1) if content.strip()]
        if not lines:
            raise DataError(f"{file}: no line with lengths. {_FORM}")
        count, samples, most = prompts_of_a_rollout(recipe), answers_to_a_prompt(recipe), recipe.rollout.max_new_tokens
        of_prompts, how = _prompt_lengths(lines, _longest_prompt(recipe))
        answers = [tokens for line in lines for tokens in line.answers]
        prompts = []
        for number in range(count):
            place = number * len(lines) // count if len(lines) >= count else number % len(lines)
            own = [*lines[place].answers, *answers[number * samples :], *answers] * samples
            prompts.append(AskedPrompt(of_prompts[place], tuple(min(most, tokens) for tokens in own[:samples])))
        return cls(tuple(prompts), f"answers are as long as in {file.name}, and prompts {how}")


def draws_answers(recipe: Recipe) -> bool:
    """Whether a recipe trains on answers that the policy draws meanwhile."""
    return recipe.stage == "rl" or bool(recipe.on_policy)


def prompts_of_a_rollout(recipe: Recipe) -> int:
    """The prompts that are answered together; in distillation the share of a step's rows with own answers."""
    if recipe.batch.prompts is not None:
        return recipe.batch.prompts
    return max(1, round(float(recipe.on_policy) * recipe.batch.packs(recipe.data.max_length)))


def answers_to_a_prompt(recipe: Recipe) -> int:
    """The answers to each prompt, a greedy one for a baseline included."""
    if recipe.stage != "rl":
        return 1
    return recipe.rollout.samples + (objective_section(recipe).baseline == "greedy")


@dataclass(frozen=True)
class _Line:
    prompt: int | None
    characters: int
    """Characters of the prompt's text."""
    answers: tuple[int, ...]
    answer_characters: int


def _longest_prompt(recipe: Recipe) -> int:
    return max(1, recipe.data.max_length - recipe.rollout.max_new_tokens)


def _prompt_lengths(lines: Sequence[_Line], longest: int) -> tuple[list[int], str]:
    """Returns (the tokens of each line's prompt, where they are from)."""
    if all(line.prompt is not None for line in lines):
        return [line.prompt or 0 for line in lines], "too"
    characters, tokens = (
        sum(line.answer_characters for line in lines),
        sum(sum(line.answers) for line in lines if line.answer_characters),
    )
    if characters and tokens and all(line.characters for line in lines):
        of_token = characters / tokens
        return (
            [min(longest, max(1, round(line.characters / of_token))) for line in lines],
            f"have a token for each {of_token:.1f} characters, as the answers",
        )
    return [longest] * len(lines), f"have the {longest} tokens that data.max_length leaves them"


def _read(file: Path) -> Iterable[str]:
    try:
        return file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{file}: cannot be read ({reason}). {_FORM}") from None


def _line(content: str, where: str) -> _Line:
    try:
        line = json.loads(content)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}). {_FORM}") from None
    if isinstance(line, int):
        return _Line(None, 0, (_count(line, where),), 0)
    if not isinstance(line, dict):
        raise DataError(f"{where}: not a mapping. {_FORM}")
    prompt, characters = line.get("prompt_tokens"), 0
    if prompt is not None:
        prompt = _count(prompt, f"{where}: prompt_tokens")
    if isinstance(said := line.get("answers"), list):
        entries = [entry for entry in said if isinstance(entry, dict)]
        answers = [_tokens(entry.get("tokens")) for entry in entries]
        characters = sum(len(entry["text"]) for entry in entries if isinstance(entry.get("text"), str))
    else:
        answers = line.get("answer_tokens", [])
        answers = answers if isinstance(answers, list) else [answers]
    if not answers:
        raise DataError(f"{where}: no answer_tokens and no answers. {_FORM}")
    counts = tuple(_count(tokens, f"{where}: answer {number}") for number, tokens in enumerate(answers, 1))
    return _Line(prompt, _characters(line.get("prompt")), counts, characters)


def _tokens(value: Any) -> Any:
    """The number of an answer's tokens, which rollouts.jsonl has by their ids; an episode may have none."""
    return max(1, len(value)) if isinstance(value, list) else value


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"{where}: {value!r} is no number of tokens, which is 1 or more. {_FORM}")
    return value


def _characters(prompt: Any) -> int:
    """The characters of a prompt, text or turns."""
    if isinstance(prompt, str):
        return len(prompt)
    turns = prompt if isinstance(prompt, list) else []
    return sum(
        len(turn["content"]) for turn in turns if isinstance(turn, dict) and isinstance(turn.get("content"), str)
    )
