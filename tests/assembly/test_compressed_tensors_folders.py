"""Whole folders that compressed-tensors and transformers wrote: the numbers that they read back from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from danlu.assembly.base_model import weight_layouts
from danlu.assembly.frozen_base import load_frozen
from danlu.models.hf_layout import hf_tensors
from danlu.models.loading import load

BY_TOKEN = {"strategy": "token", "symmetric": True, "dynamic": True, "num_bits": 8}
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "w4a16 with zeros": (
        {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32},
        None,
        "pack-quantized",
    ),
    "w8a8": (
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        {**BY_TOKEN, "type": "int"},
        "int-quantized",
    ),
    "fp8 dynamic": (
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        {**BY_TOKEN, "type": "float"},
        "float-quantized",
    ),
}


def written(folder: Path, name: str) -> None:
    """Saves a small Llama in bfloat16 as compressed-tensors stores it, with scales by the largest of each group."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import LlamaConfig, LlamaForCausalLM

    weights, activations, form = SCHEMES[name]
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)).to(torch.bfloat16)
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], format=form))
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        grouped = module.weight.data.float().unflatten(1, (-1, weights.get("group_size") or module.weight.shape[1]))
        least, greatest = grouped.amin(-1), grouped.amax(-1)
        scales, zeros = calculate_qparams(least, greatest, module.quantization_scheme.weights)
        module.weight_scale.data = scales.to(torch.bfloat16)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zeros.to(module.weight_zero_point.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_a_folder_has_the_numbers_that_transformers_reads(tmp_path: Path, name: str) -> None:
    """Products of codes and scales round to bfloat16 there, the type of the scales; here to that of the model."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    written(tmp_path, name)
    reading = CompressedTensorsConfig(run_compressed=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=reading)
    layouts = weight_layouts(tmp_path)
    assert layouts is not None and layouts.quantizes_activations == (SCHEMES[name][1] is not None)
    model, state = load(tmp_path, dtype=torch.bfloat16, layouts=layouts), theirs.state_dict()
    tensors = hf_tensors(model.config)
    assert len(tensors) == 21
    for tensor in tensors:
        assert torch.equal(tensor.assembled(model.get_parameter), state[tensor.name]), tensor.name
    frozen = load_frozen(tmp_path, dtype=torch.bfloat16).model
    for name in ("layers.0.attention.k_proj", "layers.1.mlp.down_proj"):
        numbers: Tensor = frozen.get_submodule(name).quantized.dense(torch.bfloat16)
        assert torch.equal(numbers, model.get_parameter(f"{name}.weight"))
        assert not torch.equal(numbers, model.get_parameter(f"{name}.weight").roll(1, 0))
