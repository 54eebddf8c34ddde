"""The model families: how each one's config.json is read and written, and what its tensors are called on disk.

A family is a row of `FAMILIES`. Common keys are read and written here once; a row gives what is its own: the values
transformers takes for absent keys, the fields that only it has, and where its tensor names leave Llama's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from danlu.errors import ModelError
from danlu.models.config import MAX_LAYERS, ModelConfig
from danlu.models.hf_rope import read_rope, write_rope
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import Activation, Dense, Heads, LayerSpec, check_sizes

if TYPE_CHECKING:  # it imports numpy, and a wrong recipe is told without
    from danlu.types import Task

ACTIVATIONS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu"}
_HF_ACTIVATIONS: dict[Activation, str] = {"gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}

_ARCHITECTURE_ENDINGS: dict[Task, str] = {
    "causal-lm": "ForCausalLM",
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
}
"""By task, how the classes of transformers are called: LlamaForCausalLM. It has all three for every family here."""

LLAMA_MODULES: dict[str, str] = {
    "attention": "self_attn",
    "attention_norm": "input_layernorm",
    "mlp": "mlp",
    "mlp_norm": "post_attention_layernorm",
}
"""Module inside a layer, here -> on disk. The longest dotted prefix that is listed is replaced."""
GEMMA2_MODULES: dict[str, str] = {
    **LLAMA_MODULES,
    "mlp_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
PHI3_MODULES: dict[str, str] = {
    **LLAMA_MODULES,
    # Modules that share a name on disk lie there one under the other, in the order of the forward pass.
    "attention.q_proj": "self_attn.qkv_proj",
    "attention.k_proj": "self_attn.qkv_proj",
    "attention.v_proj": "self_attn.qkv_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
}


@dataclass(frozen=True)
class Family:
    architecture: str
    """The classes of transformers that load it, without the task: Llama of LlamaForCausalLM."""
    read: Callable[[HFValues, LayerSpec, int], dict[str, Any]]
    """From config.json, a layer by the keys that all families have, and the number of layers: fields of ModelConfig,
    `layers` among them."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """What only some families have, as keys of config.json."""
    defaults: Mapping[str, Any]
    """What transformers (5.23) takes for absent keys. A key/value head count is always asked for where it guesses."""
    modules: Mapping[str, str] = field(default_factory=lambda: LLAMA_MODULES)
    scalings: tuple[str, ...] = ("linear", "dynamic", "llama3", "yarn")


def read_config_values(values: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """A ModelConfig from the content of a config.json; `where` names it in messages.

    Raises ModelError for an unknown model_type (listing the known ones) and for anything the decoder would not compute
    as the model was trained. Dropout is left out: danlu trains without it. `pretraining_tp` too: it only sums the same
    products in another order.
    """
    model_type = values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(
            f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    hf = HFValues(values, family.defaults, where)
    _refuse_unsupported(hf)
    layers = hf.integer("num_hidden_layers")
    if layers > MAX_LAYERS:  # before lists of so many are made
        raise hf.error("num_hidden_layers", f"{layers:,} layers; at most {MAX_LAYERS:,} can be built")
    try:
        return ModelConfig(
            family=str(model_type),
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hf.integer("hidden_size"),
            rms_norm_eps=hf.number("rms_norm_eps"),
            max_position_embeddings=hf.integer("max_position_embeddings"),
            tie_word_embeddings=hf.flag("tie_word_embeddings"),
            bos_token_id=hf.optional_integer("bos_token_id"),
            eos_token_ids=hf.token_ids("eos_token_id"),
            pad_token_id=hf.optional_integer("pad_token_id"),
            task=task_of(values),
            **family.read(hf, _plain_layer(hf, family), layers),
        )
    except ModelError as error:
        raise error if str(error).startswith(where) else ModelError(f"{where}: {error}") from None


def _plain_layer(hf: HFValues, family: Family) -> LayerSpec:
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
        kv_heads=_kv_heads(hf, heads),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, scalings=family.scalings),
    )
    return LayerSpec(mixer, Dense(hf.integer("intermediate_size"), _activation(hf, "hidden_act")))


def task_of(values: Mapping[str, Any]) -> Task:
    """What the model of a config.json is for, by its `architectures`; a language model where they do not tell."""
    architectures = values.get("architectures")
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    return next((task for task, ending in _ARCHITECTURE_ENDINGS.items() if named.endswith(ending)), "causal-lm")


def config_values(config: ModelConfig, *, torch_dtype: str) -> dict[str, Any]:
    """The content of a config.json that transformers 4 and 5 load as this model.

    torch_dtype: "float32", "bfloat16" or "float16": how the weights beside it are stored.
    Raises ModelError if the family has no key for something that `config` sets.
    """
    family, first = FAMILIES[config.family], config.layers[0]
    eos: int | list[int] | None = list(config.eos_token_ids) or None
    if len(config.eos_token_ids) == 1:
        eos = config.eos_token_ids[0]
    values: dict[str, Any] = {
        "architectures": [family.architecture + _ARCHITECTURE_ENDINGS[config.task]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": first.feed.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": first.mixer.heads,
        "num_key_value_heads": first.mixer.kv_heads,
        "head_dim": first.mixer.head_dim,
        "hidden_act": _HF_ACTIVATIONS[first.feed.activation],
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        **write_rope(first.mixer.rope, first.mixer.head_dim),
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": torch_dtype,
        **family.write(config),
    }
    understood = read_config_values(values)
    if understood != config:
        names = [each.name for each in fields(config)]
        lost = [name for name in names if getattr(understood, name) != getattr(config, name)]
        layers = zip(config.layers, understood.layers, strict=False)
        parts = dict.fromkeys(part for own, read in layers for part in own.differences(read))
        lost = [part for name in lost for part in (parts if name == "layers" and parts else [name])]
        raise ModelError(f"a {config.family} config.json cannot say this model's {', '.join(lost)}")
    return values


def _refuse_unsupported(hf: HFValues) -> None:
    if "quantization_config" in hf:
        method = hf.section("quantization_config").get("quant_method", "unknown method")
        if method != "bitsandbytes":
            raise hf.error(
                "quantization_config", f"weights stored quantised ({method}) are not supported; use the original"
            )
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if key in hf and hf.integer(key) > 1:
            raise hf.error(key, "mixtures of experts are not supported")
    if hf.flag("use_bidirectional_attention"):
        raise hf.error("use_bidirectional_attention", "only causal attention is supported")


def _kv_heads(hf: HFValues, heads: int) -> int:
    """`null` means as many as query heads, and so does absence in the families that began without grouped queries."""
    if "num_key_value_heads" in hf or "num_key_value_heads" not in hf.keys():  # noqa: SIM118 - `in hf` asks for a value
        return hf.integer("num_key_value_heads")
    return heads


def _activation(hf: HFValues, key: str) -> Activation:
    name = hf.text(key)
    if name not in ACTIVATIONS:
        raise hf.error(key, f"activation {name!r} is not supported; supported: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def _windows_by_type(hf: HFValues, layers: int) -> tuple[int | None, ...]:
    types, window = hf.raw("layer_types"), hf.optional_integer("sliding_window")
    if not isinstance(types, list) or len(types) != layers:
        raise hf.error("layer_types", f"expected a list with one entry for each of {layers} layers, found {types!r}")
    if wrong := sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"}):
        raise hf.error("layer_types", f"not supported: {', '.join(wrong)}")
    if window is None and "sliding_attention" in types:
        raise hf.error("sliding_window", "missing, but layer_types names sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _layers(plain: LayerSpec, windows: Sequence[int | None], **mixer: Any) -> dict[str, Any]:
    """Layers that are alike but for their windows; mixer: what else is not as in `plain`."""
    return {"layers": tuple(replace(plain, mixer=replace(plain.mixer, window=each, **mixer)) for each in windows)}


def _windows(config: ModelConfig) -> list[int | None]:
    return [layer.mixer.window for layer in config.layers]


def _layer_types(config: ModelConfig) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for window in _windows(config)]


def _one_window(config: ModelConfig) -> int | None:
    """The window of the layers that have one: a config.json has a key for only one."""
    return next((window for window in _windows(config) if window is not None), None)


def _read_llama(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    biased = hf.flag("attention_bias")
    plain = replace(plain, feed=replace(plain.feed, bias=hf.flag("mlp_bias")))
    return _layers(plain, [None] * layers, qkv_bias=biased, o_bias=biased)


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    first = config.layers[0]
    return {"attention_bias": first.mixer.qkv_bias, "mlp_bias": first.feed.bias}


def _read_windowed(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    if "layer_types" in hf and len(set(_windows_by_type(hf, layers))) > 1:
        raise hf.error("layer_types", "this family has the same window in every layer")
    return _layers(plain, [hf.optional_integer("sliding_window")] * layers)


def _write_windowed(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.layers[0].mixer.window}


def _read_qwen2(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    return _layers(plain, _qwen_windows(hf, layers), qkv_bias=True)


def _qwen_windows(hf: HFValues, layers: int) -> tuple[int | None, ...]:
    if not hf.flag("use_sliding_window"):
        return (None,) * layers
    if "layer_types" in hf:
        return _windows_by_type(hf, layers)
    window, first = hf.optional_integer("sliding_window"), hf.integer("max_window_layers")
    return tuple(window if layer >= first else None for layer in range(layers))


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": _one_window(config) is not None,
        "sliding_window": _one_window(config),
        "max_window_layers": _windows(config).count(None),
        "layer_types": _layer_types(config),
    }


def _read_qwen3(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    biased = hf.flag("attention_bias")
    return _layers(plain, _qwen_windows(hf, layers), qkv_bias=biased, o_bias=biased, qk_norm=True)


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.layers[0].mixer.qkv_bias, **_write_qwen2(config)}


def _read_gemma2(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    biased, window = hf.flag("attention_bias"), hf.optional_integer("sliding_window")
    alternating = [window if layer % 2 == 0 else None for layer in range(layers)]
    scalar = hf.number("query_pre_attn_scalar")
    if scalar <= 0:
        raise hf.error("query_pre_attn_scalar", f"{scalar:g} has no root that scores could be divided by")
    feed = replace(plain.feed, activation=_activation(hf, "hidden_activation"))
    return {
        **_layers(
            replace(plain, feed=feed, norms="sandwich"),
            _windows_by_type(hf, layers) if "layer_types" in hf else alternating,
            qkv_bias=biased,
            o_bias=biased,
            softcap=hf.optional_number("attn_logit_softcapping"),
            scale=1 / math.sqrt(scalar),
        ),
        "embedding_multiplier": hf.integer("hidden_size") ** 0.5,
        "final_softcap": hf.optional_number("final_logit_softcapping"),
        "norm_offset": 1.0,
    }


def _write_gemma2(config: ModelConfig) -> dict[str, Any]:
    first = config.layers[0]
    scalar = round(first.mixer.attention_scale**-2, 9)  # of whose root it is one over
    return {
        "attention_bias": first.mixer.qkv_bias,
        "hidden_activation": _HF_ACTIVATIONS[first.feed.activation],
        "sliding_window": _one_window(config),
        "layer_types": _layer_types(config),
        "attn_logit_softcapping": first.mixer.softcap,
        "final_logit_softcapping": config.final_softcap,
        # transformers 5 wants an integer here.
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
    }


_COMMON: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}

FAMILIES: dict[str, Family] = {
    "gemma2": Family(
        architecture="Gemma2",
        read=_read_gemma2,
        write=_write_gemma2,
        modules=GEMMA2_MODULES,
        defaults={
            **_COMMON,
            "attn_logit_softcapping": 50.0,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "llama": Family(
        architecture="Llama",
        read=_read_llama,
        write=_write_llama,
        defaults={
            **_COMMON,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
        },
    ),
    "mistral": Family(
        architecture="Mistral",
        read=_read_windowed,
        write=_write_windowed,
        defaults={
            **_COMMON,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "phi3": Family(
        architecture="Phi3",
        read=_read_windowed,
        write=_write_windowed,
        modules=PHI3_MODULES,
        scalings=(),
        defaults={
            **_COMMON,
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "max_position_embeddings": 4096,
            "num_key_value_heads": None,
            "pad_token_id": 32000,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen2": Family(
        architecture="Qwen2",
        read=_read_qwen2,
        write=_write_qwen2,
        defaults={**_COMMON, "max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 4096},
    ),
    "qwen3": Family(
        architecture="Qwen3",
        read=_read_qwen3,
        write=_write_qwen3,
        defaults={
            **_COMMON,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "sliding_window": 4096,
        },
    ),
}
"""model_type -> family. Llama covers Llama 2 and 3, TinyLlama, SmolLM2; qwen2 covers Qwen2.5; phi3 covers phi-4."""
