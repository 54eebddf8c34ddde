from __future__ import annotations

import json
from pathlib import Path

import pytest

from danlu.core.errors import ModelError
from danlu.models.presets import PRESETS, from_scratch
from danlu.recipe.sections import Model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_presets_have_the_sizes_they_promise() -> None:
    tiny = from_scratch(Model(preset="tiny"), 4096, 1, 2)
    assert tiny.parameter_count() == 5_770_496
    mixer = tiny.layers[0].mixer
    assert (mixer.heads, mixer.kv_heads, mixer.head_dim, tiny.tie_word_embeddings) == (8, 4, 32, True)
    small = from_scratch(Model(preset="small"), 32000, 1, 2)
    assert small.parameter_count() == 57_942_528
    assert list(PRESETS) == ["tiny", "small"]


def test_the_tokenizer_decides_vocabulary_and_ids(tmp_path: Path) -> None:
    assert from_scratch(Model(config=LLAMA), 300, None, 7) == from_scratch(Model(config=LLAMA), 300, eos_token_id=7)
    config = from_scratch(Model(config=LLAMA), 300, 5, 7)
    assert (config.vocab_size, config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (300, 5, (7,), None)
    config = from_scratch(Model(config=LLAMA), 300)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"vocab_size": 320, "eos_token_id": [8, 9], "bos_token_id": 4}))
    config = from_scratch(Model(config=str(file)), 300)
    assert (config.vocab_size, config.bos_token_id, config.eos_token_ids) == (320, 4, (8, 9))


def test_wrong_configs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the tokenizer has 300 tokens, the model embeds only 256"):
        from_scratch(Model(config=LLAMA | {"vocab_size": 256}), 300)
    with pytest.raises(
        ModelError,
        match=r"model.config: model_type is missing; it is one of cohere2, deepseek_v2, deepseek_v3, ernie4_5, ",
    ):
        from_scratch(Model(config={"hidden_size": 64}), 300)
    with pytest.raises(ModelError, match="needs `preset` or `config`"):
        from_scratch(Model(path="somewhere"), 300)
    with pytest.raises(ModelError, match=r"absent.json: no such file"):
        from_scratch(Model(config=str(tmp_path / "absent.json")), 300)
