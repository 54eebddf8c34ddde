"""Which rows an epoch uses: held-out rows, and sources in proportion to their weights. Pure functions on counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from danlu.data.order import Order
from danlu.errors import DataError


def hold_out(counts: Sequence[int], eval: float | int, seed: int) -> list[np.ndarray]:
    """Draw the rows kept for evaluation, uniformly over the rows of all sources.

    Args:
        counts: usable rows of each source.
        eval: a share (below 1) or a number of rows.

    Returns:
        For each source a mask [rows] bool, true where the row is held out.

    Raises:
        DataError: no row would be left to train on, or none to evaluate.
    """
    total = sum(counts)
    wanted = eval if isinstance(eval, int) else max(1, round(eval * total))
    if wanted >= total:
        raise DataError(f"data.eval: {eval} holds out {wanted} of {total} rows, which leaves none to train on")
    mask = np.zeros(total, dtype=bool)
    mask[Order.of(total, seed, "eval").take(np.arange(wanted))] = True
    return np.split(mask, np.cumsum(counts)[:-1])


def epoch_rows(counts: Sequence[int], weights: Sequence[float | None], seed: int) -> list[np.ndarray]:
    """The rows of each source that an epoch uses, as positions among its usable rows.

    Without weights every row once. With weights the source with the most rows is used once, and the others as often as
    their weights ask for beside it: repeated whole, the rest drawn by the seed. The choice is the same in every epoch.

    Args:
        counts: usable rows of each source, at least one each.
        weights: relative shares of rows; all None for no weights.
    """
    given = [weight for weight in weights if weight is not None]
    if not given:
        return [np.arange(count) for count in counts]
    largest = int(np.argmax(counts))
    chosen = []
    for number, (count, weight) in enumerate(zip(counts, given, strict=True)):
        wanted = max(1, round(counts[largest] * weight / given[largest]))
        repeats, rest = divmod(wanted, count)
        drawn = np.sort(Order.of(count, seed, "mixture", number).take(np.arange(rest)))
        chosen.append(np.concatenate([np.tile(np.arange(count), repeats), drawn]))
    return chosen
