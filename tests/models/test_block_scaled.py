"""FP8 with scales of blocks, and MXFP4: dequantised as transformers does, by box, from whole folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from danlu.assembly.frozen_base import check_frozen, load_frozen
from danlu.core.errors import ModelError
from danlu.core.shard_box import ShardBox
from danlu.models import hf_folder, safetensors_io
from danlu.models.attend import PackedAttention
from danlu.models.block_scaled import dequantize_fp8, dequantize_mxfp4, fp8_block, with_scaled
from danlu.models.decoder import Decoder
from danlu.models.hf_config import read_config_values
from danlu.models.hf_folder import read_config, read_tensors
from danlu.models.hf_layout import HFTensor, Part
from danlu.models.loading import load
from danlu.models.safetensors_io import TensorReader
from danlu.models.saving import save
from danlu.recipe import sections

BLOCK = 16


def same_bits(one: Tensor, other: Tensor) -> bool:
    raw = [each.contiguous().view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and torch.equal(*raw)


def test_every_mxfp4_number_is_transformers_to_the_bit() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    numbers = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16)
    for scale in (0, 1, 60, 126, 127, 128, 200, 251):
        scales = torch.full(numbers.shape[:-1], scale, dtype=torch.uint8)
        assert same_bits(dequantize_mxfp4(numbers, scales), convert_moe_packed_tensors(numbers, scales).mT)
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(110, 140, (3, 10, 4), dtype=torch.uint8, generator=draw)
    assert same_bits(dequantize_mxfp4(blocks, scales), convert_moe_packed_tensors(blocks, scales).mT)
    swapped = (blocks << 4) | (blocks >> 4)
    assert not torch.equal(dequantize_mxfp4(swapped, scales), dequantize_mxfp4(blocks, scales))  # control


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_transformers_to_the_bit(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    draw = torch.Generator().manual_seed(0)
    values = torch.randn(256, 384, generator=draw).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=draw).add(0.01).to(scale_dtype)
    expected = Fp8Dequantize(None)._dequantize_one(values, scales, dtype)
    assert same_bits(dequantize_fp8(values, scales, (128, 128)).to(dtype), expected)
    assert not same_bits(dequantize_fp8(values, scales.float().flip(1), (128, 128)).to(dtype), expected)  # control


def test_blocks_at_the_edge_are_cut_off() -> None:
    values, scales = torch.ones(5, 7).to(torch.float8_e4m3fn), torch.arange(1.0, 7.0).reshape(2, 3)
    found = dequantize_fp8(values, scales, (3, 3))
    assert found.tolist() == [[scales[row // 3, column // 3].item() for column in range(7)] for row in range(5)]


def boxes_of(shape: tuple[int, ...]) -> list[ShardBox]:
    """All of it, and parts that begin and end within blocks."""
    cut = tuple(side // 3 for side in shape)
    ends = tuple(max(start + 1, side - side // 4) for start, side in zip(cut, shape, strict=True))
    inner = ShardBox(shape, cut, tuple(end - start for start, end in zip(cut, ends, strict=True)))
    return [ShardBox.full(shape), inner, ShardBox(shape, (0,) * len(shape), (0, *shape[1:]))]


def test_boxes_of_experts_in_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, inner, width = 4, 6, 128  # a third of it is no whole number of blocks
    shape = (experts, inner, width)
    boxes = [ShardBox(shape, (expert, 0, 0), (1, inner, width)) for expert in range(experts)]
    parts = [
        Part(name, box, (expert, 0, 0), transposed=True, stride=2, first=index, axis=2)
        for expert, box in enumerate(boxes)
        for index, name in enumerate(("gate", "up"))
    ]
    tensor = HFTensor("gate_up_proj", (experts, width, 2 * inner), tuple(parts))
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, 2 * inner, width // 32, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(120, 130, blocks.shape[:-1], dtype=torch.uint8, generator=draw)
    save_file({"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}, tmp_path / "model.safetensors")
    stored, problems = with_scaled(read_tensors(tmp_path), (128, 128))
    assert problems == [] and stored.keys() == {"gate_up_proj"}
    location = stored["gate_up_proj"]
    assert location.shape == tensor.transposed.shape and tensor.transposed.transposed == tensor
    whole = dequantize_mxfp4(blocks, scales)
    expected = {"gate": whole[:, 0::2], "up": whole[:, 1::2]}
    for box in boxes_of(shape):
        targets = {name: (torch.zeros(box.sizes), box) for name in expected}
        with TensorReader() as reader:
            reader.fill(hf_folder.as_stored(tensor, location), location, targets)
        for name, (target, _) in targets.items():
            assert torch.equal(target, box.view_of(expected[name]).float()), (name, str(box))
    read_bytes = 0
    read_exactly = safetensors_io.read_exactly

    def counted(handle: Any, values: Tensor) -> int:
        nonlocal read_bytes
        read_bytes += values.nbytes
        return read_exactly(handle, values)

    monkeypatch.setattr(safetensors_io, "read_exactly", counted)
    with TensorReader() as reader:
        targets = {name: (torch.zeros(1, inner, width), boxes[2]) for name in expected}
        reader.fill(hf_folder.as_stored(tensor, location), location, targets)
    assert read_bytes == (blocks.nbytes + scales.nbytes) // experts


def quantized(folder: Path) -> dict[str, Tensor]:
    """Makes FP8 of a folder's linear layers, with blocks that do not fill them; returns what its tensors stand for."""
    tensors, dense = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        dense[name] = tensor
        if "_proj" in name and tensor.ndim == 2:
            rows, columns = (-(-side // BLOCK) for side in tensor.shape)
            padded = torch.zeros(rows * BLOCK, columns * BLOCK)
            padded[: tensor.shape[0], : tensor.shape[1]] = tensor
            scales = padded.reshape(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / 448
            each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: tensor.shape[0], : tensor.shape[1]]
            tensors[name], tensors[f"{name}_scale_inv"] = (tensor / each).to(torch.float8_e4m3fn), scales
            dense[name] = tensors[name].float() * each
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK] * 2}
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": settings}))
    return dense


