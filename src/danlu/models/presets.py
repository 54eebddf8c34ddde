"""Models from scratch: the presets a recipe may name, and configs given in the recipe. No torch here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from danlu.core.errors import ModelError
from danlu.models.config import ModelConfig
from danlu.models.families import FAMILIES
from danlu.models.hf_config import read_config_values
from danlu.models.hf_folder import check_vocabulary, read_json
from danlu.recipe.sections import Model

_LLAMA: dict[str, object] = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
PRESETS: dict[str, dict[str, object]] = {
    # 5.8M parameters with a vocabulary of 4096. The head is tied: apart it would be a sixth of the model.
    "tiny": {
        **_LLAMA,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "tie_word_embeddings": True,
    },
    # 57.9M parameters with a vocabulary of 32000.
    "small": {
        **_LLAMA,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "tie_word_embeddings": False,
    },
}
"""Name -> config.json without the keys that the tokenizer decides."""


def from_scratch(
    model: Model, vocab_size: int, bos_token_id: int | None = None, eos_token_id: int | None = None
) -> ModelConfig:
    """The config of `model: {preset: ...}` or `model: {config: ...}`, completed from the tokenizer.

    A config may give its own vocab_size if the tokenizer fits into it (rounded up for speed, say); token ids are the
    tokenizer's where it has them. Raises ModelError for a config that is wrong or asks for neither.
    """
    if model.preset is not None:
        values, where = dict(PRESETS[model.preset]), f"preset {model.preset}"
    elif isinstance(model.config, str):
        file = Path(model.config).expanduser()
        values, where = read_json(file), str(file)
    elif model.config is not None:
        values, where = dict(model.config), "model.config"
    else:
        raise ModelError("a model from scratch needs `preset` or `config`")
    if "model_type" not in values:
        raise ModelError(f"{where}: model_type is missing; it is one of {', '.join(sorted(FAMILIES))}")
    values.setdefault("vocab_size", vocab_size)
    config = read_config_values(values, where=where)
    check_vocabulary(config, vocab_size)
    # Ids that the config leaves out are its family's defaults, which are other tokens in this tokenizer.
    bos = config.bos_token_id if "bos_token_id" in values else None
    eos = config.eos_token_ids if "eos_token_id" in values else ()
    return replace(
        config,
        bos_token_id=bos if bos_token_id is None else bos_token_id,
        eos_token_ids=eos if eos_token_id is None else (eos_token_id,),
        pad_token_id=config.pad_token_id if "pad_token_id" in values else None,
    )
