"""The policy's log-probabilities of given tokens as training computes them, beside those that a rollout has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from danlu.data.batch import collate, pad_to_bucket
from danlu.language.roles import FrozenDecoder, forward_of
from danlu.models.attend import attend_for
from danlu.parallel.dealing import deal_by_tokens
from danlu.placing import Placed, token_shares
from danlu.plan.precision import DTYPES
from danlu.recipe import Recipe
from danlu.types import Pack, Sample


def policy_logprobs(
    recipe: Recipe,
    placed: Placed,
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    *,
    temperature: float = 1.0,
) -> list[list[float]]:
    """The log-probability of each token behind the prompts, from packed sequences; all processes compute all of them.

    sequences: prompt and answer, without virtual tokens; prompt_lengths: tokens of each that are the prompt.
    """
    model, adapters = placed.subject.model, placed.subject.adapters
    exact, device = recipe.numerics == "exact", next(model.parameters()).device
    outputs = FrozenDecoder(model, forward_of(model, compiled=recipe.compile), DTYPES[recipe.precision], exact)
    virtual_token_ids = () if adapters is None else adapters.virtual_token_ids
    rows = [np.array(sequence, dtype=np.int32) for sequence in sequences]
    logprobs: list[list[float]] = [[] for _ in rows]
    # One that is longer than a packed sequence has one of its own, and leaves another empty.
    for numbers in filter(None, deal_by_tokens([len(row) for row in rows], 0, 1, recipe.data.max_length)):
        samples = []
        for number in numbers:
            answered = np.arange(len(rows[number])) >= prompt_lengths[number]
            samples.append(Sample(rows[number], answered.astype(np.float32), f"sample {number}"))
        batch = collate([Pack(tuple(samples))], device, virtual_token_ids=virtual_token_ids)
        filled = pad_to_bucket(batch, token_shares(recipe, placed.parallel.ranks))
        values = outputs(batch, filled, attend_for(filled, exact=exact)).logprobs(temperature=temperature)
        counts = [len(rows[number]) - prompt_lengths[number] for number in numbers]
        for number, own in zip(numbers, values.logprobs.split(counts), strict=True):
            logprobs[number] = own.tolist()
    return logprobs
