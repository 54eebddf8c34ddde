"""Seconds of a layer's passes over a micro-batch, from the speeds of its primitives. Imports no torch."""

from __future__ import annotations

from danlu.planning.layer_graph import LayerGraph
from danlu.planning.layer_work import layer_work
from danlu.planning.primitives import PassSeconds
from danlu.planning.speeds import Speeds

LayerSeconds = PassSeconds


def layer_seconds(
    graph: LayerGraph,
    speeds: Speeds,
    precision: str | None = None,
    *,
    expert_ranks: int = 1,
    narrow_weights: bool = False,
) -> LayerSeconds:
    """The seconds of one layer on one rank, without collectives.

    precision: of products with activations; by default fp32, or bf16 of half-precision activations. expert_ranks: the
    ranks that share the experts. narrow_weights: whether trained weights come in the type of activations, as FSDP
    gathers them.
    """
    return PassSeconds.of(
        layer_work(graph, precision, expert_ranks=expert_ranks, narrow_weights=narrow_weights), speeds
    )
