"""What several processes do and decide together: one outcome for all of them, an error included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from danlu.errors import CheckpointError, DanluError
from danlu.parallel.comm import Group

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An error as it travels."""

    kind: type[DanluError]
    text: str

    @staticmethod
    def of(error: Exception) -> Failure:
        if isinstance(error, DanluError):
            return Failure(type(error), str(error))
        return Failure(CheckpointError, f"{type(error).__name__}: {error}")


def agree(group: Group, share: Callable[[], S], decide: Callable[[list[S]], T]) -> T:
    """Every process does its share, the first decides from what all of them brought, and all get what it decided.

    Shares and decision travel as pickles; alone, neither does, and errors are those that were raised.
    Raises on every process what went wrong on any: that of a share names the rank, and is of danlu's own kind if the
    error there was (else CheckpointError); its cause is known where it happened. RuntimeError of torch where a process
    has gone meanwhile.
    """
    if group.alone:
        return decide([share()])
    cause: Exception | None = None
    try:
        shared: S | Failure = share()
    except Exception as error:  # told to all below; an interrupt ends this process, and the others notice
        cause, shared = error, Failure.of(error)
    everyones = group.gather_objects(shared)
    decided: T | Failure | None = None
    if group.index == 0:
        try:
            decided = _first_failure(group, everyones) or decide(everyones)
        except Exception as error:
            cause, decided = error, Failure.of(error)
    outcome: T | Failure = group.all_gather_objects(decided)[0]
    if isinstance(outcome, Failure):
        raise outcome.kind(outcome.text) from cause
    return outcome


def _first_failure(group: Group, everyones: list[S]) -> Failure | None:
    """The failure of the first rank that has one, with the numbers of the others that have; None if all shared."""
    by_rank = zip(group.ranks, everyones, strict=True)
    failures = [(rank, failure) for rank, failure in by_rank if isinstance(failure, Failure)]
    if not failures:
        return None
    (rank, first), *others = failures
    more = f" (and on {len(others)} other ranks: {', '.join(str(other) for other, _ in others)})" if others else ""
    return Failure(first.kind, f"rank {rank}: {first.text}{more}")
