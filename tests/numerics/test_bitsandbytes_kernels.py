"""The kernels of bitsandbytes' library, which is called without importing the package, against plain torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from builders.torch_process import TorchProcess
from torch import Tensor

from danlu.numerics import bitsandbytes_kernels, four_bit
from danlu.numerics.bitsandbytes_config import KINDS, Kind
from danlu.numerics.four_bit import BLOCKS, Nested

SHAPES = [(4, 64), (33, 160), (17, 192), (5, 80), (3, 33), (1, 63), (1001, 257), (1, 1), (300, 700)]


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    bitsandbytes_kernels.library.cache_clear()
    yield
    bitsandbytes_kernels.library.cache_clear()


def packed(*shape: int, kind: Kind = "nf4", block: int = 64) -> tuple[Tensor, Tensor]:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))
    return four_bit.quantize(matrix, kind, block)


# Where the file is, it must work: a library that is not used for its results fails these tests.
FILE = bitsandbytes_kernels.library_file()
needs_library = pytest.mark.skipif(
    FILE is None or not FILE.exists(), reason="bitsandbytes has no CPU library for this machine"
)


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_library_equals_plain_torch(shape: tuple[int, int], dtype: torch.dtype, kind: Kind) -> None:
    codes, absmax = packed(*shape, kind=kind)
    expected, seen = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    four_bit.dequantize_into(expected, codes, absmax, kind, 64)
    bitsandbytes_kernels.dequantize_into(seen, codes, absmax, kind, 64)
    assert bitsandbytes_kernels.library()[0] is not None and torch.equal(seen, expected)


@needs_library
@pytest.mark.parametrize("block", BLOCKS)
def test_every_size_of_block(block: int) -> None:
    codes, absmax = packed(67, 193, block=block)
    expected, seen = torch.empty(67, 193), torch.empty(67, 193)
    four_bit.dequantize_into(expected, codes, absmax, "nf4", block)
    bitsandbytes_kernels.dequantize_into(seen, codes, absmax, "nf4", block)
    assert torch.equal(seen, expected)


@needs_library
@pytest.mark.parametrize("blocks", [1, 255, 256, 257, 5000])
def test_magnitudes(blocks: int) -> None:
    nested = four_bit.quantize_absmax(torch.rand(blocks, generator=torch.Generator().manual_seed(blocks)))
    assert torch.equal(bitsandbytes_kernels.dequantize_absmax(nested), four_bit.dequantize_absmax(nested))


def test_a_type_without_a_kernel() -> None:
    codes, absmax = packed(8, 96)
    expected, seen = torch.empty(8, 96), torch.empty(8, 96, dtype=torch.float64)
    four_bit.dequantize_into(expected, codes, absmax, "nf4", 64)
    bitsandbytes_kernels.dequantize_into(seen, codes, absmax, "nf4", 64)
    assert torch.equal(seen, expected.double())


@needs_library
def test_the_library_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found, note = bitsandbytes_kernels.library()
    assert found is not None and "unpacked by bitsandbytes" in note
    codes, absmax = packed(8, 64)
    out = torch.empty(8, 64)
    monkeypatch.setattr(four_bit, "dequantize_into", None)  # not asked
    bitsandbytes_kernels.dequantize_into(out, codes, absmax, "nf4", 64)
    assert out.isfinite().all()


@needs_library
@pytest.mark.parametrize(
    ("dtype", "block", "by", "said"),
    [
        (torch.bfloat16, 64, "library", "4-bit weights are unpacked by bitsandbytes (/"),
        (
            torch.bfloat16,
            16,
            "torch",
            "by plain torch, which takes longer: bitsandbytes has no kernel for blocks of 16",
        ),
        (torch.bfloat16, 2048, "torch", "no kernel for blocks of 2048 numbers here"),
        (torch.float64, 64, "torch", "no kernel for torch.float64"),
    ],
)
def test_what_unpacks_is_said_as_it_is_chosen(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: int, by: str, said: str
) -> None:
    means = bitsandbytes_kernels.unpack_kernel(torch.device("cpu"), dtype, block)
    assert means.kind == by and said in means.note
    seen = []
    monkeypatch.setattr(four_bit, "dequantize_into", lambda *arguments: seen.append("torch"))
    monkeypatch.setattr(bitsandbytes_kernels, "_unpack", lambda *arguments: seen.append("library"))
    codes, absmax = packed(8, 64)
    bitsandbytes_kernels.dequantize_into(torch.empty(8, 64, dtype=dtype), codes, absmax, "nf4", block)
    assert seen == [by]


def test_operators_of_a_gpu_that_are_not_there_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bitsandbytes_kernels, "operators", lambda: (False, "4-bit weights are unpacked by plain torch: why")
    )
    assert bitsandbytes_kernels.unpack_kernel(torch.device("cuda"), torch.bfloat16, 64) == (
        "torch",
        bitsandbytes_kernels.operators()[1],
    )
    monkeypatch.setattr(bitsandbytes_kernels, "operators", lambda: (True, "by operators"))
    assert bitsandbytes_kernels.unpack_kernel(torch.device("cuda"), torch.bfloat16, 64).kind == "operators"
    monkeypatch.undo()
    bitsandbytes_kernels.operators.cache_clear()
    monkeypatch.setattr(bitsandbytes_kernels, "find_spec", lambda name: None)
    agree, note = bitsandbytes_kernels.operators()
    assert not agree and note.endswith("bitsandbytes is not installed.")
    bitsandbytes_kernels.operators.cache_clear()


@needs_library
def test_the_package_is_not_imported(torch_process: TorchProcess) -> None:
    script = (
        "import sys, torch; from danlu.numerics.four_bit_weight import FourBitWeight\n"
        "from danlu.numerics import bitsandbytes_kernels\n"
        "FourBitWeight.quantize(torch.randn(8, 64)).dense(); assert bitsandbytes_kernels.library()[0]\n"
        "print('bitsandbytes' in sys.modules or 'torch._dynamo' in sys.modules)"
    )
    assert torch_process.run(script).endswith("False\n")


def falls_back() -> str:
    """Checks that plain torch takes over; returns the note that says why."""
    found, note = bitsandbytes_kernels.library()
    assert found is None and "by plain torch" in note
    assert bitsandbytes_kernels.unpack_kernel(torch.device("cpu"), torch.float32, 64) == ("torch", note)
    codes, absmax = packed(33, 160)
    expected, seen = torch.empty(33, 160), torch.empty(33, 160)
    four_bit.dequantize_into(expected, codes, absmax, "nf4", 64)
    bitsandbytes_kernels.dequantize_into(seen, codes, absmax, "nf4", 64)
    nested = four_bit.quantize_absmax(absmax)
    assert torch.equal(seen, expected) and torch.equal(
        bitsandbytes_kernels.dequantize_absmax(nested), four_bit.dequantize_absmax(nested)
    )
    return note


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitsandbytes_kernels, "find_spec", lambda name: None)
    assert "not installed" in falls_back()


def test_without_a_library_for_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = ModuleSpec("bitsandbytes", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(bitsandbytes_kernels, "find_spec", lambda name: spec)
    assert "cannot be used" in falls_back()


def test_a_library_that_lacks_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda path: object())
    assert "has no attribute" in falls_back()


@needs_library
def test_a_library_with_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = bitsandbytes_kernels._bind

    def swapped(loaded: ctypes.CDLL) -> bitsandbytes_kernels.Library:
        right = bind(loaded)
        wrong = dict(right.unpack)
        wrong["fp4", torch.bfloat16] = wrong["nf4", torch.bfloat16]
        return right._replace(unpack=wrong)

    monkeypatch.setattr(bitsandbytes_kernels, "_bind", swapped)
    assert "other values for fp4 in torch.bfloat16" in falls_back()


@needs_library
def test_a_library_with_other_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = bitsandbytes_kernels._bind

    def halved(loaded: ctypes.CDLL) -> bitsandbytes_kernels.Library:
        right = bind(loaded)

        def blocks_of_128(*arguments: int) -> None:
            right.dequantize_bytes(*arguments[:4], 128, arguments[5])

        return right._replace(dequantize_bytes=blocks_of_128)

    monkeypatch.setattr(bitsandbytes_kernels, "_bind", halved)
    monkeypatch.setattr(bitsandbytes_kernels, "_dequantize_absmax", with_room(bitsandbytes_kernels._dequantize_absmax))
    assert "other values for 8-bit magnitudes" in falls_back()


def with_room(unpack):  # type: ignore[no-untyped-def]
    """The wrong kernel reads a third magnitude: it must be there."""

    def roomy(function: bitsandbytes_kernels.UnpackBytes, nested: Nested) -> Tensor:
        return unpack(function, nested._replace(absmax=torch.cat((nested.absmax, torch.ones(8)))))

    return roomy
