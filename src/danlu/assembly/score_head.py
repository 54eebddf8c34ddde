"""The head of a model with adapters that classifies: of the topmost folder that has one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from danlu.adapters.adapter_config import WEIGHTS, AdapterFolder
from danlu.adapters.peft_values import PREFIX
from danlu.core.errors import ModelError
from danlu.core.safetensors_format import read_header
from danlu.models.hf_folder import read_tensors
from danlu.models.hf_layout import SCORE

if TYPE_CHECKING:
    from torch import nn


def score_head_of(folder: Path, adapters: Sequence[AdapterFolder]) -> nn.Linear | None:
    """The head of a model folder with adapters on it, lowest first: that of the topmost one that has its own.

    It is in float32; None where neither they nor the folder have any. Raises ModelError for one that cannot be read.
    """
    # Here, not above: shapes are read without torch.
    from danlu.adapters.peft_folder import read_head
    from danlu.models.score_head import head_of, stored_score_head

    for adapter in reversed(adapters):
        if tensors := read_head(adapter):
            return head_of(tensors)
    return stored_score_head(folder)


def score_head_shape(folder: Path, adapters: Sequence[AdapterFolder]) -> tuple[int, ...] | None:
    """The shape [labels, D] of the head that `score_head_of` would read, from the headers of files alone."""
    for adapter in reversed(adapters):
        if adapter.task != "causal-lm":
            header = read_header(adapter.path / WEIGHTS)
            stored = header.get(f"{PREFIX}{SCORE}")
            return None if stored is None else tuple(stored.shape)
    stored = read_tensors(folder).get(SCORE)
    return None if stored is None else tuple(stored.shape)


def required_score_head(folder: Path, adapters: Sequence[AdapterFolder]) -> nn.Linear:
    """Returns the head of a model with a config that says that it classifies. Raises ModelError where it has none."""
    head = score_head_of(folder, adapters)
    if head is None:
        raise ModelError(f"{folder}: its config.json is of a model that classifies, and its weights have no {SCORE}")
    return head
