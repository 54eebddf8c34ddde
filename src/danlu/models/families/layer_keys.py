"""Keys of a config.json that many families share, read into layers and written from them: heads, windows, biases."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import Family
from danlu.models.heads_spec import Heads
from danlu.models.hf_rope import read_rope
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec
from danlu.models.mlp_spec import Activation, Dense
from danlu.models.rope_config import Rope
from danlu.models.spec_shapes import check_sizes

ACTIVATIONS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu"}
HF_ACTIVATIONS: dict[Activation, str] = {"gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}
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
    mixer = Heads(
        heads=heads,
        kv_heads=kv_heads_of(hf, heads),
        head_dim=head_dim,
        rope=None if family.ropes_differ else read_rope(hf, head_dim, family.rope),
    )
    return LayerSpec(mixer, Dense(hf.integer("intermediate_size"), activation_of(hf, "hidden_act")))


def kv_heads_of(hf: HFValues, heads: int) -> int:
    """`null` means as many as query heads, and so does absence in the families that began without grouped queries."""
    if "num_key_value_heads" in hf or "num_key_value_heads" not in hf.keys():  # noqa: SIM118 - `in hf` asks for a value
        return hf.integer("num_key_value_heads")
    return heads


def activation_of(hf: HFValues, key: str) -> Activation:
    name = hf.text(key)
    if name not in ACTIVATIONS:
        raise hf.error(key, f"activation {name!r} is not supported; supported: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


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


def layer_types(hf: HFValues, layers: int, known: Collection[str]) -> list[str]:
    """`layer_types`. Raises ModelError where it has not one of the known ones for each layer."""
    types = hf.raw("layer_types")
    if not isinstance(types, list) or len(types) != layers:
        raise hf.error("layer_types", f"expected a list with one entry for each of {layers} layers, found {types!r}")
    if wrong := sorted({str(kind) for kind in types} - set(known)):
        raise hf.error("layer_types", f"not supported: {', '.join(wrong)}")
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
