"""Small models of every family, in the shape of real ones, and their transformers twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from builders.family_values import GEMMA2, GEMMA4_E2B

from danlu.models.decoder import Decoder
from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build

WIDTH = 48
TINY = {
    "vocab_size": 131,
    "hidden_size": WIDTH,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}

CASES: dict[str, dict[str, Any]] = {
    "llama-2": {"model_type": "llama", "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "llama-3.1": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama-tied-smollm2": {
        "model_type": "llama",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_theta": 100000,
    },
    "llama-biased-multi-query": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        **LATENT,
        "first_k_dense_replace": 3,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek-v2-lite": {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": None, "first_k_dense_replace": 9},
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **LATENT,
        "first_k_dense_replace": 3,
        "attention_bias": True,
        "rms_norm_eps": 1e-3,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek-v3-halves": {
        "model_type": "deepseek_v3",
        **LATENT,
        "first_k_dense_replace": 3,
        "rope_interleave": False,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "llama-linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama-dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 20,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    },
    "llama-transformers-5": {
        "model_type": "llama",
        "dtype": "float32",
        "rope_parameters": {**YARN, "rope_theta": 20000.0, "beta_fast": 16.0},
    },
    "llama-longrope": {
        "model_type": "llama",
        "rope_scaling": {**LONGROPE, "factor": 3.0, "short_factor": [1.0] * 6, "long_factor": [1.0, 1.2, 2, 3, 4, 4]},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "mistral-full": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e6},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    "qwen2-windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "rope_scaling": YARN,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6},
    "phi-4": {"model_type": "phi3", "rope_theta": 250000, "num_key_value_heads": 1, "rms_norm_eps": 1e-5},
    "phi3-partial": {"model_type": "phi3", "partial_rotary_factor": 0.5, "sliding_window": 9},
    "phi3-longrope": {  # as in Phi-3-mini-128k: the length before scaling stands outside it
        "model_type": "phi3",
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.3, 1.5, 1.5, 2],
            "long_factor": [1, 2, 3, 4, 4, 5.5],
        },
    },
    "gemma2": GEMMA2,
}


CASES |= {
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [2],
    },
    "qwen3.5-moe": {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 3,  # each doubles what is rounded: with 4 transformers is 1.4e-5 from its own float64
        "full_attention_interval": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3.5-tied": {
        "model_type": "qwen3_5_text",
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "rope_theta": 900.0,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 12,
        "rope_theta": 50000.0,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "tie_word_embeddings": True,
    },
    "gemma3-transformers-5": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 80000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 900.0},
        },
        "tie_word_embeddings": True,
    },
    "olmo2": {"model_type": "olmo2", "rope_theta": 500000.0},
    "olmo3": {
        "model_type": "olmo3",
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "sliding_window": 7,
        "rope_scaling": YARN,
    },
    "smollm3": {
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 3,
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
    },
    "smollm3-windows": {
        "model_type": "smollm3",
        "no_rope_layers": [0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 6,
        "tie_word_embeddings": False,
    },
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 16,
        "rope_parameters": {
            **YARN,
            "rope_theta": 1e6,
            "llama_4_scaling_beta": 0.3,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
}
"""Families whose layers differ from each other, or from Llama's."""


CASES |= {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "intermediate_size": 24, "sliding_window": None},
    "mixtral-windows": {"model_type": "mixtral", "num_local_experts": 3, "sliding_window": 6, "rope_theta": 1e4},
    "phimoe": {
        "model_type": "phimoe",
        "num_local_experts": 5,
        "intermediate_size": 24,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.4,
        "input_jitter_noise": 0.1,
        "rope_scaling": {
            **LONGROPE,
            "original_max_position_embeddings": 48,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 5.0],
            "short_mscale": 1.2,
            "long_mscale": 1.3,
        },
    },
    "phimoe-plain": {"model_type": "phimoe", "num_local_experts": 3, "intermediate_size": 24, "sliding_window": 6},
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 36,
        "mlp_only_layers": [1],
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 7,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 20},
    "glm4-moe": {
        "model_type": "glm4_moe",
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    },
    "deepseek-v2-moe": {
        "model_type": "deepseek_v2",
        **LATENT,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek-v3-moe": {
        "model_type": "deepseek_v3",
        **LATENT,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "n_group": 4,
        "topk_group": 2,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 20,
    },
}
"""Families with mixtures of experts."""

CASES["minimax-m2-as-published"] = {  # its features are said, not their share of a head
    **{key: value for key, value in CASES["minimax-m2"].items() if key != "partial_rotary_factor"},
    "rotary_dim": 4,
}
CASES |= {
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 24,
        "sliding_window": 6,
        "swiglu_limit": 0.5,
        "rope_theta": 150000,
        "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
}

