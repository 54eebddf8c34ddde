"""Virtual tokens: ids past the vocabulary that stand before every document while an adapter that has them is active.

An adapter with P of them owns P consecutive ids. Collation and generation put them in front of every document or
prompt (`AdapterSet.virtual_token_ids` says which); the embedding's slot finds them in a pass and asks the adapter for
their vectors. So attention, positions, packing and caching need to know nothing of soft prompts and prefixes.

T tokens · N virtual tokens among them · P virtual tokens of an adapter · D model width
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from danlu.adapters.adapter import ShardableModule
from danlu.core.layer_types import LinearShard


@dataclass(frozen=True)
class VirtualTokenPositions:
    """The places of one adapter's virtual tokens in one forward pass."""

    rows: Tensor  # [N] int64: their rows among the T tokens of the pass
    indices: Tensor  # [N] int64: which of the adapter's virtual tokens each is, 0 to P - 1


class VirtualTokens(ShardableModule):
    """The part of an adapter that sits in the embedding's slot and has the vectors of its virtual tokens.

    first_id: the first of its `count` consecutive ids; at least the size of the vocabulary.
    """

    def __init__(self, first_id: int, count: int) -> None:
        super().__init__()
        self.ids = range(first_id, first_id + count)
        self.adds_embeddings = True
        """False on all tensor ranks but one, where the vocabulary is cut and `embeddings` are summed over the ranks."""

    def narrow(self, shard: LinearShard) -> None:
        self.adds_embeddings = shard.first

    def positions(self, tokens: Tensor) -> VirtualTokenPositions:
        """Returns the places of this adapter's virtual tokens among tokens [T]."""
        rows = ((tokens >= self.ids.start) & (tokens < self.ids.stop)).nonzero().squeeze(1)
        return VirtualTokenPositions(rows, tokens[rows] - self.ids.start)

    def begin_pass(self, tokens: Tensor) -> None:
        """Notes where its virtual tokens are in passes over tokens [T] that do not begin at the embedding here: in
        later stages of a pipeline, and in backward passes of one of several micro-batches in flight."""

    @abstractmethod
    def embeddings(self, positions: VirtualTokenPositions, dtype: torch.dtype) -> Tensor:
        """Returns the embedding's output for the virtual tokens, [N, D] in `dtype`, before Gemma's multiplier."""

    def summand(self, positions: VirtualTokenPositions, dtype: torch.dtype) -> Tensor:
        """This rank's term of the sum of `embeddings` over the tensor ranks, [N, D].

        Zeros on all but one, but computed from the parameters, so that they have a gradient on every rank.
        """
        embeddings = self.embeddings(positions, dtype)
        return embeddings if self.adds_embeddings else embeddings * 0
