"""Memory: recomputation and offload."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import PositiveInt, Section


class Recompute(Section):
    """Activation checkpointing: what is dropped in the forward pass and recomputed in the backward pass."""

    short = "kind"

    kind: Literal["none", "full", "every", "selective", "planned"] = "none"
    """none; full: every layer; every: each `layers`-th; selective: attention and element-wise operations, while matrix
    products are kept; planned: what costs least time under `budget`, from sizes and times measured on this model."""
    layers: PositiveInt | None = None
    """every: segments of so many layers keep only their input; by default the square root of the number of layers."""
    budget: Annotated[float, Field(gt=0)] | None = None
    """planned: GiB that activations of a micro-batch may take."""


class Memory(Section):
    """What is traded for memory."""

    short = "recompute"

    recompute: Recompute = Recompute()
    """Activations that are recomputed instead of being kept."""
    offload: list[Literal["parameters", "gradients", "optimizer", "activations"]] = []
    """What is kept in the host's memory (or, with `folder`, on its disk) instead of the device's."""
    folder: str | None = None
    """A folder on a local disk (NVMe): offloaded optimizer state and parameters lie in memory-mapped files there."""
