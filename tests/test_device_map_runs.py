"""Runs whose layers lie on several devices of one process equal those on one device, bit for bit.

The devices are stubs: the CPU by other names, to and from which tensors are copied. What is moved is recorded.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_world import CONFIG, World, danlu, differences, last_state
from torch import Tensor

from danlu import device_moves, placing
from danlu.plan.device_map import Device
from danlu.train import loop

pytestmark = pytest.mark.usefixtures("tokenising_here")

MAP = {"parallel": {"device_map": "balanced"}}
DEEP = {**CONFIG, "num_hidden_layers": 4}
EVALUATED = {"data": {"eval": 10}, "evaluation": {"every": 2}}
BASE: dict[str, Any] = {"config": None, "tokenizer": None}

RUNS: dict[str, dict[str, Any]] = {
    "whole": {"model": {"config": DEEP}, "ema": 0.9, "memory": {"recompute": "selective"}},
    "tied": {"model": {"config": {**DEEP, "tie_word_embeddings": True}}, "precision": "bf16"},
    "lora": {
        "adapter": {
            "kind": "lora",
            "dropout": 0.3,
            "targets": ["all-linear", "embed_tokens"],
            "modules_to_save": ["norm"],
        },
        "memory": {"recompute": {"kind": "every", "layers": 2}},
    },
    "vera": {"adapter": {"kind": "vera", "rank": 16}, "optimizer": {"learning_rate": 0.1}},
    "prefix": {"adapter": {"kind": "prefix", "tokens": 3, "projection": 16}},
    "qlora": {"adapter": "lora", "quantization": "nf4", "precision": "bf16", "optimizer": {"kind": "adamw8bit"}},
}


def recipe(world: World, output: Path, **changes: Any) -> Path:
    if "adapter" in changes:
        changes = {"model": {"config": None, "path": str(world.base), "tokenizer": None}, **changes}
    return world.recipe(output, **{**EVALUATED, "steps": 4, "checkpoint": {"every": 2}, **changes})


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, str]]:
    """Three stub devices; each move between them, by shape and where to."""
    recorded: list[tuple[torch.Size, str]] = []
    real = device_moves.move

    def move(x: Tensor, device: str) -> Tensor:
        recorded.append((x.shape, device))
        return real(x, device)

    monkeypatch.setattr(device_moves, "move", move)
    monkeypatch.setattr(placing, "visible_devices", lambda device: [Device(f"cpu:{n}", 2**30) for n in range(3)])
    return recorded


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_several_devices_equals_the_one_on_one_device(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: list[Any], name: str
) -> None:
    assert danlu("train", recipe(tiny_world, tmp_path / "one", **RUNS[name])) == 0
    assert not moves  # control: nothing is moved on one device
    mapped = recipe(tiny_world, tmp_path / "several", **RUNS[name], **MAP)
    real = loop.accumulate

    def accumulate(*arguments: Any, **options: Any) -> Any:
        if options["step"] == 3:
            monkeypatch.setattr(loop, "accumulate", real)
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(loop, "accumulate", accumulate)
    assert danlu("train", mapped) == 143
    assert last_state(tmp_path / "several")[0].name == "step-00000003"
    assert danlu("train", mapped) == 0
    assert differences(tmp_path / "one", tmp_path / "several") == []
    assert {device for _, device in moves} >= {"cpu:0", "cpu:1"}
