"""The schedules by name: `schedule` makes the lists, `schedule_problems` says why a schedule is not possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from danlu.core.errors import RecipeError
from danlu.core.spelling import did_you_mean
from danlu.parallel.schedules import compute_order
from danlu.parallel.schedules.action import Action, Kind, forwards_only
from danlu.parallel.schedules.compute_order import ComputeOrder, actions_of, micro_batches_per_round
from danlu.parallel.schedules.messages import with_messages
from danlu.parallel.schedules.placement import V_SHAPED, placement

_ORDERS: dict[str, Callable[[ComputeOrder, int, int, int], None]] = {
    "naive": compute_order.naive,
    "gpipe": compute_order.gpipe,
    "1f1b": compute_order.one_forward_one_backward,
    "zb-h1": compute_order.zb_h1,
    "pipedream": compute_order.one_forward_one_backward,
}
KINDS = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "pipedream")
"""Names of schedules, as the recipe and `danlu schedule` take them."""


class ScheduleProblem(NamedTuple):
    """Why there is no such schedule: the wrong argument of `schedule`, the fault, and the nearest values that are
    possible.
    """

    argument: str
    message: str


@lru_cache(maxsize=64)
def schedule(kind: str, stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Returns each pipeline rank's actions in a step, in order: one tuple for each rank.

    The lists of `pipedream` are those between two flushes: each micro-batch is a step of its own. Its forward pass on a
    rank takes the newest weights there, and its backward pass takes the same ones once more (weight stashing,
    arXiv:1806.03377, section 3.3). This is not synchronous SGD.

    Args:
        kind: one of `KINDS`.
        stages: pipeline ranks.
        chunks: parts of the model on each of them (`chunks_per_rank`).
        micro_batches: the number in a step; for `pipedream` between two flushes.

    Raises:
        RecipeError: there is no such schedule; the message names the nearest one.
    """
    orders = compute_orders(kind, stages, chunks, micro_batches)
    return with_messages(orders, placement(kind, stages, chunks), update_each=kind == "pipedream")


def compute_orders(kind: str, stages: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """Returns the computations of each rank's list alone. Arguments and errors are those of `schedule`."""
    return [actions_of(codes) for codes in compute_codes(kind, stages, chunks, micro_batches)]


def compute_codes(kind: str, stages: int, chunks: int, micro_batches: int) -> list[list[int]]:
    """Returns the computations of each rank's list as numbers (`ComputeOrder.codes`), in less time. Arguments and
    errors are those of `schedule`.
    """
    problems = [
        f"{argument}: {message}" for argument, message in schedule_problems(kind, stages, chunks, micro_batches)
    ]
    if problems:
        raise RecipeError(problems)
    return [_codes_of_rank(kind, stages, chunks, micro_batches, rank) for rank in range(stages)]


@lru_cache(maxsize=256)
def order_of_rank(kind: str, stages: int, chunks: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """Returns the computations of one rank's list, where there is such a schedule."""
    return tuple(actions_of(_codes_of_rank(kind, stages, chunks, micro_batches, rank)))


def _codes_of_rank(kind: str, stages: int, chunks: int, micro_batches: int, rank: int) -> list[int]:
    order = ComputeOrder(placement(kind, stages, chunks)[rank], micro_batches)
    if kind == "interleaved":
        compute_order.interleaved(order, rank, stages, micro_batches, chunks)
    elif kind in V_SHAPED:
        from danlu.parallel.schedules import v_shaped

        (v_shaped.zbv if kind == "zbv" else v_shaped.dualpipev)(order, rank, stages, micro_batches)
    else:
        _ORDERS[kind](order, rank, stages, micro_batches)
    return order.codes


def unsplit(micro_batches: int) -> tuple[Action, ...]:
    """The actions of a process that has the whole model, in one chunk: each micro-batch there and back."""
    passes: tuple[Kind, Kind] = ("forward", "backward")
    both = [Action(kind, 0, micro) for micro in range(micro_batches) for kind in passes]
    return (*both, Action("reduce", 0), Action("update"))


@lru_cache(maxsize=64)
def evaluation_actions(chunks_of: Sequence[Sequence[int]], micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The forward passes of an evaluation and their messages, one tuple for each rank; of any number of micro-batches.

    chunks_of: numbers of the chunks of each rank (`placement`).
    """
    orders = []
    for chunks in chunks_of:
        # As a wave goes through the chunks; where it meets another one, what is nearer to its end goes first.
        passes = sorted((micro + chunk, -chunk, micro) for chunk in chunks for micro in range(micro_batches))
        orders.append([Action("forward", -chunk, micro) for _, chunk, micro in passes])
    return tuple(map(forwards_only, with_messages(orders, chunks_of, update_each=False)))


def chunks_per_rank(kind: str) -> int:
    """Returns the default number of chunks of a rank; only `interleaved` leaves a choice."""
    return 2 if kind == "interleaved" or kind in V_SHAPED else 1


def schedule_problems(kind: str, stages: int, chunks: int, micro_batches: int) -> Iterator[ScheduleProblem]:
    """Everything that keeps `schedule` from making these lists, without making them."""
    counts = {"stages": stages, "chunks": chunks, "micro_batches": micro_batches}
    too_small = [
        ScheduleProblem(name, f"{count}, but it must be at least 1") for name, count in counts.items() if count < 1
    ]
    if kind not in KINDS:
        guess = did_you_mean(kind, list(KINDS))
        yield ScheduleProblem("kind", f"there is no schedule {kind!r}.{guess} There are {', '.join(KINDS)}")
    elif not too_small:
        yield from _chunk_problems(kind, chunks)
        yield from _micro_batch_problems(kind, stages, micro_batches)
    yield from too_small


def _chunk_problems(kind: str, chunks: int) -> Iterator[ScheduleProblem]:
    fixed = chunks_per_rank(kind)
    if kind == "interleaved":
        if chunks < 2:
            yield ScheduleProblem("chunks", f"{chunks}, but interleaved needs 2 or more on each rank. Use 2, or 1f1b")
    elif chunks != fixed:
        other = "" if fixed > 1 else ", or interleaved"
        yield ScheduleProblem("chunks", f"{chunks}, but {kind} has {fixed} on each rank. Use {fixed}{other}")


def _micro_batch_problems(kind: str, stages: int, micro_batches: int) -> Iterator[ScheduleProblem]:
    if kind == "dualpipev" and micro_batches < 2 * stages:
        yield ScheduleProblem(
            "micro_batches",
            f"{micro_batches}, but dualpipev on {stages} stages needs {2 * stages} or more. Use {2 * stages}, or zbv",
        )
    if kind == "interleaved" and not _fits_rounds(stages, micro_batches):
        below = next(count for count in range(micro_batches, 0, -1) if _fits_rounds(stages, count))
        above = next(count for count in range(micro_batches, 2 * micro_batches) if _fits_rounds(stages, count))
        yield ScheduleProblem(
            "micro_batches",
            f"{micro_batches}, which interleaved on {stages} stages cannot divide into equal rounds. Use {below} or "
            f"{above}",
        )


def _fits_rounds(stages: int, micro_batches: int) -> bool:
    return micro_batches % micro_batches_per_round(stages, micro_batches) == 0
