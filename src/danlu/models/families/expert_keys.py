"""Keys of a config.json that families with mixtures of experts share, and names of their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.experts_spec import Experts, Router
from danlu.models.families.family import LLAMA_MODULES, Stored
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec
from danlu.models.mlp_spec import Dense


def by_expert(module: str, gate: str, up: str, down: str) -> dict[str, str | Stored]:
    """Modules of experts each of which has tensors of its own, in a module called `module`."""
    named = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {f"mlp.experts.{own}": Stored(f"{module}.experts.*.{name}") for own, name in named.items()}


QWEN_MOE_MODULES: dict[str, str | Stored] = {
    **LLAMA_MODULES,
    **by_expert("mlp", "gate_proj", "up_proj", "down_proj"),
    "mlp.router": "mlp.gate",
    "mlp.shared": "mlp.shared_expert",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
MIXTRAL_MODULES: dict[str, str | Stored] = {
    **LLAMA_MODULES,
    **by_expert("block_sparse_moe", "w1", "w3", "w2"),
    "mlp.router": "block_sparse_moe.gate",
    "mlp.router.correction": "block_sparse_moe.e_score_correction_bias",
}
STACKED_MODULES: dict[str, str | Stored] = {
    "mlp.experts.gate_proj.weight": Stored("mlp.experts.gate_up_proj"),
    "mlp.experts.up_proj.weight": Stored("mlp.experts.gate_up_proj"),
    "mlp.experts.down_proj.weight": Stored("mlp.experts.down_proj"),
}
"""gate_up_proj [E, 2F, D], of each expert the gate above up; down_proj [E, D, F]: transformers 5 has them so in memory,
and folders that hold its modules' own state, as FSDP's trainers write it, and Qwen3.5's published ones."""
MIXTRAL_STACKED_MODULES: dict[str, str | Stored] = {
    **STACKED_MODULES,
    "mlp.router": "mlp.gate",
    "mlp.router.correction": "mlp.e_score_correction_bias",
}


def with_feeds(layers: Sequence[LayerSpec], feeds: Sequence[Dense | Experts]) -> tuple[LayerSpec, ...]:
    """The layers, each with a feed-forward network of its own."""
    return tuple(replace(layer, feed=feed) for layer, feed in zip(layers, feeds, strict=True))


def experts_of(config: ModelConfig) -> Experts:
    """The experts of the layers that have some: a config.json has keys for only one kind of them."""
    return next(layer.feed for layer in config.layers if isinstance(layer.feed, Experts))


def dense_width(config: ModelConfig) -> int:
    """The inner width of the layers without experts; where there are none, of all experts of a token together."""
    widths = (layer.feed.intermediate_size for layer in config.layers if isinstance(layer.feed, Dense))
    return next(widths, experts_of(config).top_k * experts_of(config).intermediate_size)


def num_experts(hf: HFValues) -> int:
    """transformers 5 writes qwen3_moe's `num_experts` as `num_local_experts`."""
    return hf.integer("num_experts" if "num_experts" in hf else "num_local_experts")


def routed_experts(hf: HFValues, plain: LayerSpec, router: Router) -> Experts:
    """Experts each as wide as `intermediate_size` says, and no others."""
    feed = plain.feed
    return Experts(
        num_experts=num_experts(hf),
        top_k=hf.integer("num_experts_per_tok"),
        intermediate_size=feed.intermediate_size,
        activation=feed.activation,
        router=router,
    )


def local_expert_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys of `routed_experts` where they are called as Mixtral's are."""
    experts = experts_of(config)
    return {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.top_k}
