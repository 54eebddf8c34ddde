"""Small models in other tools' layouts, with the model of the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from danlu.assembly.layerwise_quantizing import quantized_sites
from danlu.assembly.quantized_folder import ExportedModel
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import read_config
from danlu.models.loading import load
from danlu.numerics.format import Format, Scaled, encode
from danlu.numerics.weight_layout_config import Export

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 96},
    "phi3": {"model_type": "phi3", "hidden_size": 64, "intermediate_size": 96, "pad_token_id": 0},  # fused projections
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}


def linears_of(folder: Path, *, experts: bool = True) -> list[str]:
    """The parameters of a folder's linear layers."""
    config = read_config(folder)
    return [
        f"layers.{number}.{name}.weight"
        for number in range(len(config.layers))
        for name in quantized_sites(config, number, experts=experts)
    ]


def export(
    source: Path, target: Path, form: Format, kind: Export, *, experts: bool = True, rounds_activations: bool = False
) -> tuple[Decoder, set[str]]:
    """Writes a model rounded to the nearest.

    Returns the model with the numbers of the codes as the folder has them, and the tensors on disk that have codes.
    """
    model = load(source)
    codes: dict[str, Scaled] = {}
    with torch.no_grad():
        for name in linears_of(source, experts=experts):
            parameter = model.get_parameter(name)
            codes[name] = encode(parameter, form)
            if (tensor_scale := codes[name].tensor_scale) is not None:  # stored as what the scales are divided by
                tensor_scale.copy_(tensor_scale.reciprocal().reciprocal())
            parameter.copy_(codes[name].decode())
    config = read_config(source)
    exported = ExportedModel(config, form, kind, list(codes), rounds_activations=rounds_activations)
    exported.write(source, target, dtype=torch.float32, value=model.get_parameter, scaled=codes.__getitem__)
    return model, exported.names


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder of one file."""
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    """Replaces a folder's tensors, and some keys of its config.json."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
