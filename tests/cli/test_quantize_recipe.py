"""`danlu quantize RECIPE`: rows calibrate, layers are rounded, the folder is a model; and what is refused."""

from __future__ import annotations

import io
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.docs_scripts import TOP
from builders.tiny_world import World, danlu, tokenise_here
from safetensors.torch import load_file

from danlu.assembly.frozen_base import load_frozen
from danlu.core.errors import RecipeError
from danlu.models.hf_folder import read_config
from danlu.models.loading import load
from danlu.numerics.format import Format, encode
from danlu.numerics.weight_layout_config import read_layouts
from danlu.numerics.weight_layouts import read_weight
from danlu.recipe.quantize_recipe import load_quantize_recipe
from danlu.run import quantize as running


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenise_here(monkeypatch)


def write(world: World, folder: Path, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "stage": "quantize",
        "model": str(world.base),
        "calibration": {"data": str(world.chat), "tokens": 600, "max_length": 128, "cache": str(world.cache)},
        "quantization": [{"kind": "smoothquant"}, {"kind": "gptq", "group": 16}],
        "threads": 1,
        "output": str(folder / "out"),
    }
    file = folder / "quantize.yaml"
    file.write_text(json.dumps({key: value for key, value in (values | changes).items() if value is not None}))
    return file


def test_a_recipe_writes_a_model(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("quantize", write(tiny_world, tmp_path)) == 0
    shown = capsys.readouterr().err
    assert f"{tiny_world.base} by smoothquant, gptq, calibrated with" in shown
    assert "18,432 of 44,192 parameters at 6.000 bits each" in shown
    assert not (tmp_path / ".out.quantizing").exists()
    original, written = load(tiny_world.base), load(tmp_path / "out")
    weights = [
        model.get_parameter("layers.0.mlp.up_proj.weight").unflatten(1, (-1, 16)) for model in (original, written)
    ]
    assert weights[0].shape == weights[1].shape
    assert max(len(set(group.tolist())) for row in weights[1] for group in row) <= 16 == weights[0].shape[2]
    assert danlu("generate", tmp_path / "out", "--prompt", "Tom", "--max-new-tokens", 3) == 0
    assert danlu("quantize", tmp_path / "quantize.yaml") == 6
    assert "is there already" in capsys.readouterr().err


def test_nearest_needs_no_rows(tiny_world: World, tmp_path: Path) -> None:
    file = write(tiny_world, tmp_path, calibration=None, quantization="nearest")
    assert danlu("quantize", file, "quantization.0.group=32", "quantization.0.bits=8") == 0
    original, written = load(tiny_world.base), load(tmp_path / "out")
    for name, value in original.named_parameters():
        error = (written.get_parameter(name) - value).abs().max() / value.abs().max()
        assert error < 0.01 and (error > 0) == any(f".{half}." in name for half in ("attention", "mlp")), name


def test_activations_in_8_bits_are_said_in_the_folder_and_multiplied_so(tiny_world: World, tmp_path: Path) -> None:
    """The scheme is that of published W8A8 folders; a model that only answers rounds activations, no other does."""
    steps = [{"kind": "smoothquant"}, {"kind": "nearest", "bits": 8, "group": 0}]
    file = write(tiny_world, tmp_path, quantization=steps, export="compressed-tensors", activations="int8")
    assert danlu("quantize", file) == 0
    folder = tmp_path / "out"
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = settings["config_groups"]["group_0"]
    by_token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    assert settings["format"] == scheme["format"] == "int-quantized" and scheme["input_activations"] == by_token
    assert scheme["weights"].items() >= {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}.items()
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    assert stored[f"{name}.weight"].dtype == torch.int8 and stored[f"{name}.weight_scale"].shape[1] == 1
    answering, training = (load_frozen(folder, dtype=torch.float32, answers=answers).model for answers in (True, False))
    linears = [model.get_submodule("layers.0.mlp.down_proj") for model in (answering, training)]
    x = torch.randn(3, linears[0].shape[1])
    assert torch.equal(*(linear.quantized.dense() for linear in linears))
    error = (linears[0](x) - linears[1](x)).norm() / linears[1](x).norm()
    assert 1e-4 < error < 2e-2
    assert danlu("generate", folder, "--prompt", "Tom", "--max-new-tokens", 3) == 0


def test_a_killed_run_goes_on(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(running, "save", lambda *arguments, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            running.quantize(
                load_quantize_recipe(write(tiny_world, tmp_path)), io.StringIO(), progress=lambda done, total: None
            )
    assert (tmp_path / ".out.quantizing").is_dir()
    assert danlu("quantize", tmp_path / "quantize.yaml") == 0
    layers = len(read_config(tiny_world.base).layers)
    assert f"{layers} layers were done by an earlier run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": [{"kind": "gptq", "group": 24}]}, "24 does not divide the 32 inputs of layers.0"),
        ({"quantization": "smoothquant"}, "only moves outliers: name nearest, gptq or awq behind it"),
        ({"quantization": ["nearest", "gptq"]}, "quantization.0: nearest rounds, and nothing can follow it"),
        ({"quantization": ["smoothquant", "smoothquant", "nearest"]}, "names smoothquant twice"),
        ({"quantization": []}, "names no method"),
        ({"quantization": "gtpq"}, "Did you mean 'gptq'?"),
        ({"quantization": [{"kind": "gptq", "groop": 24}]}, "unknown key. Did you mean 'group'?"),
        ({"calibration": None}, "smoothquant, gptq looks at rows: add `calibration: rows.json#256`"),
        ({"calibration": {"data": []}}, "calibration.data: names no rows"),
        ({"stage": "sft"}, "takes recipes with stage: quantize, this is sft. Use `danlu train`"),
        ({"output": None}, "output"),
        ({"export": "awq"}, "export: awq is 4 bits with zeros: set symmetric: false in quantization.1"),
        ({"export": "fp8"}, "quantization.1.group: is fixed by export: fp8; leave it out"),
        ({"export": "gptq", "quantization": [{"kind": "nearest", "bits": 5}]}, "2, 3, 4 or 8 bits, not 5"),
        ({"activations": "int8"}, "activations: int8 is a setting of export: compressed-tensors"),
        ({"activations": "int8", "export": "compressed-tensors"}, "one scale a row: set bits: 8"),
        ({"device": "tpu"}, "device: expected"),
    ],
)
def test_what_is_refused(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert danlu("quantize", write(tiny_world, tmp_path, **changes)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_codes_are_written_in_another_tools_layout(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounding = [{"kind": "nearest", "group": 16}]
    file = write(tiny_world, tmp_path, calibration=None, quantization=rounding, export="compressed-tensors")
    assert danlu("quantize", file, "dtype=bf16") == 0
    shown = capsys.readouterr().err
    assert "18,432 of 44,192 parameters at 5.000 bits each" in shown
    assert f"danlu eval {tmp_path / 'out'}" in shown
    values = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (values["quant_method"], values["format"], values["ignore"]) == (
        *("compressed-tensors", "pack-quantized"),
        ["lm_head"],
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    module = "model.layers.0.mlp.up_proj."
    own = {key.removeprefix(module): value for key, value in tensors.items() if key.startswith(module)}
    layouts = read_layouts({"quantization_config": values}, "config.json")
    assert layouts is not None
    (layout,) = layouts.layouts
    original = load(tiny_world.base).get_parameter("layers.0.mlp.up_proj.weight")
    wanted = encode(original, Format("int4", (1, 16), "bfloat16")).decode()  # scales are of the model's type
    assert torch.equal(read_weight(layout, own, module).decode(), wanted)
    assert not torch.equal(encode(original, Format("int4", (1, 16))).decode(), wanted)
    assert danlu("quantize", file, "export=gptq", "output=other") == 4
    assert "is not of multiples of 32, which gptq's int32 need" in capsys.readouterr().err


def test_a_broken_row_of_calibration(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tiny_world.chat.read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:30], '{"nothing": 1}', *lines[30:]]))
    calibration = {"data": str(tmp_path / "rows.jsonl"), "tokens": 600, "max_length": 128, "cache": str(tmp_path / "c")}
    file = write(tiny_world, tmp_path, calibration=calibration, quantization=[{"kind": "gptq", "group": 16}])
    assert danlu("quantize", file) == 3
    shown = capsys.readouterr().err
    assert "rows.jsonl:31" in shown and "Set calibration.on_bad_row: skip to leave such rows out" in shown
    assert danlu("quantize", file, "calibration.on_bad_row=skip") == 0


def test_the_documented_recipe_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (TOP / "docs" / "quantization.md").read_text(encoding="utf-8")
    block = re.search(r"(?:^ {4}.*\n)+", page, re.MULTILINE)
    assert block is not None and "stage: quantize" in block[0]
    (tmp_path / "quantize.yaml").write_text(textwrap.dedent(block[0]))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RecipeError, match=r"quantize.yaml:3:\d+ calibration.data.0.path: no file or folder 'alpaca.json'"
    ):
        load_quantize_recipe(tmp_path / "quantize.yaml")
    (tmp_path / "alpaca.json").touch()
    recipe = load_quantize_recipe(tmp_path / "quantize.yaml")
    assert recipe.export == "compressed-tensors"
    assert [step.kind for step in recipe.quantization] == ["smoothquant", "gptq"]


