"""Folders in other tools' layouts: each weight on disk has the numbers of its codes, which transformers reads too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from builders.exported_folders import FAMILIES, export, linears_of
from builders.tiny_run import saved_models
from safetensors.torch import load_file
from torch import Tensor

from danlu.assembly.frozen_base import load_frozen
from danlu.assembly.quantized_folder import ExportedModel
from danlu.core.errors import ModelError
from danlu.models.attend import PackedAttention
from danlu.models.hf_folder import read_config
from danlu.models.loading import load
from danlu.models.saving import save
from danlu.numerics.format import Format
from danlu.numerics.weight_layout_config import Export, read_layouts
from danlu.numerics.weight_layouts import read_weight

FORMATS: dict[Export, Format] = {
    "compressed-tensors": Format("int4", (1, 16)),
    "gptq": Format("int4", (1, 32), "float16"),
    "awq": Format("int4", (1, 32), "float16", "integer"),
    "mxfp4": Format("e2m1", (1, 32), "e8m0", rounding="floor"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_models(tmp_path_factory.mktemp("models"), FAMILIES)


def read_back(folder: Path, names: set[str]) -> dict[str, Tensor]:
    """The quantized weights of a folder, decoded from its own tensors by what its config.json says."""
    layouts = read_layouts(json.loads((folder / "config.json").read_text()), str(folder))
    assert layouts is not None
    (layout,) = layouts.layouts
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for name in names:
        module = name.removesuffix("weight")
        own = {key.removeprefix(module): value for key, value in tensors.items() if key.startswith(module)}
        weights[name] = read_weight(layout, own, name).decode()
    return weights


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_the_numbers_on_disk_are_those_of_the_codes(
    folders: dict[str, Path], tmp_path: Path, family: str, kind: Export
) -> None:
    model, names = export(folders[family], tmp_path / "out", FORMATS[kind], kind)
    save(model, tmp_path / "dense")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    weights = read_back(tmp_path / "out", names)
    assert len(weights) == (14 if family == "llama" else 8)
    for name, value in weights.items():
        assert torch.equal(value, dense[name]), name
        assert not torch.equal(value, dense[name].roll(1, 0)), name
    others = load_file(tmp_path / "out" / "model.safetensors")
    kept = dense.keys() - names
    assert kept and all(torch.equal(others[name], dense[name]) for name in kept)


def test_experts_one_by_one_or_left(folders: dict[str, Path], tmp_path: Path) -> None:
    form, source = FORMATS["compressed-tensors"], folders["mixtral"]
    model, names = export(source, tmp_path / "out", form, "compressed-tensors")
    save(model, tmp_path / "dense")
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    assert sum(".experts." in name for name in names) == 2 * 2 * 3  # layers, experts, matrices
    for name, value in read_back(tmp_path / "out", names).items():
        assert torch.equal(value, dense[name]), name
    _, left = export(source, tmp_path / "left", form, "compressed-tensors", experts=False)
    assert not any(".experts." in name for name in left)
    ignored = json.loads((tmp_path / "left" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignored and any(".experts." in name for name in ignored) and any("gate" in n for n in ignored)


def test_danlu_reads_its_fp8(folders: dict[str, Path], tmp_path: Path) -> None:
    model, _ = export(folders["llama"], tmp_path / "out", Format("e4m3", (128, 128)), "fp8")
    written = load(tmp_path / "out")
    for name, value in model.named_parameters():
        assert torch.equal(written.get_parameter(name), value), name


@pytest.mark.parametrize(
    ("kind", "form", "message"),
    [
        ("awq", Format("int4", (1, 16), "float16"), "awq is 4 bits with integer zeros"),
        ("gptq", Format("int4", (1, 24), "float16", "integer"), "64 inputs are not in whole groups of 24"),
        ("compressed-tensors", Format("int4", (1, 16), zero="float"), "holds integer zeros, and these are not"),
    ],
)
def test_what_a_layout_cannot_hold(folders: dict[str, Path], kind: Export, form: Format, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ExportedModel(read_config(folders["llama"]), form, kind, linears_of(folders["llama"]))


def test_one_tensor_of_several_scales(folders: dict[str, Path]) -> None:
    form = Format("e2m1", (1, 16), "e4m3")
    ExportedModel(read_config(folders["llama"]), form, "nvfp4", linears_of(folders["llama"]))
    with pytest.raises(ModelError, match="is made of 3 weights, each with a scale of its own tensor"):
        ExportedModel(read_config(folders["phi3"]), form, "nvfp4", linears_of(folders["phi3"]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compressed-tensors", "mxfp8", "mxfp4", "nvfp4", "fp8"])
def test_transformers_computes_with_the_same_numbers(folders: dict[str, Path], tmp_path: Path, kind: Export) -> None:
    transformers = pytest.importorskip("transformers")
    own: dict[Export, Format] = {
        "nvfp4": Format("e2m1", (1, 16), "e4m3"),
        "fp8": Format("e4m3", (128, 128)),
        "mxfp8": Format("e4m3", (1, 32), "e8m0"),
    }
    model, _ = export(folders["llama"], tmp_path / "out", own.get(kind) or FORMATS[kind], kind)
    if kind == "nvfp4":  # compressed-tensors makes these numbers in bfloat16
        with torch.no_grad():
            for name in linears_of(folders["llama"]):
                parameter = model.get_parameter(name)
                parameter.copy_(parameter.bfloat16())
    save(model, tmp_path / "dense")
    if kind == "fp8":
        reading = transformers.FineGrainedFP8Config(dequantize=True)
    else:
        pytest.importorskip("compressed_tensors")
        reading = transformers.CompressedTensorsConfig(run_compressed=False)
    tokens = torch.arange(1, 40).unsqueeze(0)

    def logits(folder: Path, **options: Any) -> Tensor:
        read: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained
        with torch.no_grad():
            result: Tensor = read(folder, dtype=torch.float32, **options)(tokens).logits
        return result

    wanted, values = logits(tmp_path / "dense"), logits(tmp_path / "out", quantization_config=reading)
    torch.testing.assert_close(values, wanted, atol=2e-6, rtol=1e-6)
    original = logits(folders["llama"])
    assert (values - original).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("element", ["int8", "e4m3"])
def test_transformers_rounds_activations_as_danlu_does(
    folders: dict[str, Path], tmp_path: Path, element: Literal["int8", "e4m3"]
) -> None:
    """W8A8; numbers next to a border between two codes may get the other one. The control leaves activations as they
    are."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    form, is_integer = Format(element, (1, 0)), element == "int8"
    export(folders["llama"], tmp_path / "out", form, "compressed-tensors", rounds_activations=is_integer)
    if not is_integer:  # as FP8-dynamic folders have it
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        (scheme,) = config["quantization_config"]["config_groups"].values()
        scheme["input_activations"] = {"dynamic": True, "num_bits": 8, "strategy": "token", "type": "float"}
        (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(1, 40)
    attend = PackedAttention((0, len(tokens)))
    with torch.no_grad():
        wanted = theirs(tokens.unsqueeze(0)).logits[0]
        rounded, plain = (
            model.requires_grad_(False).logits(model(tokens, torch.arange(len(tokens)), attend))
            for model in (
                load_frozen(tmp_path / "out", dtype=torch.float32, answers=each).model for each in (True, False)
            )
        )
    error, control = (float((each - wanted).norm() / wanted.norm()) for each in (rounded, plain))
    assert error < 2e-4 and control > 1e-3, (error, control)


def test_blocks_that_rows_cut_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    form = Format("e4m3", (40, 32))
    with pytest.raises(ModelError, match="weights have blocks that are cut"):
        export(folders["phi3"], tmp_path / "out", form, "fp8")
    assert not (tmp_path / "out").exists()
    export(folders["phi3"], tmp_path / "out", replace(form, block=(32, 32)), "fp8")
