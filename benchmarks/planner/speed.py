"""The expected speed of a published run: danlu's layer operations on its shape, a card's roofline, and its collectives.

A run's layers are danlu's (`danlu.planning.layer_work`) with the sizes of its `Architecture`, attention by a flash
kernel, and what its engine does otherwise: operators that are compiled into one pass, types of gradients, resharding.
Collectives are rings over the links of `danlu.planning.cluster`.

Few constants, `Constants`, are fitted: shares of a card's peaks that kernels reach. No run is judged by constants that
were fitted on it (`errors_of_speed`).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from danlu.planning.batch_shape import BatchShape, ContextCut, RankShare
from danlu.planning.cluster import Cluster
from danlu.planning.layer_graph import LayerGraph
from danlu.planning.layer_work import layer_work
from danlu.planning.primitives import Moved, OperationWork, Primitive, Product
from danlu.planning.speeds import COMPILED_PASSES, EAGER_PASSES, CardSpeeds, Efficiency
from danlu.planning.step_work import embedding_work, loss_work, norm_work
from planner.baselines import trained_parameters
from planner.layers import layer_of, training_of
from planner.published_cards import card
from planner.rows import PublishedRun

CARDS_OF_NODE = 8
_LOSS_BYTES, _COMPILED_LOSS_BYTES = 40, 16
"""Bytes of a logit that a cross-entropy reads and writes besides those of danlu's kernels: its float32 copy, the
logarithms of probabilities, their gradient and its narrow copy; where they are compiled, one pass each way."""
_FUSED_LOSS = frozenset({"llm-foundry"})
"""Engines with a kernel for the cross-entropy: llmfoundry/models/mpt/modeling_mpt.py@0085285a (fused_crossentropy)."""
_CAST_BYTES, _COMPILED_CAST_BYTES = 5, 3
"""Bytes of a number that is made an 8-bit one: it is read for its scale, read again, and written; where they are
compiled, the operator that makes it finds its scale."""
_BYTES = {"fp32": 4, "bf16": 2, "int8": 1, None: 4}
"""Bytes of a number; of a type that is not stated those of float32."""


@dataclass(frozen=True)
class Constants:
    """The constants of an engine, but for its factor."""

    product: float = 0.9
    narrow: float = 128.0
    attention: float = 0.4
    memory: float = 0.8
    link: float = 0.7
    """The share of a link's bytes/s that collectives reach."""
    hidden: float = 0.5
    """The share of the seconds of hidden collectives by which they slow the work that hides them."""
    call_s: float = 2e-5
    """Seconds of a host for one operator. No row of llm-foundry depends on it, so it is not fitted: danlu's own figures
    say it (`own_figures.host_seconds`)."""


_FITTED = ("product", "narrow", "attention", "memory", "link", "hidden")
_SHARES = frozenset({"product", "attention", "memory", "link", "hidden"})
_LARGEST_ERROR = 0.3
"""Errors count as this one at most, so that single rows do not decide."""


@dataclass(frozen=True)
class StepWork:
    """The work of one GPU in one step of a run."""

    micro: Mapping[Primitive, float]
    """Primitive -> how many times it is in one micro-batch."""
    hidden_bytes: float
    """Bytes that a GPU sends in a micro-batch while it computes."""
    exposed_bytes: float
    """Bytes that a GPU sends in a micro-batch while it waits."""
    group: int
    """Neighbouring GPUs that `hidden_bytes` go through."""
    exposed_group: int
    once_bytes: float
    """Bytes that a step sends once."""
    update_bytes: float
    """Bytes that the optimizer reads and writes."""