CASES |= {
    "ernie": {"model_type": "ernie4_5", "head_dim": 16, "use_bias": True},
    "exaone4": {
        "model_type": "exaone4",
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "rope_theta": 1e6,
        "rope_scaling": LLAMA3,
    },
    "exaone4-full": {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 3},
    "granite-moe": {
        "model_type": "granitemoe",
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 20,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "granite-4": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 72,
        "layer_types": ["attention"] * 3,
        "position_embedding_type": "rope",
        "mamba_n_heads": 32,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "granite-4-experts": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 20,
        "shared_intermediate_size": 28,
        "layer_types": ["attention"] * 3,
        "position_embedding_type": "nope",
        "mamba_n_heads": 32,
        "attention_multiplier": 0.3,
    },
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 16,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
        "tie_word_embeddings": True,
    },
    "seed-oss": {
        "model_type": "seed_oss",
        "head_dim": 16,
        "rope_theta": 1e7,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
}
"""Families of 2025, each a little off from Llama."""


CASES |= {
    "gemma": {"model_type": "gemma", "head_dim": 16, "hidden_act": "gelu", "num_key_value_heads": 1},
    "glm": {"model_type": "glm", "head_dim": 16, "rope_theta": 5000.0},
    "glm4": {
        "model_type": "glm4",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 0.25},
    },
}
"""Families with rotated pairs of neighbours, or with gelu in a name for something else."""
CASES |= {
    "glm4-moe-lite": {
        "model_type": "glm4_moe_lite",
        **LATENT,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "n_group": 4,
        "topk_group": 2,
        "rope_theta": 1000.0,
    },
    "glm4-moe-lite-pattern": {
        "model_type": "glm4_moe_lite",
        **LATENT,
        "q_lora_rank": None,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rope_interleave": False,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "gpt-neox": {"model_type": "gpt_neox", "num_key_value_heads": 4, "rotary_pct": 0.34, "rotary_emb_base": 500.0},
    "gpt-neox-sequential": {
        "model_type": "gpt_neox",
        "num_key_value_heads": 4,
        "attention_bias": False,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-3,
        "rotary_pct": 1.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "use_parallel_residual": False,
    },
    "cohere2": {
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "sliding_window_pattern": 2,
        "sliding_window": 6,
        "logit_scale": 0.3,
        "rope_theta": 700.0,
    },
    "cohere2-biased": {
        "model_type": "cohere2",
        "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 9,
        "logit_scale": 0.7,
        "tie_word_embeddings": False,
    },
}
"""Families with latent attention behind other keys, LayerNorms, a parallel residual, or a network without a gate."""

CASES |= {
    "gemma4": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
    },
    "gemma4-experts": {
        "model_type": "gemma4_text",
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 6,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "tie_word_embeddings": True,
    },
    "gemma4-plain": {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 24,
        "attention_bias": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 9,
        "use_bidirectional_attention": "vision",
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        "tie_word_embeddings": False,
    },
    "gemma4-e2b": {
        **GEMMA4_E2B,
        "num_hidden_layers": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 131,
        "final_logit_softcapping": 2.0,
    },
    "gemma4-e4b": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 131,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 6,
        "tie_word_embeddings": False,
    },
    "gemma4-unified": {
        "model_type": "gemma4_unified_text",
        "num_hidden_layers": 7,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 12,
        "tie_word_embeddings": True,
    },
}
"""Families with normed values, values that are keys, and layers that are multiplied by a number."""


@pytest.fixture(scope="session")
def tiny_values() -> Callable[[str], dict[str, Any]]:
    """Name of a case -> the config.json of its tiny model."""
    return lambda case: {**TINY, **CASES[case]}


@pytest.fixture(params=sorted(CASES))
def hf_values(request: pytest.FixtureRequest, tiny_values: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """The config.json of every case in turn, one family or feature at a time."""
    return tiny_values(request.param)


FIRST_OF_FAMILY = {values["model_type"]: case for case, values in reversed(CASES.items())}


@pytest.fixture(params=sorted(FIRST_OF_FAMILY.values()))
def family_values(request: pytest.FixtureRequest, tiny_values: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """The config.json of one case of every family in turn."""
    return tiny_values(request.param)


@pytest.fixture
def tiny_model(tiny_values: Callable[[str], dict[str, Any]]) -> Callable[..., Decoder]:
    """Name of a case (and changes to its config) -> the decoder, with weights drawn from seed 0."""

    def make(case: str, **changes: Any) -> Decoder:
        model = build(read_config_values(tiny_values(case) | changes))
        initialize(model, 0)
        return model

    return make
