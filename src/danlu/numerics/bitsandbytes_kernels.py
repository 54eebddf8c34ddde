"""bitsandbytes' kernels for unpacking, where they exist and agree with the definition in `four_bit`.

On a CPU its shared library is called directly. `import bitsandbytes` would take three seconds, load torch's compiler
and log a line about a package it misses, all for a few functions. On CUDA its operators are used.

The library's own rule for a row's blocks is wrong where a row is no multiple of a block ([O, 96] in blocks of 64 comes
back damaged on CPUs with AVX-512, bitsandbytes 0.50.2). Here it always gets rows of one block each, which is the same
memory and right for every shape.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from sys import platform
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from danlu.numerics import four_bit
from danlu.numerics.bitsandbytes_config import KINDS, Kind
from danlu.numerics.four_bit import BLOCKS, NESTED_BLOCK, Nested, dynamic_map

_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(platform, ".so")
_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

_PLAIN = "4-bit weights are unpacked by plain torch, which takes longer"

# With AVX-512 the kernel loses accuracy in longer blocks, says bitsandbytes, and does not use it there either.
_LONGEST_BLOCK = 1024

Kernel = Callable[[int, int, int, int, int, int], None]  # of pointers, then of sizes


class Library(NamedTuple):
    """The functions of bitsandbytes' CPU library that are used."""

    unpack: dict[tuple[Kind, torch.dtype], Kernel]  # codes, absmax, out, block, rows, numbers in a row
    dequantize_bytes: Kernel  # values, codes, absmax, out, block, numbers


class UnpackKernel(NamedTuple):
    """The kernel that dequantizes a matrix, and a note for the console: for plain torch, why no kernel is used."""

    kind: Literal["library", "operators", "torch"]
    note: str


def unpack_kernel(device: torch.device, dtype: torch.dtype, block: int) -> UnpackKernel:
    """Returns the kernel that dequantizes matrices of this device, dtype and block size: the one place where it is
    chosen.
    """
    if device.type not in ("cpu", "cuda"):
        return UnpackKernel("torch", f"{_PLAIN}: bitsandbytes is used on CPUs and CUDA, not on {device.type}.")
    if dtype not in _TYPES:
        return UnpackKernel("torch", f"{_PLAIN}: bitsandbytes has no kernel for {dtype}.")
    if block not in BLOCKS or (device.type == "cpu" and block > _LONGEST_BLOCK):
        return UnpackKernel("torch", f"{_PLAIN}: bitsandbytes has no kernel for blocks of {block} numbers here.")
    if device.type == "cuda":
        agree, note = operators()
        return UnpackKernel("operators" if agree else "torch", note)
    cpu_library, note = library()
    return UnpackKernel("torch" if cpu_library is None else "library", note)


def dequantize_into(out: Tensor, codes: Tensor, absmax: Tensor, kind: Kind, block: int) -> None:
    """`four_bit.dequantize_into` by the fastest kernel available; the same bits.

    Numbers below 1.2e-38 aside: CPUs with bfloat16 instructions make them 0, plain torch does not. Blocks that
    bitsandbytes does not know, as those of a matrix that was cut may be, are left to plain torch.
    """
    match unpack_kernel(out.device, out.dtype, block).kind:
        case "operators":
            torch.ops.bitsandbytes.dequantize_4bit.out(codes, absmax, block, kind, out.shape, out.dtype, out=out)
        case "library":
            cpu_library = library()[0]
            assert cpu_library is not None, "it was chosen"
            _unpack(cpu_library.unpack[kind, out.dtype], out.view(-1), codes.view(-1), absmax, kind, block)
        case "torch":
            four_bit.dequantize_into(out, codes, absmax, kind, block)


def dequantize_absmax(nested: Nested) -> Tensor:
    """`four_bit.dequantize_absmax` by the fastest kernel available; the same bits."""
    cpu_library = library()[0] if nested.codes.device.type == "cpu" else None
    if cpu_library is None:
        return four_bit.dequantize_absmax(nested)
    return _dequantize_absmax(cpu_library.dequantize_bytes, nested)


