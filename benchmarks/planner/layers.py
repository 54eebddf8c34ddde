"""Published runs' layers as danlu has them: their spec, and the parts of them that are trained. Imports no torch."""

from __future__ import annotations

from danlu.models.layer_spec import Dense, LayerSpec
from danlu.models.mixer_spec import Heads
from danlu.models.rope_config import Rope
from danlu.planning.layer_graph import LayerTraining, LowRankAdapter
from planner.rows import PublishedRun

_NAMES = {
    "q": "attention.q_proj",
    "k": "attention.k_proj",
    "v": "attention.v_proj",
    "o": "attention.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Product of an `Architecture` -> its name in a layer."""


def layer_of(run: PublishedRun) -> LayerSpec:
    """The layer of a run's architecture as danlu has it."""
    shape = run.architecture
    rope = Rope(1e4, shape.head_width, run.length) if shape.positions == "rotary" else None
    mixer = Heads(shape.heads, shape.kv_heads, shape.head_width, rope, qkv_bias=shape.qkv_bias, o_bias=shape.bias)
    feed = Dense(shape.inner, "silu" if shape.gated else "gelu", bias=shape.bias, gated=shape.gated)
    return LayerSpec(
        mixer,
        feed,
        norms="shared" if shape.norms == 1 else "pre",
        norm_kind="rms" if shape.norm == "rms" else "layer-bias",
        parallel=shape.parallel,
    )


def training_of(run: PublishedRun) -> LayerTraining:
    """The parts of a run's layers that are trained."""
    rank, products = run.method.rank, run.architecture.products
    targets = [name for name in run.method.targets or () if rank and name in products]
    adapters = tuple((_NAMES[name], LowRankAdapter(rank or 0)) for name in targets)
    return LayerTraining(run.method.kind == "full", adapters, quantized=run.method.base is not None)
