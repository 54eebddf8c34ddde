"""Bytes that one stage of a pipeline sends in a step, in closed form: activations, their gradients, and shared
gradients. Imports no torch.

A rank sends the activation after each of its chunks that has its next one elsewhere, and the gradient of the input of
each of its chunks that has its predecessor elsewhere; where two chunks that follow each other are on one rank, as at
the turn of a V, nothing is sent. The schedule decides when, and not how much.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from danlu.parallel.collective_traffic import CollectiveTraffic, axis_along, ring_bytes
from danlu.parallel.layout import Layout


def messages_by_stage(chunks_of: Sequence[Sequence[int]]) -> list[int]:
    """The number of messages of each stage for one micro-batch. chunks_of: the numbers of each stage's chunks.

    With p stages in a loop with v chunks each, those in between send 2v, the first and the last 2v - 1.
    """
    stage_of = {chunk: stage for stage, chunks in enumerate(chunks_of) for chunk in chunks}
    messages = [0] * len(chunks_of)
    for before, behind in itertools.pairwise(sorted(stage_of)):
        if stage_of[before] != stage_of[behind]:
            messages[stage_of[before]] += 1  # the activation
            messages[stage_of[behind]] += 1  # its gradient
    return messages


def pipeline_traffic(
    chunks_of: Sequence[Sequence[int]],
    stage: int,
    layout: Layout,
    *,
    activation_bytes: Sequence[int],
    shared_bytes: Mapping[int, int],
) -> Iterator[CollectiveTraffic]:
    """Yields the traffic of a stage's rank in a step.

    Args:
        chunks_of: the numbers of each stage's chunks (`parallel.schedules.placement`).
        activation_bytes: for each micro-batch, the bytes that pass between two chunks: T·D numbers, of tokens with
            padding; under sequence parallelism a tensor rank's share of them. Gradients are as large.
        shared_bytes: by the number of stages that have them, the bytes of gradients that are summed over stages: of a
            tied embedding, and of parameters that adapters share.
    """
    axis, _ = axis_along(layout, "pipeline")
    messages = messages_by_stage(chunks_of)[stage] * sum(activation_bytes)
    if messages:
        yield CollectiveTraffic(
            axis, "point-to-point", ring_bytes("point-to-point", 2, messages), what="activations and their gradients"
        )
    for size, count in shared_bytes.items():
        yield CollectiveTraffic(axis, "all-reduce", ring_bytes("all-reduce", size, count), what="what stages share")