def test_rows_without_tokens_are_refused(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    calibration = {"data": str(tmp_path / "empty.jsonl"), "cache": str(tiny_world.cache)}
    assert danlu("quantize", write(tiny_world, tmp_path, calibration=calibration)) == 3
    assert "the file is empty" in capsys.readouterr().err


def test_a_quantized_folder_is_refused(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("quantize", tiny_world.base, tmp_path / "nf4") == 0
    assert danlu("quantize", write(tiny_world, tmp_path, model=str(tmp_path / "nf4"))) == 4
    assert "is quantized already (nf4); quantizing it again would round twice" in capsys.readouterr().err


def test_flags_are_of_the_short_form(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("quantize", write(tiny_world, tmp_path), "--kind", "fp4") == 2
    assert "in a recipe they are keys" in capsys.readouterr().err
    assert danlu("quantize", tiny_world.base) == 2
    assert "takes MODEL and OUT, or a recipe" in capsys.readouterr().err


def test_rows_that_the_run_evaluates_on_are_left_out(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tiny_world.values(tmp_path / "run")["data"] | {"eval": 20}
    run = tiny_world.recipe(tmp_path / "run", data=data, steps=2)
    assert danlu("train", run) == 0
    calibration = {"data": str(tiny_world.chat), "max_length": 128, "cache": str(tiny_world.cache)}
    assert danlu("quantize", write(tiny_world, tmp_path, model=str(tmp_path / "run"), calibration=calibration)) == 0
    assert "rows are left out, on which the run of" in capsys.readouterr().err
    assert torch.isfinite(load(tmp_path / "out").get_parameter("norm.weight")).all()
