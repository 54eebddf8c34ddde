"""A pipeline's timeline as text, two lines for each rank: its actions, and their micro-batches.

Only for timelines in which all actions last a whole number of units, as those of simulations do.
"""

from __future__ import annotations

from collections.abc import Sequence

from danlu.parallel.timeline import TimelineEvent

LETTERS = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
LEGEND = "F forward, B backward, I input gradient, W weight gradient, . idle; below the micro-batch, its last digit"
LATER = "small letters: chunks behind the rank's first"


def text_timeline(events: Sequence[TimelineEvent], unit_s: float, max_columns: int) -> list[str] | None:
    """The lines of a drawing with a column for each unit, or None if it does not fit or units are no measure of it."""
    drawn = [event for event in events if event.kind in LETTERS]
    end = max((round(event.end_s / unit_s) for event in drawn), default=0)
    ranks = sorted({event.rank for event in drawn})
    label = f"rank {max(ranks, default=0)}  "
    exact = all(
        abs(time / unit_s - round(time / unit_s)) < 1e-6 for event in drawn for time in (event.start_s, event.end_s)
    )
    if not drawn or not exact or len(label) + end > max_columns:
        return None
    lines = []
    for rank in ranks:
        letters, micros = ["."] * end, [" "] * end
        first = min(event.chunk or 0 for event in drawn if event.rank == rank)
        for event in (event for event in drawn if event.rank == rank):
            letter = LETTERS[event.kind]
            for column in range(round(event.start_s / unit_s), round(event.end_s / unit_s)):
                letters[column] = letter if event.chunk == first else letter.lower()
                micros[column] = str((event.micro or 0) % 10)
        lines += [f"rank {rank}".ljust(len(label)) + "".join(letters), " " * len(label) + "".join(micros).rstrip()]
    later = len({event.chunk for event in drawn}) > len(ranks)
    return [*lines, LEGEND, *([LATER] if later else [])]
