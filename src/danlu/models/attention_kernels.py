"""Which attention kernels a device has besides `scaled_dot_product_attention`, and how torch's versions call them.

`attend.PackedAttention` asks a `Kernels` what it may use, never a tensor where it is, so that a test can give one whose
kernels run anywhere.

T packed tokens · H query heads · K key/value heads · C head width
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

NARROW = (torch.float16, torch.bfloat16)
EVERY = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLASH_WIDTHS = range(8, 257, 8)
"""Of heads that flash attention takes."""
FLEX_BLOCK = 128
FLEX_WIDTH = 16
"""Heads narrower than this are refused by flex attention."""

# On CPU, documents up to this length are done by `attend._BlockAttention`: the backward pass of torch's flash kernel is
# slow for short rows (161 tokens, 8 heads of 32, bf16, two threads: 2.8 ms against 1.1 ms; equal near 800 tokens).
SHORT_DOCUMENT = 768
# Documents for torch's kernel are filled up to a multiple of this. Every new shape of product makes oneDNN generate
# code and keep it, which with documents of any length takes time and memory in every step (a 7M model in bf16, packs of
# 2048: 820 MiB after 100 steps instead of 1660, and a tenth faster).
DOCUMENT_MULTIPLE = 64


@dataclass(frozen=True)
class Varlen:
    """Causal flash attention over documents laid end to end: `torch.nn.attention.varlen.varlen_attn`, since torch 2.10.

    What its signature has differs by version: `window_size` came for `is_causal` in 2.11, `enable_gqa` in 2.13.
    """

    kernel: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...] = NARROW

    @property
    def windows(self) -> bool:
        return "window_size" in _parameters(self.kernel)

    @property
    def grouped_heads(self) -> bool:
        return "enable_gqa" in _parameters(self.kernel)

    def takes(self, q: Tensor, window: int | None, softcap: float | None) -> bool:
        fits = q.dtype in self.dtypes and q.shape[-1] in FLASH_WIDTHS
        return fits and softcap is None and (window is None or self.windows)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, *, scale: float, window: int | None
    ) -> Tensor:
        """q [T, H, C], k and v [T, K, C]; offsets [documents + 1] int32, from 0 to T; longest document -> [T, H, C]."""
        options: dict[str, Any] = {"scale": scale}
        if self.windows:  # tokens to the left and right that a query sees besides itself; -1: all
            options["window_size"] = (-1 if window is None else window - 1, 0)
        else:
            options["is_causal"] = True
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and self.grouped_heads:
            options["enable_gqa"] = True
        elif groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out: Tensor = self.kernel(q, k, v, offsets, offsets, longest, longest, **options)
        return out


@dataclass(frozen=True)
class Flex:
    """Attention with a softcap, by `torch.nn.attention.flex_attention`."""

    attention: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...] = NARROW

    def takes(self, q: Tensor, softcap: float | None) -> bool:
        return softcap is not None and q.dtype in self.dtypes and q.shape[-1] >= FLEX_WIDTH

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scale: float, softcap: float) -> Tensor:
        """q [T, H, C], k and v [T, K, C]; mask: of `documents_mask` -> [T, H, C]."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, T, C]
        out: Tensor = self.attention(
            q, k, v,
            score_mod=_softcap(softcap), block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return out.squeeze(0).transpose(0, 1)


@dataclass(frozen=True)
class Kernels:
    """The attention kernels of a device besides `scaled_dot_product_attention`; by default none."""

    varlen: Varlen | None = None
    flex: Flex | None = None
    grouped_heads: tuple[torch.dtype, ...] = EVERY
    """Types in which `scaled_dot_product_attention` has a kernel for grouped heads that keeps no scores."""
    short_document: int = -1
    """Documents up to this length are done in blocks of products."""
    document_multiple: int = 1
    """Longer ones are filled up to a multiple of this."""


def kernels_of(device: torch.device) -> Kernels:
    """The attention kernels that the installed torch has for a device."""
    if device.type == "cuda":
        return _cuda_kernels(device)
    short, multiple = (SHORT_DOCUMENT, DOCUMENT_MULTIPLE) if device.type == "cpu" else (-1, 1)
    return Kernels(short_document=short, document_multiple=multiple)


@cache
def _cuda_kernels(device: torch.device) -> Kernels:
    flash = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    if not flash:  # whose only kernel that keeps no scores knows no groups
        return Kernels(grouped_heads=())
    # Imported here: it brings torch._dynamo along, a second at the start of every process, and only GPUs use it.
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        varlen = None
    else:
        varlen = Varlen(varlen_attn)
    return Kernels(varlen=varlen, flex=_compiled_flex(), grouped_heads=NARROW)


def _compiled_flex() -> Flex | None:
    """flex_attention, compiled; None without a compiler: uncompiled it would keep all scores of a pack."""
    if importlib.util.find_spec("triton") is None:
        return None
    from torch.nn.attention.flex_attention import flex_attention

    return Flex(torch.compile(flex_attention, dynamic=True))


@cache
def _parameters(kernel: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters)


@cache  # one function for each cap: compiled code is kept by function
def _softcap(cap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, copied without the host waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def documents_mask(boundaries: Sequence[int], window: int | None, device: torch.device) -> Any:
    """The `BlockMask` of causal attention inside each document of a pack, with a window or without.

    What a query sees begins at its document or its window, and neither ever moves back, so the blocks of keys that a
    block of queries sees follow from its first and last query. torch's own way compares all tokens with all.
    """
    from torch.nn.attention.flex_attention import BlockMask

    total = boundaries[-1]
    lengths = torch.tensor([end - start for start, end in itertools.pairwise(boundaries)])
    first = torch.repeat_interleave(torch.tensor(boundaries[:-1]), lengths)  # [T] of the keys that a query sees
    if window is not None:
        first = torch.maximum(first, torch.arange(total) - (window - 1))
    blocks = -(-total // FLEX_BLOCK)
    rows = torch.arange(blocks)
    lowest = first[rows * FLEX_BLOCK] // FLEX_BLOCK  # [blocks] of those that any query of a block sees
    last = (rows * FLEX_BLOCK + FLEX_BLOCK - 1).clamp(max=total - 1)
    whole = (-(-first[last] // FLEX_BLOCK)).minimum(rows).maximum(lowest)  # the first that all of them see entirely
    columns = rows.expand(blocks, blocks)
    filled = (rows + 1) * FLEX_BLOCK <= total  # as torch has it, a block that the end cuts sees none entirely
    full = (columns >= whole[:, None]) & (columns < rows[:, None]) & filled[:, None]
    partial = (columns >= lowest[:, None]) & (columns <= rows[:, None]) & ~full
    seen_from = copy_to(first, device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= seen_from[query])

    counts, indices = (copy_to(column, device) for column in _ordered(partial))
    full_counts, full_indices = (copy_to(column, device) for column in _ordered(full))
    return BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=(total, total)
    )


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The count and the indices of the chosen blocks of each row: [1, 1, blocks], [1, 1, blocks, blocks] int32."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1)[None, None].int(), order[None, None].int()