@pytest.mark.parametrize("case", ["llama-2", "phi-4"])
def test_a_folder_in_fp8_is_a_dense_model(
    case: str, tiny_model: Callable[..., Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tiny_model(case), tmp_path / "model")
    dense = quantized(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").stat().st_size < 4 * sum(one.numel() for one in dense.values())
    monkeypatch.setattr(safetensors_io, "BUFFER_BYTES", 1000)
    model = load(tmp_path / "model")
    save(model, tmp_path / "result", dtype=torch.bfloat16, origin=tmp_path / "model")
    written = load_file(tmp_path / "result" / "model.safetensors")
    assert written.keys() == dense.keys()
    assert all(torch.equal(written[name], dense[name].to(torch.bfloat16)) for name in dense)
    assert "quantization_config" not in json.loads((tmp_path / "result" / "config.json").read_text())
    assert read_config(tmp_path / "result") == model.config
    check_frozen(tmp_path / "model")
    adapted = load_frozen(tmp_path / "model", dtype=torch.bfloat16, new={"own": sections.Lora(rank=2)})
    for name, parameter in model.named_parameters():
        assert torch.equal(adapted.model.get_parameter(name), parameter.to(adapted.model.get_parameter(name).dtype))
    packed = load_frozen(tmp_path / "model", dtype=torch.bfloat16, quantization=sections.Nf4())
    assert packed.model.layers["0"].attention.q_proj.quantized is not None


def test_transformers_reads_the_same_from_a_folder_in_fp8(tiny_model: Callable[..., Decoder], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    save(tiny_model("llama-2", hidden_size=64, intermediate_size=96), tmp_path)
    quantized(tmp_path)
    settings = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings, dtype=torch.bfloat16)
    save(load(tmp_path, dtype=torch.bfloat16), tmp_path / "dense", dtype=torch.bfloat16)
    mine = load_file(tmp_path / "dense" / "model.safetensors")
    named = dict(theirs.named_parameters())
    assert mine.keys() <= named.keys() and len(mine) > 10
    # transformers leaves what is not quantized in the type it is stored in, here float32.
    assert [name for name, value in mine.items() if not torch.equal(named[name].to(value.dtype), value)] == []


def test_gpt_oss_in_mxfp4_is_transformers_dense_model(tiny_model: Callable[..., Decoder], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    save(tiny_model("gpt-oss", hidden_size=64, intermediate_size=32), tmp_path)
    tensors, draw = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
        tensors[f"{name}_scales"] = torch.randint(120, 126, shape[:-1], dtype=torch.uint8, generator=draw)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    settings = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=settings, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model, tokens = load(tmp_path), torch.arange(3, 30)
    named = dict(theirs.named_parameters())
    gate = "layers.1.mlp.experts.gate_proj.weight"
    assert torch.equal(model.get_parameter(gate), named["model.layers.1.mlp.experts.gate_up_proj"][..., 0::2].mT)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        mine = model.logits(model(tokens, torch.arange(len(tokens)), PackedAttention((0, len(tokens)))))
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0)
    save(model, tmp_path / "dense", dtype=torch.bfloat16, origin=tmp_path)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32, attn_implementation="eager")
    assert all(torch.equal(value.bfloat16(), named[name].bfloat16()) for name, value in dense.named_parameters())


Change = Callable[[dict[str, Tensor]], object]
Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q0}_scale_inv"), rf"{Q0} in .*: expected floating point, found F8_E4M3"),
        (
            lambda t: t.update({f"{Q0}_scale_inv": torch.ones(2, 3)}),
            r"expected scales of shape \[3, 3\], found \[2, 3\]",
        ),
        (lambda t: t.update({f"{Q0}_scale_inv": torch.ones(3, 3).int()}), "expected scales of type F32 or BF16"),
        (lambda t: t[f"{Q0}_scale_inv"].view(-1)[3].fill_(float("inf")), f"tensor {Q0} holds NaN or infinity"),
    ],
)
def test_what_does_not_go_together_is_said(
    change: Change, message: str, tiny_model: Callable[..., Decoder], tmp_path: Path
) -> None:
    save(tiny_model("llama-2"), tmp_path)
    quantized(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_a_block_has_as_many_rows_and_columns_as_the_file_says() -> None:
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 32]}
    assert fp8_block({"quantization_config": settings}, "config.json") == (64, 32)


@pytest.mark.parametrize("settings", [{"weight_block_size": None}, {"fmt": "e5m2", "weight_block_size": [128, 128]}])
def test_other_fp8_is_refused(settings: dict[str, Any], tiny_model: Callable[..., Decoder], tmp_path: Path) -> None:
    save(tiny_model("llama-2"), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", **settings}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="of FP8 danlu reads E4M3 with a scale for each block"):
        load(tmp_path)
    values["quantization_config"] = {"quant_method": "hqq"}
    with pytest.raises(ModelError, match=r"weights stored quantised \(hqq\) are not supported; use the original"):
        read_config_values(values)
