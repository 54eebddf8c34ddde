"""Converts a config.json into a ModelConfig and back: the keys that all families have. `families` has the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from danlu.core.errors import ModelError
from danlu.models.block_scaled import CODED_METHODS, METHODS
from danlu.models.config import MAX_LAYERS, ModelConfig
from danlu.models.families import FAMILIES, READ_AS
from danlu.models.families.family import ARCHITECTURE_ENDINGS, DEFAULTS, Family
from danlu.models.families.layer_keys import HF_ACTIVATIONS, plain_layer
from danlu.models.hf_rope import write_rope
from danlu.models.hf_values import HFValues
from danlu.models.mixer_spec import Delta, Latent
from danlu.models.multimodal import MULTIMODAL, text_values

if TYPE_CHECKING:
    from danlu.core.types import Task


PADDING_KEY = "vocab_padding"
"""danlu's own key of config.json: how many of the `vocab_size` rows, at the end, no token has."""


def read_config_values(values: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """A ModelConfig from the content of a config.json; `where` names it in messages.

    Raises ModelError for an unknown model_type (listing the known ones), for one that danlu does not train (saying
    why) and for anything the decoder would not compute as the model was trained. Dropout is left out: danlu trains
    without it. `pretraining_tp` too: it only sums the same products in another order.
    """
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in MULTIMODAL:
        text = read_config_values(text_values(values, where), where=where)
        return replace(text, multimodal=model_type, task=task_of(values))
    model_type = READ_AS.get(str(model_type), model_type)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None and model_type in UNSUPPORTED:
        raise ModelError(f"{where}: model_type {model_type!r} is not supported: {UNSUPPORTED[model_type]}")
    if family is None:
        raise ModelError(
            f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    renamed = {other: values[key] for key, other in family.aliases.items() if values.get(key) is not None}
    hf = HFValues({**values, **renamed}, {**DEFAULTS, **family.defaults}, where)
    _refuse_unsupported(hf, family)
    layers = hf.integer("num_hidden_layers")
    if layers > MAX_LAYERS:  # before lists of so many are made
        raise hf.error("num_hidden_layers", f"{layers:,} layers; at most {MAX_LAYERS:,} can be built")
    try:
        return ModelConfig(
            family=str(model_type),
            vocab_size=hf.integer("vocab_size") - (padding := _padding(hf)),
            hidden_size=hf.integer("hidden_size"),
            rms_norm_eps=hf.number(family.norm_eps_key),
            max_position_embeddings=hf.integer("max_position_embeddings"),
            tie_word_embeddings=hf.flag("tie_word_embeddings"),
            bos_token_id=hf.optional_integer("bos_token_id"),
            eos_token_ids=hf.token_ids("eos_token_id"),
            pad_token_id=hf.optional_integer("pad_token_id"),
            task=task_of(values),
            vocab_padding=padding,
            **family.read(hf, plain_layer(hf, family), layers),
        )
    except ModelError as error:
        raise error if str(error).startswith(where) else ModelError(f"{where}: {error}") from None


def _padding(hf: HFValues) -> int:
    """Rows of the vocabulary that no token has, as danlu writes them."""
    padding = hf.optional_integer(PADDING_KEY) or 0
    if not 0 <= padding < hf.integer("vocab_size"):
        raise hf.error(
            PADDING_KEY, f"{padding} of {hf.integer('vocab_size')} rows: expected 0 or more, and fewer than all"
        )
    return padding


def task_of(values: Mapping[str, Any]) -> Task:
    """Returns the task of a config.json's model by its `architectures`; a language model where they do not say."""
    architectures = values.get("architectures")
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    return next((task for task, ending in ARCHITECTURE_ENDINGS.items() if named.endswith(ending)), "causal-lm")


def architecture_of(family: str, task: Task) -> str:
    """The class of transformers that loads a family's models for a task: LlamaForCausalLM.

    Raises ModelError where transformers has none, with the families for which it has one. Training calls this first, so
    that the error does not come when the model is to be written.
    """
    architecture = FAMILIES[family].architecture_of(task)
    if architecture is None:
        others = [name for name, other in FAMILIES.items() if other.architecture_of(task) is not None]
        raise ModelError(
            f"transformers has no class for {task} with a {family} model, so nothing could load the result. It has one "
            f"for {', '.join(others)}; an adapter on {family} can be trained, which danlu loads without one"
        )
    return architecture


def config_values(config: ModelConfig, *, torch_dtype: str) -> dict[str, Any]:
    """Returns the content of a config.json that transformers 4 and 5 load as this model, or as a multimodal model's
    language part.

    torch_dtype: "float32", "bfloat16" or "float16": the dtype of the weights in the folder.
    Raises ModelError if the family has no key for something that `config` sets, or no class for its task.
    """
    config = replace(config, multimodal=None)
    family, first = FAMILIES[config.family], config.layers[0]
    heads = next(layer.mixer for layer in config.layers if not isinstance(layer.mixer, Delta))
    # transformers' head_dim of latent attention is the width of what is rotated.
    head_dim = heads.qk_rope_head_dim if isinstance(heads, Latent) else heads.head_dim
    eos: int | list[int] | None = list(config.eos_token_ids) or None
    if len(config.eos_token_ids) == 1:
        eos = config.eos_token_ids[0]
    values: dict[str, Any] = {
        "architectures": [architecture_of(config.family, config.task)],
        "model_type": config.family,
        "vocab_size": config.vocab_rows,
        **({PADDING_KEY: config.vocab_padding} if config.vocab_padding else {}),
        "hidden_size": config.hidden_size,
        "intermediate_size": first.feed.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": heads.heads,
        "num_key_value_heads": heads.kv_heads,
        "head_dim": None if family.heads_split_width else head_dim,
        "hidden_act": HF_ACTIVATIONS.get(first.feed.activation, "silu"),
        "max_position_embeddings": config.max_position_embeddings,
        family.norm_eps_key: config.rms_norm_eps,
        **(write_rope(config.ropes[0], head_dim) if config.ropes else {}),
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": torch_dtype,
        **family.write(config),
    }
    values = {key: value for key, value in values.items() if value is not None or key not in _LEFT_OUT}
    understood = read_config_values(values)
    if understood != config:
        names = [each.name for each in fields(config)]
        lost = [name for name in names if getattr(understood, name) != getattr(config, name)]
        layers = zip(config.layers, understood.layers, strict=False)
        parts = dict.fromkeys(part for own, read in layers for part in own.differences(read))
        lost = [part for name in lost for part in (parts if name == "layers" and parts else [name])]
        raise ModelError(f"a {config.family} config.json cannot say this model's {', '.join(lost)}")
    return values


_LEFT_OUT = ("head_dim", "num_key_value_heads", "partial_rotary_factor", "rope_theta", "rope_scaling")
"""The keys that a family leaves out where it writes null: it has no such key, or another one."""


def _refuse_unsupported(hf: HFValues, family: Family) -> None:
    if "quantization_config" in hf:
        method = hf.section("quantization_config").get("quant_method", "unknown method")
        known = ("bitsandbytes", *METHODS, *CODED_METHODS)
        if method not in known:
            raise hf.error(
                "quantization_config",
                f"weights stored quantised ({method}) are not supported; use the original weights, or a folder in one "
                f"of {', '.join(known)}",
            )
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if not family.has_experts and key in hf and hf.integer(key) > 1:
            raise hf.error(key, "mixtures of experts are not supported for this family")
    if hf.raw("use_bidirectional_attention") not in (None, False, "vision"):  # that of images changes no text
        raise hf.error("use_bidirectional_attention", "only causal attention is supported")


_INDEXER = "its attention is sparse: an indexer chooses which keys a query sees, and has losses of its own"
_STATE_SPACE = "its layers are state-space models (Mamba), which danlu has no kernels for"
_ENCODER = "it encodes text and predicts no next token"
_ENCODER_DECODER = "it has an encoder in addition to its decoder"

UNSUPPORTED: dict[str, str] = {
    "bamba": _STATE_SPACE,
    "bart": _ENCODER_DECODER,
    "bert": _ENCODER,
    "deepseek_v32": _INDEXER,
    "falcon_h1": _STATE_SPACE,
    "falcon_mamba": _STATE_SPACE,
    "gemma3n": "its layers have embeddings of their own, and residual streams that are mixed (AltUp)",
    "gemma3n_text": "its layers have embeddings of their own, and residual streams that are mixed (AltUp)",
    "glm_moe_dsa": _INDEXER,
    "jamba": _STATE_SPACE,
    "llama4": "its attention is cut into chunks, and its router scales what experts are given",
    "llama4_text": "its attention is cut into chunks, and its router scales what experts are given",
    "mamba": _STATE_SPACE,
    "mamba2": _STATE_SPACE,
    "modernbert": _ENCODER,
    "nemotron_h": _STATE_SPACE,
    "recurrent_gemma": "its layers are gated linear recurrences (RG-LRU)",
    "roberta": _ENCODER,
    "rwkv": "its layers are recurrences (RWKV)",
    "t5": _ENCODER_DECODER,
    "zamba": _STATE_SPACE,
    "zamba2": _STATE_SPACE,
}
"""The reasons by `model_type` of config.json."""