class Prepared:
    """A run with its work, which no constant changes."""

    def __init__(self, run: PublishedRun) -> None:
        assert run.speed is not None and run.card is not None, "rows without a speed or a card are left out"
        self.run = run
        self.measured = run.speed.tokens_per_s
        self.card = card(run.card)
        nodes = math.ceil(run.gpus / CARDS_OF_NODE)
        self.cluster = Cluster.of_card(self.card, nodes, min(run.gpus, CARDS_OF_NODE))

    @cached_property
    def work(self) -> StepWork:
        return step_work(self.run)

    def seconds(self, constants: Constants) -> float:
        """Expected seconds of one step."""
        run, work = self.run, self.work
        speeds = CardSpeeds(self.card, efficiency_of(run, constants))
        compute = sum(times * primitive.seconds(speeds) for primitive, times in work.micro.items())
        hidden = work.hidden_bytes / self.bytes_per_s(work.group, constants)
        exposed = work.exposed_bytes / self.bytes_per_s(work.exposed_group, constants)
        micro = max(compute, hidden) + constants.hidden * min(compute, hidden) + exposed
        once = work.once_bytes / self.bytes_per_s(work.group, constants)
        return micro * micro_batches_with_bubble(run) + once + speeds.moved(work.update_bytes)

    def tokens_per_s(self, constants: Constants) -> float:
        """Expected tokens/s of a GPU."""
        layout = self.run.layout
        tokens = self.run.length * self.run.micro_batch * self.run.accumulation * layout.data / layout.gpus
        return tokens / self.seconds(constants)

    def bytes_per_s(self, ranks: int, constants: Constants) -> float:
        """Bytes that each of some neighbouring GPUs sends in a second.

        Rings through several nodes enter each one as many times as it has ranks of the group, by a network card each.
        """
        if ranks <= 1:
            return math.inf
        within = self.cluster.link_across(0, min(ranks, self.cluster.cards_per_node) - 1).bytes_per_s
        if ranks <= self.cluster.cards_per_node:
            return within * constants.link
        between = self.cluster.link_across(0, ranks - 1).bytes_per_s
        return min(within, between * self.cluster.cards_per_node) * constants.link


def efficiency_of(run: PublishedRun, constants: Constants) -> Efficiency:
    """The constants as a roofline takes them; operators that are compiled, or are one kernel, go over memory once."""
    is_fused = run.compiled or run.engine == "llm-foundry"
    shares = {name: getattr(constants, name) for name in ("product", "narrow", "attention", "memory", "call_s")}
    return Efficiency(**shares, passes=COMPILED_PASSES if is_fused else EAGER_PASSES)


def micro_batches_with_bubble(run: PublishedRun) -> float:
    """Micro-batches of a step, and those in whose time a stage waits (Narayanan et al., arXiv:2104.04473)."""
    stages = run.layout.pipeline
    chunks = 2 if run.layout.schedule == "interleaved-1F1B" else 1
    return run.accumulation + (stages - 1) / chunks


