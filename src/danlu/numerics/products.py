"""Products of matrices in few bits: by kernels where a device has them, else of decoded numbers.

The definition of a product is the sum of the decoded numbers' products in float32. On a CPU both are decoded and
multiplied. Powers of two as scales decode exactly into bfloat16, so a CPU with fast products of that type may use
them. Hopper multiplies E4M3 with scales of 1 x 128 numbers, of 128 x 128, of rows and of whole tensors
(`F.scaled_mm`), and adds up in float32.

M, N rows of the factors · K contracted
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.numerics import batch_invariant
from danlu.numerics.format import WHOLE, Format, Scaled

_TILE = 128
_MULTIPLE = 16
"""K and N that the kernels take are multiples of it; N of blocks of 128 x 128 is one of 128."""
_ROWS = 4
"""M of products of tiles is a multiple of it."""


def product(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """a [M, K] times b [N, K], transposed -> [M, N] in `dtype`, by sums in float32.

    With `numerics: exact` it is a product of decoded numbers, which is batch-invariant (`numerics.batch_invariant`);
    nothing says so of the kernels.
    """
    has_kernel = _has_kernel(a.codes.device) and not batch_invariant.is_enabled()
    if has_kernel and (recipes := kernel_recipes(a, b)) is not None:
        return scaled_mm(a, b, recipes, dtype)
    wide = _decoded_dtype(a, b, dtype)
    return (a.decode(wide) @ b.decode(wide).t()).to(dtype)


def prepared(a: Format, b: Scaled, dtype: torch.dtype) -> Callable[[Scaled], Tensor]:
    """Returns `product` as a function of factors [M, K] in format `a`, with b [N, K] that stays the same.

    Where the device has no kernel, b is decoded here, once.
    """
    like = Scaled(b.codes[:1], b.scales, a)
    if _has_kernel(b.codes.device) and kernel_recipes(like, b) is not None:
        return lambda x: product(x, b, dtype)
    wide = _decoded_dtype(like, b, dtype)
    factor = b.decode(wide).t()
    return lambda x: (x.decode(wide) @ factor).to(dtype)


def kernel_recipes(a: Scaled, b: Scaled) -> tuple[str, str] | None:
    """The names of the scaling types of `F.scaled_mm` for two factors; None where Hopper has no kernel for them."""
    if a.format.element != "e4m3" and b.format.element != "e4m3":
        return None  # of two factors in E5M2 there is none
    if {a.format.element, b.format.element} - {"e4m3", "e5m2"}:
        return None
    columns = b.shape[-2]
    kinds = _scaling_type(a), _scaling_type(b)
    multiple = _TILE if kinds[1] == "BlockWise128x128" else _MULTIPLE
    return kinds if kinds in _PAIRS and columns % multiple == 0 else None


def scaled_mm(a: Scaled, b: Scaled, recipes: tuple[str, str], dtype: torch.dtype) -> Tensor:
    """The product by `F.scaled_mm`, in the layouts that it asks for: a [M, K], b [N, K] -> [M, N].

    K is filled up with zeros to whole tiles, M to a multiple of 4.
    """
    from torch.nn.functional import ScalingType

    rows, contracted = a.shape
    tiled = recipes[0].startswith("Block")
    short = -contracted % (_TILE if tiled else _MULTIPLE), -rows % (_ROWS if tiled else 1)
    a_codes, b_codes = _filled(a.codes, *short), _filled(b.codes, short[0], 0)
    a_scales = _kernel_scales(a, recipes[0], first=True, more=short[1])
    b_scales = _kernel_scales(b, recipes[1], first=False, more=0)
    # Kernels for rows write bfloat16 alone.
    out = torch.bfloat16 if recipes[0] == "RowWise" else dtype
    y: Tensor = F.scaled_mm(
        a_codes,
        b_codes.t(),
        a_scales,
        getattr(ScalingType, recipes[0]),
        b_scales,
        getattr(ScalingType, recipes[1]),
        output_dtype=out,
    )
    return y[:rows].to(dtype)


_PAIRS = (
    ("BlockWise1x128", "BlockWise128x128"),
    ("BlockWise1x128", "BlockWise1x128"),
    ("RowWise", "RowWise"),
    ("TensorWise", "TensorWise"),
)


@cache
def _has_kernel(device: torch.device) -> bool:
    """Whether a device multiplies E4M3: GPUs of Hopper, with a torch that has `F.scaled_mm`."""
    return device.type == "cuda" and hasattr(F, "scaled_mm") and torch.cuda.get_device_capability(device)[:1] == (9,)


def _scaling_type(factor: Scaled) -> str:
    """The name of a factor's scaling type; "" where its blocks have none."""
    rows, columns = factor.format.block
    if factor.format.scale not in ("float32", "power-of-two"):
        return ""
    return {
        (1, _TILE): "BlockWise1x128",
        (_TILE, _TILE): "BlockWise128x128",
        (1, WHOLE): "RowWise",
        (WHOLE, WHOLE): "TensorWise",
    }.get((rows, columns), "")


def _filled(codes: Tensor, columns: int, rows: int) -> Tensor:
    """Codes [R, C], contiguous by rows, with zeros behind the last columns and rows."""
    if not (columns or rows):
        return codes.contiguous()
    padded = F.pad(codes.view(torch.uint8), (0, columns, 0, rows))
    return padded.view(codes.dtype)


def _kernel_scales(factor: Scaled, kind: str, *, first: bool, more: int) -> Tensor:
    """The scales of a factor in the kernel's layout. more: rows that its codes were filled up by."""
    scales = factor.wide_scales()
    match kind:
        case "BlockWise1x128":  # [R, K / 128], neighbours along rows
            return F.pad(scales, (0, 0, 0, more), value=1.0).t().contiguous().t()
        case "BlockWise128x128":  # [K / 128, filled up to a multiple of 4, N / 128], neighbours along K
            return F.pad(scales, (0, -scales.shape[1] % 4), value=1.0).contiguous().t()
        case "RowWise":
            return scales.reshape(-1).clone().unsqueeze(1 if first else 0)
    return scales.reshape(1)


def _decoded_dtype(a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.dtype:
    """The type that factors are decoded into for a product in `dtype`.

    bfloat16 where that is exact, the product is rounded to it anyway, and the device multiplies it fast.
    """
    exact = all(factor.format.scale in ("power-of-two", "e8m0") and factor.format.bits <= 8 for factor in (a, b))
    if dtype == torch.bfloat16 and exact and _has_fast_bfloat16(a.codes.device):
        return torch.bfloat16
    return torch.float32


@cache
def _has_fast_bfloat16(device: torch.device) -> bool:
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
