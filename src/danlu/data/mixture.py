"""The choice of an epoch's rows: held-out rows, and sources in proportion to their weights. Pure functions on
counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from danlu.core.errors import DataError
from danlu.data.permutation import Permutation

MAX_ROWS = 10**8
"""The most rows of a source in an epoch, when it has not that many itself."""


def hold_out(counts: Sequence[int], eval: float | int, seed: int) -> list[np.ndarray]:
    """Draw the rows kept for evaluation, uniformly over the rows of all sources.

    Where the draw takes every row of a source, the one drawn last goes back and the next of the draw is taken instead
    of it, so that every source keeps a row to train on.

    Args:
        counts: usable rows of each source, at least one each.
        eval: a share (below 1) or a number of rows.

    Returns:
        For each source a mask [rows] bool, true where the row is held out.

    Raises:
        DataError: fewer rows would be left to train on than there are sources.
    """
    total = sum(counts)
    wanted = eval if isinstance(eval, int) else max(1, round(eval * total))
    problem = f"data.eval: {eval} holds out {wanted} of {total} rows, which leaves"
    if wanted >= total:
        raise DataError(f"{problem} none to train on")
    limit = total - len(counts)
    if wanted > limit:
        smallest = int(np.argmin(counts))
        raise DataError(
            f"{problem} {total - wanted} to train on for {len(counts)} sources; each keeps one, so at most {limit} can "
            f"be held out. data.train.{smallest} is the smallest, with {counts[smallest]} rows"
        )
    order, ends = Permutation.of(total, seed, "eval"), np.cumsum(counts)
    drawn = order.take(np.arange(wanted))
    mask = np.zeros(total, dtype=bool)
    mask[drawn] = True
    sources = np.searchsorted(ends, drawn, side="right")  # [wanted] the source of each drawn row
    kept = np.asarray(counts) - np.bincount(sources, minlength=len(counts))
    following = wanted
    for source in np.flatnonzero(kept == 0).tolist():
        mask[drawn[np.flatnonzero(sources == source)[-1]]] = False
        kept[source] = 1
        while True:
            row = order[following]
            following += 1
            row_source = int(np.searchsorted(ends, row, side="right"))
            if kept[row_source] > 1:  # a source without rows left is never drawn again: all of its rows were drawn
                break
        mask[row] = True
        kept[row_source] -= 1
    return np.split(mask, ends[:-1])


def epoch_rows(counts: Sequence[int], weights: Sequence[float | None], seed: int) -> list[np.ndarray]:
    """Returns the rows of each source that an epoch uses, as positions among its usable rows.

    Without weights every row once. With weights the source with the most rows is used once, and the others as often as
    their weights ask for relative to it: repeated whole, the rest drawn by the seed. The choice is the same in every
    epoch.

    Args:
        counts: usable rows of each source, at least one each.
        weights: relative shares of rows; all None for no weights.

    Raises:
        DataError: the weights repeat a source so often that an epoch would have `MAX_ROWS` of it and more.
    """
    given = [weight for weight in weights if weight is not None]
    if not given:
        return [np.arange(count) for count in counts]
    largest = int(np.argmax(counts))
    chosen = []
    for number, (count, weight) in enumerate(zip(counts, given, strict=True)):
        share = count if number == largest else counts[largest] * weight / given[largest]
        if share > max(MAX_ROWS, count):
            raise DataError(
                f"data.train.{number}.weight: {weight:g} next to {given[largest]:g} of data.train.{largest}, the "
                f"largest source, asks for {share:.3g} rows of its {count:,} in each epoch. Give weights nearer to one "
                "another"
            )
        wanted = max(1, round(share))
        repeats, rest = divmod(wanted, count)
        drawn = np.sort(Permutation.of(count, seed, "mixture", number).take(np.arange(rest)))
        chosen.append(np.concatenate([np.tile(np.arange(count), repeats), drawn]))
    return chosen
