"""The head of a model that classifies: `score` of transformers' classes, a linear layer [labels, D] in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from danlu.core.errors import ModelError
from danlu.core.types import Task
from danlu.models.hf_folder import CONFIG, read_json, read_tensors
from danlu.models.hf_layout import SCORE, SCORE_BIAS
from danlu.models.initialize import named_generator
from danlu.models.loading import read_tensor

DEFAULT_STD = 0.02
"""transformers' `initializer_range` where a config.json has none."""


def new_score_head(width: int, labels: int, *, bias: bool, seed: int, std: float = DEFAULT_STD) -> nn.Linear:
    """Returns a head with a weight drawn from normal(0, std) by the seed alone, and a bias of 0, as in transformers."""
    weight = torch.empty(labels, width).normal_(std=std, generator=named_generator(seed, SCORE))
    return _head(weight, torch.zeros(labels) if bias else None)


def stored_score_head(folder: Path) -> nn.Linear | None:
    """The head that a model folder has, in float32; None of a language model.

    Raises ModelError for one that cannot be read, or that has layers between `score` and the hidden states.
    """
    stored = read_tensors(folder)
    if SCORE not in stored:
        return None
    if len(shape := stored[SCORE].shape) != 2:
        raise ModelError(f"{folder}: {SCORE} has the shape {list(shape)}; a score head is a matrix")
    return head_of({name: read_tensor(folder, name) for name in (SCORE, SCORE_BIAS) if name in stored})


def head_of(tensors: Mapping[str, Tensor]) -> nn.Linear:
    """The head of tensors as `head_tensors` names them, in float32."""
    return _head(tensors[SCORE], tensors.get(SCORE_BIAS))


def head_tensors(head: nn.Linear) -> dict[str, Tensor]:
    """The head by the names of its tensors in a model folder."""
    bias = {} if head.bias is None else {SCORE_BIAS: head.bias.detach()}
    return {SCORE: head.weight.detach(), **bias}


def label_values(head: nn.Linear, task: Task) -> dict[str, Any]:
    """The keys of config.json by which transformers makes a head of as many labels."""
    names = {str(label): f"LABEL_{label}" for label in range(head.out_features)}
    values: dict[str, Any] = {"id2label": names, "label2id": {name: int(label) for label, name in names.items()}}
    if task == "sequence-classification" and head.out_features == 1:
        values["problem_type"] = "regression"
    return values


def initializer_range(folder: Path) -> float:
    """The standard deviation by which transformers would draw a new head of the folder's model."""
    value = read_json(folder / CONFIG).get("initializer_range")
    return float(value) if isinstance(value, int | float) and value > 0 else DEFAULT_STD


def _head(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    labels, width = weight.shape
    head = nn.Linear(width, labels, bias=bias is not None)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(bias)
    return head
