"""Virtual tokens: ids past the vocabulary that stand before every document while an adapter that has them is active.

An adapter with P of them owns P consecutive ids. Whoever lays out documents or prompts puts them in front
(`AdapterSet.virtual_token_ids` says which); the embedding's slot finds them again and asks the adapter for their
vectors. So attention, positions, packing and caching need to know nothing of prompts and prefixes.

T tokens · N virtual tokens among them · P virtual tokens of an adapter · D model width
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from danlu.adapters.adapter import TensorAxes
from danlu.types import LinearShard


@dataclass(frozen=True)
class Places:
    """Where an adapter's virtual tokens are in one forward pass."""

    rows: Tensor  # [N] int64, of the T tokens
    which: Tensor  # [N] int64, 0 to P - 1


class VirtualTokens(nn.Module):
    """What an adapter puts into the embedding's slot for its virtual tokens."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self.ids = range(first, first + count)
        self.adds = True
        """False where the words are cut over processes, and another one gives the vectors."""

    @property
    def tensor_axes(self) -> TensorAxes:
        return {}

    def narrow(self, share: LinearShard) -> None:
        self.adds = share.first

    def find(self, tokens: Tensor) -> Places:
        """Where this adapter's tokens are among tokens [T]."""
        rows = ((tokens >= self.ids.start) & (tokens < self.ids.stop)).nonzero().squeeze(1)
        return Places(rows, tokens[rows] - self.ids.start)

    @abstractmethod
    def vectors(self, places: Places, dtype: torch.dtype) -> Tensor:
        """[N, D] what the embedding gives for them, before any multiplier."""

    def added(self, places: Places, dtype: torch.dtype) -> Tensor:
        """The same, or zeros where another process gives them, which still lead back: all have a gradient."""
        vectors = self.vectors(places, dtype)
        return vectors if self.adds else vectors * 0
