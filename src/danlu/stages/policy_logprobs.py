"""The policy's log-probabilities of given tokens as training computes them, to compare with those of a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from danlu.assembly.parallelize import Placed
from danlu.core.types import ROTARY_LENGTH, ROUTES, Batch, Outputs, Pack, Role, Sample
from danlu.inference.recorded_routes import end_to_end
from danlu.inference.support import Support
from danlu.parallel.batch_sharding import shard_by_tokens
from danlu.recipe import Recipe
from danlu.rl.experience_trees import SUPPORT
from danlu.stages.no_grad_pass import learner_to_ask, no_grad_pass


def policy_logprobs(
    recipe: Recipe,
    placed: Placed,
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    routes: Sequence[np.ndarray | None] = (),
    supports: Sequence[Sequence[Support | None]] = (),
) -> list[list[float]]:
    """The log-probability of each token behind the prompts, from packed sequences; all processes compute all of them,
    stages of a pipeline together.

    sequences: prompt and answer, without virtual tokens; prompt_lengths: tokens of each that are the prompt;
    max_new_tokens: that the answers might have had, for LongRoPE chose its factors by these and the prompt's; routes:
    of each sequence the experts of its tokens, as `Completion.routes`, which they go to again; without any, or with
    None, routers choose; supports: of each answer the tokens that the policy is confined to in each place, None for all
    there; without any it is not confined.
    """
    model = placed.subject.model
    learner = learner_to_ask(recipe, placed, model.input_device)
    virtual_tokens = len(placed.subject.virtual_token_ids)
    known = end_to_end(routes, [len(sequence) for sequence in sequences]) if routes else None
    of_sequences = None if known is None else np.split(known, np.cumsum([len(each) for each in sequences])[:-1])
    rows = [np.array(sequence, dtype=np.int32) for sequence in sequences]
    logprobs: list[list[float]] = [[] for _ in rows]
    widest = max((len(support.ids) for of_answer in supports for support in of_answer if support), default=0)

    def columns_of(number: int) -> dict[str, np.ndarray]:
        columns = {} if of_sequences is None else {ROUTES: of_sequences[number]}
        if widest:
            columns[SUPPORT] = np.full((len(rows[number]), widest), -1, np.int32)
            for place, support in enumerate(supports[number], prompt_lengths[number]):
                if support is not None:
                    columns[SUPPORT][place, : len(support.ids)] = support.ids
        return columns

    def sample(number: int) -> Sample:
        answered = np.arange(len(rows[number])) >= prompt_lengths[number]
        text = virtual_tokens + prompt_lengths[number] + max_new_tokens
        return Sample(
            rows[number],
            answered.astype(np.float32),
            f"sample {number}",
            columns=columns_of(number),
            facts={ROTARY_LENGTH: np.array([min(text, model.config.context_length)], np.float32)},
        )

    def logprobs_of(outputs: Mapping[Role, Outputs], batch: Batch) -> Tensor:
        support = batch.columns.get(SUPPORT)
        support = None if support is None else support.long()
        return outputs["policy"].logprobs(temperature=temperature, support=support).logprobs

    # One that is longer than a packed sequence has one of its own, and leaves another empty.
    dealt = [*filter(None, shard_by_tokens([len(row) for row in rows], 0, 1, recipe.data.max_length))]
    items = [Pack((sample(number),)) for number in range(len(rows))]
    for numbers, values in no_grad_pass(learner.judged_by, items, dealt, logprobs_of):
        counts = [len(rows[number]) - prompt_lengths[number] for number in numbers]
        for number, own in zip(numbers, values.split(counts), strict=True):
            logprobs[number] = own.tolist()
    return placed.parallel.from_end_of_pipeline(logprobs)
