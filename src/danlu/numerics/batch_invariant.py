"""`numerics: exact`: products with the same bits in a row whatever the other rows are.

A library chooses how it multiplies by the shape of the whole product, and with it the order in which a row's terms are
added. So the same token gets other bits in a pack of 2048 tokens than alone in decoding: in float32 [M, 1536] x [1536,
512] has other rows at M = 64 to 192 than at 16 to 48 or from 256 on (MKL, 2026-11). Here every product with tokens as
rows is made of products of `TILE_ROWS` rows, the last one filled up with zeros, so that one kernel serves all of them.
As in vLLM's batch-invariant mode and thinking-machines' batch_invariant_ops, torch's own operators are overridden
(`torch.library`), below autograd, so all callers take part: layers, adapters, quantized weights.

M rows · K contracted · N columns
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS = 32
"""The number of rows M of every product.

Fewer make training slower, since the right matrix is packed again for each tile (T = 2048: with 16 it takes 1.3 to 2
times as long as one product, with 32 or 64 1.05 to 1.4 times). More make decoding slower, where rows are mostly zeros:
a single sequence takes 6 times as long with 32, 10 with 64; from 32 on nothing is lost.
"""

ALIGNMENT_BYTES = 64
"""The alignment of torch's own memory on a CPU. MKL's kernels may take other steps over rows with another alignment."""

MIN_COLUMNS = 16
"""N of every product on a CPU. With fewer, MKL's kernels add up a row by where it lies in its tile, whatever K is (2 to
11 columns, AMD Zen 4, 2026-11): columns of zeros are added."""

DEVICES = ("CPU", "CUDA")

_library: torch.library.Library | None = None


def enable() -> None:
    """Makes torch's matrix products batch-invariant in this process, until it ends. A second call changes nothing.

    Not under torch.compile, which calls the libraries' products by itself.
    """
    global _library
    if _library is None:
        _library = _override()


def is_enabled() -> bool:
    """Whether torch's matrix products are batch-invariant in this process at present."""
    return _library is not None


@contextmanager
def batch_invariant() -> Iterator[None]:
    """A context in which products are batch-invariant."""
    global _library
    before, _library = _library, _library or _override()
    try:
        yield
    finally:
        if before is None:
            _library._destroy()
        _library = before


def _override() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    products: dict[str, Callable[..., Tensor]] = {
        "mm": mm,
        "addmm": addmm,
        "addmm_": _addmm_in_place,
        "mv": mv,
        "addmv": addmv,
        "_grouped_mm": grouped_mm,
    }
    # torch computes the last numbers of a float32 tensor, those that do not fill a vector register, by other code.
    elementwise: dict[str, Callable[..., Tensor]] = {"silu": silu, "gelu": gelu, "sigmoid": sigmoid}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")
        for device in DEVICES:
            for name, function in products.items():
                library.impl(name, function, device)
        for name, function in elementwise.items():
            library.impl(name, function, "CPU")
    return library


def mm(left: Tensor, right: Tensor) -> Tensor:
    """left [M, K] @ right [K, N] in tiles of rows."""
    if short := _missing_columns(left, right):
        return mm(left, F.pad(right, (0, short)))[:, :-short].contiguous()
    return _in_tiles(left, right, lambda rows, _, out: torch.mm(rows, right, out=out))


