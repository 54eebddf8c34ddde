"""Activation recomputation: the activations that each layer drops in the forward pass, as data; and layers that drop
them.

Kept per token and layer, in numbers (D model width · Q all query heads · K all key/value heads · F inner width), with
full fine-tuning; norms keep one more number each, attention its own statistics where it is not recomputed, and with
`none` the probabilities of short documents, windows and softcaps where torch's kernels do not take these:

    none          4 D + 2 Q + 2 K + 3 F
    elementwise   2 D + 2 Q + 2 K + 2 F    norms' outputs, the gated product and such probabilities are recomputed
    selective     2 D +   Q + 2 K + 2 F    rotation and attention too: only inputs of products that nothing else gives
    full              D                    the layer's input

Keys and values that later layers read (`models.carried`) are kept with every kind, once for all of these layers.

A mixture of experts keeps 3 F and 2 D for each of a token's experts (`none`), else 2 F and D: rows are copied once more
from the tokens, unless they came from another process.

Under sequence parallelism the tensors that tensor ranks gather at the entrances of attention and MLP, all tokens times
2 D, are not kept either. A rank keeps its own tokens of them (or the inputs of their norm), and all gather again when
the first product behind an entrance has its backward pass, once for all products there (arXiv:2205.05198, section
4.2.2).

`every` keeps the D of each segment's first layer alone. In the backward pass the inputs of the segment's layers are
made first, then each layer from its input: the memory of sqrt(L) + sqrt(L) inputs and one layer (arXiv:1604.06174 with
a second level), for most of a forward pass more than `full`. The paper's single level would hold the activations of a
whole segment at once, and as those of one layer are some twenty times its input, that is mostly more than `full`
holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from danlu.memory.layer_plan import KINDS, Kind, LayerPlan, Plan, plan_of_layers
from danlu.memory.recomputed_function import OutputDroppingFunction, RecomputedFunction
from danlu.models.chunks import layer_spans
from danlu.models.decoder import Decoder, Layer
from danlu.recipe.sections import Recompute


def plan_of(section: Recompute, model: Decoder, planned: Callable[[], Plan] | None = None) -> list[LayerPlan]:
    """The plan of a recipe's section, one entry for each layer that `model` has.

    planned: makes the plan of kind `planned`, from measurements that only the caller can take
        (`memory.recompute_planner`).
    """
    if section.kind == "planned":
        assert planned is not None, "a plan from measurements needs them"
        return list(planned())
    chunks = [model.chunks.layers[chunk] for chunk in model.chunks.local]
    return plan_of_layers(section, [int(name) for name in model.layers], chunks)


def wrap(model: Decoder, plan: Plan, *, gathered: bool = False) -> None:
    """Makes the layers drop and recompute activations according to the plan.

    gathered: tokens are gathered at the entrances of attention and MLP (sequence parallelism), and gathered again in
        the backward pass instead of being kept.

    It goes by instance attributes (`layer.forward`), so hooks that are installed on the modules later, as FSDP's, stay
    outside of the recomputed functions; the layers of a segment are called as modules once more, with their hooks. A
    model is wrapped once.
    """
    for entry in plan:
        wrap_layer(model.layers[str(entry.layer)], entry.kind, f"layers.{entry.layer}", gathered=gathered)
    model.recomputed_attention = frozenset(entry.layer for entry in plan if entry.kind == "elementwise")
    model.segments = {chunk: parts for chunk in model.chunks.local if (parts := _segments(model, plan, chunk))}


def _segments(model: Decoder, plan: Plan, chunk: int) -> list[Callable[..., Tensor]]:
    """Returns the functions that run the layers of a chunk one after the other; empty where each layer runs by
    itself.
    """
    parts: list[Callable[..., Tensor]] = []
    own = [entry for entry in plan if entry.layer in model.chunks.layers[chunk]]
    if all(entry.segment is None for entry in own):
        return []
    for segment, entries in groupby(own, key=lambda entry: entry.segment):
        layers = [model.layers[str(entry.layer)] for entry in entries]
        if segment is None or len(layers) == 1:
            parts += layers
        else:
            parts.append(_RecomputedSegment(layers, f"segment {segment} of the layers"))
    return parts if any(isinstance(part, RecomputedFunction) for part in parts) else []


@dataclass(frozen=True)
class _Segment:
    """Layers that are called one after the other, as one function."""

    layers: Sequence[Callable[..., Tensor]]

    def __call__(self, x: Tensor, *args: Any) -> Any:
        if len(args) > 2:  # values that travel between layers besides the residual stream
            from danlu.models.carried import run_parts

            return run_parts(self.layers, x, *args)
        for layer in self.layers:
            x = layer(x, *args)
        return x


class _RecomputedSegment(RecomputedFunction):
    """A segment that is run again in the backward pass; `layers`: what it has."""

    def __init__(self, layers: Sequence[Callable[..., Tensor]], where: str) -> None:
        super().__init__(_Segment(layers), where)
        self.layers = layers


def wrap_layer(layer: Any, kind: Kind, where: str = "layer", *, gathered: bool = False) -> None:
    """Makes one layer, which is not wrapped yet, drop and recompute activations of `kind`. where: its name, for
    messages.
    """
    assert isinstance(layer, Layer) and "forward" not in vars(layer), "a layer is wrapped once"
    if kind == "none" and not gathered:
        return
    if kind == "full":
        layer.forward = RecomputedFunction(layer.forward, where)  # type: ignore[assignment,method-assign]
    else:
        dropping = OutputDroppingFunction(layer.forward)
        layer.forward = dropping  # type: ignore[assignment,method-assign]
        for owner, name, place in _recompute_points(layer, kind):
            setattr(owner, name, RecomputedFunction(getattr(owner, name), f"{where}.{place}", dropping))
        if gathered:
            layer.enter = RecomputedFunction(layer.enter, f"{where}.enter", dropping)


def unwrap_layer(layer: Layer) -> None:
    """Undoes `wrap_layer`."""
    vars(layer).pop("forward", None)
    for kind in KINDS:
        for owner, name, _ in _recompute_points(layer, kind):
            vars(owner).pop(name, None)
    if isinstance(layer.enter, RecomputedFunction):
        layer.enter = layer.enter.function


def _recompute_points(layer: Layer, kind: Kind) -> Iterator[tuple[Any, str, str]]:
    """Yields (object, name of its function, name for messages) for the declarations of the layer and its sublayers for
    a kind.
    """
    blocks: list[tuple[str, Any]] = [("", layer), *((f"{name}.", block) for name, block in layer.sublayers.items())]
    for prefix, block in blocks:
        for path in block.recompute_points.get(kind, ()):
            *owner_path, function = path.split(".")
            owner = functools.reduce(getattr, owner_path, block)
            if owner is not None:
                yield owner, function, (prefix + ".".join(owner_path)).rstrip(".")


def describe(plan: Plan) -> str:
    """`recompute: full in layers 0-3 and 6, selective in layers 4-5`, for the console."""
    if any(entry.segment is not None for entry in plan):
        firsts = [next(entries).layer for _, entries in groupby(plan, key=lambda entry: entry.segment)]
        return f"recompute: all but the inputs of layers {', '.join(map(str, firsts))}"
    by_kind = {kind: [entry.layer for entry in plan if entry.kind == kind] for kind in KINDS}
    kinds = [f"{kind} in layers {layer_spans(layers)}" for kind, layers in by_kind.items() if layers]
    return f"recompute: {', '.join(kinds)}"
