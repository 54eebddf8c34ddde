"""Texts that a model writes while it is trained: prompts rendered once, and the function that continues them."""

from __future__ import annotations

from collections.abc import Sequence

from danlu.assembly.parallelize import Placed
from danlu.core.errors import DataError
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.inference.engine import awake
from danlu.inference.logprob_gap import rollout_gap
from danlu.inference.prompts import prompt_problem
from danlu.inference.request import Request, SamplingOptions
from danlu.models.config import ModelConfig
from danlu.recipe import Recipe
from danlu.stages.policy_logprobs import policy_logprobs
from danlu.stages.reader import chat_tokenizer_of
from danlu.stages.rollout import sleeping_engine
from danlu.training.state import Generate, Samples


def sampler(recipe: Recipe, placed: Placed) -> Generate | None:
    """A function from the recipe's prompts to texts of the policy; None where the recipe asks for none.

    With the texts comes how far the log-probabilities that they were drawn with are from those of training.
    """
    section, subject = recipe.evaluation.samples, placed.subject
    if section is None:
        return None
    chat_tokenizer = chat_tokenizer_of(recipe, subject.model.config)
    sampling = SamplingOptions(temperature=section.temperature, seed=recipe.seed)
    virtual_tokens = len(subject.virtual_token_ids)
    prompt_tokens = sample_prompts(recipe, chat_tokenizer, subject.model.config, virtual_tokens)
    lengths = [virtual_tokens + len(prompt_tokens[prompt]) + section.max_new_tokens for prompt in section.prompts]
    engine = sleeping_engine(recipe, placed, chat_tokenizer.decode, lengths)

    def write(prompts: Sequence[str]) -> Samples:
        requests = [
            Request(
                number, tuple(prompt_tokens[prompt]), sampling, section.max_new_tokens, stop_ids=chat_tokenizer.stop_ids
            )
            for number, prompt in enumerate(prompts)
        ]
        with awake(engine):
            completions = engine.generate(requests)
        rows = [(*request.prompt, *answer.tokens) for request, answer in zip(requests, completions, strict=True)]
        prompt_lengths = [len(request.prompt) for request in requests]
        trainer = policy_logprobs(
            recipe,
            placed,
            rows,
            prompt_lengths,
            max_new_tokens=section.max_new_tokens,
            temperature=section.temperature or 1.0,
            routes=[completion.routes for completion in completions],
        )
        gap = rollout_gap(completions, trainer)
        texts = [completion.text for completion in completions]
        return Samples(texts, {"rollout_gap_max": gap.largest, "rollout_gap_mean": gap.mean})

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
    problems: dict[str, str] = {}  # a reason that several prompts share is given for the first
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
