"""Bytes counted from a config, against the tensors that runs really hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_run import tiny_config
from builders.tiny_world import World, danlu

from danlu.assembly.frozen_base import quantize_weight
from danlu.models.hf_folder import read_config
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.plan.parameter_memory import Method, nf4_bytes, packed_bytes, parameter_bytes
from danlu.recipe import sections

METHODS: dict[Method, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": {"kind": "lora", "rank": 4}},
    "qlora": {"adapter": {"kind": "lora", "rank": 4}, "quantization": "nf4"},
}


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize("method", METHODS)
def test_a_run_holds_what_was_counted(tiny_world: World, tmp_path: Path, method: Method) -> None:
    base = {"model": {"config": None, "tokenizer": None, "path": str(tiny_world.base)}, "precision": "bf16", "steps": 2}
    assert danlu("train", tiny_world.recipe(tmp_path / "run", **base, **METHODS[method])) == 0
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["memory"]
    counted = parameter_bytes(read_config(tiny_world.base), method, rank=4)
    assert {name: found[name] for name in vars(counted)} == vars(counted)
    assert counted.total != parameter_bytes(read_config(tiny_world.base), method, rank=5).total or method == "full"


@pytest.mark.parametrize("shape", [(1, 1), (3, 21), (16, 64), (100, 1000), (257, 64)])
def test_nf4(shape: tuple[int, int]) -> None:
    assert FourBitWeight.quantize(torch.randn(shape)).stored_bytes() == nf4_bytes(shape[0] * shape[1])


def test_a_large_model_in_the_usual_words() -> None:
    """7 billion parameters in full are 16 bytes each, and 65 billion in NF4 are a little over half a byte each."""
    config = tiny_config()
    count = config.parameter_count()
    tensors = parameter_bytes(config, "full").optimizer - 8 * count
    assert parameter_bytes(config, "full").total == 16 * count + tensors
    assert nf4_bytes(65 * 10**9) / 65e9 == pytest.approx(4.127 / 8, rel=1e-4)


@pytest.mark.parametrize(
    "section",
    [
        sections.Nf4(),
        sections.Fp4(block=128, double=False),
        sections.Nf4(block=32),
        sections.Int8(group=48),
        sections.Int4(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("shape", [(3, 21), (100, 1000)])
def test_packed_matrices_of_every_kind(section: Any, shape: tuple[int, int]) -> None:
    assert quantize_weight(torch.randn(shape), section).stored_bytes() == packed_bytes(shape, section)
