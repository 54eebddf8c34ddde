"""Texts that a model writes while it is trained: prompts rendered once, and the function that continues them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from danlu.errors import DataError
from danlu.language.reader import tokenizer_of
from danlu.models.config import ModelConfig
from danlu.placing import Subject
from danlu.recipe import Recipe
from danlu.rollout.chat_tokenizer import ChatTokenizer
from danlu.rollout.generate import generate
from danlu.rollout.prompts import prompt_problem
from danlu.rollout.request import SamplingOptions
from danlu.train.state import Generate


def sampler(recipe: Recipe, subject: Subject, dtype: torch.dtype) -> Generate | None:
    """A function from the recipe's prompts to texts of the model; None where the recipe asks for none."""
    samples = recipe.evaluation.samples
    if samples is None:
        return None
    chat_tokenizer = ChatTokenizer(tokenizer_of(recipe))
    options = SamplingOptions(temperature=samples.temperature, seed=recipe.seed)
    virtual_token_ids = () if subject.adapters is None else subject.adapters.virtual_token_ids
    prompt_tokens = sample_prompts(recipe, chat_tokenizer, subject.model.config, len(virtual_token_ids))

    def write(prompts: Sequence[str]) -> list[str]:
        answers = generate(
            subject.model,
            [prompt_tokens[prompt] for prompt in prompts],
            options,
            samples.max_new_tokens,
            sorted(chat_tokenizer.stop_ids),
            decode=chat_tokenizer.decode,
            dtype=dtype,
            virtual_token_ids=virtual_token_ids,
        )
        return [answer.text for answer in answers]

    return write


def sample_prompts(
    recipe: Recipe, chat_tokenizer: ChatTokenizer, config: ModelConfig, num_virtual_tokens: int = 0
) -> dict[str, list[int]]:
    """The tokens of each prompt that samples are asked for, rendered once for the whole run.

    num_virtual_tokens: of adapters before each prompt, where they are known.
    Raises DataError with all prompts that cannot be rendered or that the model cannot continue.
    """
    assert recipe.evaluation.samples is not None, "there are prompts"
    encode = chat_tokenizer.encode_prompt if recipe.stage == "pretrain" else chat_tokenizer.encode_chat_prompt
    tokens: dict[str, list[int]] = {}
    problems: dict[str, str] = {}  # a reason that several prompts share is told of the first
    for index, prompt in enumerate(recipe.evaluation.samples.prompts):
        where = f"evaluation.samples.prompts.{index} ({_beginning(prompt)!r})"
        try:
            tokens[prompt] = encode(prompt)
        except DataError as error:
            problems.setdefault(str(error), f"{where}: {error}")
            continue
        if problem := prompt_problem(config, tokens[prompt], num_virtual_tokens):
            problems[where] = f"{where} {problem}"
    if problems:
        raise DataError("\n  ".join(problems.values()))
    return tokens


def _beginning(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"
