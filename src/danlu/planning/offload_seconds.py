"""Seconds of what `memory.offload` moves between a GPU and the host's memory. Imports no torch.

Copies take the share of PCI Express' rate that nvbandwidth reaches: 24.8 of 32 GB/s on eight A100s (NVIDIA/nvbandwidth
issue 53), 52.8 of 64 on eight H100s (issue 24). Activations and shards of parameters are in page-locked memory.
Optimizer state is in pages that are not, which the driver copies to such memory first: taken to be half as fast, and
the host's processors are taken to read and write as fast as PCI Express does, on each card's part of the host. Neither
was measured with danlu; a disk (`memory.folder`) and a CPU's own pages have no seconds here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from danlu.models.chunks import Chunks
from danlu.optim.state_shapes import FLOAT32_BYTES, optimizer_bytes
from danlu.parallel.layout import Layout
from danlu.planning.cards import Card
from danlu.planning.primitives import OperationWork, PassSeconds
from danlu.planning.rank_memory import RankStates, chunks_step, is_on_host, is_paged
from danlu.planning.speeds import CardSpeeds, Efficiency
from danlu.planning.target import Target
from danlu.planning.workload import Workload

LOCKED, PAGED = 0.8, 0.4
"""The shares of PCI Express' rate that copies from and to page-locked memory reach, and those from and to pages."""
KIND = "offload"
"""The kind of their seconds in a plan."""


def host_speeds(card: Card) -> CardSpeeds:
    """The speeds of a card's part of the host, as far as passes over memory go."""
    efficiency = Efficiency()
    return CardSpeeds(replace(card, bandwidth=LOCKED * card.pcie / efficiency.memory), efficiency)


def update_seconds(
    workload: Workload, layout: Layout, states: RankStates, work: list[OperationWork], update: PassSeconds, card: Card
) -> PassSeconds:
    """The seconds of an optimizer's step with what is offloaded. work, update: the same in the card's memory."""
    if is_on_host(workload, layout, "cuda"):
        return PassSeconds.of(work, host_speeds(card))
    if not is_paged(workload, "cuda"):
        return update
    state = optimizer_bytes(workload.recipe.optimizer, states.trained, paged=True).state
    seconds = 2 * state / (PAGED * card.pcie)  # there and back, a parameter at a time
    return update + PassSeconds(forward=seconds, by_kind=MappingProxyType({KIND: seconds}))


def kept_bytes(workload: Workload, chunks: Chunks, chunk: int, micro: int, target: Target) -> int:
    """Bytes that a micro-batch's passes through a chunk send to the host and back."""
    recipe = workload.recipe
    kept_here = recipe.model_copy(update={"memory": recipe.memory.model_copy(update={"offload": []})})
    own = replace(workload, recipe=kept_here)
    return chunks_step(own, chunks, target.device_type, target.kernels, micro, chunk=chunk).activations.kept


def pass_seconds(seconds: PassSeconds, copied_bytes: int, card: Card) -> PassSeconds:
    """The seconds of a micro-batch's passes through a chunk, of which so many bytes are copied meanwhile.

    Copies run next to the computation on a stream of their own; a pass ends when both have. seconds: without copies.
    """
    copied = copied_bytes / (LOCKED * card.pcie)
    forward, backward = max(0.0, copied - seconds.forward), max(0.0, copied - seconds.backward)
    return seconds + PassSeconds(forward, backward, by_kind=MappingProxyType({KIND: forward + backward}))


def shards_seconds(
    workload: Workload,
    layout: Layout,
    states: RankStates,
    micro_batches: int,
    card: Card,
    chunks: Iterable[PassSeconds],
) -> float:
    """Seconds by which a step is longer for shards that come from the host and gradients that go there.

    FSDP2 copies a layer's shards before each gather, and its part of the gradients behind each sum, while the step
    computes. chunks: the seconds of a micro-batch's passes through each chunk of the stage.
    """
    if not is_on_host(workload, layout, "cuda"):
        return 0.0
    section, rate = workload.recipe.parallel, LOCKED * card.pcie
    gathers = 2 * micro_batches if section.shard == "zero3" else 1
    sums = micro_batches if section.reduces_each_micro_batch else 1
    weights = sum(each.bytes for each in states.tensors if each.whole.is_parameter)
    gradients = FLOAT32_BYTES * sum(map(math.prod, states.trained.values()))
    chunks = list(chunks)
    to_card = gathers * weights / rate - micro_batches * sum(each.total for each in chunks)
    # There and back the link has both directions at a time.
    return max(0.0, to_card, sums * gradients / rate - micro_batches * sum(each.backward for each in chunks))
