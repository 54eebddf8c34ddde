"""Rows of stage reward as samples: pairs behind a shared prompt, and chains of steps with a label each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from danlu.core.types import Branch, Pack, Sample

NAN = float("nan")


def pair(prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int], margin: float = NAN) -> Pack:
    """One sample: the prompt, then both answers, each a branch of it."""
    return _pack(prompt, [chosen, rejected], [0, 0], {"label": [NAN, 1, 0], "margin": [NAN, margin, margin]})


def chain(prompt: Sequence[int], steps: Sequence[Sequence[int]], labels: Sequence[float]) -> Pack:
    """One sample: the prompt, then each step a branch of the one before it."""
    return _pack(prompt, steps, range(len(steps)), {"label": [NAN, *labels]})


def _pack(
    prompt: Sequence[int], answers: Sequence[Sequence[int]], parents: Sequence[int], facts: dict[str, list[float]]
) -> Pack:
    tokens, branches = list(prompt), [Branch(-1, 0, len(prompt))]
    for parent, answer in zip(parents, answers, strict=True):
        branches.append(Branch(parent, len(tokens), len(tokens) + len(answer)))
        tokens += answer
    weights = np.ones(len(tokens), dtype=np.float32)
    weights[: len(prompt)] = 0
    arrays = {name: np.array(values, dtype=np.float32) for name, values in facts.items()}
    sample = Sample(np.array(tokens, dtype=np.int32), weights, "a row", branches=tuple(branches), facts=arrays)
    return Pack((sample,))
