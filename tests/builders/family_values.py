"""Keys of small config.json files that several builders of models start from, as transformers names them."""

from __future__ import annotations

from typing import Any

GEMMA2: dict[str, Any] = {
    "model_type": "gemma2",
    "head_dim": 16,
    "sliding_window": 6,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 2.0,
    "query_pre_attn_scalar": 12,
    "tie_word_embeddings": True,
}
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
}
"""Two layers, one of each kind; those of the 31B model in small."""
GEMMA4_E2B: dict[str, Any] = {
    "model_type": "gemma4_text",
    "head_dim": 8,
    "global_head_dim": 16,
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "sliding_window": 6,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "tie_word_embeddings": True,
}
"""Eight layers, of which the last four have no keys; those of the E2B model in small, but for layers' embeddings."""
