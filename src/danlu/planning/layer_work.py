"""The primitives that a layer's operations come down to, forward and backward, as danlu computes them. No torch.

Sizes are those of one rank (`LayerGraph.share`). Collectives are no part of it: see `traffic`.

T tokens · O, I outputs and inputs of a product · E experts · D model width
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import groupby

from danlu.models.layer_operations import ENTER
from danlu.models.layer_spec import Experts
from danlu.models.mixer_spec import Delta, Heads, Latent
from danlu.models.operations import ROTATION, Operation
from danlu.planning.flops import attention_pairs
from danlu.planning.layer_graph import LayerGraph, LowRankAdapter
from danlu.planning.primitives import Attention, Dequantized, Grouped, Moved, OperationWork, Primitive, Product

_FLOAT32 = 4
_ROTATION_PASSES = 6
"""x cos, the halves changed round (three), their product with sin, and the sum (`models.ops._rotate`)."""
_MASK_PASSES = 13
"""Passes over int32 in which the mask of a dropout is drawn: shifts, masks, exclusive ors and two products."""
_ORDER = Moved(8 * 12, passes=25)
"""Passes over a token's expert while it is sorted: 90 to 140 ns on a Zen 4, as long as copies of 2.4 KB."""
_CHOICE_PASSES = {"cpu": 60, "flash": 6, "document": 6}
"""Passes over scores in which the best of them are found: torch's topk takes 10 ns a score on the same CPU."""


def layer_work(
    graph: LayerGraph, precision: str | None = None, *, expert_ranks: int = 1, narrow_weights: bool = False
) -> tuple[OperationWork, ...]:
    """The work of each operation of a layer, in the order of its forward pass.

    precision: of products with activations; by default fp32, or bf16 of half-precision activations. expert_ranks: the
    ranks that share the experts, each with all tokens of its own. narrow_weights: whether trained weights come in the
    type of activations, as FSDP gathers them, and leave their gradients in it.
    """
    return tuple(_LayerWork(graph, precision, expert_ranks, narrow_weights).all())


def recomputed_operations(graph: LayerGraph) -> list[bool]:
    """Whether the forward pass of each operation of a layer runs in the backward pass once more."""
    work = _LayerWork(graph, None, 1, narrow_weights=False)
    return [work.is_made_again(operation) for operation in graph.operations]


