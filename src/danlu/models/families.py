"""The model families: how each one's config.json is read and written, and what its tensors are called on disk.

A family is a row of `FAMILIES`. Common keys are read and written here once; a row gives what is its own: the values
transformers takes for absent keys, the layers that only it has, and where its tensor names leave Llama's. `family.py`
has what rows are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from danlu.errors import ModelError
from danlu.models import family_experts, family_layers, family_linear, latent_families
from danlu.models.block_scaled import METHODS
from danlu.models.config import MAX_LAYERS, ModelConfig
from danlu.models.family import (
    ARCHITECTURE_ENDINGS,
    GEMMA_MODULES,
    HF_ACTIVATIONS,
    PHI3_MODULES,
    POST_NORM_MODULES,
    Family,
    plain_layer,
)
from danlu.models.hf_rope import write_rope
from danlu.models.hf_values import HFValues
from danlu.models.latent_spec import Latent
from danlu.models.layer_spec import Delta
from danlu.models.multimodal import MULTIMODAL, text_values
from danlu.models.unsupported import UNSUPPORTED

if TYPE_CHECKING:  # it imports numpy, and a wrong recipe is told without
    from danlu.types import Task


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
    hf = HFValues(values, family.defaults, where)
    _refuse_unsupported(hf, family)
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
            **family.read(hf, plain_layer(hf, family), layers),
        )
    except ModelError as error:
        raise error if str(error).startswith(where) else ModelError(f"{where}: {error}") from None


def task_of(values: Mapping[str, Any]) -> Task:
    """What the model of a config.json is for, by its `architectures`; a language model where they do not tell."""
    architectures = values.get("architectures")
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    return next((task for task, ending in ARCHITECTURE_ENDINGS.items() if named.endswith(ending)), "causal-lm")


def architecture_of(family: str, task: Task) -> str:
    """The class of transformers that loads a family's models for a task: LlamaForCausalLM.

    Raises ModelError where transformers has none, with the families of which it has one. What trains a model asks
    first, so that this is not told when the model is to be written.
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
    """The content of a config.json that transformers 4 and 5 load as this model; of a multimodal one its language part.

    torch_dtype: "float32", "bfloat16" or "float16": how the weights beside it are stored.
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
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": first.feed.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": heads.heads,
        "num_key_value_heads": heads.kv_heads,
        "head_dim": head_dim,
        "hidden_act": HF_ACTIVATIONS.get(first.feed.activation, "silu"),
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
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
    values = {key: value for key, value in values.items() if value is not None or key not in _ROPE_KEYS}
    understood = read_config_values(values)
    if understood != config:
        names = [each.name for each in fields(config)]
        lost = [name for name in names if getattr(understood, name) != getattr(config, name)]
        layers = zip(config.layers, understood.layers, strict=False)
        parts = dict.fromkeys(part for own, read in layers for part in own.differences(read))
        lost = [part for name in lost for part in (parts if name == "layers" and parts else [name])]
        raise ModelError(f"a {config.family} config.json cannot say this model's {', '.join(lost)}")
    return values


_ROPE_KEYS = ("rope_theta", "rope_scaling")
"""Which a family that writes rope_parameters takes out."""


def _refuse_unsupported(hf: HFValues, family: Family) -> None:
    if "quantization_config" in hf:
        method = hf.section("quantization_config").get("quant_method", "unknown method")
        if method not in ("bitsandbytes", *METHODS):
            raise hf.error(
                "quantization_config", f"weights stored quantised ({method}) are not supported; use the original"
            )
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if not family.has_experts and key in hf and hf.integer(key) > 1:
            raise hf.error(key, "mixtures of experts are not supported for this family")
    if hf.flag("use_bidirectional_attention"):
        raise hf.error("use_bidirectional_attention", "only causal attention is supported")


_COMMON: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}

FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        architecture="DeepseekV2",
        architectures={"token-classification": None},
        has_experts=True,
        read=latent_families.read_deepseek_v2,
        write=latent_families.write_deepseek_v2,
        modules=latent_families.DEEPSEEK_MODULES,
        ropes_differ=True,
        defaults={
            **_COMMON,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "first_k_dense_replace": 0,
            "kv_lora_rank": 512,
            "max_position_embeddings": 2048,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_key_value_heads": None,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "v_head_dim": 128,
        },
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3",
        has_experts=True,
        has_mtp=True,
        mtp_keys=("num_nextn_predict_layers",),
        read=latent_families.read_deepseek_v3,
        write=latent_families.write_deepseek_v3,
        modules=latent_families.DEEPSEEK_MODULES,
        ropes_differ=True,
        defaults={
            **_COMMON,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_key_value_heads": None,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rope_interleave": True,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
            "v_head_dim": 128,
        },
    ),
    "gemma2": Family(
        architecture="Gemma2",
        read=family_layers.read_gemma2,
        write=family_layers.write_gemma2,
        modules=GEMMA_MODULES,
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
    "gemma3_text": Family(
        architecture="Gemma3",
        architectures={
            "sequence-classification": "Gemma3TextForSequenceClassification",
            "token-classification": None,
        },
        read=family_layers.read_gemma3,
        write=family_layers.write_gemma3,
        modules=GEMMA_MODULES,
        rope=family_layers.GEMMA3_ROPE,
        ropes_differ=True,
        defaults={
            **_COMMON,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
    ),
    "glm4_moe": Family(
        architecture="Glm4Moe",
        architectures={"sequence-classification": None, "token-classification": None},
        has_experts=True,
        read=family_experts.read_glm4_moe,
        write=family_experts.write_glm4_moe,
        modules=family_experts.DEEPSEEK_MOE_MODULES,
        has_mtp=True,
        mtp_keys=("num_nextn_predict_layers",),
        defaults={
            **_COMMON,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131072,
            "n_group": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
        },
    ),
    "gpt_oss": Family(
        architecture="GptOss",
        has_experts=True,
        read=family_experts.read_gpt_oss,
        write=family_experts.write_gpt_oss,
        modules=family_experts.GPT_OSS_MODULES,
        rope=family_experts.GPT_OSS_ROPE,
        defaults={
            **_COMMON,
            "attention_bias": True,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": family_experts.GPT_OSS_ROPE_PARAMETERS,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    ),
    "granite": Family(
        architecture="Granite",
        architectures={"sequence-classification": None, "token-classification": None},
        read=family_layers.read_granite,
        write=family_layers.write_granite,
        defaults={
            **_COMMON,
            "attention_multiplier": 1.0,
            "bos_token_id": 1,
            "embedding_multiplier": 1.0,
            "eos_token_id": 2,
            "logits_scaling": 1.0,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "residual_multiplier": 1.0,
        },
    ),
    "llama": Family(
        architecture="Llama",
        read=family_layers.read_llama,
        write=family_layers.write_llama,
        defaults={
            **_COMMON,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
        },
    ),
    "mfa": Family(
        architecture="MFA",
        architectures={"sequence-classification": None, "token-classification": None},
        read=latent_families.read_mfa,
        write=latent_families.write_mfa,
        ropes_differ=True,
        defaults={**_COMMON, "bos_token_id": None, "eos_token_id": None, "num_key_value_heads": 1},
    ),
    "minimax_m2": Family(
        architecture="MiniMaxM2",
        architectures={"sequence-classification": None, "token-classification": None},
        has_experts=True,
        read=family_experts.read_minimax_m2,
        write=family_experts.write_minimax_m2,
        modules=family_experts.MIXTRAL_MODULES,
        rope=family_experts.MINIMAX_ROPE,
        defaults={
            **_COMMON,
            "bos_token_id": 200034,
            "eos_token_id": 200020,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "num_experts_per_tok": 8,
        },
    ),
    "ministral3": Family(
        architecture="Ministral3",
        read=family_layers.read_ministral3,
        write=family_layers.write_ministral3,
        rope=family_layers.MINISTRAL3_ROPE,
        defaults={
            **_COMMON,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "pad_token_id": 11,
            "rms_norm_eps": 1e-5,
            "rope_parameters": family_layers.MINISTRAL3_PARAMETERS,
            "sliding_window": None,
        },
    ),
    "mistral": Family(
        architecture="Mistral",
        read=family_layers.read_windowed,
        write=family_layers.write_windowed,
        defaults={
            **_COMMON,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "mixtral": Family(
        architecture="Mixtral",
        has_experts=True,
        read=family_experts.read_mixtral,
        write=family_experts.write_mixtral,
        modules=family_experts.MIXTRAL_MODULES,
        rope=family_experts.MIXTRAL_ROPE,
        defaults={
            **_COMMON,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
        },
    ),
    "olmo2": Family(
        architecture="Olmo2",
        architectures={"token-classification": None},
        read=family_layers.read_olmo2,
        write=family_layers.write_olmo2,
        modules=POST_NORM_MODULES,
        defaults={
            **_COMMON,
            "eos_token_id": 50279,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "pad_token_id": 1,
            "rms_norm_eps": 1e-5,
        },
    ),
    "olmo3": Family(
        architecture="Olmo3",
        architectures={"token-classification": None},
        read=family_layers.read_olmo3,
        write=family_layers.write_olmo3,
        modules=POST_NORM_MODULES,
        rope=family_layers.OLMO3_ROPE,
        ropes_differ=True,
        defaults={
            **_COMMON,
            "eos_token_id": 50279,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "pad_token_id": 1,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
    ),
    "olmoe": Family(
        architecture="Olmoe",
        architectures={"sequence-classification": None, "token-classification": None},
        has_experts=True,
        read=family_experts.read_olmoe,
        write=family_experts.write_olmoe,
        modules=family_experts.QWEN_MOE_MODULES,
        defaults={
            **_COMMON,
            "eos_token_id": 50279,
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_key_value_heads": None,
            "pad_token_id": 1,
            "rms_norm_eps": 1e-5,
        },
    ),
    "phi3": Family(
        architecture="Phi3",
        read=family_layers.read_windowed,
        write=family_layers.write_phi3,
        modules=PHI3_MODULES,
        rope=family_layers.PHI3_ROPE,
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
        read=family_layers.read_qwen2,
        write=family_layers.write_qwen2,
        defaults={**_COMMON, "max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 4096},
    ),
    "qwen2_moe": Family(
        architecture="Qwen2Moe",
        has_experts=True,
        read=family_experts.read_qwen2_moe,
        write=family_experts.write_qwen2_moe,
        modules=family_experts.QWEN_MOE_MODULES,
        defaults={
            **_COMMON,
            "decoder_sparse_step": 1,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "qkv_bias": True,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 4096,
        },
    ),
    "qwen3": Family(
        architecture="Qwen3",
        read=family_layers.read_qwen3,
        write=family_layers.write_qwen3,
        defaults={
            **_COMMON,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "sliding_window": 4096,
        },
    ),
    "qwen3_5_moe_text": Family(
        architecture="Qwen3_5Moe",
        architectures={"sequence-classification": None, "token-classification": None},
        has_experts=True,
        read=family_linear.read_qwen3_5_moe,
        write=family_linear.write_qwen3_5_moe,
        modules=family_linear.GATED_HEADS_MODULES,
        linear_modules=family_linear.QWEN3_5_DELTA_MODULES,
        has_mtp_module=True,
        mtp_keys=family_linear.MTP_KEYS,
        defaults={**_COMMON, **family_linear.DEFAULTS, **family_linear.QWEN3_5_MOE_DEFAULTS},
    ),
    "qwen3_5_text": Family(
        architecture="Qwen3_5",
        architectures={
            "sequence-classification": "Qwen3_5TextForSequenceClassification",
            "token-classification": None,
        },
        read=family_linear.read_linear,
        write=family_linear.write_linear,
        modules=family_linear.GATED_HEADS_MODULES,
        linear_modules=family_linear.QWEN3_5_DELTA_MODULES,
        has_mtp_module=True,
        mtp_keys=family_linear.MTP_KEYS,
        defaults={**_COMMON, **family_linear.DEFAULTS},
    ),
    "qwen3_moe": Family(
        architecture="Qwen3Moe",
        has_experts=True,
        read=family_experts.read_qwen3_moe,
        write=family_experts.write_qwen3_moe,
        modules=family_experts.QWEN_MOE_MODULES,
        defaults={
            **_COMMON,
            "decoder_sparse_step": 1,
            "max_position_embeddings": 32768,
            "num_experts_per_tok": 8,
            "sliding_window": 4096,
        },
    ),
    "qwen3_next": Family(
        architecture="Qwen3Next",
        has_experts=True,
        has_mtp=True,
        read=family_linear.read_linear_moe,
        write=family_linear.write_linear_moe,
        modules=family_linear.GATED_HEADS_MODULES,
        linear_modules=family_linear.QWEN3_NEXT_DELTA_MODULES,
        has_mtp_module=True,
        defaults={
            **_COMMON,
            **family_linear.DEFAULTS,
            **family_linear.QWEN3_NEXT_DEFAULTS,
            "num_key_value_heads": 2,
        },
    ),
    "smollm3": Family(
        architecture="SmolLM3",
        read=family_layers.read_smollm3,
        write=family_layers.write_smollm3,
        rope=family_layers.SMOLLM3_ROPE,
        defaults={
            **_COMMON,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "max_position_embeddings": 32768,
            "no_rope_layer_interval": 4,
            "num_key_value_heads": 4,
            "pad_token_id": 128004,
            "tie_word_embeddings": True,
        },
    ),
}
"""model_type -> family. Llama covers Llama 2 and 3, TinyLlama, SmolLM2; qwen2 covers Qwen2.5; phi3 covers phi-4.
`mfa` is danlu's own: no class of transformers loads it."""

READ_AS = {"kimi_k2": "deepseek_v3"}
"""model_type of folders that bring their own code along -> the family that computes the same, as which they are
written."""
