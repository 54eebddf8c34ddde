"""The placement of the model's chunks on ranks."""

from __future__ import annotations

V_SHAPED = ("zbv", "dualpipev")
"""Schedules that give the first and the last chunk to the first rank."""


def placement(kind: str, stages: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of the chunks that each rank holds, rising, of a model in `stages * chunks` chunks.

    Chunks go round the ranks in a loop (Megatron-LM, arXiv:2104.04473, section 2.2): rank r of p holds r, p + r, ...
    In V-shaped schedules (arXiv:2401.10241, section 6) they go there and back: rank r holds r and 2p - 1 - r, so that
    the loss is computed where the embedding is, and the turn at the last rank needs no message.

    Args:
        kind: of the schedule.
        stages: pipeline ranks p.
        chunks: on each of them.
    """
    if kind in V_SHAPED:
        return tuple((rank, 2 * stages - 1 - rank) for rank in range(stages))
    return tuple(tuple(range(rank, stages * chunks, stages)) for rank in range(stages))
