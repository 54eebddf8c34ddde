"""A rank's computations in order: the builder, and schedules that place chunks in a loop.

p ranks, m micro-batches, r the rank. The optimal schedules here are optimal for forward, input and weight gradient of
equal time (F = B = W); the messages between are added by `messages.py`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from danlu.parallel.schedules.action import Action, Kind

PASSES: tuple[Kind, ...] = ("forward", "input", "weight", "backward")
"""The computations of a list, by the numbers that `ComputeOrder.codes` has for them."""
_FORWARD, _INPUT, _WEIGHT, _BACKWARD = range(4)


class ComputeOrder:
    """The computations of one rank. Each call appends the next micro-batch of a chunk, and nothing where none is left.

    That micro-batches go through a chunk in their order holds for every schedule, so that phases can be written as
    counts ("p - r forward passes") that also hold where there are fewer micro-batches than the pipeline is deep.
    """

    def __init__(self, chunks: tuple[int, ...], micro_batches: int) -> None:
        self.codes: list[int] = []
        """4 x chunk + the number of the computation in `PASSES`."""
        self._forwards = dict.fromkeys(chunks, micro_batches)  # that are left
        self._backwards = dict.fromkeys(chunks, micro_batches)
        self._put_off: deque[int] = deque()  # chunks of weight gradients, the oldest first

    def forward(self, chunk: int) -> None:
        """Appends the next forward pass of a chunk."""
        if self._forwards[chunk]:
            self._forwards[chunk] -= 1
            self.codes.append(4 * chunk)

    def backward(self, chunk: int) -> None:
        """Appends the next whole backward pass of a chunk."""
        if self._backwards[chunk]:
            self._backwards[chunk] -= 1
            self.codes.append(4 * chunk + _BACKWARD)

    def input(self, chunk: int) -> None:
        """Appends the next input gradient of a chunk, and puts its weight gradients off."""
        if self._backwards[chunk]:
            self._backwards[chunk] -= 1
            self._put_off.append(chunk)
            self.codes.append(4 * chunk + _INPUT)

    def weight(self) -> None:
        """Appends the weight gradients that were put off the longest ago: their activations are kept the longest."""
        if self._put_off:
            self.codes.append(4 * self._put_off.popleft() + _WEIGHT)

    def backwards_left(self, chunk: int) -> int:
        """How many micro-batches of a chunk have no backward pass yet."""
        return self._backwards[chunk]

    @property
    def weights_left(self) -> int:
        """How many weight gradients are put off."""
        return len(self._put_off)


def actions_of(codes: Sequence[int]) -> list[Action]:
    """The computations of a rank with their micro-batches, which go through each chunk in their order."""
    forwards: dict[int, int] = defaultdict(int)
    backwards: dict[int, int] = defaultdict(int)
    put_off: dict[int, deque[int]] = defaultdict(deque)
    actions = []
    for code in codes:
        chunk, number = divmod(code, 4)
        if number == _WEIGHT:
            micro = put_off[chunk].popleft()
        else:
            passes = backwards if number else forwards
            micro = passes[chunk]
            passes[chunk] += 1
            if number == _INPUT:
                put_off[chunk].append(micro)
        actions.append(Action(PASSES[number], chunk, micro))
    return actions


def naive(order: ComputeOrder, rank: int, stages: int, micro_batches: int) -> None:
    """One micro-batch there and back before the next begins: at any time one rank computes."""
    for _ in range(micro_batches):
        order.forward(rank)
        order.backward(rank)


def gpipe(order: ComputeOrder, rank: int, stages: int, micro_batches: int) -> None:
    """All forward passes, then all backward passes (GPipe, arXiv:1811.06965, figure 2).

    Backward passes begin with micro-batch 0, as torch's do, not with the last one, as in the paper's figure: the
    time is the same, and every schedule sums gradients in the same order.
    """
    for _ in range(micro_batches):
        order.forward(rank)
    for _ in range(micro_batches):
        order.backward(rank)


def one_forward_one_backward(order: ComputeOrder, rank: int, stages: int, micro_batches: int) -> None:
    """p - r forward passes, then one backward and one forward in turns (PipeDream's 1F1B, arXiv:1806.03377)."""
    for _ in range(stages - rank):
        order.forward(rank)
    for _ in range(micro_batches):
        order.backward(rank)
        order.forward(rank)


def zb_h1(order: ComputeOrder, rank: int, stages: int, micro_batches: int) -> None:
    """1F1B with weight gradients that run r micro-batches behind (ZB-H1, arXiv:2401.10241, section 2.2 and figure 2).

    The later the rank, the more it puts off: input gradients reach the first rank p - 1 units earlier, and the put-off
    work fills the end. Every rank holds p micro-batches, as many as 1F1B holds on its first.
    """
    for _ in range(stages - rank):
        order.forward(rank)
    for _ in range(micro_batches):
        order.input(rank)
        if order.weights_left > rank:
            order.weight()
        order.forward(rank)
    while order.weights_left:
        order.weight()


def interleaved(order: ComputeOrder, rank: int, stages: int, micro_batches: int, chunks: int) -> None:
    """1F1B over several chunks of each rank (Megatron-LM, arXiv:2104.04473, section 2.2).

    Micro-batches go in rounds of p: all of a round through a rank's first chunk, then through its next one. Where m
    is no multiple of p, the rounds are longer, as torch makes them.
    """
    round_ = micro_batches_per_round(stages, micro_batches)
    local = [chunk * stages + rank for chunk in range(chunks)]
    rounds = micro_batches // round_
    forwards = [chunk for _ in range(rounds) for chunk in local for _ in range(round_)]
    backwards = [chunk for _ in range(rounds) for chunk in reversed(local) for _ in range(round_)]
    ahead = min(len(forwards), (chunks - 1) * round_ + 2 * (stages - 1 - rank))
    for chunk in forwards[:ahead]:
        order.forward(chunk)
    for forward_chunk, backward_chunk in zip(forwards[ahead:], backwards, strict=False):
        order.forward(forward_chunk)
        order.backward(backward_chunk)
    for chunk in backwards[len(forwards) - ahead :]:
        order.backward(chunk)


def micro_batches_per_round(stages: int, micro_batches: int) -> int:
    """Micro-batches that go through a chunk before the rank's next one begins; m is a multiple of it if it fits."""
    return micro_batches // max(1, micro_batches // stages)