def step_work(run: PublishedRun) -> StepWork:
    """The work of one GPU: that of the first stage of a pipeline without what is outside of layers, which is shared."""
    shape, layout = run.architecture, run.layout
    is_full = run.method.kind == "full"
    batch = BatchShape.of_lengths([run.length // layout.context] * run.micro_batch, 2, "flash")
    if layout.context > 1:
        batch = replace(batch, context=ContextCut(layout.context))
    graph = LayerGraph(
        layer_of(run),
        shape.width,
        batch,
        training_of(run),
        "full" if run.recompute == "full" else "none",
        RankShare(layout.tensor),
    )
    assert run.card is not None, "rows without a card are left out for speed"
    is_8bit = run.precision.products in ("float8", "mxfp8") and "fp8" in card(run.card).peaks
    products = "fp8" if is_8bit else None
    micro: dict[Primitive, float] = defaultdict(float)
    for operation in layer_work(graph, products, narrow_weights=True):
        again = 1.0 if operation.recomputed else _made_again(run, operation)
        _add(micro, operation, shape.layers / layout.pipeline, again)
        if products == "fp8":
            cast_bytes = _COMPILED_CAST_BYTES if run.compiled else _CAST_BYTES
            micro[Moved(cast_bytes * _made_narrow(operation))] += shape.layers / layout.pipeline
    tokens = graph.batch.tokens
    vocabulary = shape.vocabulary // layout.tensor
    has_head = is_full or "head" in run.method.trained
    has_embedding = is_full or "embedding" in run.method.trained
    for operation in (
        embedding_work(tokens, shape.width, vocabulary, 2, trained=has_embedding),
        norm_work(tokens, shape.width, 2),
        loss_work(tokens, shape.width, vocabulary, 2, frozen=not has_head, device="cuda"),
    ):
        # Engines keep the logits that danlu makes a second time.
        again = tuple(each for each in operation.forward if getattr(each, "is_model", True))
        _add(micro, replace(operation, forward=again), 1 / layout.pipeline)
    logits = tokens * vocabulary / layout.pipeline
    if run.engine not in _FUSED_LOSS:
        micro[Moved((_COMPILED_LOSS_BYTES if run.compiled else _LOSS_BYTES) * logits)] += 1
    return _with_traffic(run, micro, tokens)


def _made_again(run: PublishedRun, operation: OperationWork) -> float:
    """The share of an operation that selective recomputation makes again: torchtitan keeps attention and every second
    product."""
    if run.recompute != "selective" or operation.kind == "attention":
        return 0.0
    return 0.5 if operation.kind == "product" else 1.0


def _made_narrow(operation: OperationWork) -> float:
    """Numbers that become 8-bit ones: inputs and weights of a product in the forward pass, gradients and weights for
    the gradient of its inputs, and its inputs once more for that of its weights."""
    made = 0.0
    for each in (*operation.forward, *operation.backward_input):
        if isinstance(each, Product):
            made += (each.rows + each.outputs) * each.inputs
    return made + sum(each.outputs * each.inputs for each in operation.backward_weight if isinstance(each, Product))


def _add(micro: dict[Primitive, float], operation: OperationWork, times: float, again: float = 0.0) -> None:
    for primitive in (*operation.forward, *operation.backward_input, *operation.backward_weight):
        micro[primitive] += times
    if again:
        for primitive in operation.forward:
            micro[primitive] += times * again


def _with_traffic(run: PublishedRun, micro: Mapping[Primitive, float], tokens: int) -> StepWork:
    shape, layout = run.architecture, run.layout
    parameters = shape.parameters / layout.tensor / layout.pipeline
    trained = trained_parameters(run) / layout.tensor / layout.pipeline
    gradient_bytes = _BYTES[run.precision.gradients]
    ranks = layout.data
    share = (ranks - 1) / ranks
    is_sharded = layout.fsdp > 1 or layout.zero == 3
    hidden = once = exposed = 0.0
    if is_sharded:
        hidden = share * (2 * 2 * parameters + gradient_bytes * trained)
    elif ranks > 1:
        once = 2 * share * gradient_bytes * trained
    if layout.tensor > 1:
        sums = 4 + 2 * (run.recompute == "full")
        of_ranks = 2 * (layout.tensor - 1) / layout.tensor
        exposed = sums * of_ranks * tokens * shape.width * 2 * shape.layers / layout.pipeline
        exposed *= 0.5 if layout.asynchronous_tensor else 1
    states = trained / (ranks if is_sharded or layout.zero else 1)
    element = 2 * _BYTES[run.precision.states] + 2 * 2 * _BYTES[run.precision.states] + gradient_bytes
    return StepWork(micro, hidden, exposed, ranks * layout.tensor, layout.tensor, once, states * element)


def fit(prepared: Sequence[Prepared], start: Constants = Constants()) -> Constants:
    """The constants with the least mean error over some runs: a search along one constant after the other, in steps
    that become smaller."""
    best, least, step = start, _mean_error(prepared, start), 1.3
    for _ in range(6):
        for _ in range(4):
            before = least
            for name in _FITTED:
                for factor in (step, 1 / step):
                    value = getattr(best, name) * factor
                    other = replace(best, **{name: min(1.0, value) if name in _SHARES else value})
                    error = _mean_error(prepared, other)
                    if error < least:
                        best, least = other, error
                        break
            if least == before:
                break
        step = math.sqrt(step)
    return best


def _mean_error(prepared: Sequence[Prepared], constants: Constants) -> float:
    errors = (abs(math.log(each.tokens_per_s(constants) / each.measured)) for each in prepared)
    return statistics.fmean(min(_LARGEST_ERROR, error) for error in errors)


Group = Callable[[PublishedRun], object]
REFERENCE = "llm-foundry"
"""The engine with rows of several cards, sizes and lengths, by which constants are fitted."""


def leaving_out(prepared: Sequence[Prepared], group: Group) -> list[float | None]:
    """Tokens/s of each run by constants of the runs of other groups; None where there are none."""
    constants: dict[object, Constants | None] = {}
    for own in dict.fromkeys(group(each.run) for each in prepared):
        others = [each for each in prepared if group(each.run) != own]
        constants[own] = fit(others) if others else None
    found = (constants[group(each.run)] for each in prepared)
    return [own and each.tokens_per_s(own) for each, own in zip(prepared, found, strict=True)]


def with_factors(prepared: Sequence[Prepared], constants: Constants, group: Group) -> list[float | None]:
    """Tokens/s of each run by constants of another engine and one factor of its group: the median of what is measured
    over what is expected, of the other runs there; None where there are none."""
    expected = [each.tokens_per_s(constants) for each in prepared]
    ratios: dict[object, list[tuple[int, float]]] = defaultdict(list)
    for number, (each, tokens) in enumerate(zip(prepared, expected, strict=True)):
        ratios[group(each.run)].append((number, each.measured / tokens))
    predicted: list[float | None] = []
    for number, (each, tokens) in enumerate(zip(prepared, expected, strict=True)):
        others = [ratio for other, ratio in ratios[group(each.run)] if other != number]
        predicted.append(tokens * statistics.median(others) if others else None)
    return predicted