def addmm(added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * added + alpha * (left [M, K] @ right [K, N]) in tiles of rows; added broadcasts to [M, N]."""
    whole = added.expand(left.shape[0], right.shape[1])
    if short := _missing_columns(left, right):
        padded = addmm(F.pad(whole, (0, short)), left, F.pad(right, (0, short)), beta=beta, alpha=alpha)
        return padded[:, :-short].contiguous()

    def product(rows: Tensor, place: slice, out: Tensor) -> Any:
        return torch.addmm(_filled(whole[place], len(rows)), rows, right, beta=beta, alpha=alpha, out=out)

    return _in_tiles(left, right, product)


def _addmm_in_place(added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return added.copy_(addmm(added, left, right, beta=beta, alpha=alpha))


def mv(matrix: Tensor, vector: Tensor) -> Tensor:
    """matrix [N, K] @ vector [K], where the vector is a token: the same bits as among other tokens."""
    return mm(vector.unsqueeze(0), matrix.t()).squeeze(0)


def addmv(added: Tensor, matrix: Tensor, vector: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * added + alpha * (matrix [N, K] @ vector [K]), where the vector is a token."""
    return addmm(added, vector.unsqueeze(0), matrix.t(), beta=beta, alpha=alpha).squeeze(0)


def grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """left [M, K] @ right [G, K, N], by groups of rows that end at `offs` [G], each in tiles of its own; or left [K, M]
    @ right [M, N], by groups of the contracted rows -> [G, K, N].
    """
    assert offs is not None and bias is None and out_dtype in (None, left.dtype), "products of other kinds are not made"
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in itertools.pairwise([0, *ends])]
    if right.ndim == 3:
        return torch.cat([mm(left[rows], matrix) for rows, matrix in zip(groups, right.unbind(), strict=True)])
    return torch.stack([mm(left[:, rows], right[rows]) for rows in groups])


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), by operations that compute each number alike wherever it stands."""
    if x.dtype != torch.float32:
        return torch.ops.aten.sigmoid.out(x, out=torch.empty_like(x))  # type: ignore[no-any-return]
    return x.neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), by operations that compute each number alike wherever it stands."""
    if x.dtype != torch.float32:
        return torch.ops.aten.silu.out(x, out=torch.empty_like(x))  # type: ignore[no-any-return]
    return x / x.neg().exp_().add_(1)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """GELU (arXiv:1606.08415), with tanh or exact, by operations that compute each number alike wherever it stands."""
    if x.dtype != torch.float32:
        return torch.ops.aten.gelu.out(x, approximate=approximate, out=torch.empty_like(x))  # type: ignore[no-any-return]
    if approximate == "none":
        return x.mul(0.5**0.5).erf_().add_(1).mul_(x).mul_(0.5)
    inner = x.pow(3).mul_(0.044715).add_(x).mul_((2 / torch.pi) ** 0.5)
    return inner.tanh_().add_(1).mul_(x).mul_(0.5)


def _in_tiles(left: Tensor, right: Tensor, product: Callable[[Tensor, slice, Tensor], Any]) -> Tensor:
    """Computes left [M, K] @ right [K, N] in tiles, each by `product(rows of left, their place, out)`."""
    rows, tile = left.shape[0], TILE_ROWS
    out = left.new_empty(rows, right.shape[1])
    if not _rows_are_tokens(left):
        product(left, slice(0, rows), out)
        return out
    left = left.contiguous()
    if left.device.type == "cpu" and left.data_ptr() % ALIGNMENT_BYTES:
        left = left.clone()
    whole = rows // tile * tile
    for start in range(0, whole, tile):
        place = slice(start, start + tile)
        product(left[place], place, out[place])
    if whole < rows:
        place = slice(whole, rows)
        filled = out.new_empty(tile, out.shape[1])
        product(_filled(left[place], tile), place, filled)
        out[place] = filled[: rows - whole]
    return out


def _missing_columns(left: Tensor, right: Tensor) -> int:
    """How many columns `right` [K, N] has too few for a row to have the same bits wherever it lies."""
    if left.device.type != "cpu" or not _rows_are_tokens(left):
        return 0
    return max(0, MIN_COLUMNS - right.shape[1])


def _rows_are_tokens(left: Tensor) -> bool:
    """False for a gradient or an activation [T, K] that was transposed, as products that give a weight's gradient have
    it: tokens are contracted there, so no row is a token's. Activations lie in memory row by row."""
    rows, columns = left.shape
    return not (rows > 1 and columns > 1 and left.stride(0) == 1 and left.stride(1) >= rows)


def _filled(x: Tensor, rows: int) -> Tensor:
    """Pads x [M, K] with rows of zeros to `rows` rows; returns x itself where it has them."""
    return x if len(x) == rows else F.pad(x, (0, 0, 0, rows - len(x)))
