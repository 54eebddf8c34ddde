"""Joint work and decisions of several processes: one outcome for all of them, errors included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from danlu.core.errors import CheckpointError, DanluError
from danlu.parallel.comm import Group
from danlu.training.units import first_few

S = TypeVar("S")
T = TypeVar("T")
_SHOWN_TEXTS = 4  # of different failures


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
    """Runs `share` on every process and `decide` on the first, with the shares of all; returns its decision on all.

    Shares and decision travel as pickles; alone, neither does, and errors are those that were raised.
    Raises on every process the error of any: shares that failed name their ranks, and the error is of danlu's own kind
    if the first of them is (else CheckpointError); its cause is known where it happened. RuntimeError of torch where a
    process has gone meanwhile.
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
            decided = _failure_of_shares(group, everyones) or decide(everyones)
        except Exception as error:
            cause, decided = error, Failure.of(error)
    outcome: T | Failure = group.all_gather_objects(decided)[0]
    if isinstance(outcome, Failure):
        raise outcome.kind(outcome.text) from cause
    return outcome


def one_failure(by_rank: Mapping[int, Failure | None], *, names_rank: bool = False) -> Failure | None:
    """The failures of several ranks as one of the first one's kind, with each text once; None where there is none.

    names_rank: where all texts are the same, whether it is said of which ranks they are; of different ones it always
    is.
    """
    ranks_of: dict[str, list[int]] = {}
    failed = {rank: failure for rank, failure in by_rank.items() if failure is not None}
    for rank, failure in failed.items():
        ranks_of.setdefault(failure.text, []).append(rank)
    if not failed:
        return None
    kind, texts = next(iter(failed.values())).kind, list(ranks_of)
    if len(texts) == 1 and not names_rank:
        return Failure(kind, texts[0])
    lines = [f"rank {ranks[0]}: {text}{_also(ranks[1:])}" for text, ranks in [*ranks_of.items()][:_SHOWN_TEXTS]]
    if hidden := [rank for text in texts[_SHOWN_TEXTS:] for rank in ranks_of[text]]:
        lines.append(f"and other errors on ranks {first_few([str(rank) for rank in hidden], 'others')}")
    return Failure(kind, "\n".join(lines))


def _also(ranks: Sequence[int]) -> str:
    numbers = ", ".join(str(rank) for rank in ranks)
    return f" (and on {len(ranks)} other ranks: {numbers})" if ranks else ""


def _failure_of_shares(group: Group, everyones: Sequence[object]) -> Failure | None:
    """The failures of all ranks that could not share, as one; None if all shared."""
    shared = zip(group.ranks, everyones, strict=True)
    return one_failure({rank: share if isinstance(share, Failure) else None for rank, share in shared}, names_rank=True)
