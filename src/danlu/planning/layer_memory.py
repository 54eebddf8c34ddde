"""The most bytes that a layer takes in its forward and in its backward pass, by the lifetimes of its tensors.

In the forward pass a value is there from the operation that makes it to the last one that reads it, or to the backward
pass if it is kept (`layer_graph`). In the backward pass the gradient of a value is there from the first operation that
hands it back to the one that made the value, and a kept value is freed with the last operation that needs it. An
operation adds temporaries of its own. Tests compare with the peak that torch's allocator counts. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from danlu.models.mixer_spec import Delta
from danlu.models.operations import OF_OTHERS, ROTATION, Operation
from danlu.planning.attention_memory import attention_temporaries
from danlu.planning.kept_in_few_bits import CODES, ProductSize, has_few_bits
from danlu.planning.layer_graph import LayerGraph

_FLOAT32 = 4
_INT32 = 4


class PassBytes(NamedTuple):
    """Bytes of one pass at the moment when they are the most together."""

    activations: int
    gradients: int
    """Bytes of gradients that stay when the pass is over."""


class PutOff(NamedTuple):
    """The gradient of one operation's weights that an input pass leaves for later."""

    frees: int
    """Bytes that wait for this gradient and for none after it."""
    gradient: int
    """Bytes of the gradient, float32."""
    narrow: int
    """Bytes of the same gradient in half precision, before it is widened."""


@dataclass(frozen=True)
class LayerMemory:
    """The memory of one layer's passes over a micro-batch on one rank, in bytes; without the tables of rotations."""

    graph: LayerGraph

    @cached_property
    def kept(self) -> int:
        """Bytes from the end of the forward pass to the backward pass."""
        return self.graph.kept_bytes

    @cached_property
    def forward(self) -> int:
        """The most bytes in the forward pass besides the layer's input: values, and temporaries of one operation."""
        return _forward_peak(self.graph)

    @cached_property
    def backward(self) -> int:
        """The most bytes in the backward pass, with the layer's input and the gradient of its output.

        These are kept values, those that are computed again, gradients of values, and of one operation at a time the
        gradients of its weights, which are added to those of the micro-batches before.
        """
        return _backward_peak(self.graph).activations

    @cached_property
    def first_backward(self) -> PassBytes:
        """The same where the pass makes the gradients of weights that stay, and finds none."""
        return _backward_peak(self.graph, gradients_stay=True)

    @cached_property
    def input(self) -> int:
        """The same in a pass that puts off the weight gradients of products (`core.weight_gradients`)."""
        return _backward_peak(self.graph, puts_off=True).activations

    @cached_property
    def put_off(self) -> tuple[PutOff, ...]:
        """The gradients that such a pass puts off, in the order in which a weight pass makes them."""
        return tuple(_put_off(self.graph))

    @cached_property
    def put_off_bytes(self) -> tuple[int, int]:
        """(bytes that wait for these gradients, bytes of the gradients)."""
        return sum(each.frees for each in self.put_off), sum(each.gradient for each in self.put_off)

    @cached_property
    def gradients(self) -> int:
        """Bytes of the gradients of all trained weights, float32."""
        return sum(weight_gradient_bytes(self.graph, each) for each in self.graph.with_backward)

    @cached_property
    def offloaded_backward(self) -> int:
        """The same where kept values come back from an offload one operation after the other."""
        return _backward_peak(self.graph, is_offloaded=True).activations


def weight_gradient_bytes(graph: LayerGraph, operation: Operation) -> int:
    """Bytes of the float32 gradients of an operation's trained weights, those of its adapter included."""
    if not operation.weights:
        return 0
    shares = min(graph.share.degree, operation.parts) if operation.is_product else 1
    count = sum(math.prod(shape) for _, shape in operation.weights) // shares if graph.training.weights else 0
    adapter = graph.training.adapter_of(operation.name)
    if adapter is not None:
        *stacked, outputs, inputs = operation.weights[0][1]
        of_factors = outputs + inputs * adapter.trains_a
        count += math.prod(stacked) * adapter.rank * of_factors + outputs * adapter.has_magnitude
    return count * _FLOAT32


def _forward_peak(graph: LayerGraph) -> int:
    kept = graph.kept.names
    last_reader = {name: index for index, each in enumerate(graph.operations) for name in each.reads}
    live: dict[str, int] = {}
    unnamed = peak = 0
    for index, operation in enumerate(graph.operations):
        live |= {value.name: graph.bytes_of(value.name) for value in operation.makes}
        if graph.region(operation) is None:
            unnamed += graph.bytes_of_elements(*graph.unnamed(operation))
        peak = max(peak, unnamed + sum(live.values()) + _forward_temporaries(graph, operation))
        done = {name for name in live if last_reader.get(name, -1) <= index} - kept - {graph.output}
        live = {name: size for name, size in live.items() if name not in done}
    return peak


