"""The actions of all ranks in one order in which each comes after all that it waits for. Imports no torch.

The order depends on the lists alone, so the same one serves any seconds (`pipeline_simulation`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from danlu.parallel.schedules import Action
from danlu.parallel.schedules.dependencies import Result, needs, result

NONE = -1
"""The number of a step that there is not."""


class Step(NamedTuple):
    """One action, with the numbers of the steps with ends that it waits for besides the rank's own computations."""

    rank: int
    position: int
    """The place of the action in its rank's list."""
    holds_rank: bool
    """Whether the rank does nothing else meanwhile: not so of messages and sums."""
    after: int
    also_after: int
    is_receive: bool
    """Whether it is the other end of the send `after`, with the same times."""


def dependency_order(lists: Sequence[Sequence[Action]]) -> tuple[Step, ...]:
    """The actions in an order in which they can be taken: of each rank as many as possible, then of the next.

    Raises AssertionError where ranks wait for each other for ever: a list is wrong, which no recipe can cause.
    """
    search = _Search(lists)
    while search.advance():
        pass
    return tuple(search.steps)


class _Search:
    """Each rank's position in its list, and the steps that gave it what it has."""

    def __init__(self, lists: Sequence[Sequence[Action]]) -> None:
        self.steps: list[Step] = []
        self._lists = lists
        self._num_chunks = len({action.chunk for actions in lists for action in actions if action.kind == "forward"})
        self._position = [0] * len(lists)
        self._sum = [NONE] * len(lists)  # the rank's last sum of gradients
        self._ready: list[dict[Result, int]] = [{} for _ in lists]
        self._sends: dict[tuple[int, int], list[int]] = defaultdict(list)  # by (from, to)
        self._received: dict[tuple[int, int], int] = defaultdict(int)  # receives that were reached, likewise

    def advance(self) -> bool:
        """Takes every rank as far as it can go; False once all have ended."""
        before = len(self.steps)
        for rank, actions in enumerate(self._lists):
            for position in range(self._position[rank], len(actions)):
                if not self._take(rank, position, actions[position]):
                    break
                self._position[rank] = position + 1
        waiting = [
            f"rank {rank} waits for what it needs to {actions[position]}"
            for rank, (actions, position) in enumerate(zip(self._lists, self._position, strict=True))
            if position < len(actions)
        ]
        assert len(self.steps) > before or not waiting, "deadlock: " + "; ".join(waiting)
        return bool(waiting)

    def _take(self, rank: int, position: int, action: Action) -> bool:
        """Takes one action; False where its inputs are not there yet."""
        number = len(self.steps)
        match action.kind:
            case "send":
                assert action.peer is not None
                sends = self._sends[rank, action.peer]
                step = Step(rank, position, False, sends[-1] if sends else NONE, NONE, False)
                sends.append(number)
            case "receive":
                return self._receive(rank, position, action)
            case "reduce":
                # Collectives run next to computations, one after the other; the rank's update waits for them.
                step = Step(rank, position, False, self._sum[rank], NONE, False)
                self._sum[rank] = number
            case "update":
                step = Step(rank, position, True, self._sum[rank], NONE, False)
            case _:
                ready = [self._ready[rank].get(need) for need in needs(action, self._num_chunks)]
                if None in ready:
                    return False
                first, second, *_ = *(each for each in ready if each is not None), NONE, NONE
                step = Step(rank, position, True, first, second, False)
                self._ready[rank][result(action)] = number
        self.steps.append(step)
        return True

    def _receive(self, rank: int, position: int, action: Action) -> bool:
        assert action.peer is not None and action.chunk is not None
        route = action.peer, rank
        if self._received[route] == len(self._sends[route]):
            return False
        send = self._sends[route][self._received[route]]
        self._received[route] += 1
        what, source = (
            ("activation", action.chunk - 1) if action.what == "activation" else ("gradient", action.chunk + 1)
        )
        self._ready[rank][what, source, action.micro] = send
        self.steps.append(Step(rank, position, False, send, NONE, True))
        return True
