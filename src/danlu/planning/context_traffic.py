"""Bytes that a context rank sends in a step, in closed form. Imports no torch.

Context ranks send keys around a ring or gather them, and exchange tokens for heads. That depends on where documents are
cut: tokens of documents that stay whole are not sent. So the formulas take the rows of chunks that each context rank
has of each micro-batch (`data.context_sharding`), in the order of the ranks: t rows of this rank, S rows of its Ulysses
group of U ranks, R groups, the ranks of a ring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from danlu.parallel.collective_traffic import CollectiveTraffic, GroupShape, Kind, axis_along, ring_bytes
from danlu.parallel.layout import Layout

Transport = Literal["ring", "gather"]


class TokenTensor(NamedTuple):
    """A tensor with a row for each token."""

    width: int  # numbers of a row, on this tensor rank
    element_bytes: int
    has_gradient: bool = True

    @property
    def bytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.element_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a row's gradient where several ranks add to it: in float32 or wider."""
        return self.width * max(4, self.element_bytes)


@dataclass(frozen=True)
class ContextLayer:
    """The tensors of one layer that travel between context ranks, and how often a micro-batch sends them forward."""

    inputs: tuple[TokenTensor, ...]
    """The tensors that Ulysses exchanges before attention: queries, keys and values, of as many heads as can be
    dealt."""
    output: TokenTensor
    """The tensor that Ulysses exchanges after attention; without a gradient nothing is sent backward."""
    keys: tuple[TokenTensor, ...]
    """The tensors that go around the ring, or are gathered, for the heads of one rank of an Ulysses group: keys and
    values, or the tensor that both are made of."""
    runs: int = 1
    """Once, and once more for each time that attention is recomputed."""
    output_runs: int = 1
    """The number of runs of the output's exchange, which is not repeated where nothing has saved it."""


def context_groups(layout: Layout) -> tuple[GroupShape, GroupShape]:
    """The ring of a context rank, and the ranks that it exchanges heads with."""
    ring = GroupShape(layout.context // layout.ulysses, layout.ulysses * layout.tensor)
    return ring, GroupShape(layout.ulysses, layout.tensor)


def context_traffic(
    layers: Sequence[ContextLayer], rows: Sequence[Sequence[int]], layout: Layout, index: int, transport: Transport
) -> Iterator[CollectiveTraffic]:
    """Yields the traffic of context rank `index` in a step. rows: the rows of each context rank, for each micro-batch.

    In a layer and a micro-batch, of tensors of w bytes a token:

        ulysses   forward (U-1)/U·t·w of queries, keys and values, and (S-t)/U·w of attention's output; backward their
                  gradients, the other way: (S-t)/U·w and (U-1)/U·t·w
        ring      of keys w times all rows but those of the next group, forward and backward, where they travel again;
                  of their gradients w times all rows but this group's own, backward
        gather    (R-1)·w times the most rows of a group, all-gathered forward and reduce-scattered backward

    A pass that is recomputed repeats its forward traffic.
    """
    axis, _ = axis_along(layout, "context")
    ring, ulysses = context_groups(layout)
    forward = sum(layer.runs for layer in layers) * len(rows)
    backward = sum(layer.output.has_gradient for layer in layers) * len(rows)
    sent_bytes: dict[tuple[Kind, str], Fraction] = defaultdict(Fraction)
    for counts in rows:
        groups = [counts[first : first + layout.ulysses] for first in range(0, len(counts), layout.ulysses)]
        number, place = divmod(index, layout.ulysses)
        for layer in layers:
            sent_bytes["all-to-all", "tokens for heads"] += _exchanged(layer, groups[number], place)
            for kind, count in _keys_sent(layer, [sum(group) for group in groups], number, transport):
                sent_bytes[kind, "keys"] += count
    for (kind, what), count in sent_bytes.items():
        if count:
            match kind:
                case "point-to-point":  # backward keys travel again, and their gradients behind them
                    calls, group = (ring.size - 1) * (forward + 2 * backward), ring
                case "all-to-all":  # before attention and after it
                    calls, group = 2 * (forward + backward), ulysses
                case _:
                    calls, group = forward if kind == "all-gather" else backward, ring
            yield CollectiveTraffic(axis, kind, count, calls, what, group)


def document_load_traffic(numbers: int, layout: Layout) -> Iterator[CollectiveTraffic]:
    """Yields the traffic of a context rank for the load of each expert by each document, `numbers` numbers in a step:
    float32 sums over its Ulysses group, then over its ring."""
    axis, _ = axis_along(layout, "context")
    sizes = (layout.ulysses, layout.context // layout.ulysses)
    sent_bytes = sum(ring_bytes("all-reduce", size, 4 * numbers) for size in sizes)
    if sent_bytes:
        group = GroupShape(layout.context, layout.tensor)
        yield CollectiveTraffic(axis, "all-reduce", sent_bytes, 1, "loads by document", group)


def _exchanged(layer: ContextLayer, rows: Sequence[int], place: int) -> Fraction:
    """Bytes of one layer's exchanges in an Ulysses group with these rows on its ranks."""
    size = len(rows)
    to_heads = Fraction((size - 1) * rows[place], size)
    to_tokens = Fraction(sum(rows) - rows[place], size)
    forward = to_heads * layer.runs * sum(x.bytes for x in layer.inputs)
    forward += to_tokens * layer.output_runs * layer.output.bytes
    backward = to_tokens * sum(x.bytes for x in layer.inputs if x.has_gradient)
    return forward + backward + to_heads * layer.output.bytes * layer.output.has_gradient


def _keys_sent(
    layer: ContextLayer, rows: Sequence[int], own: int, transport: Transport
) -> Iterator[tuple[Kind, Fraction]]:
    """Bytes of one layer's keys and their gradients, where group number `own` is one of several with these rows."""
    if len(rows) == 1:
        return
    backward = layer.output.has_gradient
    if transport == "ring":
        passed = sum(rows) - rows[(own + 1) % len(rows)]
        returned = sum(rows) - rows[own]
        forward = (layer.runs + backward) * passed * sum(x.bytes for x in layer.keys)
        yield "point-to-point", Fraction(forward + backward * returned * sum(x.gradient_bytes for x in layer.keys))
        return
    filled = (len(rows) - 1) * max(rows)
    yield "all-gather", Fraction(layer.runs * filled * sum(x.bytes for x in layer.keys))
    gradients = sum(x.gradient_bytes for x in layer.keys if x.has_gradient)
    yield "reduce-scatter", Fraction(filled * gradients)
