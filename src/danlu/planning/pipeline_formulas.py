"""Bubble and activations in flight of pipeline schedules, in closed form. Imports no torch.

p ranks with v chunks each, m micro-batches, rank r. Bubbles hold for forward, input and weight gradient of equal time
(F = B = W) and messages that take none; of gpipe, 1f1b, interleaved and pipedream for any times.
"""

from __future__ import annotations


def bubble_formula(kind: str, stages: int, chunks: int, micro_batches: int) -> tuple[str, float | None]:
    """The bubble of a schedule, idle time over busy time of all ranks, and its formula; None where there is none.

    naive p - 1; gpipe (arXiv:1811.06965), 1f1b and pipedream, between two flushes (arXiv:1806.03377) (p - 1)/m;
    interleaved (p - 1)/vm (arXiv:2104.04473, section 2.2.2); zb-h1 (p - 1)/3m (arXiv:2401.10241, table 1: (p - 1)(F + B
    - W) of m(F + B + W)); zbv (p - 1)/6m, all of it before a rank's first action or after its last, and dualpipev (p -
    1)/6m, both from m = 2p on. Terms for fewer micro-batches than ranks are derived here: then all wait for the first
    micro-batch's way there and back.
    """
    p, v, m = stages, chunks, micro_batches
    match kind:
        case "naive":
            return "p - 1", p - 1
        case "gpipe" | "1f1b" | "pipedream":
            return "(p - 1)/m", (p - 1) / m
        case "interleaved" if m >= p:
            return "(p - 1)/vm", (p - 1) / (v * m)
        case "interleaved":
            return "(p - 1 + (v - 1)(p - m))/vm", (p - 1 + (v - 1) * (p - m)) / (v * m)
        case "zb-h1" if m >= p:
            return "(p - 1)/3m", (p - 1) / (3 * m)
        case "zb-h1":
            return "(2p - 1 - m)/3m", (2 * p - 1 - m) / (3 * m)
        case _ if m >= 2 * p:
            return "(p - 1)/6m", (p - 1) / (6 * m)
    return "none for m < 2p", None


def in_flight_formula(kind: str, rank: int, stages: int, chunks: int, micro_batches: int) -> tuple[str, int]:
    """The most (chunk, micro-batch) pairs that a rank keeps activations of at once, and the formula.

    A chunk is 1/v of a rank's part of the model: 2p chunks of zbv are as much memory as p micro-batches of 1f1b.
    interleaved: 1 + (p - 1)/pv times the memory of 1f1b on the first rank (arXiv:2104.04473), counted on each rank.
    dualpipev: PP + 1 chunks (arXiv:2412.19437, table 2), where PP is our 2p. Minima with m are those of short steps.
    """
    p, v, m, r = stages, chunks, micro_batches, rank
    match kind:
        case "naive":
            return "1", 1
        case "gpipe":
            return "m", m
        case "1f1b" | "pipedream":
            return "min(m, p - r)", min(m, p - r)
        case "interleaved":
            rounds = max(1, m // p)
            return "min(vm, (v - 1)p + 2(p - 1 - r) + 1)", min(v * m, (v - 1) * (m // rounds) + 2 * (p - 1 - r) + 1)
        case "zb-h1":
            return "min(m, p)", min(m, p)
        case "zbv":
            return "min(2p, 2m, m + r + 1)", min(2 * p, 2 * m, m + r + 1)
    return "2p + 1", 2 * p + 1
