"""Model types that danlu knows and does not train, each with the reason."""

from __future__ import annotations

_INDEXER = "its attention is sparse: an indexer chooses which keys a query sees, and has losses of its own"
_STATE_SPACE = "its layers are state-space models (Mamba), which danlu has no kernels for"
_ENCODER = "it encodes text and predicts no next token"
_ENCODER_DECODER = "it has an encoder beside its decoder"

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
    "granitemoehybrid": _STATE_SPACE,
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
