from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig

from danlu.core.errors import ModelError
from danlu.numerics.bitsandbytes_config import KINDS, FourBitConfig, Kind, config_values, read_config


@pytest.mark.parametrize("skip", [None, ["lm_head", "model.layers.0.mlp.down_proj"]])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_values_are_those_of_transformers(kind: Kind, double: bool, skip: list[str] | None) -> None:
    theirs = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=skip,
    ).to_dict()
    ours = config_values(kind, double=double, compute_dtype="bfloat16", skip=skip)
    assert ours == theirs | {"quant_method": "bitsandbytes"}  # theirs is an enumeration's member, equal to its text
    assert config_values(kind, double=not double, compute_dtype="bfloat16", skip=skip) != theirs
    assert read_config({"quantization_config": theirs}, "config.json") == FourBitConfig(kind, double, tuple(skip or ()))
    assert BitsAndBytesConfig.from_dict(ours).to_dict() == theirs


def test_a_model_that_is_not_quantized() -> None:
    assert read_config({"hidden_size": 64}, "config.json") is None
    assert read_config({"quantization_config": None}, "config.json") is None


def test_what_an_old_folder_leaves_out() -> None:
    assert read_config({"quantization_config": {"load_in_4bit": True}}, "config.json") == FourBitConfig("fp4", False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantized with 'gptq'. danlu reads bitsandbytes' nf4 and fp4"),
        ({"quant_method": "awq"}, "quantized with 'awq'"),
        ({"bits": 4}, "quantized with None"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quantized to 8 bits"),
        ({"load_in_8bit": True}, "quantized to 8 bits"),
        ({"quant_method": "bitsandbytes"}, "neither 4 nor 8 bits"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4'"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": ["nf4"]}, "bnb_4bit_quant_type is"),
        ({"load_in_4bit": "yes"}, "load_in_4bit is 'yes', not true or false"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": 1}, "bnb_4bit_use_double_quant is 1"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "int8"}, "bnb_4bit_compute_dtype is 'int8'"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": 16}, "bnb_4bit_compute_dtype is 16"),
        ({"load_in_4bit": True, "llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules is 'lm_head'"),
        (["nf4"], "quantization_config is ['nf4'], not an object"),
    ],
)
def test_what_cannot_be_read_is_told(values: Any, message: str) -> None:
    with pytest.raises(ModelError) as told:
        read_config({"quantization_config": values}, "folder/config.json")
    assert str(told.value).startswith("folder/config.json: ") and message in str(told.value)
