"""How a run is laid over processes and memory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.section import PositiveInt, Section


class Parallel(Section):
    """How a run is spread over processes; what is computed stays the same, and `danlu verify` shows it."""

    short = "shard"

    data: PositiveInt | Literal["auto"] = "auto"
    """Processes (times `context`, `tensor` and `pipeline`) that each take other rows; auto: as many as there are."""
    shard: Literal["none", "zero1", "zero2", "zero3"] = "none"
    """What data ranks share instead of holding it each: nothing (DDP), optimizer state (zero1), gradients too (zero2),
    parameters too (zero3, the same as FSDP)."""
    replicate: PositiveInt = 1
    """Hybrid sharding: this many copies of a model that is sharded among data / replicate ranks."""
    tensor: PositiveInt = 1
    """Ranks among which every matrix is cut, with its attention heads and its part of the vocabulary."""
    sequence: bool = False
    """With tensor: cut tokens among the same ranks where norms and residuals are computed (arXiv:2205.05198)."""
    pipeline: PositiveInt = 1
    """Stages of layers, one after the other. Only 1 so far."""
    context: PositiveInt = 1
    """Ranks among which the tokens of long documents are cut. Only 1 so far."""
    expert: PositiveInt = 1
    """Ranks among which experts are dealt out. Only 1 so far."""
    accumulate: Literal["auto", "local", "sharded"] = "auto"
    """Between micro-batches: local keeps whole gradients and sends them once a step; sharded sends after each
    micro-batch and keeps a share. auto: sharded with zero2 and zero3, else local."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are summed over data ranks; bf16 halves what is sent, and loses digits."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """zero3: layers whose parameters are gathered ahead of use."""
    workers: Literal["processes", "threads"] = "processes"
    """threads: data parallel in one process, a copy of the model for each device (a teaching mode: Python runs one
    thread at a time, so it is slower)."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often the whole group starts again from the last checkpoint when a process dies."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A collective that takes longer has failed; the processes that wait, and where, are told before."""


class Recompute(Section):
    """Activations that are dropped in the forward pass and made again in the backward pass."""

    short = "kind"

    kind: Literal["none", "full", "every", "selective", "planned"] = "none"
    """none; full: every layer; every: each `layers`-th; selective: attention and element-wise operations, while matrix
    products are kept; planned: what costs least time under `budget`, from sizes and times measured on this model."""
    layers: PositiveInt | None = None
    """every: segments of so many layers keep their input alone; by default the root of the number of layers."""
    budget: Annotated[float, Field(gt=0)] | None = None
    """planned: GiB that activations of a micro-batch may take."""


class Memory(Section):
    """What is traded for memory."""

    short = "recompute"

    recompute: Recompute = Recompute()
    """Activations that are made again instead of being kept."""
    offload: list[Literal["parameters", "gradients", "optimizer", "activations"]] = []
    """What is kept in the host's memory (or, with `folder`, on its disk) instead of the device's."""
    folder: str | None = None
    """A folder on a local disk (NVMe): offloaded optimizer state and parameters lie in memory-mapped files there."""
