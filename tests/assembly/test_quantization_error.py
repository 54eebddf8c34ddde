"""What few bits lose, against norms of whole matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_run import tiny_model
from safetensors.torch import load_file

from danlu.assembly.frozen_base import quantize_weight
from danlu.assembly.quantizing import quantization_errors, quantize
from danlu.core.errors import ModelError
from danlu.models.hf_folder import SINGLE_FILE
from danlu.models.saving import save
from danlu.recipe import sections

FORMATS: dict[str, Any] = {
    "nf4": sections.Nf4(),
    "whole scales": sections.Nf4(double=False),
    "fp4": sections.Fp4(),
    "int8": sections.Int8(group=16),
    "int4": sections.Int4(group=16),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("base") / "base"
    save(tiny_model(hidden_size=64, intermediate_size=128), base, dtype=torch.bfloat16)
    return base


def test_norms_are_of_all_linear_layers(folder: Path) -> None:
    done: list[tuple[int, int]] = []
    found = quantization_errors(folder, FORMATS, lambda *pair: done.append(pair))
    assert done == [(number, 14) for number in range(1, 15)]
    matrices = {name: one for name, one in load_file(folder / SINGLE_FILE).items() if "_proj.weight" in name}
    every = torch.cat([one.float().flatten() for one in matrices.values()])
    for name, section in FORMATS.items():
        packed = {key: quantize_weight(one, section) for key, one in matrices.items()}
        lost = {key: (one.dense(torch.float32) - matrices[key].float()).flatten() for key, one in packed.items()}
        together = torch.cat(list(lost.values()))
        error = found[name]
        assert error.relative == pytest.approx(float(together.norm() / every.norm()), rel=1e-4)
        assert error.mean_relative == pytest.approx(float(together.abs().mean() / every.abs().mean()), rel=1e-4)
        by_layer = {key: float(one.norm() / matrices[key].float().norm()) for key, one in lost.items()}
        assert error.worst == pytest.approx(max(by_layer.values()), rel=1e-4)
        worst = max(by_layer, key=lambda key: by_layer[key])
        assert f"model.{error.worst_layer}.weight".replace(".attention.", ".self_attn.") == worst
        assert error.bits == pytest.approx(8 * sum(one.stored_bytes() for one in packed.values()) / len(every))
        assert error.elements == len(every)


def test_formats_keep_their_order(folder: Path) -> None:
    """NF4's levels are those of a normal distribution, which these weights are of."""
    found = {name: one.relative for name, one in quantization_errors(folder, FORMATS).items()}
    assert found["int8"] < 0.01 < found["whole scales"] < found["nf4"] < found["fp4"] < 0.15
    bits = {name: one.bits for name, one in quantization_errors(folder, FORMATS).items()}
    assert bits["whole scales"] == 4.5 and 4.1 < bits["nf4"] < 4.2 and bits["int8"] == 10.0 and bits["int4"] == 6.0


def test_a_quantized_model_has_nothing_to_measure(folder: Path, tmp_path: Path) -> None:
    quantize(folder, tmp_path / "nf4", sections.Nf4())
    with pytest.raises(ModelError, match="nf4: is quantized already"):
        quantization_errors(tmp_path / "nf4", FORMATS)
