"""Gemma 4's language part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from danlu.models.config import ModelConfig
from danlu.models.families.family import GENERATION_ONLY, Family, Stored
from danlu.models.families.gemma import GEMMA_MODULES
from danlu.models.families.layer_keys import (
    HF_ACTIVATIONS,
    activation_of,
    attention_biases,
    layer_types_of,
    one_window,
    ropes_by_type,
    windows_by_type,
)
from danlu.models.hf_rope import RopeRules, read_ropes_by_type, write_rope_parameters
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import Dense, Experts, LayerSpec, Router
from danlu.models.mixer_spec import Heads

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN = 6
"""Every layer of this number sees everything, where a config.json does not say which ones do."""
_ROPE = RopeRules(("linear", "llama3", "proportional", "yarn"))
_ROPES: dict[str, Any] = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_OF_LAYER = ("head_dim", "num_key_value_heads")
"""The keys that `per_layer_config` may have."""


def read_gemma4(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    _refuse_parts(hf)
    window = hf.integer("sliding_window")
    pattern = [window if (layer + 1) % _PATTERN and layer + 1 < layers else None for layer in range(layers)]
    windows = windows_by_type(hf, layers, absent=pattern)
    if windows[-1] is not None:
        raise hf.error("layer_types", f"transformers makes the last layer {_FULL}, whatever is given: say so")
    mixer = replace(plain.attention, scale=1.0, qk_norm="head", value_norm=True, **attention_biases(hf))
    heads = {_SLIDING: mixer, _FULL: _full_heads(hf, mixer, windows)}
    ropes = _read_ropes(hf, {kind: each.head_dim for kind, each in heads.items()})
    width, wide = plain.feed.intermediate_size, 2 if hf.flag("use_double_wide_mlp") else 1
    sharing = _sharing(hf, windows)
    feeds = {reads: _read_feed(hf, width * (wide if reads else 1)) for reads in (False, True)}
    own_width = _per_layer_width(hf)
    of_kind = {
        (window, shares): replace(
            plain,
            mixer=replace(
                heads[kind := _SLIDING if window else _FULL], window=window, rope=ropes[kind], sharing=shares
            ),
            feed=feeds[shares == "reads"],
            norms="sandwich",
            scalar=True,
            per_layer_width=own_width,
        )
        for window, shares in dict.fromkeys(zip(windows, sharing, strict=True))
    }
    return {
        "layers": tuple(of_kind[each] for each in zip(windows, sharing, strict=True)),
        "embedding_multiplier": hf.integer("hidden_size") ** 0.5,
        "final_softcap": hf.optional_number("final_logit_softcapping"),
    }


def write_gemma4(config: ModelConfig) -> dict[str, Any]:
    full = next(layer.attention for layer in config.layers if layer.mixer.window is None)
    sliding = next((layer.attention for layer in config.layers if layer.mixer.window is not None), full)
    ropes = zip((_FULL, _SLIDING), ropes_by_type(config), (full.head_dim, sliding.head_dim), strict=True)
    return {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            kind: _ROPES[kind] if rope is None else write_rope_parameters(rope, width) for kind, rope, width in ropes
        },
        "attention_bias": full.qkv_bias,
        "attention_k_eq_v": full.values_are_keys,
        "head_dim": sliding.head_dim,
        "num_key_value_heads": sliding.kv_heads,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads if full.values_are_keys else None,
        "sliding_window": one_window(config) or _DEFAULTS["sliding_window"],
        "layer_types": layer_types_of(config),
        "final_logit_softcapping": config.final_softcap,
        "hidden_size_per_layer_input": config.per_layer_width,
        "num_kv_shared_layers": sum(layer.attention.reads_keys for layer in config.layers),
        **_feed_keys(config),
        **({"vocab_size_per_layer_input": config.vocab_rows} if config.per_layer_width else {}),
    }


def _read_feed(hf: HFValues, width: int) -> Dense | Experts:
    dense = Dense(width, activation_of(hf, "hidden_activation"))
    if not hf.flag("enable_moe_block"):
        return dense
    return Experts(
        num_experts=hf.integer("num_experts"),
        top_k=hf.integer("top_k_experts"),
        intermediate_size=hf.integer("moe_intermediate_size"),
        activation=dense.activation,
        router=Router(normalise=True, input_norm=True, expert_scales=True),
        shared=dense,
        branch_norms=True,
    )


def _sharing(hf: HFValues, windows: tuple[int | None, ...]) -> list[Literal["gives", "reads"] | None]:
    """How each layer shares keys and values: the last layers read those of the last layer before them of their kind."""
    count = hf.optional_integer("num_kv_shared_layers") or 0
    first = len(windows) - count
    if count < 0 or first < 1 or set(windows[first:]) - set(windows[:first]):
        raise hf.error(
            "num_kv_shared_layers",
            f"{count} of {len(windows)} layers have no keys and values, and each kind of them needs a layer before "
            "them that has some",
        )
    sharing: list[Literal["gives", "reads"] | None] = [
        None if layer < first else "reads" for layer in range(len(windows))
    ]
    for window in dict.fromkeys(windows[first:]):
        sharing[max(layer for layer in range(first) if windows[layer] == window)] = "gives"
    return sharing


def _per_layer_width(hf: HFValues) -> int:
    width = hf.optional_integer("hidden_size_per_layer_input") or 0
    rows = hf.optional_integer("vocab_size_per_layer_input")
    if width and rows not in (None, hf.integer("vocab_size")):
        raise hf.error(
            "vocab_size_per_layer_input",
            f"{rows} tokens have embeddings of each layer, and vocab_size is {hf.integer('vocab_size')}: only tables "
            "with a row for each token of the vocabulary are read",
        )
    return width


def _feed_keys(config: ModelConfig) -> dict[str, Any]:
    feed = config.layers[0].feed
    wide = [layer.feed.intermediate_size != feed.intermediate_size for layer in config.layers]
    if isinstance(feed, Dense):
        return {
            "enable_moe_block": False,
            "hidden_activation": HF_ACTIVATIONS[feed.activation],
            "use_double_wide_mlp": any(wide),
        }
    assert feed.shared is not None, "experts stand next to a dense network"
    return {
        "enable_moe_block": True,
        "hidden_activation": HF_ACTIVATIONS[feed.activation],
        "intermediate_size": feed.shared.intermediate_size,
        "moe_intermediate_size": feed.intermediate_size,
        "num_experts": feed.num_experts,
        "top_k_experts": feed.top_k,
    }


def read_gemma4_unified(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    if hf.flag("enable_moe_block"):
        raise hf.error("enable_moe_block", "transformers does not read it for this family")
    if hf.optional_integer("hidden_size_per_layer_input"):
        raise hf.error("hidden_size_per_layer_input", "transformers does not read it for this family")
    return read_gemma4(hf, plain, layers)


def _refuse_parts(hf: HFValues) -> None:
    if hf.optional_integer("num_kv_shared_layers") and hf.flag("enable_moe_block"):
        raise hf.error("num_kv_shared_layers", "layers with experts that share keys and values are not supported")
    for key in ("rope_theta", "rope_scaling"):
        if key in hf:
            raise hf.error(key, "transformers does not read it for this family; say it in rope_parameters")


def _full_heads(hf: HFValues, sliding: Heads, windows: tuple[int | None, ...]) -> Heads:
    """The heads of layers that see everything. sliding: of the others."""
    keys_are_values = hf.flag("attention_k_eq_v")
    if "per_layer_config" in hf:
        own = _of_layers(hf, windows)
        head_dim, kv_heads = own.get("head_dim", sliding.head_dim), own.get("num_key_value_heads", sliding.kv_heads)
    else:
        head_dim = hf.integer("global_head_dim")
        given = hf.optional_integer("num_global_key_value_heads") if keys_are_values else None
        kv_heads = sliding.kv_heads if given is None else given
    return replace(sliding, head_dim=head_dim, kv_heads=kv_heads, values_are_keys=keys_are_values)


def _of_layers(hf: HFValues, windows: tuple[int | None, ...]) -> Mapping[str, int]:
    """Returns the entry of `per_layer_config` for the layers that see everything, which transformers 5.23 writes in
    place of `global_head_dim` and `num_global_key_value_heads`.
    """
    by_layer = hf.section("per_layer_config")
    of_window: dict[bool, list[Any]] = {True: [], False: []}
    for layer, window in enumerate(windows):
        of_window[window is not None].append(by_layer.get(str(layer), {}))
    own = of_window[False][0]
    fits = isinstance(own, dict) and own.keys() <= set(_OF_LAYER) and all(type(size) is int for size in own.values())
    if any(of_window[True]) or any(each != own for each in of_window[False]) or not fits:
        raise hf.error(
            "per_layer_config",
            f"only {' and '.join(_OF_LAYER)} of layers that see everything may be given, the same for all of them",
        )
    return dict(own)


def _read_ropes(hf: HFValues, head_dims: Mapping[str, int]) -> Mapping[str, Any]:
    if not hf.section("rope_parameters"):  # null
        hf = HFValues({"rope_parameters": _ROPES}, {key: hf.raw(key) for key in hf.keys()}, hf.where)  # noqa: SIM118
    return read_ropes_by_type(hf, head_dims, _ROPE, local_theta=("rope_theta", 10_000.0))


_MODULES: dict[str, str | Stored] = {
    **GEMMA_MODULES,
    "layer_scalar.weight": "layer_scalar",
    "per_layer.gate_proj": "per_layer_input_gate",
    "per_layer.down_proj": "per_layer_projection",
    "post_per_layer_norm": "post_per_layer_input_norm",
}
_EXPERTS_MODULES: dict[str, str | Stored] = {
    **_MODULES,
    "mlp.router.weight": "router.proj.weight",
    "mlp.router.scale": "router.scale",
    "mlp.router.expert_scales": "router.per_expert_scale",
    "mlp.experts.gate_proj.weight": Stored("experts.gate_up_proj"),
    "mlp.experts.up_proj.weight": Stored("experts.gate_up_proj"),
    "mlp.experts.down_proj.weight": Stored("experts.down_proj"),
    "mlp.input_norm": "pre_feedforward_layernorm_2",
    "mlp.output_norm": "post_feedforward_layernorm_2",
    "mlp.shared": "mlp",
    "mlp.shared_input_norm": "pre_feedforward_layernorm",
    "mlp.shared_output_norm": "post_feedforward_layernorm_1",
}
_DEFAULTS: dict[str, Any] = {
    "bos_token_id": 2,
    "eos_token_id": 1,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "rope_parameters": _ROPES,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 262144,
}

FAMILIES: dict[str, Family] = {
    "gemma4_text": Family(
        architecture="Gemma4",
        architectures=GENERATION_ONLY,
        read=read_gemma4,
        write=write_gemma4,
        modules=_EXPERTS_MODULES,
        has_experts=True,
        experts_module="experts",
        rope=_ROPE,
        ropes_differ=True,
        defaults=_DEFAULTS,
    ),
    "gemma4_unified_text": Family(
        architecture="Gemma4Unified",
        architectures=GENERATION_ONLY,
        read=read_gemma4_unified,
        write=write_gemma4,
        modules=_MODULES,
        rope=_ROPE,
        ropes_differ=True,
        defaults={
            **_DEFAULTS,
            "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
        },
    ),
}
