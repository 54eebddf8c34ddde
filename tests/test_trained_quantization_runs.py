"""Runs with `quantization.trained`, in full and with LoRA: `danlu quantize` writes the numbers that were trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_world import World, danlu

from danlu.assembly.trained_quantization import trained_format
from danlu.models.loading import load, stored_dtype
from danlu.numerics.format import encode
from danlu.recipe import sections

pytestmark = pytest.mark.usefixtures("tokenising_here")

INT3: dict[str, Any] = {"kind": "int3", "group": 16, "trained": True}
EVALUATED = {"eval": 10}
FORM = trained_format(sections.Int3(group=16, trained=True))


def quantized(model: Path, output: Path, **rounding: Any) -> Path:
    file = output.with_suffix(".yaml")
    method = {"kind": "nearest", "bits": 3, "group": 16, **rounding}
    values = {"stage": "quantize", "model": str(model), "quantization": [method], "threads": 1, "output": str(output)}
    file.write_text(json.dumps(values))
    assert danlu("quantize", file) == 0
    return output


@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "rank": 4}], ids=["full", "lora"])
def test_the_loss_of_the_run_is_that_of_the_quantized_model(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], adapter: Any
) -> None:
    """The last evaluation of the run, once more by another command; the controls are the model without rounding, and
    one that is rounded in larger groups, which is noted."""
    run = tmp_path / "run"
    optimizer = {"kind": "adamw", "learning_rate": 1e-2}
    changes = {"optimizer": optimizer, "adapter": adapter, "quantization": INT3, "steps": 4, "precision": "fp32"}
    changes["model"] = str(tiny_world.base)
    recipe = tiny_world.recipe(run, **changes, data=EVALUATED, evaluation={"every": 4})
    assert danlu("train", recipe) == 0
    whole = run
    if adapter is not None:
        whole = tmp_path / "merged"
        assert danlu("merge", run, whole, "--dtype", "fp32") == 0
    folder = whole / "model" if adapter is None else whole
    assert stored_dtype(folder) == torch.float32
    out = quantized(whole, tmp_path / "out")
    numbers, masters = load(out), load(folder)
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(numbers.get_parameter(name), encode(masters.get_parameter(name), FORM).decode())
    assert "was trained for other numbers" not in capsys.readouterr().err
    coarse = quantized(whole, tmp_path / "coarse", group=32)
    assert ("was trained for other numbers (kind: int3, group: 16" in capsys.readouterr().err) == (adapter is None)
    trained = last_loss(run)
    assert loss_of(tiny_world, out) == pytest.approx(trained, rel=1e-6)
    for other in (whole, coarse):
        assert abs(loss_of(tiny_world, other) - trained) > 3e-5


def loss_of(world: World, model: Path) -> float:
    """The loss of a model on the rows that the run evaluates on, by a step that changes nothing."""
    run = model.with_name(f"{model.name}-evaluated")
    values: dict[str, Any] = {
        "model": str(model),
        "steps": 1,
        "optimizer": {"kind": "sgd", "learning_rate": 0.0},
        "precision": "fp32",
    }
    values["schedule"] = {"warmup": 0}
    assert danlu("train", world.recipe(run, **values, data=EVALUATED, evaluation={"every": 1})) == 0
    return last_loss(run)


def last_loss(run: Path) -> float:
    """The loss of a run's last evaluation."""
    return float(json.loads((run / "summary.json").read_text())["evaluation"]["last"])


def test_the_folder_of_a_run_in_bf16_has_its_float32_weights(tiny_world: World, tmp_path: Path) -> None:
    """Codes of rounded weights would be others; the control is a run without the format."""
    for name, section in (("trained", INT3), ("plain", None)):
        recipe = tiny_world.recipe(tmp_path / name, quantization=section, precision="bf16", steps=1, schedule=None)
        assert danlu("train", recipe) == 0
        dtype = stored_dtype(tmp_path / name / "model")
        assert dtype == (torch.bfloat16 if section is None else torch.float32)
