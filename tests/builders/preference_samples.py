"""Pairs and judged answers as trees of tokens, and a learner of two small decoders: what preference losses are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from danlu.core.types import Branch, Objective, Pack, Sample
from danlu.data.batch import empty_like
from danlu.models.decoder import Decoder
from danlu.stages.learner import DecoderLearner
from danlu.stages.roles import FrozenDecoder
from danlu.training.step import StepGradients, accumulate

NAN = float("nan")


def tree(stem: Sequence[int], answers: Sequence[Sequence[int]], weights: Sequence[float], **facts: Any) -> Pack:
    """A stem and the answers behind it, whose tokens have the weights given; facts [1 + answers]."""
    tokens, branches = list(stem), [Branch(-1, 0, len(stem))]
    of_tokens = [0.0] * len(stem)
    for answer, weight in zip(answers, weights, strict=True):
        branches.append(Branch(0, len(tokens), len(tokens) + len(answer)))
        tokens += answer
        of_tokens += [weight] * len(answer)
    sample = Sample(
        np.array(tokens, np.int32),
        np.array(of_tokens, np.float32),
        "pairs.jsonl row 1",
        branches=tuple(branches),
        facts={name: np.array(values, np.float32) for name, values in facts.items()},
    )
    return Pack((sample,))


def pair(row: Mapping[str, Any]) -> Pack:
    """A row of prompt, chosen, rejected and perhaps margin."""
    margin = row.get("margin", NAN)
    return tree(
        row["prompt"], [row["chosen"], row["rejected"]], [1, 1], label=[NAN, 1, 0], margin=[NAN, margin, margin]
    )


def judged(rows: Sequence[Mapping[str, Any]]) -> list[Pack]:
    """Rows of prompt, answer and label, each with the next row's answer behind its prompt."""
    following = [*rows[1:], rows[0]]
    return [
        tree(
            row["prompt"],
            [row["answer"], after["answer"]],
            [1, 0],
            label=[NAN, float(row["label"]), NAN],
            mismatched=[0, 0, 1],
        )
        for row, after in zip(rows, following, strict=True)
    ]


def random_rows(count: int, vocabulary: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows that pairs and judged answers can be made of; half of them have a margin."""
    random = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return random.integers(0, vocabulary, random.integers(low, high)).tolist()

    rows = [{"prompt": tokens(1, 5), "chosen": tokens(2, 8), "rejected": tokens(2, 8)} for _ in range(count)]
    margins = [{} if number % 2 else {"margin": 0.1 * number} for number in range(count)]
    judgements = [{"label": number % 3 != 1} for number in range(count)]
    return [
        {**row, "answer": row["chosen"], **margin, **label}
        for row, margin, label in zip(rows, margins, judgements, strict=True)
    ]


def preference_learner(
    policy: Decoder, reference: Decoder | None, objective: Objective, items: Sequence[Pack], micro: int, **options: Any
) -> DecoderLearner:
    """A learner of `objective` on the CPU in float32, or in `dtype`."""
    dtype = options.pop("dtype", torch.float32)
    roles = {} if reference is None else {"reference": FrozenDecoder(reference, reference, dtype)}
    empty = empty_like(items[0].samples[0])
    return DecoderLearner(
        policy, policy, torch.device("cpu"), dtype, micro, objective, objective, roles=roles, empty=empty, **options
    )


def step_gradients(
    learner: DecoderLearner, items: Sequence[Pack], **options: Any
) -> tuple[StepGradients, dict[str, Tensor]]:
    """What one step is of, and the gradient of each parameter of the policy."""
    learner.model.zero_grad()
    step = accumulate(learner, items, step=1, clip=None, **options)
    gradients = {}
    for name, parameter in learner.model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        gradients[name] = gradient.clone()
    return step, gradients
