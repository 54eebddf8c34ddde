"""Bytes that one process sends in a step, in closed form: a record for each axis and collective. Imports no torch.

Ψ counts the communicated bytes. fully_shard shards a tensor by rows and pads the last shards, so a tensor of 10 rows is
sent as 12 among 4 (`padded_elements`); parameters that tensor parallelism cuts count with their local shard. The
formulas follow a ring (`collective_traffic.ring_bytes`): of N, each sends (N-1)/N of gathered or scattered bytes, twice
that of all-reduced ones. Tests compare them with counts (`parallel.traffic_counter`).

A rank of a pipeline sends the activation after each of its chunks that has its next one elsewhere, and the gradient of
the input of each of its chunks that has its predecessor elsewhere; where two chunks that follow each other are on one
rank, as at the turn of a V, nothing is sent. The schedule decides when, and not how much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, NamedTuple

from danlu.parallel.collective_traffic import (
    BUCKET_BYTES,
    CollectiveTraffic,
    GroupShape,
    Kind,
    axis_along,
    axis_of_data_ranks,
    ring_bytes,
)
from danlu.parallel.layout import Layout, expert_shard_dim
from danlu.recipe.sections import Parallel

REDUCED_BYTES = {"fp32": 4, "bf16": 2}
Half = Literal["embedding", "attention", "mlp", "head"]
_HALVES: tuple[Half, Half] = ("attention", "mlp")
_LOSS_CALLS = 2
"""Sums of the cross-entropy over a cut vocabulary in a micro-batch, about."""


@dataclass(frozen=True)
class Weight:
    """A parameter as data ranks share it."""

    shape: tuple[int, ...]  # of the local shard of tensor parallelism
    trained: bool = True
    sharded: bool = True
    """Whether fully_shard shards it. Norms and routers are whole on each process, and their gradients summed apart; so
    are experts that one rank of a copy of the model has."""
    gathered_bytes: int = 4
    """Bytes of one element when it is gathered: 2 where fully_shard's policy computes in bf16, 1 of quantized codes."""
    of_experts: bool = False
    """Whether this is a weight of experts [E, ..], those of this rank: sharded and summed among ranks that have the
    same ones."""
    gathers: int = 2
    """The number of times that zero3 gathers it in a micro-batch: for the forward and the backward pass, with or
    without recompute; once for parameters outside of layers, which are kept, for the backward pass begins with them.
    Each backward pass ends by freeing them, so a stage with several chunks gathers them once for each."""
    layer: int | None = None
    """The layer that it is gathered with; None outside of layers."""


