"""The memory that is counted by part, against the peak of everything that torch allocates in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders.peak_memory import peak_in
from builders.tiny_world import World, danlu

from danlu.core.memory_parts import MemoryParts
from danlu.training import loop
from danlu.training.memory_parts import Activations, memory_line

# Wide enough that the parts are large against what every product allocates for a moment.
WIDE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6}


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_the_sum_of_the_parts_is_the_peak_of_a_step(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    base: dict[str, Any] = {"model": {"config": {**_config(), **WIDE}}, "steps": 2, "schedule": {"warmup": 1}}
    assert danlu("train", tiny_world.recipe(tmp_path / "base", **base)) == 0
    found: list[tuple[MemoryParts, int]] = []
    measured: list[int] = []
    real = loop.accumulate

    def accumulate(*arguments: Any, **options: Any) -> Any:
        if options["step"] != 3:
            return real(*arguments, **options)
        results: list[Any] = []
        measured.append(peak_in(lambda: results.append(real(*arguments, **options))))
        return results[0]

    def kept(parts: MemoryParts, program: int, held: int) -> str:
        found.append((parts, held))
        return ""

    monkeypatch.setattr(loop, "accumulate", accumulate)
    monkeypatch.setattr("danlu.run.train.memory_line", kept)
    changes: dict[str, Any] = {
        "model": {"config": None, "tokenizer": None, "path": str(tmp_path / "base")},
        "adapter": "lora",
        "quantization": quantization,
        "data": {"max_length": 128},
        "batch": {"sequences": 4, "micro": 4},
        "steps": 4,
    }
    assert danlu("train", tiny_world.recipe(tmp_path / "run", **changes)) == 0
    parts, held = found[0]
    counted = parts.activations + parts.logits + parts.gradients
    assert counted == pytest.approx(measured[0], rel=0.05)
    assert parts.total < held
    assert parts.adapter == parts.gradients and parts.optimizer >= 2 * parts.adapter
    assert counted - parts.activations // 8 != pytest.approx(measured[0], rel=0.05)  # an eighth less is seen


def _config() -> dict[str, Any]:
    from builders.tiny_world import CONFIG

    return CONFIG


def test_each_storage_counts_once_and_weights_do_not() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8, requires_grad=True)
    counting = Activations.beside([weight])
    with counting.counted(4):
        y = (x @ weight).exp()
        (y * y).sum()
    assert counting.peak_bytes == 2 * 4 * 8 * 4  # x and y


def test_the_line_names_what_is_no_tensor() -> None:
    mib = 2**20
    parts = MemoryParts(111 * mib, 2 * mib, 2 * mib, 4 * mib, 0, 155 * mib, 24 * mib)
    assert memory_line(parts, 240 * mib, 829 * mib) == (
        "memory: weights 111 MiB + adapter 2.00 MiB + gradients 2.00 MiB + optimizer 4.00 MiB + activations 155 MiB + "
        "logits 24.0 MiB = 298 MiB in tensors; at most 829 MiB were held (program 240 MiB, kernels and freed memory "
        "291 MiB)"
    )
    assert memory_line(parts, 0, 300 * mib).endswith("= 298 MiB in tensors; at most 300 MiB were held")
