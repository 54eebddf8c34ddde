"""The activations that each layer recomputes, as plain data (`recompute` describes the kinds). Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from danlu.recipe.sections import Recompute

Kind = Literal["none", "elementwise", "selective", "full"]
KINDS: tuple[Kind, ...] = ("none", "elementwise", "selective", "full")
"""The kinds from the one that keeps most to the one that keeps least."""


@dataclass(frozen=True)
class LayerPlan:
    """The activations that one layer recomputes in the backward pass."""

    layer: int
    kind: Kind
    segment: int | None = None  # number of the segment, of several layers, of which only the first input is kept


Plan = Sequence[LayerPlan]


def plan_of_layers(section: Recompute, layers: Sequence[int], chunks: Sequence[Sequence[int]]) -> list[LayerPlan]:
    """The plan of a section that needs no measurements. chunks: the layers of each chunk of a pipeline that is here."""
    if section.kind != "every":
        kind: Kind = section.kind  # type: ignore[assignment]
        return [LayerPlan(layer, kind) for layer in layers]
    size = section.layers or max(1, round(math.sqrt(len(layers))))
    # No segment goes beyond a chunk of a pipeline: what comes next in the model is in another forward pass.
    segments = [chunk[start : start + size] for chunk in chunks for start in range(0, len(chunk), size)]
    return [LayerPlan(layer, "full", number) for number, own in enumerate(segments) for layer in own]