class _LayerWork:
    def __init__(self, graph: LayerGraph, precision: str | None, expert_ranks: int, narrow_weights: bool) -> None:
        self.graph, self.expert_ranks = graph, expert_ranks
        self.casts_weights = graph.batch.is_half and graph.training.weights and not narrow_weights
        self.streamed = "bf16" if graph.batch.is_half else "fp32"
        self.precision = precision or self.streamed
        self.element = graph.batch.element_bytes
        self.with_backward = {operation.name for operation in graph.with_backward}

    def all(self) -> Iterator[OperationWork]:
        for operation in self.graph.operations:
            forward = tuple(self.forward(operation))
            by_input: tuple[Primitive, ...] = ()
            by_weight: tuple[Primitive, ...] = ()
            if operation.name in self.with_backward:
                by_input = (*self.backward(operation), *self.sums_of_gradients(operation))
                by_weight = tuple(self.weight_gradients(operation))
            yield OperationWork(
                operation.name,
                operation.kind,
                forward,
                by_input,
                by_weight,
                tuple(self.accumulated(operation)) if by_weight else (),
                self.is_made_again(operation),
            )

    def is_made_again(self, operation: Operation) -> bool:
        """Whether the forward pass of an operation runs in the backward pass once more."""
        if self.graph.recompute == "full":
            return bool(self.graph.with_backward)
        return self.graph.region(operation) in self.regions_made_again

    @cached_property
    def regions_made_again(self) -> frozenset[str | None]:
        """The recomputed functions with values that some backward pass reads."""
        graph = self.graph
        needed: set[str] = set()
        for name, saved in graph.saved.items():
            own = next(graph.region(each) for each in graph.operations if each.name == name)
            needed |= {own} if own is not None and saved else set()
            needed |= {graph.region_of[value] for value in saved if value in graph.region_of}
        before: set[str] = set()
        while needed != before:
            before = set(needed)
            inputs = (value for region in before for value in graph.inputs_of(region))
            needed |= {graph.region_of[value] for value in inputs if value in graph.region_of}
        return frozenset(needed)

    def forward(self, operation: Operation) -> Iterator[Primitive]:
        match operation.kind:
            case "product":
                yield from self.product(operation)
            case "grouped":
                yield from self.grouped(operation)
            case "attention":
                yield from self.attention(operation)
            case "scan":
                yield from self.scan(backward=False)
            case "norm":
                yield Moved(2 * self.bytes_of(operation.makes[0].name), "norm", self.streamed)
            case "add":
                yield Moved(3 * self.bytes_of(operation.makes[0].name), "add", self.streamed)
            case "gather":
                yield from self.gather(operation)
            case _:
                yield from self.elementwise(operation)

    def backward(self, operation: Operation) -> Iterator[Primitive]:
        """The gradients of what an operation reads, with those of small weights."""
        match operation.kind:
            case "product" | "grouped":
                yield from self.input_gradient(operation)
            case "attention":
                yield from self.attention_gradient(operation)
            case "scan":
                yield from self.scan(backward=True)
            case "norm":
                yield Moved(3 * self.bytes_of(operation.makes[0].name), "norm_backward", self.streamed)
            case "add":
                return
            case "gather":
                yield from self.gather_gradient(operation)
            case _:
                yield from self.elementwise_gradient(operation)

    def bytes_of(self, *names: str) -> int:
        return sum(self.graph.bytes_of(name) for name in names if name != ROTATION)

    # Products

    def shape(self, operation: Operation) -> tuple[int, int]:
        """(O, I) of a product's weight on this rank."""
        outputs, inputs = operation.weights[0][1][-2:]
        shares = min(self.graph.share.degree, operation.parts)
        if operation.makes[0].parts > 1:
            return outputs // shares, inputs
        return outputs, inputs // shares

    @property
    def tokens(self) -> int:
        return self.graph.batch.tokens

    @property
    def experts(self) -> tuple[float, float]:
        """(experts of this rank, rows of each)."""
        assert isinstance(self.graph.spec.feed, Experts), "grouped products are those of experts"
        count = self.graph.spec.feed.num_experts / self.expert_ranks
        return count, self.tokens * self.graph.rows_per_token / count

    def elements(self, operation: Operation) -> float:
        """Elements of a product's weight on this rank."""
        count = self.experts[0] if operation.kind == "grouped" else 1
        return count * math.prod(self.shape(operation))

    def dense(self, operation: Operation) -> Iterator[Primitive]:
        """A weight becomes a dense one in the type of the product."""
        training, elements = self.graph.training, self.elements(operation)
        if training.rounded is not None:
            from danlu.planning.rounded_weights import weight_work

            yield from weight_work(training.rounded, operation, elements)
        elif training.quantized and not operation.in_float32:
            yield Dequantized(elements)
        elif self.casts_weights and not operation.in_float32:
            yield Moved(elements * (_FLOAT32 + self.element), "new")

    def product(self, operation: Operation) -> Iterator[Primitive]:
        outputs, inputs = self.shape(operation)
        if operation.in_float32 and self.graph.batch.is_half:
            yield Moved(self.tokens * inputs * (_FLOAT32 + self.element), "new")
        yield from self.dense(operation)
        yield Product(self.tokens, outputs, inputs, self.product_precision(operation))
        adapter = self.graph.training.adapter_of(operation.name)
        if len(operation.weights) > 1 and self.graph.batch.is_half and adapter is None:  # a bias of another type
            yield Moved(2 * self.tokens * outputs * self.element, "new")
        if adapter is not None:
            yield from self.low_rank(operation, adapter)

    def product_precision(self, operation: Operation) -> str:
        return "fp32" if operation.in_float32 else self.precision

    def low_rank(self, operation: Operation, adapter: LowRankAdapter) -> Iterator[Primitive]:
        """A x of all adapters that share x, of which this is one's part; B of it added to the output."""
        outputs, inputs = self.shape(operation)
        together = _rank_of_call(self.graph, operation)
        share = adapter.rank / together
        yield from self.joined_factors(adapter, outputs, inputs, together)
        yield from self.dropout(operation, adapter, share)
        yield Product(self.tokens, together, inputs, self.streamed, share, is_model=False)
        yield Product(self.tokens, outputs, adapter.rank, self.streamed, is_model=False)
        yield Moved(self.tokens * outputs * self.element, "copy", self.streamed)
        if adapter.has_magnitude:  # the norms of W + s B A, and rows of W that are scaled
            yield Product(outputs, adapter.rank, inputs, self.streamed, is_model=False)
            yield Product(outputs, adapter.rank, adapter.rank, "fp32", is_model=False)
            yield Moved(2 * outputs * inputs * self.element, "new")

    def joined_factors(self, adapter: LowRankAdapter, outputs: int, inputs: int, together: int) -> Iterator[Moved]:
        """A of all adapters of a call, one under the other, and B times the scale, in the type of activations."""
        if together > adapter.rank:
            yield Moved(2 * _FLOAT32 * adapter.rank * inputs)
        yield Moved(2 * _FLOAT32 * adapter.rank * outputs)
        if self.graph.batch.is_half:
            yield Moved((_FLOAT32 + self.element) * adapter.rank * (inputs + outputs))

    def dropout(self, operation: Operation, adapter: LowRankAdapter, share: float) -> Iterator[Moved]:
        """The mask of an adapter's input, which is drawn by integer arithmetic, and its product with that.

        share: of the adapter in a mask that several have together.
        """
        if adapter.drops_out:
            narrow = self.bytes_of(operation.reads[0])
            yield Moved(2 * _FLOAT32 * narrow / self.element, "new", passes=_MASK_PASSES * share)
            yield Moved(2 * narrow, "new", self.streamed, 2 * share)

    def grouped(self, operation: Operation) -> Iterator[Primitive]:
        count, rows = self.experts
        outputs, inputs = self.shape(operation)
        yield from self.dense(operation)
        yield Grouped(count, rows, outputs, inputs, self.precision)
        if len(operation.weights) > 1:
            yield Moved(5 * count * rows * outputs * self.element)
        adapter = self.graph.training.adapter_of(operation.name)
        if adapter is not None:
            yield Grouped(count, rows, adapter.rank, inputs, self.streamed, is_model=False)
            yield Moved(2 * count * outputs * adapter.rank * _FLOAT32)
            yield Grouped(count, rows, outputs, adapter.rank, self.streamed, is_model=False)
            yield Moved(3 * count * rows * outputs * self.element, "add", self.streamed)

    def input_gradient(self, operation: Operation) -> Iterator[Primitive]:
        """Products with the weight, and all gradients of an adapter but those of its factors."""
        outputs, inputs = self.shape(operation)
        has_input = operation.reads[0] in self.graph.gradients
        adapter = self.graph.training.adapter_of(operation.name)
        is_grouped = operation.kind == "grouped"
        count, rows = self.experts if is_grouped else (1, self.tokens)
        if has_input:
            yield from self.dense(operation)
            if is_grouped:
                yield Grouped(count, rows, inputs, outputs, self.precision, result="input_gradient")
            else:
                precision = self.product_precision(operation)
                yield Product(rows, inputs, outputs, precision, result="input_gradient")
            if operation.in_float32 and self.graph.batch.is_half:
                yield Moved(self.tokens * inputs * (_FLOAT32 + self.element), "new")
        if adapter is None:
            return
        rank = adapter.rank
        if is_grouped:
            yield Grouped(count, rows, rank, outputs, self.streamed, is_model=False, result="input_gradient")
            if has_input:
                yield Grouped(count, rows, inputs, rank, self.streamed, is_model=False, result="input_gradient")
                yield Moved(3 * count * rows * inputs * self.element, "add", self.streamed)
            return
        together = _rank_of_call(self.graph, operation)
        yield Moved(2 * _FLOAT32 * outputs * rank)  # B times the scale
        yield Product(rows, rank, outputs, self.streamed, is_model=False, result="input_gradient")
        yield Moved(2 * rows * rank * self.element, "copy", self.streamed)  # into the columns of all adapters of a call
        if has_input:
            yield from self.joined_factors(adapter, 0, inputs, together)
            yield from self.dropout(operation, adapter, rank / together)
            yield Product(rows, inputs, together, self.streamed, rank / together, False, "input_gradient")
        if adapter.has_magnitude:
            yield Moved(2 * rows * outputs * self.element, "new")
            yield Moved(2 * outputs * inputs * self.element, "new")

    def weight_gradients(self, operation: Operation) -> Iterator[Primitive]:
        if not operation.is_product:
            return
        outputs, inputs = self.shape(operation)
        is_grouped = operation.kind == "grouped"
        count, rows = self.experts if is_grouped else (1, self.tokens)
        if self.graph.training.weights:
            if is_grouped:
                yield Grouped(count, outputs, inputs, rows, self.precision, result="weight_gradient")
            else:
                precision = self.product_precision(operation)
                yield Product(outputs, inputs, rows, precision, result="weight_gradient")
            if self.casts_weights and not operation.in_float32:
                yield Moved(count * outputs * inputs * (_FLOAT32 + self.element), "new")
            if len(operation.weights) > 1:
                yield Moved(count * rows * outputs * self.element)
        adapter = self.graph.training.adapter_of(operation.name)
        if adapter is None:
            return
        if not is_grouped and adapter.trains_a:
            if (maker := self.graph.maker_of_adapter_s_input(operation)) is not None:
                yield from self.forward(maker)
            yield from self.dropout(operation, adapter, adapter.rank / _rank_of_call(self.graph, operation))
        yield Moved(2 * _FLOAT32 * outputs * adapter.rank)  # B's gradient times the scale
        for n, k in ((outputs, adapter.rank), (inputs, adapter.rank if adapter.trains_a else 0)):
            if is_grouped and k:
                yield Grouped(count, k, n, rows, self.streamed, is_model=False, result="weight_gradient")
            elif k:
                yield Product(k, n, rows, self.streamed, is_model=False, result="weight_gradient")

    def accumulated(self, operation: Operation) -> Iterator[Primitive]:
        elements = self.elements(operation) if self.graph.training.weights else 0.0
        adapter = self.graph.training.adapter_of(operation.name)
        if adapter is not None:
            outputs, inputs = self.shape(operation)
            count = self.experts[0] if operation.kind == "grouped" else 1
            elements += count * adapter.rank * (outputs + inputs * adapter.trains_a)
        yield Moved(3 * _FLOAT32 * elements, "add")

    def sums_of_gradients(self, operation: Operation) -> Iterator[Primitive]:
        """The gradients of values with several readers are added up: by autograd, or in place by adapted products."""
        for value in operation.makes if operation.reads != ("x",) else (self.graph.values["x"], *operation.makes):
            if value.name not in self.graph.gradients:
                continue
            readers = [each for each in self.graph.with_backward if value.name in each.reads]
            adapted = [each for each in readers if each.kind == "product" and self.is_adapted_call(each)]
            times = len(readers) - max(0, len(adapted) - 1) - 1
            if times > 0:
                yield Moved(3 * self.bytes_of(value.name), "add", self.streamed, times)

    def is_adapted_call(self, operation: Operation) -> bool:
        return bool(self.graph.training.adapters) and _rank_of_call(self.graph, operation) > 0

    # Attention

    def attention(self, operation: Operation) -> Iterator[Attention]:
        mixer, batch, degree = self.graph.spec.mixer, self.graph.batch, self.graph.share.degree
        assert not isinstance(mixer, Delta), "a recurrence has no pairs of tokens"
        values = mixer.v_head_dim if isinstance(mixer, Latent) else mixer.head_dim
        # Flash kernels know one width, and are given narrower values filled up with zeros.
        width = max(mixer.head_dim, values)
        ranks = 1 if batch.context is None else batch.context.ring * batch.context.heads
        runs = Counter(run for document in batch.documents for run in document)
        for run, count in runs.items():
            keys, before = (run.tokens + run.before) * ranks, run.before * ranks
            pairs = attention_pairs((keys,), mixer.window) - attention_pairs((before,), mixer.window)
            length = keys if mixer.window is None else min(keys, 2 * mixer.window)
            yield Attention(
                count,
                length,
                pairs / ranks,
                mixer.heads // degree,
                width,
                2 * (mixer.head_dim + values),
                self.streamed,
                at_once=batch.kernels == "flash",
            )

    def attention_gradient(self, operation: Operation) -> Iterator[Primitive]:
        batch, mixer = self.graph.batch, self.graph.spec.mixer
        for forward in self.attention(operation):
            is_windowed = isinstance(mixer, Heads) and mixer.window is not None
            in_blocks = forward.length <= batch.short_document or is_windowed
            if self.graph.recompute == "elementwise" and batch.kernels == "cpu" and in_blocks:
                yield forward._replace(is_model=False)  # probabilities are made again
            yield forward._replace(backward=True)

    def scan(self, *, backward: bool) -> Iterator[Primitive]:
        """The products of `models.delta_rule` over chunks [C, K] of keys and [C, V] of values, in float32."""
        mixer, degree = self.graph.spec.mixer, self.graph.share.degree
        assert isinstance(mixer, Delta), "a scan is a recurrence"
        size, chunks = self.graph.batch.chunks
        count, keys, values = chunks * mixer.heads // degree, mixer.key_dim, mixer.value_dim
        recurrence = [(size, values, keys), (keys, values, size), (size, values, keys)]
        inner = [(size, size, keys), (size, size, keys), (size, keys, size)]
        if backward:
            recurrence *= 2
            inner += [(size, values, size)] * 3 + [(size, keys, values)] + [(size, size, values)] * 2
            inner += [(size, keys, size)] * 4
        else:
            inner += [(size, values, size)] * 2
        matrices, rows = (26, 40) if backward else (8, 12)
        for is_model, shapes in ((True, recurrence), (False, inner)):
            for m, n, k in shapes:
                yield Grouped(count, m, n, k, "fp32", is_model)
        yield Moved(2 * count * size * size * _FLOAT32, passes=matrices)
        yield Moved(2 * count * size * (keys + values) / 2 * _FLOAT32, passes=rows)

    # Passes over memory

    def gather(self, operation: Operation) -> Iterator[Primitive]:
        last = operation.name.rpartition(".")[2]
        feed = self.graph.spec.feed
        if last in (ENTER, "leave") or not isinstance(feed, Experts):
            return  # collectives
        match last:
            case "order":
                yield _ORDER._replace(bytes=self.tokens * feed.top_k * _ORDER.bytes)
            case "choose":
                yield Moved(self.bytes_of(operation.reads[0]), passes=_CHOICE_PASSES[self.graph.batch.kernels])
            case "weighted_sum":
                yield from self.sum_of_rows(operation.makes[0].name, weighted=True)
            case _:
                yield Moved(2 * self.bytes_of(operation.makes[0].name), "new", self.streamed)

    def gather_gradient(self, operation: Operation) -> Iterator[Primitive]:
        last = operation.name.rpartition(".")[2]
        if last == "weighted_sum":  # rows of the gradient, their products with the experts' outputs and with weights
            rows = self.bytes_of(operation.reads[0])
            wide = rows // self.element * _FLOAT32
            yield Moved(2 * rows, passes=2)
            yield Moved(2 * wide, passes=3 if self.graph.batch.is_half else 4)
        elif last == "choose":
            yield Moved(2 * self.bytes_of(operation.reads[0]))
        elif last not in (ENTER, "leave", "order"):
            yield from self.sum_of_rows(operation.reads[0], weighted=False)

    def sum_of_rows(self, name: str, *, weighted: bool) -> Iterator[Primitive]:
        """Each token's rows are looked up and added in float32, one of its experts after the other."""
        assert isinstance(self.graph.spec.feed, Experts), "only experts have rows of tokens"
        narrow = self.bytes_of(name)
        wide, chosen = narrow // self.element * _FLOAT32, self.graph.spec.feed.top_k
        yield Moved(2 * narrow, "copy", self.streamed, chosen)
        yield Moved(3 * wide, "add", passes=chosen)
        if self.graph.batch.is_half:
            yield Moved(narrow + wide, passes=chosen * weighted + 1)

    def elementwise(self, operation: Operation) -> Iterator[Primitive]:
        output_bytes = self.bytes_of(operation.makes[0].name)
        last = operation.name.rpartition(".")[2]
        if ROTATION in operation.reads:
            yield Moved(2 * output_bytes, "new", self.streamed, _ROTATION_PASSES)
        elif self.is_activation(operation):
            yield Moved((1 + len(operation.reads)) * output_bytes, "activation", self.streamed)
        elif last.endswith("conv1d"):
            yield Moved(self.wide_rows(operation), passes=4 + 1.5 * operation.weights[0][1][-1])
        else:
            yield Moved(self.bytes_of(*operation.reads, *(value.name for value in operation.makes)), "new")

    def elementwise_gradient(self, operation: Operation) -> Iterator[Primitive]:
        output_bytes = self.bytes_of(operation.makes[0].name)
        last = operation.name.rpartition(".")[2]
        if ROTATION in operation.reads:
            yield Moved(2 * output_bytes, "new", self.streamed, _ROTATION_PASSES)
        elif self.is_activation(operation):
            yield Moved((1 + 2 * len(operation.reads)) * output_bytes, "activation_backward", self.streamed)
        elif last.endswith("conv1d"):
            yield Moved(self.wide_rows(operation), passes=2 * (4 + 1.5 * operation.weights[0][1][-1]))
        else:
            saved = self.graph.saved[operation.name]
            yield Moved(self.bytes_of(*saved, *operation.reads, operation.makes[0].name), "new")

    def is_activation(self, operation: Operation) -> bool:
        """Whether an operation is that of a feed-forward network, or of a delta rule's gate."""
        last = operation.name.rpartition(".")[2]
        return last == "gated_activation" or (last == "gated" and isinstance(self.graph.spec.mixer, Delta))

    def wide_rows(self, operation: Operation) -> int:
        """Bytes of a float32 copy that is read and written."""
        return 2 * self.bytes_of(operation.makes[0].name) // self.element * _FLOAT32


def _rank_of_call(graph: LayerGraph, operation: Operation) -> int:
    """The ranks of all adapters on the products that share an input."""
    adapter_of = graph.training.adapter_of
    for _, call in groupby(graph.operations, key=lambda each: (each.kind, each.reads, each.in_float32)):
        names = [each.name for each in call]
        if operation.name in names:
            return sum(adapter.rank for name in names if (adapter := adapter_of(name)) is not None)
    raise AssertionError("an operation is in the list of its layer")
