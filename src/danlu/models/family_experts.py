"""What families with mixtures of experts have in their config.json: how their layers are read from it, and written.

As in `family_layers.py`, each reader takes a layer by the keys that all families have, and the number of layers; it
returns fields of ModelConfig.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.family import LLAMA_MODULES, Stored, layer_types_of, one_window, windows_by_type, with_windows
from danlu.models.family_layers import read_qwen_windows, read_windowed, write_qwen2, write_windowed
from danlu.models.hf_rope import RopeRules
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import ClampedSwiGLU, Dense, Experts, LayerSpec, Router

MIXTRAL_ROPE = RopeRules(theta=1_000_000.0)
MINIMAX_ROPE = RopeRules(theta=5_000_000.0)


def _by_expert(module: str, gate: str, up: str, down: str) -> dict[str, str | Stored]:
    """Modules of experts each of which has tensors of its own, in a module called `module`."""
    named = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {f"mlp.experts.{own}": Stored(f"{module}.experts.*.{name}") for own, name in named.items()}


QWEN_MOE_MODULES: dict[str, str | Stored] = {
    **LLAMA_MODULES,
    **_by_expert("mlp", "gate_proj", "up_proj", "down_proj"),
    "mlp.router": "mlp.gate",
    "mlp.shared": "mlp.shared_expert",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
DEEPSEEK_MOE_MODULES: dict[str, str | Stored] = {
    **QWEN_MOE_MODULES,
    "mlp.router.correction": "mlp.gate.e_score_correction_bias",
    "mlp.shared": "mlp.shared_experts",
}
MIXTRAL_MODULES: dict[str, str | Stored] = {
    **LLAMA_MODULES,
    **_by_expert("block_sparse_moe", "w1", "w3", "w2"),
    "mlp.router": "block_sparse_moe.gate",
    "mlp.router.correction": "block_sparse_moe.e_score_correction_bias",
}


GPT_OSS_MODULES: dict[str, str | Stored] = {
    **LLAMA_MODULES,
    **{
        f"mlp.experts.{own}.{kind}": Stored(f"mlp.experts.{name}{suffix}", transposed=True, alternates=True)
        for kind, suffix in (("weight", ""), ("bias", "_bias"))
        for own, name in (("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"), ("down_proj", "down_proj"))
    },
}
GPT_OSS_ROPE = RopeRules(theta=150_000.0)
GPT_OSS_ROPE_PARAMETERS: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers takes where a config has no rotary settings."""


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


# ── mixtral, minimax_m2 ──