def _forward_temporaries(graph: LayerGraph, operation: Operation) -> int:
    """Bytes that an operation takes in the forward pass besides what it reads and makes."""
    is_half = graph.batch.is_half
    output = graph.bytes_of(operation.makes[0].name)
    wide = output // graph.batch.element_bytes * _FLOAT32
    match operation.kind:
        case "product" | "grouped":
            if (size := _size_in_8_bits(graph, operation)) is not None:
                return size.forward_bytes() + _mask_bytes(graph, operation)
            return _narrow_weight(graph, operation) + _mask_bytes(graph, operation)
        case "norm":  # the squares of rows, and rows that are normed and not scaled; of half precision, rows in float32
            return 3 * wide if is_half else 2 * output
        case "attention" | "scan":
            return attention_temporaries(graph.spec, graph.batch, graph.share.degree, backward=False)
        case "elementwise" if ROTATION in operation.reads:
            return 2 * output
    return 0


def _narrow_weight(graph: LayerGraph, operation: Operation) -> int:
    """Bytes of a float32 weight in half precision, for the time of a product; of experts, of one after the other."""
    if not graph.batch.is_half or not graph.training.weights:
        return 0
    shares = min(graph.share.degree, operation.parts)
    return math.prod(operation.weights[0][1][-2:]) // shares * graph.batch.element_bytes