@cache
def operators() -> tuple[bool, str]:
    """Whether bitsandbytes' CUDA operators can be used and give the values of `four_bit`, and a sentence on it."""
    if find_spec("bitsandbytes") is None:
        return False, f"{_PLAIN}: bitsandbytes is not installed."
    try:
        import bitsandbytes  # noqa: F401 - registers torch.ops.bitsandbytes; seconds, which only CUDA has a use for
    except (ImportError, OSError, RuntimeError) as error:
        return False, f"{_PLAIN}: bitsandbytes cannot be used ({error})."
    device = torch.device("cuda")
    codes, absmax = _example(device)
    for kind in KINDS:
        for dtype in _TYPES:
            expected, seen = (torch.empty(8, 64, dtype=dtype, device=device) for _ in range(2))
            four_bit.dequantize_into(expected, codes[:256], absmax, kind, 64)
            try:
                torch.ops.bitsandbytes.dequantize_4bit.out(
                    codes[:256], absmax, 64, kind, expected.shape, dtype, out=seen
                )
            except (NotImplementedError, RuntimeError) as error:
                return False, f"{_PLAIN}: bitsandbytes' operators cannot be used ({error})."
            if not torch.equal(expected, seen):
                return False, f"{_PLAIN}: bitsandbytes' operators give other values for {kind} in {dtype}."
    return True, "4-bit weights are unpacked by bitsandbytes' operators."


@cache
def library() -> tuple[Library | None, str]:
    """bitsandbytes' CPU library and a sentence on it; None if it is missing or gives other values than `four_bit`."""
    path = library_file()
    if path is None:
        return None, f"{_PLAIN}: bitsandbytes is not installed."
    try:
        loaded = _bind(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        return None, f"{_PLAIN}: bitsandbytes' library cannot be used ({error})."
    if (disagreement := _disagreement(loaded)) is not None:
        return None, f"{_PLAIN}: {path} gives other values for {disagreement}."
    return loaded, f"4-bit weights are unpacked by bitsandbytes ({path})."


def library_file() -> Path | None:
    """The path of bitsandbytes' CPU library; None if bitsandbytes is not installed."""
    spec = find_spec("bitsandbytes")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / f"libbitsandbytes_cpu{_SUFFIX}"


def _bind(loaded: ctypes.CDLL) -> Library:
    """The library's functions with their signatures. Raises AttributeError if one is missing."""
    pointer, size = ctypes.c_void_p, ctypes.c_longlong

    def function(name: str, arguments: list[type]) -> Callable[..., None]:
        bound = getattr(loaded, name)
        bound.argtypes, bound.restype = arguments, None
        return bound

    unpack = {
        (kind, dtype): function(f"cdequantize_blockwise_cpu_{kind}_{name}", [pointer] * 3 + [size] * 3)
        for kind in KINDS
        for dtype, name in _TYPES.items()
    }
    return Library(unpack, function("cdequantize_blockwise_cpu_fp32", [pointer] * 4 + [size] * 2))


def _disagreement(loaded: Library) -> str | None:
    """The format in which the library gives other values than `four_bit`, tried on every code; None if in none."""
    codes, absmax = _example(torch.device("cpu"))
    for (kind, dtype), function in loaded.unpack.items():
        for block in (32, 64):
            expected, seen = torch.empty(1000, dtype=dtype), torch.empty(1000, dtype=dtype)
            four_bit.dequantize_into(expected, codes, absmax, kind, block)
            _unpack(function, seen, codes.view(-1), absmax, kind, block)
            if not torch.equal(expected, seen):
                return f"{kind} in {dtype}"
    nested = Nested(codes[:300, 0], absmax[:2], absmax.mean(), dynamic_map())
    if not torch.equal(four_bit.dequantize_absmax(nested), _dequantize_absmax(loaded.dequantize_bytes, nested)):
        return "8-bit magnitudes"
    return None


def _example(device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes of 1024 numbers, [512, 1], and the absmax of their blocks."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(2).unsqueeze(1)
    return codes, torch.linspace(0.01, 3, 32, device=device)


def _unpack(function: Kernel, out: Tensor, codes: Tensor, absmax: Tensor, kind: Kind, block: int) -> None:
    """Dequantizes into out [N]: whole blocks by the library, a short last block by plain torch."""
    blocks = out.numel() // block
    if blocks:
        function(codes.data_ptr(), absmax.data_ptr(), out.data_ptr(), block, blocks, block)
    whole = blocks * block
    if whole < out.numel():
        four_bit.dequantize_into(out[whole:], codes[whole // 2 :], absmax[blocks:], kind, block)


def _dequantize_absmax(function: Kernel, nested: Nested) -> Tensor:
    codes, values = nested.codes, nested.values
    out = torch.empty(codes.shape, dtype=torch.float32)
    function(values.data_ptr(), codes.data_ptr(), nested.absmax.data_ptr(), out.data_ptr(), NESTED_BLOCK, codes.numel())
    return out.add_(nested.offset)
