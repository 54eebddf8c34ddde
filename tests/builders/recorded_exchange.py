"""A ring of ranks in one process: each runs by itself, and receives what the others have sent the last time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Exchange = list[tuple[int, Tensor]]
"""What one exchange sends, and to which rank."""


class RecordedGroup:
    """In the place of a `Group` of several ranks: keeps what is sent, and receives what was sent in the last round."""

    alone = False

    def __init__(self, index: int, last_round: Sequence[list[Exchange]]) -> None:
        self.index, self.last_round = index, last_round
        self.exchanges: list[Exchange] = []

    @property
    def size(self) -> int:
        return len(self.last_round)

    def start_exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Callable[[], None]:
        """As `Group.start_exchange`; receives zeros where the last round got less far."""
        number = len(self.exchanges)
        self.exchanges.append([(receiver, tensor.detach().clone()) for tensor, receiver in sends])
        arrived: dict[int, list[Tensor]] = {}
        for sender in {sender for _, sender in receives}:
            recorded = self.last_round[sender]
            exchange = recorded[number] if number < len(recorded) else []
            arrived[sender] = [tensor for receiver, tensor in exchange if receiver == self.index]
        with torch.no_grad():
            for tensor, sender in receives:
                tensor.copy_(arrived[sender].pop(0)) if arrived[sender] else tensor.zero_()
        return lambda: None


def run_ring(function: Callable[[Any], Any], size: int) -> list[Any]:
    """What `function(group)` returns for each of `size` ranks.

    What an exchange sends follows from what those before it received, so one more round than there are exchanges has
    the right numbers throughout.
    """
    last_round: list[list[Exchange]] = [[] for _ in range(size)]
    rounds = 0
    while True:
        groups = [RecordedGroup(index, last_round) for index in range(size)]
        results = [function(group) for group in groups]
        last_round = [group.exchanges for group in groups]
        rounds += 1
        if rounds > max(map(len, last_round)):
            return results