def _size_in_8_bits(graph: LayerGraph, operation: Operation) -> ProductSize | None:
    """The numbers of a product in 8 bits; of experts, of one of them with its share of the rows. None for others."""
    if graph.training.fp8 is None or not has_few_bits(operation):
        return None
    element_bytes, shares = graph.batch.element_bytes, min(graph.share.degree, operation.parts)
    shape = operation.weights[0][1]
    x, y = (graph.bytes_of(name) // element_bytes for name in (operation.reads[0], operation.makes[0].name))
    return ProductSize(x, math.prod(shape[-2:]) // shares, y, element_bytes, math.prod(shape[:-2]))


def _recomputed_gate_bytes(graph: LayerGraph, operation: Operation) -> int:
    """Bytes of the two factors of a gated activation, decoded, and of their product, which a layer behind them computes
    again in the backward pass; 0 of other operations."""
    maker = next((each for each in graph.operations if each.makes[0].name == operation.reads[0]), operation)
    gated = maker if operation.is_product else operation
    if graph.training.fp8 is None or not graph.saved[gated.name] or gated.is_product:
        return 0
    is_kept_so = all(name.endswith(CODES) for name in graph.saved[gated.name])
    return 3 * graph.bytes_of(gated.makes[0].name) if is_kept_so else 0


def _mask_bytes(graph: LayerGraph, operation: Operation) -> int:
    """Bytes of the integers that the mask of an adapter's dropout is made of, each in three steps at a time."""
    adapter = graph.training.adapter_of(operation.name)
    if adapter is None or not adapter.drops_out:
        return 0
    return 3 * _INT32 * graph.bytes_of(operation.reads[0]) // graph.batch.element_bytes


def _adapter_temporaries(graph: LayerGraph, operation: Operation) -> int:
    """Bytes in the backward pass of a product's adapter: its input, where that is made again, and dropout's mask with
    the gradient through the low-rank path."""
    again = graph.maker_of_adapter_s_input(operation) is not None
    mask = _mask_bytes(graph, operation)
    return (again + (mask > 0)) * graph.bytes_of(operation.reads[0]) + mask


def _put_off(graph: LayerGraph) -> Iterator[PutOff]:
    graph = replace(graph, recompute="none", gathers_again=False) if graph.recompute == "full" else graph
    operations = [each for each in reversed(graph.with_backward) if _is_put_off(graph, each)]
    for index, operation in enumerate(operations):
        later = set[str]().union(*(_waiting_for(graph, each) for each in operations[index + 1 :]))
        frees = sum(graph.bytes_of(name) for name in _inputs_of_gradient(graph, operation) - later)
        frees += sum(graph.bytes_of(value.name) for value in operation.makes if _gradient_of(value.name) not in later)
        yield PutOff(frees, weight_gradient_bytes(graph, operation), _narrow_weight(graph, operation))


def _is_put_off(graph: LayerGraph, operation: Operation) -> bool:
    return operation.is_product and weight_gradient_bytes(graph, operation) > 0


def _inputs_of_gradient(graph: LayerGraph, operation: Operation) -> set[str]:
    """Names of the kept values that the gradient of an operation's weights is made of."""
    return set(graph.saved[operation.name]) - OF_OTHERS


def _gradient_of(name: str) -> str:
    return f"gradient of {name}"


def _waiting_for(graph: LayerGraph, operation: Operation) -> set[str]:
    return _inputs_of_gradient(graph, operation) | {_gradient_of(value.name) for value in operation.makes}


def _backward_peak(
    graph: LayerGraph, *, is_offloaded: bool = False, puts_off: bool = False, gradients_stay: bool = False
) -> PassBytes:
    """Finds the moment with the most bytes; gradients of weights are activations in it, but for those that stay."""
    peak, staying = PassBytes(0, 0), 0
    waiting = set[str]()  # values and gradients that put-off weight gradients are made of

    def reach(activations: int) -> None:
        nonlocal peak
        peak = max(peak, PassBytes(activations, staying), key=sum)

    if graph.recompute == "full":  # its forward pass runs again, and keeps everything
        kept = graph.kept_bytes
        graph = replace(graph, recompute="none", gathers_again=False)
        reach(kept + _forward_peak(graph) + graph.bytes_of(graph.output))
        is_offloaded = False
    live = {name: graph.bytes_of(name) for name in (graph.kept.names | {"x"}) - OF_OTHERS}
    unnamed = {
        each.name: graph.bytes_of_elements(*graph.unnamed(each))
        for each in graph.with_backward
        if graph.region(each) is None
    }
    gradients = {graph.output: graph.bytes_of(graph.output)}
    made_again = set[str]()
    for index in reversed(range(len(graph.with_backward))):
        operation = graph.with_backward[index]
        for region in {graph.region_of[name] for name in graph.saved[operation.name] if name in graph.region_of}:
            if region not in made_again:
                made_again.add(region)
                live |= _values_of(graph, region)
                unnamed |= {each.name: graph.bytes_of_elements(*graph.unnamed(each)) for each in graph.regions[region]}
                again = max(_forward_temporaries(graph, each) for each in graph.regions[region])
                there = 0 if is_offloaded else sum(live.values()) + sum(unnamed.values())
                reach(there + sum(gradients.values()) + again)
        if is_offloaded:
            there = sum(graph.bytes_of(name) for name in graph.saved[operation.name] if name not in OF_OTHERS)
            there += unnamed.get(operation.name, 0)
        else:
            there = sum(live.values()) + sum(unnamed.values())
        handed = {name: graph.bytes_of(name) for name in operation.reads if name in graph.gradients - OF_OTHERS}
        new = weight_gradient_bytes(graph, operation)
        if puts_off and _is_put_off(graph, operation):
            new = 0
            waiting |= _waiting_for(graph, operation)
        if gradients_stay:
            staying, new = staying + new, 0
        total = there + sum(gradients.values()) + sum(handed.values()) + new
        reach(total + _backward_temporaries(graph, operation))
        gradients = {
            name: size
            for name, size in gradients.items()
            if not _makes(operation, name) or _gradient_of(name) in waiting
        } | handed
        unnamed.pop(operation.name, None)
        needed = {name for each in graph.with_backward[:index] for name in graph.saved[each.name]} | {"x"} | waiting
        needed |= {name for region in graph.regions.keys() - made_again for name in graph.inputs_of(region)}
        live = {name: size for name, size in live.items() if name in needed}
    return peak


def _makes(operation: Operation, name: str) -> bool:
    return any(value.name == name for value in operation.makes)


def _values_of(graph: LayerGraph, region: str) -> Mapping[str, int]:
    """The values that a recomputed function makes and some backward pass reads, with their bytes."""
    wanted = {name for names in graph.saved.values() for name in names}
    names = [value.name for operation in graph.regions[region] for value in operation.makes]
    return {name: graph.bytes_of(name) for name in names if name in wanted}


def _backward_temporaries(graph: LayerGraph, operation: Operation) -> int:
    """Bytes that an operation takes in the backward pass besides what it reads and hands back."""
    is_half = graph.batch.is_half
    output = graph.bytes_of(operation.makes[0].name)
    wide = output // graph.batch.element_bytes * _FLOAT32
    match operation.kind:
        case "product" | "grouped":  # the weight in half precision; then its gradient in half precision
            if (size := _size_in_8_bits(graph, operation)) is not None:
                assert graph.training.fp8 is not None
                own = size.backward_bytes(graph.training.fp8) + _recomputed_gate_bytes(graph, operation)
                return own + _adapter_temporaries(graph, operation)
            return _narrow_weight(graph, operation) + _adapter_temporaries(graph, operation)
        case "norm":
            return 4 * wide if is_half else 2 * output
        case "attention" | "scan":
            return attention_temporaries(graph.spec, graph.batch, graph.share.degree, backward=True)
        case "gather" if operation.name.endswith("weighted_sum"):
            # The gradient's rows, and their products with the experts': in half precision three float32 copies, before
            # rows are handed back.
            rows = graph.bytes_of(operation.reads[0])
            return 3 * rows // graph.batch.element_bytes * _FLOAT32 if is_half else rows
        case "elementwise" if ROTATION in operation.reads:
            return 2 * output
        case "elementwise" if not isinstance(graph.spec.mixer, Delta) or operation.name.startswith("mlp"):
            return output + _recomputed_gate_bytes(graph, operation)
    return 0
