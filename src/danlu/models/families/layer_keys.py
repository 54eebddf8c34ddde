"""Keys of a config.json that many families share: heads, windows, biases, experts, and names of experts' tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import LLAMA_MODULES, Family, Stored
from danlu.models.hf_rope import read_rope
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import Activation, Dense, Experts, LayerSpec, Router
from danlu.models.mixer_spec import Heads, check_sizes
from danlu.models.rope_config import Rope

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",  # the same formula with its constant to ten digits
    "gelu_new": "gelu_tanh",  # the same formula, in Python
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
HF_ACTIVATIONS: dict[Activation, str] = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}
"""Not of clamped ones, which a family writes as more keys than this one."""


def plain_layer(hf: HFValues, family: Family) -> LayerSpec:
    """A layer by the keys that all families have."""
    heads, width = hf.integer("num_attention_heads"), hf.integer("hidden_size")
    if "head_dim" not in hf and (heads < 1 or width % heads):
        raise hf.error(
            "hidden_size", f"{width} does not divide over {heads} attention heads, and head_dim is not given"
        )
    head_dim = hf.integer("head_dim") if "head_dim" in hf else width // heads
    check_sizes({"heads": heads, "head_dim": head_dim})
    if family.heads_split_width and head_dim * heads != width:
        raise hf.error("head_dim", f"transformers takes {width} / {heads} for this family, whatever is given")
    mixer = Heads(
        heads=heads,
        kv_heads=kv_heads_of(hf, heads),
        head_dim=head_dim,
        rope=None if family.ropes_differ else read_rope(hf, head_dim, family.rope),
    )
    return LayerSpec(mixer, Dense(hf.integer("intermediate_size"), activation_of(hf, "hidden_act", family.activations)))


def kv_heads_of(hf: HFValues, heads: int) -> int:
    """`null` means as many as query heads, and so does absence in the families that began without grouped queries."""
    if "num_key_value_heads" in hf or "num_key_value_heads" not in hf.keys():  # noqa: SIM118 - `in hf` asks for a value
        return hf.integer("num_key_value_heads")
    return heads


def activation_of(hf: HFValues, key: str, of_family: Mapping[str, Activation] | None = None) -> Activation:
    """Returns the activation of a key. of_family: names that a family means otherwise."""
    name, known = hf.text(key), {**ACTIVATIONS, **(of_family or {})}
    if name not in known:
        raise hf.error(key, f"activation {name!r} is not supported; supported: {', '.join(sorted(known))}")
    return known[name]


def attention_biases(hf: HFValues) -> dict[str, Any]:
    """Fields of `Heads` by `attention_bias`: whether all four projections have biases."""
    biased = hf.flag("attention_bias")
    return {"qkv_bias": biased, "o_bias": biased}


def interval_of(hf: HFValues, key: str) -> int:
    """Returns the number of layers after which something recurs. Raises ModelError for less than one."""
    every = hf.integer(key)
    if every < 1:
        raise hf.error(key, f"{every} is no number of layers")
    return every


def layer_types(hf: HFValues, layers: int, known: Collection[str], key: str = "layer_types") -> list[str]:
    """The list of `key`. Raises ModelError where it has not one of the known types for each layer."""
    types = hf.raw(key)
    if not isinstance(types, list) or len(types) != layers:
        raise hf.error(key, f"expected a list with one entry for each of {layers} layers, found {types!r}")
    if wrong := sorted({str(kind) for kind in types} - set(known)):
        raise hf.error(key, f"not supported: {', '.join(wrong)}")
    return types


def windows_by_type(hf: HFValues, layers: int, absent: Sequence[int | None] | None = None) -> tuple[int | None, ...]:
    """The window of each layer by `layer_types`; absent: those of a config without it, which else is refused."""
    if absent is not None and "layer_types" not in hf:
        return tuple(absent)
    types = layer_types(hf, layers, ("full_attention", "sliding_attention"))
    window = hf.optional_integer("sliding_window")
    if window is None and "sliding_attention" in types:
        raise hf.error("sliding_window", "missing, but layer_types names sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def alternating_windows(hf: HFValues, layers: int) -> tuple[int | None, ...]:
    """The window of each layer by `layer_types`; without it, every other layer has one, the first among them."""
    window = hf.optional_integer("sliding_window")
    return windows_by_type(hf, layers, absent=[window if layer % 2 == 0 else None for layer in range(layers)])


def with_windows(plain: LayerSpec, windows: Sequence[int | None], **mixer: Any) -> dict[str, Any]:
    """Returns layers that are alike but for their windows. mixer: other fields that differ from `plain`."""
    return {"layers": tuple(replace(plain, mixer=replace(plain.attention, window=each, **mixer)) for each in windows)}


def windows_of(config: ModelConfig) -> list[int | None]:
    return [layer.mixer.window for layer in config.layers]


def layer_types_of(config: ModelConfig) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for window in windows_of(config)]


def one_window(config: ModelConfig) -> int | None:
    """The window of the layers that have one: a config.json has a key for only one."""
    return next((window for window in windows_of(config) if window is not None), None)


def with_ropes(
    plain: LayerSpec, windows: Sequence[int | None], ropes: dict[str, Rope], **mixer: Any
) -> tuple[LayerSpec, ...]:
    """Returns layers with a rotary embedding that depends on whether they have a window. ropes: from
    `read_ropes_by_type`.
    """
    kinds = {windowed: ropes["sliding_attention" if windowed else "full_attention"] for windowed in (False, True)}
    return tuple(
        replace(plain, mixer=replace(plain.attention, window=window, rope=kinds[window is not None], **mixer))
        for window in windows
    )


def ropes_by_type(config: ModelConfig) -> tuple[Rope | None, Rope | None]:
    """The rotary embeddings of layers that see everything, and of those with a window; None where there are none."""
    of_type = {layer.mixer.window is not None: layer.mixer.rope for layer in config.layers}
    return of_type.get(False), of_type.get(True)


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
