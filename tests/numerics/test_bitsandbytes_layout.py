"""4-bit weights in files: written as bitsandbytes writes them, read as it reads them, and every damage told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.numerics.bitsandbytes_config import KINDS, Kind
from danlu.numerics.bitsandbytes_layout import STATE
from danlu.numerics.four_bit_weight import FourBitWeight

NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def bitsandbytes() -> ModuleType:
    import bitsandbytes  # seconds: not when tests are collected

    return bitsandbytes


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def written(bitsandbytes: ModuleType, matrix: Tensor, kind: Kind, double: bool) -> dict[str, Tensor]:
    """The tensors of a layer of bitsandbytes in a state_dict."""
    outputs, inputs = matrix.shape
    layer = bitsandbytes.nn.Linear4bit(inputs, outputs, bias=False, compress_statistics=double, quant_type=kind)
    layer.load_state_dict({"weight": matrix})
    state = layer.to(matrix.dtype).to("cpu").state_dict()
    return {NAME.removesuffix("weight") + key: value for key, value in state.items()}


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_tensors_both_ways(bitsandbytes: ModuleType, dtype: torch.dtype, kind: Kind, double: bool) -> None:
    matrix = normal(100, 192, dtype=dtype)
    expected = written(bitsandbytes, matrix, kind, double)
    weight = FourBitWeight.quantize(matrix, kind=kind, double=double)
    tensors = weight.tensors(NAME)
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        assert values.dtype == tensors[name].dtype and torch.equal(values, tensors[name]), name
    read = FourBitWeight.from_tensors(NAME, expected, where="x")
    assert (read.kind, read.shape, read.dtype, read.block) == (kind, (100, 192), dtype, 64)
    assert torch.equal(read.dense(), weight.dense()) and read.stored_bytes() == weight.stored_bytes()
    assert not torch.equal(read.dense(), FourBitWeight.quantize(-matrix, kind=kind, double=double).dense())


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_bitsandbytes_reads_a_file_of_ours(bitsandbytes: ModuleType, tmp_path: Path, kind: Kind, double: bool) -> None:
    weights = {
        name: FourBitWeight.quantize(normal(rows, 128), kind=kind, double=double)
        for name, rows in (("a", 64), ("b", 96))
    }
    # Two in one file: no memory may be shared.
    tensors = {key: value for name, weight in weights.items() for key, value in weight.tensors(name).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    for name, weight in weights.items():
        stats = {key.removeprefix(f"{name}."): value for key, value in loaded.items() if key.startswith(f"{name}.")}
        parameter = bitsandbytes.nn.Params4bit.from_prequantized(loaded[name], stats, device="cpu")
        assert torch.equal(
            bitsandbytes.functional.dequantize_4bit(parameter.data, parameter.quant_state), weight.dense()
        )
        assert torch.equal(FourBitWeight.from_tensors(name, loaded, where="x").dense(), weight.dense())


@pytest.mark.parametrize("shape", [(3, 33), (1, 63), (5, 80), (1, 1), (257, 64)])
@pytest.mark.parametrize("double", [True, False])
def test_awkward_shapes(shape: tuple[int, int], double: bool) -> None:
    weight = FourBitWeight.quantize(normal(*shape), double=double)
    read = FourBitWeight.from_tensors(NAME, weight.tensors(NAME), where="x")
    assert torch.equal(read.dense(), weight.dense()) and read.dense().shape == shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_codes_stored_as_numbers_of_another_type(dtype: torch.dtype) -> None:
    weight = FourBitWeight.quantize(normal(8, 64))
    tensors = weight.tensors(NAME)
    tensors[NAME] = tensors[NAME].view(-1).view(dtype).unsqueeze(1)
    read = FourBitWeight.from_tensors(NAME, tensors, where="x")
    assert torch.equal(read.codes, weight.codes) and torch.equal(read.dense(), weight.dense())


def test_a_map_of_magnitudes_other_than_the_usual_is_used(bitsandbytes: ModuleType) -> None:
    tensors = FourBitWeight.quantize(normal(64, 128)).tensors(NAME)
    usual = FourBitWeight.from_tensors(NAME, tensors, where="x")
    tensors[f"{NAME}.nested_quant_map"] *= 1.25
    read = FourBitWeight.from_tensors(NAME, tensors, where="x")
    stats = {key.removeprefix(f"{NAME}."): value for key, value in tensors.items() if key != NAME}
    parameter = bitsandbytes.nn.Params4bit.from_prequantized(tensors[NAME], stats, device="cpu")
    expected = bitsandbytes.functional.dequantize_4bit(parameter.data, parameter.quant_state)
    assert torch.equal(read.dense(), expected) and not torch.equal(usual.dense(), expected)
    again = FourBitWeight.from_tensors(NAME, read.tensors(NAME), where="x")
    assert torch.equal(again.dense(), expected)


Damage = Callable[[dict[str, Tensor]], Any]


def state_with(**changes: Any) -> Damage:
    def damage(tensors: dict[str, Tensor]) -> None:
        key = f"{NAME}{STATE}nf4"
        state = json.loads(bytes(tensors[key].tolist())) | changes
        state = {name: value for name, value in state.items() if value is not ...}
        tensors[key] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return damage


def with_tensor(suffix: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return lambda tensors: tensors.update({NAME + suffix: change(tensors[NAME + suffix])})


def spoilt(values: Tensor) -> Tensor:
    return torch.cat((values[:-1], torch.tensor([torch.nan])))


CASES: dict[str, tuple[Damage, str]] = {
    "no codes": (lambda tensors: tensors.pop(NAME), f"{NAME} is missing"),
    "no state": (lambda tensors: tensors.pop(f"{NAME}{STATE}nf4"), "bitsandbytes__nf4 (or fp4) is missing"),
    "no magnitudes": (lambda tensors: tensors.pop(f"{NAME}.absmax"), ".absmax is missing"),
    "no values": (lambda tensors: tensors.pop(f"{NAME}.quant_map"), ".quant_map is missing"),
    "no nested": (lambda tensors: tensors.pop(f"{NAME}.nested_absmax"), ".nested_absmax is missing"),
    "no nested map": (lambda tensors: tensors.pop(f"{NAME}.nested_quant_map"), ".nested_quant_map is missing"),
    "two states": (
        lambda tensors: tensors.update({f"{NAME}{STATE}fp4": tensors[f"{NAME}{STATE}nf4"]}),
        "has 2 descriptions: fp4, nf4",
    ),
    "another kind": (
        lambda tensors: tensors.update({f"{NAME}{STATE}af4": tensors.pop(f"{NAME}{STATE}nf4")}),
        "is quantized as 'af4'. danlu reads nf4 and fp4",
    ),
    "kinds differ": (state_with(quant_type="fp4"), "says quant_type 'fp4'"),
    "values of fp4": (with_tensor(".quant_map", lambda values: values.flip(0)), "does not hold nf4's 16 values"),
    "short codes": (with_tensor("", lambda codes: codes[:-1]), "takes 3071 bytes, but 6144 numbers take 3072"),
    "another shape": (state_with(shape=[64, 97]), "takes 3072 bytes, but 6208 numbers take 3104"),
    "no matrix": (state_with(shape=[6144]), "the shape [6144], not [outputs, inputs]"),
    "negative shape": (state_with(shape=[-64, -96]), "the shape [-64, -96]"),
    "shape of text": (state_with(shape="64 x 96"), "the shape '64 x 96'"),
    "no shape": (state_with(shape=...), "the shape None"),
    "odd block": (state_with(blocksize=65), "the blocksize 65, not 32, 64"),
    "another block": (state_with(blocksize=128), ".absmax has 96 entries, not 48"),
    "block of text": (state_with(blocksize="64"), "the blocksize '64'"),
    "unknown type": (state_with(dtype="int8"), "the dtype 'int8', not float32, bfloat16 or float16"),
    "unhashable type": (state_with(dtype=[1]), "the dtype [1]"),
    "nested block": (state_with(nested_blocksize=128), "the nested_blocksize 128, not 256"),
    "nested type": (state_with(nested_dtype="float16"), "the nested_dtype 'float16', not float32"),
    "offset of text": (state_with(nested_offset="0.1"), "the nested_offset '0.1'"),
    "offset is NaN": (state_with(nested_offset=float("nan")), "the nested_offset nan"),
    "offset too large": (state_with(nested_offset=1e39), "the nested_offset 1e+39"),
    "no offset": (state_with(nested_offset=...), "the nested_offset None"),
    "not JSON": (with_tensor(f"{STATE}nf4", lambda text: text[:-3]), "is no JSON ("),
    "not UTF-8": (with_tensor(f"{STATE}nf4", lambda text: text | 0x80), "is no JSON ("),
    "too deep": (
        with_tensor(f"{STATE}nf4", lambda text: torch.full((200_000,), ord("["), dtype=torch.uint8)),
        "is no JSON",
    ),
    "a list": (with_tensor(f"{STATE}nf4", lambda text: torch.tensor([91, 93], dtype=torch.uint8)), "is no JSON object"),
    "not bytes": (with_tensor(f"{STATE}nf4", lambda text: text.float()), "holds float32, not bytes"),
    "wide magnitudes": (with_tensor(".absmax", lambda codes: codes.float()), ".absmax holds float32, not uint8"),
    "few magnitudes": (with_tensor(".absmax", lambda codes: codes[:-1]), ".absmax has 95 entries, not 96"),
    "spoilt nested": (with_tensor(".nested_absmax", spoilt), ".nested_absmax holds NaN or infinite values"),
    "spoilt map": (with_tensor(".nested_quant_map", spoilt), ".nested_quant_map holds NaN"),
    "narrow nested": (with_tensor(".nested_absmax", lambda values: values.half()), "holds float16, not float32"),
    "long nested": (with_tensor(".nested_absmax", lambda values: values.repeat(2)), "has 2 entries, not 1"),
    "short map": (with_tensor(".nested_quant_map", lambda values: values[:16]), "has 16 entries, not 256"),
}


@pytest.mark.parametrize("case", CASES)
def test_damage_is_told(case: str) -> None:
    damage, message = CASES[case]
    tensors = FourBitWeight.quantize(normal(64, 96)).tensors(NAME)
    FourBitWeight.from_tensors(NAME, tensors, where="model-00001.safetensors")
    damage(tensors)
    with pytest.raises(ModelError) as told:
        FourBitWeight.from_tensors(NAME, tensors, where="model-00001.safetensors")
    assert str(told.value).startswith("model-00001.safetensors: ") and NAME in str(told.value)
    assert message in str(told.value)


@pytest.mark.parametrize(("bad", "message"), [(torch.inf, "holds NaN or infinite"), (None, "has 95 entries, not 96")])
def test_damage_of_plain_magnitudes(bad: float | None, message: str) -> None:
    tensors = FourBitWeight.quantize(normal(64, 96), double=False).tensors(NAME)
    absmax = tensors[f"{NAME}.absmax"].clone()
    if bad is None:
        tensors[f"{NAME}.absmax"] = absmax[:-1]
    else:
        absmax[7] = bad
        tensors[f"{NAME}.absmax"] = absmax
    with pytest.raises(ModelError, match=message):
        FourBitWeight.from_tensors(NAME, tensors, where="x")
