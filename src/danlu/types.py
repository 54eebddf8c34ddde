"""What crosses a room's door. Importing this file does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# S tokens of one sample · T packed tokens · N trained targets · D model width
# H query heads · K key/value heads · C head width


@dataclass(frozen=True)
class Sample:
    """One tokenised row: a document that attention never leaves.

    `weights[i]` belongs to token i *as a target*, predicted from tokens before it; `weights[0]` is always 0.
    """

    tokens: np.ndarray  # [S] int32
    weights: np.ndarray  # [S] float32, 0 = context only
    row: str  # where it came from, for messages: "alpaca.json row 17"


@dataclass(frozen=True)
class Pack:
    """Samples laid end to end, without padding. One or more packs make a micro-batch."""

    samples: tuple[Sample, ...]

    @property
    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device: packed documents, and the targets that carry weight.

    Target n is predicted from hidden state `sources[n]`, which is the token just before it in the same document.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, restart at 0 in each document
    boundaries: tuple[int, ...]  # [documents + 1] offsets into T, from 0 to T
    sources: Tensor  # [N] int64, rising
    targets: Tensor  # [N] int64
    weights: Tensor  # [N] float32, all > 0 (see `data.batch.fill_up` for those that are not)
    weight: float  # sum of `weights`
    rows: tuple[str, ...]  # one per document, for messages


@dataclass(frozen=True)
class Loss:
    """A sum and the weight it is to be divided by, once per optimizer step; never a mean."""

    total: Tensor  # scalar float32, sum over targets of weight x loss
    weight: float
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # sums, divided by `weight` when shown


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int  # real tokens of this step
    trained_tokens: int
    tokens_per_second: float
    memory_bytes: int  # peak so far: resident on CPU, allocated on CUDA
    extra: Mapping[str, float] = field(default_factory=dict)


class Attend(Protocol):
    """Attention over flat tokens, given to the decoder from outside: packed documents, paged cache, ring, reference."""

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [T, H, C] rotated
        k: Tensor,  # [T, K, C] rotated
        v: Tensor,  # [T, K, C]
        *,
        scale: float,
        window: int | None,  # a query sees itself and window - 1 tokens before it; None = all
        softcap: float | None,  # Gemma-2: softcap * tanh(score / softcap)
    ) -> Tensor: ...  # [T, H, C]
