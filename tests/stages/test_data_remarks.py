"""Warnings about data before a run begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from builders.chat_tokenizers import tokenizer_and_oracle

from danlu.data.prompts import Prompt
from danlu.recipe.sections import FormatReward, Kto, Recipe
from danlu.stages.data_remarks import balance_lines, thought_lines


@dataclass
class Labelled:
    """A sample of which only the labels are asked for."""

    facts: dict[str, np.ndarray]


class Rows(list[Labelled]):
    def sample(self, number: int) -> Labelled:
        return self[number]


def lines(labels: list[list[float]], **term: Any) -> list[str]:
    recipe = Recipe.model_construct(objective=[Kto(**term)])
    samples: Any = Rows(Labelled({"label": np.array(each, np.float32)}) for each in labels)
    return list(balance_lines(recipe, samples))


def test_judged_answers_of_which_one_kind_is_rare() -> None:
    nan = float("nan")
    (line,) = lines([[1.0, nan]] * 8 + [[0.0]])
    assert line.startswith("objective kto: 8 desirable and 1 undesirable answers weigh 8 : 1, and the rarer kind")
    assert "{kind: kto, undesirable: 8}" in line
    assert lines([[1.0]] * 8 + [[0.0]], undesirable=8.0) == []
    assert lines([[1.0]] * 4 + [[0.0]] * 3) == [] and lines([[1.0]] * 4) == []
    assert "{kind: kto, desirable: 2.67}" in lines([[0.0]] * 8 + [[1.0]] * 3)[0]
    assert list(balance_lines(Recipe.model_construct(objective=[]), Rows())) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "pattern", "is_told"),
    [
        ("user: a\nassistant: <think>\n", r"<think>.*</think>", True),
        ("user: a\nassistant: <think>\n", r"^\<think\>", True),
        ("user: a\nassistant: <think>\n", r".*</think>", False),
        ("user: a\nassistant:", r"<think>.*</think>", False),
    ],
)
def test_a_format_that_asks_for_what_the_prompt_has(prompt: str, pattern: str, is_told: bool) -> None:
    tokenizer = tokenizer_and_oracle("chatml")[0]
    recipe = Recipe.model_construct(rewards=[FormatReward(pattern="x"), FormatReward(pattern=pattern)])
    prompts = [Prompt(tuple(tokenizer.encode(prompt)), {}, prompt, "rows:1")]
    told = list(thought_lines(recipe, prompts, tokenizer))
    assert len(told) == is_told
    assert not told or told[0].startswith(
        "rewards.1 (format): the pattern asks for <think>, with which the prompt ends"
    )
