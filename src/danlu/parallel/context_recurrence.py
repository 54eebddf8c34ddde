"""How layers with a state go through documents that are cut over context ranks: each rank has some heads of all tokens.

A state is made by the tokens before, in order, so a rank could only wait for the one before it. But heads know nothing
of each other, nor do the channels of the convolutions in front of them: exchanged for heads (Ulysses,
arXiv:2309.14509), the tokens of all ranks are whole documents.

t tokens of this rank · T tokens of all ranks · H heads
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.models.recurrent_order import RecurrentOrder
from danlu.parallel.comm import Group
from danlu.parallel.context_exchange import heads_of_all, tokens_of_all


class UlyssesHeads:
    """A `models.recurrent_order.HeadExchange` over a group of context ranks.

    Args:
        counts: tokens of each rank, which lie end to end.
        rows: [T] int64, these tokens in the order of their documents.
        order: of the documents.
    """

    def __init__(self, group: Group, counts: Sequence[int], rows: Tensor, order: RecurrentOrder) -> None:
        self._group, self._counts = group, counts
        self._rows, self._places = rows, rows.argsort()
        self.order = order

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._group.size

    @property
    def index(self) -> int:
        """Number of this rank among them, and of its heads among as many equal parts."""
        return self._group.index

    def to_heads(self, x: Tensor) -> Tensor:
        """x [t, H, ..], all heads of the tokens here -> [T, H / size, ..], some of all, in the order of documents."""
        if self._rows.device != x.device:
            self._rows, self._places = copy_to(self._rows, x.device), copy_to(self._places, x.device)
        return heads_of_all(x, self._group, self._counts).index_select(0, self._rows)

    def to_tokens(self, x: Tensor) -> Tensor:
        """The way back: x [T, H / size, ..] -> [t, H, ..]."""
        return tokens_of_all(x.index_select(0, self._places), self._group, self._counts)
