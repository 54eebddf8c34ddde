"""Weights in other tools' tensors: compressed-tensors' own code reads ours to the same numbers, and we read its."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders.scaled_formats import FORMATS
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.models.block_scaled import CODED_METHODS
from danlu.numerics.format import Format, Scaled, encode
from danlu.numerics.weight_layout_config import (
    METHODS,
    Export,
    WeightLayout,
    config_values,
    export_problem,
    read_layouts,
)
from danlu.numerics.weight_layouts import EXPORTS, read_weight, write_weight

NAME = "model.layers.0.self_attn.q_proj.weight"
ZEROS = Format("int4", (1, 32), "float16", "integer")
COMPRESSED = {
    "int4": Format("int4", (1, 32), "bfloat16"),
    "int4, float32, narrow": Format("int4", (1, 32), narrow_range=True),
    "int4, zeros": ZEROS,
    "int8": Format("int8", (1, 0), "bfloat16"),
    "int3": Format("int3", (1, 32), "float16"),
    "int2, zeros": Format("int2", (1, 32), "bfloat16", "integer"),
    "fp8 tensor": Format("e4m3", (0, 0)),
    "fp8 rows": Format("e4m3", (1, 0), "bfloat16"),
    "fp8 blocks": Format("e4m3", (16, 32), "bfloat16"),
    "mxfp8": FORMATS["mxfp8"],
    "mxfp4": FORMATS["mxfp4"],
    "nvfp4": FORMATS["nvfp4"],
}
OTHERS: dict[str, tuple[Export, Format]] = {
    "awq": ("awq", ZEROS),
    "gptq": ("gptq", Format("int4", (1, 32), "float16")),
    "gptq, 3 bits, zeros": ("gptq", Format("int3", (1, 0), "float16", "integer")),
    "gptq, 8 bits": ("gptq", Format("int8", (1, 64), "float16")),
}
SHAPE = (96, 128)


def matrix(shape: tuple[int, int] = SHAPE) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return x * torch.logspace(-1, 1, shape[1])


def by_ends(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(NAME.removesuffix("weight")): tensor for name, tensor in tensors.items()}


def layout(export: Export, form: Format) -> WeightLayout:
    values = {"quantization_config": config_values(export, form, skip=["lm_head"])}
    read = read_layouts(values, "config.json")
    assert read is not None
    return read.layouts[0]


def theirs(form: Format) -> tuple[Any, Any]:
    """compressed-tensors' compressor of a format, and its scheme, by the config.json that we write."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(config_values("compressed-tensors", form, skip=[]))
    scheme = config.config_groups["group_0"]
    return BaseCompressor.get_value_from_registry(scheme.format), scheme


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_reads_ours(name: str) -> None:
    form = COMPRESSED[name]
    compressor, scheme = theirs(form)
    weight = encode(matrix(), form)
    tensors = by_ends(write_weight(NAME, weight, "compressed-tensors", dtype=torch.bfloat16))
    read = compressor.decompress(tensors, scheme)["weight"]
    expected = weight.decode(read.dtype)
    if form.scale == "e4m3":  # it divides by the tensor's scale, which ours is multiplied by
        torch.testing.assert_close(read, expected, rtol=2.0**-22 if read.dtype == torch.float32 else 2.0**-8, atol=0)
    else:
        assert torch.equal(read, expected)
    assert not torch.equal(read, weight.decode(read.dtype).roll(1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPRESSED)
def test_ours_reads_compressed_tensors(name: str) -> None:
    """Its codes of our numbers, at our scales: rounding numbers of a format again is exact."""
    form = COMPRESSED[name]
    compressor, scheme = theirs(form)
    weight = encode(matrix(), form)
    state = {"weight": weight.decode(), "weight_scale": weight.wide_scales()}
    if form.scale == "e4m3":
        assert weight.tensor_scale is not None
        state = {"weight": weight.decode(), "weight_scale": weight.scales.float()}
        state["weight_global_scale"] = weight.tensor_scale.reciprocal().reshape(1)
    if form.block == (0, 0):
        state["weight_scale"] = state["weight_scale"].reshape(1)
    if weight.zeros is not None:
        state["weight_zero_point"] = (weight.zeros.to(torch.int16) - (1 << (form.bits - 1))).to(torch.int8)
    tensors = compressor.compress(state, scheme)
    read = read_weight(layout("compressed-tensors", form), tensors, NAME)
    assert torch.equal(read.codes.view(torch.uint8), weight.codes.view(torch.uint8)) or torch.equal(
        read.decode(), weight.decode()
    )
    torch.testing.assert_close(read.decode(), weight.decode(), rtol=2.0**-22 if form.scale == "e4m3" else 0, atol=0)


@pytest.mark.parametrize("name", [*COMPRESSED, *OTHERS])
def test_a_weight_comes_back_by_the_same_codes(name: str) -> None:
    export, form = OTHERS[name] if name in OTHERS else ("compressed-tensors", COMPRESSED[name])
    weight = encode(matrix(), form)
    tensors = by_ends(write_weight(NAME, weight, export, dtype=torch.bfloat16))
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    read = read_weight(layout(export, form), tensors, NAME)
    torch.testing.assert_close(read.decode(), weight.decode(), rtol=2.0**-22 if form.scale == "e4m3" else 0, atol=0)
    codes = next(key for key in ("weight_packed", "qweight", "weight") if key in tensors)
    other = {**tensors, codes: tensors[codes].roll(1, 1)}
    assert not torch.equal(read_weight(layout(export, form), other, NAME).decode(), read.decode())


def bits_of(packed: Tensor, bits: int, number: int) -> Tensor:
    """Code `number` of each column of int32 [n, C], bit by bit."""
    codes = torch.zeros(packed.shape[1], dtype=torch.int64)
    for bit in range(bits):
        place = number * bits + bit
        codes |= ((packed[place // 32].long() >> (place % 32)) & 1) << bit
    return codes


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "awq"])
def test_gptq_is_read_input_by_input(name: str) -> None:
    """W[o, i] = scales[g_idx[i], o] (code - zero), with zeros less one in the first format."""
    _, form = OTHERS[name]
    weight = encode(matrix((32, 64)), form)
    tensors = by_ends(write_weight(NAME, weight, "gptq", dtype=torch.bfloat16))
    minus_one = form.zero == "none"
    zeros = torch.stack([bits_of(tensors["qzeros"].t(), form.bits, output) for output in range(32)], dim=1)  # [G, O]
    rows = []
    for number, group in enumerate(tensors["g_idx"].tolist()):
        zero = zeros[group]
        codes = bits_of(tensors["qweight"], form.bits, number)
        rows.append(tensors["scales"][group].float() * (codes - zero - int(minus_one)))
    assert torch.equal(torch.stack(rows, dim=1), weight.decode())


def test_act_order_keeps_the_group_of_each_input() -> None:
    form = OTHERS["gptq"][1]
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    ordered, back = encode(matrix()[:, order], form), order.argsort()
    groups = (torch.arange(128, dtype=torch.int32) // 32)[back]
    weight = replace(ordered, codes=ordered.codes[:, back], groups=groups)
    tensors = by_ends(write_weight(NAME, weight, "gptq", dtype=torch.bfloat16))
    assert torch.equal(tensors["g_idx"], groups)
    read = read_weight(layout("gptq", form), tensors, NAME)
    assert torch.equal(read.decode(), ordered.decode()[:, back])
    lost = read_weight(layout("gptq", form), {**tensors, "g_idx": torch.arange(128) // 32}, NAME)
    assert not torch.equal(lost.decode(), read.decode())
    with pytest.raises(ModelError, match="groups of inputs are no neighbours"):
        write_weight(NAME, weight, "compressed-tensors", dtype=torch.bfloat16)


def test_the_last_int32_of_gptq_may_have_codes_of_no_input() -> None:
    """GPTQModel writes a layer of 60 inputs so: rows of int32 for 64, and a group for each of 60."""
    form = OTHERS["gptq"][1]
    weight = encode(matrix((32, 64)), form)
    tensors = by_ends(write_weight(NAME, weight, "gptq", dtype=torch.bfloat16))
    tensors["g_idx"] = tensors["g_idx"][:60]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert layout("gptq", form).shape(shapes, None) == (32, 60)
    assert torch.equal(read_weight(layout("gptq", form), tensors, NAME).decode(), weight.decode()[:, :60])
    with pytest.raises(ModelError, match=r"g_idx of shape \[50\], not \[64\]"):
        layout("gptq", form).shape({**shapes, "g_idx": (50,)}, None)


@pytest.mark.slow
def test_awq_is_what_llm_compressor_makes_of_it() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    weight = encode(matrix(), ZEROS)
    tensors = write_weight(NAME, weight, "awq", dtype=torch.float16)
    converted = AutoAWQConverter(group_size=32).process(dict(tensors))
    ours = write_weight(NAME, weight, "compressed-tensors", dtype=torch.float16)
    assert converted.keys() == ours.keys()
    assert all(torch.equal(converted[key], ours[key]) for key in ours)


@pytest.mark.slow
def test_fp8_blocks_are_those_that_transformers_dequantises() -> None:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    weight = encode(matrix((256, 384)), Format("e4m3", (128, 128)))
    tensors = by_ends(write_weight(NAME, weight, "fp8", dtype=torch.bfloat16))
    read = _dequantize_fp8_weight(tensors["weight"], tensors["weight_scale_inv"], [128, 128], torch.float32)
    assert torch.equal(read, weight.decode())


PROBLEMS: dict[str, tuple[Export, Format, tuple[int, int] | None, str]] = {
    "float zeros": ("awq", replace(ZEROS, zero="float"), None, "awq holds integer zeros, and these are not"),
    "no zeros": ("awq", Format("int4", (1, 32), "float16"), None, "4 bits with integer zeros"),
    "5 bits": ("gptq", Format("int5", (1, 32), "float16"), None, "2, 3, 4 or 8 bits, not 5"),
    "float32": ("gptq", Format("int4", (1, 32)), None, "float16 scales, not float32"),
    "groups": ("compressed-tensors", COMPRESSED["int4"], (8, 100), "100 inputs are not in whole groups of 32"),
    "outputs": ("awq", ZEROS, (12, 64), "12 outputs do not fill int32 of 8 codes"),
    "words": ("gptq", OTHERS["gptq"][1], (24, 64), "24 x 64 is not of multiples of 32"),
    "rows": ("fp8", Format("e4m3", (1, 0)), None, "fp8 is E4M3 with a float32 scale of each block"),
    "mxfp4": ("mxfp4", FORMATS["nvfp4"], None, "mxfp4 does not hold e2m1 with scales of e4m3"),
    "inputs": ("nvfp4", FORMATS["nvfp4"], (8, 24), "24 inputs are not in whole groups of 16"),
    "blocks": ("compressed-tensors", Format("int8", (16, 16)), None, "for each group of inputs of a row"),
    "mxfp8": ("mxfp8", FORMATS["mxfp4"], None, "mxfp8 does not hold e2m1 with scales of e8m0"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_a_tool_cannot_hold(name: str) -> None:
    export, form, shape, message = PROBLEMS[name]
    assert re.search(message, export_problem(form, export, shape) or "")
    weight = encode(matrix(shape or SHAPE), form)
    with pytest.raises(ModelError, match=f"{re.escape(NAME)} cannot be stored as {export}: .*{message}"):
        write_weight(NAME, weight, export, dtype=torch.bfloat16)


def test_weights_that_are_spoilt() -> None:
    weight = encode(matrix(), ZEROS)
    tensors = by_ends(write_weight(NAME, weight, "awq", dtype=torch.float16))
    own = layout("awq", ZEROS)
    broken: dict[str, Callable[[], dict[str, Tensor]]] = {
        "its tensor qzeros is missing": lambda: {key: value for key, value in tensors.items() if key != "qzeros"},
        "its scales are not finite": lambda: {**tensors, "scales": tensors["scales"] * torch.inf},
        r"scales of shape \[96, 2\], not \[96, 4\]": lambda: {**tensors, "scales": tensors["scales"][:2]},
    }
    for message, damaged in broken.items():
        with pytest.raises(ModelError, match=f"file: {message}"):
            read_weight(own, damaged(), "file")
    spoilt = Scaled(weight.codes, weight.scales * torch.nan, ZEROS, weight.zeros)
    with pytest.raises(ModelError, match="its scales are not finite"):
        write_weight(NAME, spoilt, "awq", dtype=torch.float16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "awq", "version": "gemv"}, "in the layout gemm, not 4 in 'gemv'"),
        ({"quant_method": "gptq", "bits": 5}, "2, 3, 4 and 8 bits"),
        ({"quant_method": "gptq", "group_size": 0}, "in groups of 0"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "not 4 in 'marlin'"),
        ({"quant_method": "compressed-tensors"}, "config_groups is None"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}}, "config_groups.a says nothing of its wei"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {"weights": {}}}},
            "is in the format 'marlin-24' of 8 bits",
        ),
    ],
)
def test_what_config_json_may_not_say(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: quantization_config: .*{message}"):
        read_layouts({"quantization_config": settings}, "config.json")


def test_methods_and_exports() -> None:
    assert set(EXPORTS) - set(METHODS) == {"fp8", "mxfp8", "mxfp4", "nvfp4"}
    assert METHODS == CODED_METHODS  # the room of models has a list of its own
    assert read_layouts({}, "config.json") is read_layouts({"quantization_config": {"quant_method": "fp8"}}, "") is None
