"""What is said of a model folder before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from danlu.core.errors import DataError, ModelError
from danlu.inference.generation_config import find_model, generation_stops, sampling_defaults

CONFIG = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}


def write(file: Path, values: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "model" / "config.json", CONFIG)
    write(tmp_path / "model" / "tokenizer.json", {})
    return tmp_path / "model"


def test_a_folder_a_run_and_what_they_lack(folder: Path) -> None:
    run = folder.parent
    assert find_model(str(folder)) == folder
    (run / "recipe.yaml").write_text("stage: sft\n", encoding="utf-8")
    assert find_model(str(run)) == folder
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=f"{folder}: this model folder has no tokenizer.* Copy its tokenizer's files"):
        find_model(str(folder))
    write(folder / "config.json", CONFIG | {"model_type": "gptj"})
    with pytest.raises(
        ModelError, match=r"model_type 'gptj' is not supported; supported: cohere2, deepseek_v2, deepseek_v3"
    ):
        find_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=rf"not written its model yet.* `danlu train {run / 'recipe.yaml'}`"):
        find_model(str(run))


def test_what_the_makers_advise(folder: Path) -> None:
    file = folder / "generation_config.json"
    assert sampling_defaults(folder) == {} and generation_stops(folder) == ()
    write(file, {"do_sample": False, "temperature": 0.6, "eos_token_id": 7})
    assert sampling_defaults(folder) == {} and generation_stops(folder) == (7,)
    write(file, {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": [7, 9]})
    assert sampling_defaults(folder) == {"temperature": 0.6, "top_k": 20} and generation_stops(folder) == (7, 9)
    for unsaid in ({}, {"top_k": None}):  # as transformers fills it in
        write(file, {"do_sample": True, **unsaid})
        assert sampling_defaults(folder) == {"top_k": 50}
    write(file, {"do_sample": True, "top_k": 0, "min_p": 0.1})
    assert sampling_defaults(folder) == {"top_k": 0, "min_p": 0.1}
    write(file, {"do_sample": True, "top_k": 20.5})
    with pytest.raises(ModelError, match=f"{file}: top_k: expected an integer, found 20.5"):
        sampling_defaults(folder)
    for value, said in (("0.6", "expected a number, found '0.6'"), (True, "expected a number"), (-1, "-1 is out of")):
        write(file, {"do_sample": True, "temperature": value})
        with pytest.raises(ModelError, match=f"{file}: temperature: {said}"):
            sampling_defaults(folder)
    write(file, {"eos_token_id": ["7"]})
    with pytest.raises(ModelError, match=r"eos_token_id: expected an integer or a list of them, found \['7'\]"):
        generation_stops(folder)