def read_mixtral(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    return read_windowed(hf, replace(plain, feed=_mixtral_experts(hf, plain, Router(normalise=True))), layers)


def _mixtral_experts(hf: HFValues, plain: LayerSpec, router: Router) -> Experts:
    feed = plain.feed
    return Experts(
        num_experts=num_experts(hf),
        top_k=hf.integer("num_experts_per_tok"),
        intermediate_size=feed.intermediate_size,
        activation=feed.activation,
        router=router,
    )


def write_mixtral(config: ModelConfig) -> dict[str, Any]:
    return {**write_windowed(config), **_mixtral_keys(config)}


def _mixtral_keys(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.top_k}


def read_minimax_m2(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    router = Router("sigmoid", normalise=True, bias_correction=True)
    plain = replace(plain, feed=_mixtral_experts(hf, plain, router))
    return with_windows(plain, [None] * layers, qk_norm="full")


def write_minimax_m2(config: ModelConfig) -> dict[str, Any]:
    return _mixtral_keys(config)


# ── qwen2_moe, qwen3_moe, olmoe ──


def read_qwen2_moe(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    windows = _qwen2_moe_windows(hf, layers)
    plain_layers = with_windows(plain, windows, qkv_bias=hf.flag("qkv_bias"))["layers"]
    return {"layers": with_feeds(plain_layers, sparse_layers(hf, plain, gated_shared_experts(hf, plain), layers))}


def gated_shared_experts(hf: HFValues, plain: LayerSpec) -> Experts:
    """Experts of Qwen's later models: beside those of the router one that all tokens go through, with a gate."""
    return replace(
        qwen_experts(hf, plain),
        shared=Dense(hf.integer("shared_expert_intermediate_size"), plain.feed.activation),
        shared_gate=True,
    )


def gated_shared_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys of `gated_shared_experts`, and of which layers have them."""
    experts = experts_of(config)
    return {
        **qwen_keys(config),
        "num_experts": experts.num_experts,
        "shared_expert_intermediate_size": None if experts.shared is None else experts.shared.intermediate_size,
    }


def _qwen2_moe_windows(hf: HFValues, layers: int) -> tuple[int | None, ...]:
    """Not as in qwen2: every other layer below `max_window_layers` has the window."""
    if not hf.flag("use_sliding_window") or "layer_types" in hf:
        return read_qwen_windows(hf, layers)
    window, end = hf.optional_integer("sliding_window"), hf.integer("max_window_layers")
    return tuple(window if layer % 2 == 0 and layer < end else None for layer in range(layers))


def write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    return {**write_qwen2(config), **gated_shared_keys(config), "qkv_bias": config.layers[0].attention.qkv_bias}


def read_qwen3_moe(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    biased = hf.flag("attention_bias")
    window = hf.optional_integer("sliding_window") if hf.flag("use_sliding_window") else None
    plain_layers = with_windows(plain, [window] * layers, qkv_bias=biased, o_bias=biased, qk_norm="head")["layers"]
    return {"layers": with_feeds(plain_layers, sparse_layers(hf, plain, qwen_experts(hf, plain), layers))}


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    first = config.layers[0].attention
    return {
        **qwen_keys(config),
        "num_experts": experts_of(config).num_experts,
        "attention_bias": first.qkv_bias,
        "use_sliding_window": first.window is not None,
        "sliding_window": first.window,
    }


def qwen_experts(hf: HFValues, plain: LayerSpec) -> Experts:
    return Experts(
        num_experts=num_experts(hf),
        top_k=hf.integer("num_experts_per_tok"),
        intermediate_size=hf.integer("moe_intermediate_size"),
        activation=plain.feed.activation,
        router=Router(normalise=hf.flag("norm_topk_prob")),
    )


def sparse_layers(hf: HFValues, plain: LayerSpec, experts: Experts, layers: int) -> list[Dense | Experts]:
    """The feed-forward network of each layer: of each `decoder_sparse_step`-th experts, but for `mlp_only_layers`."""
    step, dense = hf.integer("decoder_sparse_step"), hf.raw("mlp_only_layers") or []
    if step < 1:
        raise hf.error("decoder_sparse_step", f"{step} is no number of layers")
    if not isinstance(dense, list) or any(layer not in range(layers) for layer in dense):
        raise hf.error("mlp_only_layers", f"expected numbers of the {layers} layers, found {dense!r}")
    assert isinstance(plain.feed, Dense)
    own = plain.feed
    feeds = [own if layer in dense or (layer + 1) % step else experts for layer in range(layers)]
    if experts not in feeds:
        raise hf.error("decoder_sparse_step", f"{step} leaves none of {layers} layers with experts: use a dense family")
    return feeds


def qwen_keys(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.intermediate_size,
        "intermediate_size": dense_width(config),
        "norm_topk_prob": experts.router.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [number for number, layer in enumerate(config.layers) if isinstance(layer.feed, Dense)],
    }


def read_olmoe(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    if hf.optional_number("clip_qkv") is not None:
        raise hf.error("clip_qkv", "queries, keys and values that are clipped are not supported")
    biased = hf.flag("attention_bias")
    experts = _mixtral_experts(hf, plain, Router(normalise=hf.flag("norm_topk_prob")))
    plain = replace(plain, feed=experts)
    return with_windows(plain, [None] * layers, qkv_bias=biased, o_bias=biased, qk_norm="full")


def write_olmoe(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        "attention_bias": config.layers[0].attention.qkv_bias,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.normalise,
    }


# ── gpt_oss ──


def read_gpt_oss(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    biased, window = hf.flag("attention_bias"), hf.optional_integer("sliding_window")
    alternating = [window if layer % 2 == 0 else None for layer in range(layers)]
    experts = replace(
        # The k highest logits, then softmax over these: the same weights as of all experts divided by their sum.
        _mixtral_experts(hf, plain, Router(normalise=True, bias=True)),
        activation=ClampedSwiGLU(hf.number("swiglu_alpha"), hf.number("swiglu_limit")),
        bias=True,
    )
    return with_windows(
        replace(plain, feed=experts),
        windows_by_type(hf, layers) if "layer_types" in hf else alternating,
        qkv_bias=biased,
        o_bias=biased,
        sinks=True,
    )


def write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    activation = experts_of(config).activation
    assert isinstance(activation, ClampedSwiGLU), "gpt_oss has no other"
    return {
        **_mixtral_keys(config),
        "attention_bias": config.layers[0].attention.qkv_bias,
        "sliding_window": one_window(config),
        "layer_types": layer_types_of(config),
        "swiglu_alpha": activation.alpha,
        "swiglu_limit": activation.limit,
    }


# ── deepseek, glm4_moe ──


def deepseek_v3_router(hf: HFValues) -> Router:
    return Router(
        "sigmoid",
        normalise=hf.flag("norm_topk_prob"),
        scale=hf.number("routed_scaling_factor"),
        groups=hf.integer("n_group"),
        top_groups=hf.integer("topk_group"),
        group_score="top-2",
        bias_correction=True,
    )


def deepseek_v2_router(hf: HFValues) -> Router:
    if hf.flag("norm_topk_prob"):
        raise hf.error("norm_topk_prob", "transformers reads it for this family and does not apply it")
    method = hf.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise hf.error("topk_method", f"{method!r} is not supported; supported: greedy, group_limited_greedy")
    plain = Router(scale=hf.number("routed_scaling_factor"))
    if method == "greedy":
        return plain
    return replace(plain, groups=hf.integer("n_group"), top_groups=hf.integer("topk_group"))


def deepseek_feeds(hf: HFValues, plain: LayerSpec, router: Router, layers: int) -> list[Dense | Experts]:
    """The feed-forward network of each layer: experts, and shared ones, behind the first `first_k_dense_replace`."""
    assert isinstance(plain.feed, Dense)
    dense, width = plain.feed, hf.integer("moe_intermediate_size")
    shared = hf.optional_integer("n_shared_experts") or 0
    experts = Experts(
        num_experts=hf.integer("n_routed_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        intermediate_size=width,
        activation=dense.activation,
        router=router,
        shared=Dense(shared * width, dense.activation) if shared else None,
    )
    first = hf.integer("first_k_dense_replace")
    return [dense if layer < first else experts for layer in range(layers)]


def deepseek_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys of `deepseek_feeds` and its routers; without experts those that say so."""
    feeds = [layer.feed for layer in config.layers]
    first = next((number for number, feed in enumerate(feeds) if isinstance(feed, Experts)), len(feeds))
    if first == len(feeds):
        return {"first_k_dense_replace": first}
    experts = experts_of(config)
    router = experts.router
    return {
        "intermediate_size": dense_width(config),
        "moe_intermediate_size": experts.intermediate_size,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": 0
        if experts.shared is None
        else experts.shared.intermediate_size // experts.intermediate_size,
        "num_experts_per_tok": experts.top_k,
        "first_k_dense_replace": first,
        "norm_topk_prob": router.normalise,
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.top_groups,
    }


def read_glm4_moe(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    qk_norm = "head" if hf.flag("use_qk_norm") else None
    windows = [None] * layers
    plain_layers = with_windows(plain, windows, qkv_bias=hf.flag("attention_bias"), qk_norm=qk_norm)["layers"]
    return {"layers": with_feeds(plain_layers, deepseek_feeds(hf, plain, deepseek_v3_router(hf), layers))}


def write_glm4_moe(config: ModelConfig) -> dict[str, Any]:
    first = config.layers[0].attention
    return {**deepseek_keys(config), "attention_bias": first.qkv_bias, "use_qk_norm": first.qk_norm is not None}
