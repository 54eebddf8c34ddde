"""Texts that a model writes while it is trained: prompts rendered once, and the function that continues them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from danlu.data.batch import collate, pad_to_bucket
from danlu.errors import DataError
from danlu.language.reader import tokenizer_of
from danlu.language.roles import FrozenDecoder, forward_of
from danlu.language.rollout import engine_options, rollout_engine
from danlu.models.attend import attend_for
from danlu.models.config import ModelConfig
from danlu.parallel.dealing import deal_by_tokens
from danlu.placing import Placed, token_shares
from danlu.plan.precision import DTYPES
from danlu.recipe import Recipe
from danlu.rollout.cache_size import cache_gib
from danlu.rollout.chat_tokenizer import ChatTokenizer
from danlu.rollout.logprob_gap import rollout_gap
from danlu.rollout.prompts import prompt_problem
from danlu.rollout.request import Completion, Request, SamplingOptions
from danlu.train.state import Generate, Samples
from danlu.types import Pack, Sample


def sampler(recipe: Recipe, placed: Placed) -> Generate | None:
    """A function from the recipe's prompts to texts of the policy; None where the recipe asks for none.

    With the texts comes how far the log-probabilities that they were drawn with are from those of training.
    """
    section, subject = recipe.evaluation.samples, placed.subject
    if section is None:
        return None
    chat_tokenizer = ChatTokenizer(tokenizer_of(recipe))
    sampling = SamplingOptions(temperature=section.temperature, seed=recipe.seed)
    virtual_tokens = 0 if subject.adapters is None else len(subject.adapters.virtual_token_ids)
    prompt_tokens = sample_prompts(recipe, chat_tokenizer, subject.model.config, virtual_tokens)
    # No larger than all samples need: training takes what there is of the device's memory.
    lengths = [virtual_tokens + len(prompt_tokens[prompt]) + section.max_new_tokens for prompt in section.prompts]
    needed = cache_gib(subject.model, DTYPES[recipe.precision], lengths, engine_options(recipe))
    engine = rollout_engine(recipe, placed, decode=chat_tokenizer.decode, cache_gib=needed)
    engine.sleep()

    def write(prompts: Sequence[str]) -> Samples:
        requests = [
            Request(
                number, tuple(prompt_tokens[prompt]), sampling, section.max_new_tokens, stop_ids=chat_tokenizer.stop_ids
            )
            for number, prompt in enumerate(prompts)
        ]
        engine.update(engine.version + 1)
        engine.wake()
        try:
            completions = engine.generate(requests)
        finally:
            engine.sleep()
        gap = rollout_gap(completions, trainer_logprobs(recipe, placed, requests, completions))
        texts = [completion.text for completion in completions]
        return Samples(texts, {"rollout_gap_max": gap.largest, "rollout_gap_mean": gap.mean})

    return write


def trainer_logprobs(
    recipe: Recipe, placed: Placed, requests: Sequence[Request], completions: Sequence[Completion]
) -> list[list[float]]:
    """The log-probability of each token of the completions as training computes it, from packed sequences.

    requests: of each completion, the request that it answers; of these one temperature.
    """
    model, adapters = placed.subject.model, placed.subject.adapters
    exact, device = recipe.numerics == "exact", next(model.parameters()).device
    outputs = FrozenDecoder(model, forward_of(model, compiled=recipe.compile), DTYPES[recipe.precision], exact)
    virtual_token_ids = () if adapters is None else adapters.virtual_token_ids
    temperature = requests[0].sampling.temperature or 1.0
    rows = [
        np.array([*request.prompt, *answer.tokens], dtype=np.int32)
        for request, answer in zip(requests, completions, strict=True)
    ]
    logprobs: list[list[float]] = [[] for _ in completions]
    for numbers in deal_by_tokens([len(row) for row in rows], 0, 1, recipe.data.max_length):
        samples = []
        for number in numbers:
            answered = np.arange(len(rows[number])) >= len(requests[number].prompt)
            samples.append(Sample(rows[number], answered.astype(np.float32), f"sample {number}"))
        batch = collate([Pack(tuple(samples))], device, virtual_token_ids=virtual_token_ids)
        filled = pad_to_bucket(batch, token_shares(recipe, placed.parallel.ranks))
        values = outputs(batch, filled, attend_for(filled, exact=exact)).logprobs(temperature=temperature)
        counts = [len(completions[number].tokens) for number in numbers]
        for number, own in zip(numbers, values.logprobs.split(counts), strict=True):
            logprobs[number] = own.tolist()
    return logprobs


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