def padded_elements(shape: Sequence[int], shards: int, dim: int = 0) -> int:
    """Elements communicated for a tensor that is sharded, by rows or along another dimension: as many indices of it for
    each shard, the last ones padded."""
    sizes = list(shape) or [1]
    sizes[dim] = -(-sizes[dim] // shards) * shards
    return math.prod(sizes)


def data_traffic(
    weights: Sequence[Weight], layout: Layout, section: Parallel, *, micro_batches: int, rank: int = 0
) -> Iterator[CollectiveTraffic]:
    """Yields the traffic of a rank to other data ranks in a step of `micro_batches` micro-batches: gradients and
    parameters.

    With Ψ bytes in each type, N data ranks, M micro-batches:

        none             2(N-1)/N·Ψ          gradients are summed, once (as in DDP)
        zero1            2(N-1)/N·Ψ          gradients are scattered, and parameters gathered, once
        zero2            (M+1)(N-1)/N·Ψ      gradients are scattered after each micro-batch, parameters gathered once
        zero3            3M(N-1)/N·Ψ         parameters are gathered forward and backward, gradients scattered (less
                         M(N-1)/N of embedding and head, which stay from forward to backward)
        replicate: R     the above among N/R shards, and 2(R-1)/R·ΨR/N of gradients' shares, once

    `accumulate: local` scatters once where zero2 and zero3 do so M times, and `sharded` M times where zero1 does once.
    Gradients of parameters that are not sharded are summed over all data ranks in float32, once. For distributed
    experts, N is the number of ranks that have the same ones, and Ψ counts those of this rank.
    """
    for of_experts in (False, True):
        own = [weight for weight in weights if weight.of_experts == of_experts]
        expert = layout.expert if of_experts else 1
        yield from _among_data_ranks(own, layout, section, micro_batches, expert, data_number(layout, rank))


def data_number(layout: Layout, rank: int) -> int:
    """The number of a rank among data and context ranks."""
    place = layout.coordinates(rank)
    return (place["replicate"] * layout.shard + place["shard"]) * layout.context + place["context"]


class _DataGroup(NamedTuple):
    """Some data and context ranks, by their numbers among these: `start`, `start + step`, ..."""

    layout: Layout
    start: int
    step: int
    size: int

    def traffic(self, kind: Kind, full_bytes: int, what: str, calls: int = 1) -> Iterator[CollectiveTraffic]:
        """The record of collectives that move these bytes in all; none for nothing, or for a group of one."""
        if self.size > 1 and full_bytes:
            sent_bytes = ring_bytes(kind, self.size, full_bytes)
            yield CollectiveTraffic(self.axis, kind, sent_bytes, calls, what, self.shape)

    @property
    def axis(self) -> str:
        return axis_of_data_ranks(self.layout, self.start, self.step, self.size)

    @property
    def shape(self) -> GroupShape:
        return GroupShape(self.size, self.step * self.layout.tensor)


def _among_data_ranks(
    weights: Sequence[Weight], layout: Layout, section: Parallel, micro_batches: int, expert: int, number: int
) -> Iterator[CollectiveTraffic]:
    """`data_traffic` of parameters that every `expert`-th data and context rank has. number: of the rank among them."""
    count = layout.data * layout.context // expert
    shards = layout.expert_sizes[2] if expert > 1 else layout.shard * layout.context
    index = number // expert  # among those with the same parameters
    every = _DataGroup(layout, number % expert, expert, count)
    of_copy = _DataGroup(layout, (index - index % shards) * expert + number % expert, expert, shards)
    replicas = _DataGroup(layout, index % shards * expert + number % expert, expert * shards, count // shards)
    reduced = REDUCED_BYTES[section.reduce]
    if section.shard == "none":
        gradients = sum(math.prod(weight.shape) for weight in weights if weight.trained)
        # Buckets leave experts to `ParallelContext`, which sums in float32.
        element_bytes = reduced if expert == 1 else 4
        calls = 1 + gradients * element_bytes // BUCKET_BYTES
        yield from every.traffic("all-reduce", gradients * element_bytes, "gradients", calls)
        return
    sharded = [
        (weight, padded_elements(weight.shape, shards, expert_shard_dim(weight.shape, shards) * weight.of_experts))
        for weight in weights
        if weight.sharded
    ]
    each = micro_batches if section.shard == "zero3" else 0
    gathered = sum(count * weight.gathered_bytes * (each * weight.gathers or 1) for weight, count in sharded)
    gradients = sum(count for weight, count in sharded if weight.trained) * reduced
    apart = sum(math.prod(weight.shape) for weight in weights if weight.trained and not weight.sharded)
    scatters = micro_batches if section.reduces_each_micro_batch else 1
    what = "of experts" if expert > 1 else "of norms and routers"
    units = {weight.layer: each * weight.gathers or 1 for weight, _ in sharded}
    with_gradients = len({weight.layer for weight, _ in sharded if weight.trained})
    yield from of_copy.traffic("all-gather", gathered, "parameters", sum(units.values()))
    yield from of_copy.traffic("reduce-scatter", scatters * gradients, "gradients", scatters * with_gradients)
    yield from replicas.traffic("all-reduce", gradients // shards, "shares of gradients", with_gradients)
    yield from every.traffic("all-reduce", apart * 4, f"gradients {what}")


class Crossings(NamedTuple):
    """The number of times that all activations [T, D] cross the borders of a region."""

    entrances: int = 0
    exits: int = 0


@dataclass(frozen=True)
class TensorRegion:
    """A part of a decoder that tensor ranks compute together, and the crossings of its borders in a step.

    After its exit partial results are summed (`g` of Megatron, arXiv:1909.08053, section 3), before its entrance
    gradients are (`f`). With sequence parallelism tokens are gathered at one border and scattered at the other.
    """

    layer: int | None  # None outside of layers
    half: Half
    forward: Crossings
    backward: Crossings
    recomputed: Crossings


def decoder_regions(
    recompute: Sequence[tuple[str, int | None]],
    *,
    first_with_gradient: int = 0,
    trained_between: bool = False,
    gathered_again: Collection[int] = (),
    to_the_end: bool = False,
    with_gradients: tuple[Collection[int], Collection[int]] | None = None,
    has_embedding: bool = True,
    has_head: bool = True,
) -> list[TensorRegion]:
    """The regions of a decoder, or of a stage of a pipeline: embedding, attention and MLP of each layer, head.

    Halves of layers are numbered: attention of layer 0, its MLP, attention of layer 1, and so on.

    recompute: kind and number of segment of each layer, as `memory.layer_plan.LayerPlan` has them.
    first_with_gradient: the first half with an input that needs a gradient: something is trained in front of its
    entrance.
    trained_between: whether that lies behind the exit of the region before (a norm, a bottleneck), so that no gradient
        goes back through that exit; otherwise it lies within that region.
    gathered_again: with sequence parallelism, halves in layers that are not recomputed as a whole, with a product that
    needs its input once more in the backward pass, where it is gathered again instead of being kept.
    to_the_end: whether the last recomputed operation of a layer lies after the MLP's exit: norms after the halves of a
    layer, or bottlenecks. Otherwise recomputation ends before it.
    with_gradients: the halves with a gradient at their entrances, and those with one at their exits; None: as the first
        two arguments say, which is so where each half reads the output of the one before.
    has_embedding, has_head: whether the stage has them.
    """
    # The region before the first half with a gradient still has one at its exit, if something in it is trained.
    first_exit = first_with_gradient - 1 + trained_between
    embedding = TensorRegion(None, "embedding", Crossings(exits=1), Crossings(exits=int(first_exit < 0)), Crossings())
    regions = [embedding] if has_embedding else []
    for layer, (kind, segment) in enumerate(recompute):
        is_run_again = kind == "full"
        # Layers of a segment but the last run once more besides, for the input of the layer behind them.
        gives_input = segment is not None and recompute[layer + 1 : layer + 2] == [(kind, segment)]
        for number, half in enumerate(_HALVES, 2 * layer):
            enters, leaves = number >= first_with_gradient, number >= first_exit
            if with_gradients is not None:
                enters, leaves = number in with_gradients[0], number in with_gradients[1]
            reaches_exit = is_run_again and (half == "attention" or to_the_end)
            regions.append(
                TensorRegion(
                    layer,
                    half,
                    Crossings(1, 1),
                    Crossings(int(enters), int(leaves)),
                    Crossings(is_run_again + gives_input + (number in gathered_again), reaches_exit + gives_input),
                )
            )
    head = TensorRegion(None, "head", Crossings(entrances=1), Crossings(entrances=1), Crossings())
    return [*regions, head] if has_head else regions


@dataclass(frozen=True)
class TensorStep:
    """The facts of a model, and of a step on it, that decide the traffic between tensor ranks."""

    tokens: int  # that one process takes through the model in a step, over all micro-batches
    targets: int  # of them, with a loss
    hidden_size: int
    element_bytes: int  # of activations
    regions: Sequence[TensorRegion]
    partial: Mapping[int, int] = field(default_factory=dict)
    """Maps the number of processes of a sum to the local elements with gradients that are parts of such a sum: norms of
    queries and keys; with `sequence` all norms and biases behind rows; of adapters the matrix that is whole; keys and
    values of a head that several processes hold, among these."""
    row_norms: int = 0
    """The number of sums that DoRA on matrices with sharded rows makes for the norms of whole rows."""
    head_norms: int = 0
    """Numbers that norms over all queries and keys sum: for each token one forward, one backward, and one where the
    norm is recomputed."""
    micro_batches: int = 1
    own_embeddings: int = 0
    """Columns of layers' own embeddings, which are looked up in rows that are cut as the vocabulary is."""
    trains_own_embeddings: bool = False
    maxima: Sequence[int] = ()
    """Numbers of each maximum of factors with one scale (`shared_scales`), in one micro-batch."""
    losses: int = 5
    """Numbers of each target that the cross-entropy reduces: greatest logit, sum of exponentials, the target's logit,
    for label smoothing the sum of all, and whether a token before the target has the greatest logit."""


def tensor_traffic(step: TensorStep, layout: Layout, section: Parallel) -> Iterator[CollectiveTraffic]:
    """Yields the traffic between tensor ranks in a step: activations (Megatron, arXiv:1909.08053, section 3).

    Where everything is trained and kept, that is forward two sums of [T, D] a layer (behind attention and MLP) and one
    behind the embedding; backward, two a layer (at their entrances) and one before the head: 4L + 2 all-reduces of T·D.
    With `sequence` each becomes an all-gather and a reduce-scatter of the same size, at entrance and exit: the same
    bytes; and 2L all-gathers more, of tensors that would otherwise be kept for the backward pass (arXiv:2205.05198,
    section 4.2.2). The cross-entropy sends a few numbers for each target, never logits.
    """
    once = step.tokens * step.hidden_size * step.element_bytes
    each = step.micro_batches
    sums = sum(part.forward.exits + part.backward.entrances + part.recomputed.exits for part in step.regions)
    if section.sequence:
        gathers = sum(part.forward.entrances + part.backward.exits + part.recomputed.entrances for part in step.regions)
        yield from _among_tensor_ranks(layout, "all-gather", gathers * once, "activations", gathers * each)
        yield from _among_tensor_ranks(layout, "reduce-scatter", sums * once, "activations", sums * each)
    else:
        yield from _among_tensor_ranks(layout, "all-reduce", sums * once, "activations", sums * each)
    yield from _own_embeddings(step, layout, section)
    numbers = (
        (step.losses * step.targets, "numbers of the cross-entropy", _LOSS_CALLS * each),
        (step.row_norms, "norms of rows", each),
        (step.head_norms, "norms of all heads", each),
        (sum(step.maxima) * each, "scales of whole tensors", len(step.maxima) * each),
    )
    for count, what, calls in numbers:
        yield from _among_tensor_ranks(layout, "all-reduce", count * 4, what, calls)
    for size, elements in step.partial.items():
        yield from _among_tensor_ranks(layout, "all-reduce", elements * 4, "partial gradients", among=size)


def _own_embeddings(step: TensorStep, layout: Layout, section: Parallel) -> Iterator[CollectiveTraffic]:
    """Yields the traffic of layers' own embeddings: sums of rows, and their gradients where tokens are cut."""
    rows, each = step.tokens * step.own_embeddings * step.element_bytes, step.micro_batches
    if not section.sequence:
        yield from _among_tensor_ranks(layout, "all-reduce", rows, "layers' own embeddings", each)
        return
    yield from _among_tensor_ranks(layout, "reduce-scatter", rows, "layers' own embeddings", each)
    if step.trains_own_embeddings:
        yield from _among_tensor_ranks(layout, "all-gather", rows, "layers' own embeddings", each)


@dataclass(frozen=True)
class RowExchange:
    """The exchange between ranks with other experts in one layer of a step, over all its micro-batches, seen from one
    rank."""

    sent_rows: int  # of its own tokens, to experts that are elsewhere
    received_rows: int  # of others' tokens, to its experts
    num_experts: int
    micro_batches: int
    row_bytes: int  # of a row in the type of activations, as outputs and the gradients of inputs travel
    dispatched_bytes: int  # of a row on its way to the experts
    gradient_bytes: int  # of a row of the gradients of outputs, on their way to the experts
    runs: int = 1  # how often the layer runs in a micro-batch: once more where it is recomputed
    output_gradients: bool = True  # whether something that is trained lies in front of what experts give
    input_gradients: bool = True  # or in front of the experts


def expert_traffic(exchanges: Sequence[RowExchange], layout: Layout, *, rank: int = 0) -> Iterator[CollectiveTraffic]:
    """Yields the traffic between ranks that have other experts: rows of D numbers to the experts and back, and
    gradients.

    Four all-to-alls in a layer (two forward, two backward; two more where the layer is recomputed). A rank that sends n
    rows of its tokens elsewhere, and receives m, sends n and gives back m; it likewise sends n rows of gradients of the
    experts' outputs, and gives back m. What is sent may be in few bits, what comes back never is. Before, ranks tell
    each other how many rows of each of E experts come: E numbers of 8 bytes, once, also where the layer is recomputed.
    """
    row_bytes = counts = calls = 0
    for each in exchanges:
        row_bytes += (each.sent_rows * each.dispatched_bytes + each.received_rows * each.row_bytes) * each.runs
        row_bytes += each.sent_rows * each.gradient_bytes * each.output_gradients
        row_bytes += each.received_rows * each.row_bytes * each.input_gradients
        counts += each.micro_batches * each.num_experts
        calls += each.micro_batches * (2 * each.runs + each.output_gradients + each.input_gradients)
    number = data_number(layout, rank)
    group = _DataGroup(layout, number - number % layout.expert, 1, layout.expert)
    if row_bytes:  # counted as they are: the share that stays here is no n-th of them
        yield CollectiveTraffic(group.axis, "all-to-all", Fraction(row_bytes), calls, "rows of tokens", group.shape)
    of_counts = sum(each.micro_batches for each in exchanges)
    yield from group.traffic("all-to-all", counts * 8, "rows of each expert", of_counts)


def _among_tensor_ranks(
    layout: Layout, kind: Kind, full_bytes: int, what: str, calls: int = 1, among: int | None = None
) -> Iterator[CollectiveTraffic]:
    """The record of collectives that move these bytes in all; none for nothing, or for a group of one.

    among: size of the group, where it is not the whole axis.
    """
    size = layout.tensor if among is None else among
    if size > 1 and full_bytes:
        yield CollectiveTraffic("tensor", kind, ring_bytes(kind, size, full_bytes), calls, what, GroupShape(size))


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
    stride = layout.world // layout.pipeline
    messages = messages_by_stage(chunks_of)[stage]
    if message_bytes := messages * sum(activation_bytes):
        calls, group = messages * len(activation_bytes), GroupShape(layout.pipeline, stride)
        what = "activations and their gradients"
        yield CollectiveTraffic(axis, "point-to-point", Fraction(message_bytes), calls, what, group)
    for size, count in shared_bytes.items():
        group = GroupShape(size, stride * (layout.pipeline - 1) // max(1, size - 1))
        sent_bytes = ring_bytes("all-reduce", size, count)
        yield CollectiveTraffic(axis, "all-reduce", sent_bytes, 1, "what stages share", group)
