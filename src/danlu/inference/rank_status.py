"""Messages between the ranks of a rollout: while they answer, and at their end."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from danlu.core import errors
from danlu.core.errors import DanluError, TrainingError
from danlu.inference.completion_bytes import from_bytes, to_bytes
from danlu.inference.request import Completion
from danlu.parallel.comm import Group


class PeerFailedError(Exception):
    """Another rank has an error, which is raised when all have stopped."""


class PeerStatus:
    """Status messages between ranks while they work: whether any still does, and whether one has failed.

    All of them take part in each exchange, with or without work.

    groups: one for each axis along which they lie.
    """

    def __init__(self, *groups: Group) -> None:
        self.groups = groups
        self.any_failed = False

    def begin(self) -> None:
        """Resets the status before work that all ranks begin together."""
        self.any_failed = False

    def exchange(self, *, works: bool, failed: bool = False) -> bool:
        """Whether any rank still works. Raises PeerFailedError where one that works hears of a failure."""
        counts = torch.tensor([float(works), float(failed)])
        for group in self.groups:
            group.sum(counts)
        sums = counts.tolist()
        self.any_failed = sums[1] > 0
        if self.any_failed and works:
            raise PeerFailedError
        return bool(sums[0])


def gather_answers(world: Group, own: Sequence[Completion], error: Exception | None) -> list[Completion]:
    """The completions of all ranks. Raises an error of any on all."""
    payloads = world.all_gather_bytes(_payload_of(own, error))
    if (failure := _first_failure(payloads, error)) is not None:
        raise failure from error
    return [completion for payload in payloads for completion in from_bytes(payload[1:])]


def _payload_of(completions: Sequence[Completion], error: Exception | None) -> bytes:
    """The message of a rank: its completions, or its error."""
    if error is None:
        return b"c" + to_bytes(completions)
    if not isinstance(error, DanluError):
        return b"e" + json.dumps([TrainingError.__name__, f"{type(error).__name__}: {error}"]).encode()
    # Of one that is defined elsewhere, such as ConnectionLost, its nearest base that all ranks know.
    kind = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    return b"e" + json.dumps([kind.__name__, str(error)]).encode()


def _first_failure(payloads: Sequence[bytes], own: Exception | None) -> Exception | None:
    """The error of the first rank that has one; on a rank with one that danlu does not raise on purpose, that one."""
    failures = [(rank, json.loads(payload[1:])) for rank, payload in enumerate(payloads) if payload[:1] == b"e"]
    if not failures:
        return None
    if own is not None and not isinstance(own, DanluError):
        return own
    rank, (kind, text) = failures[0]
    return getattr(errors, kind)(f"rank {rank}: {text}")  # type: ignore[no-any-return]
