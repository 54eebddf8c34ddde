"""The precision that multiplies fastest on this machine: `precision: auto`, and a warning about a slower choice.

That depends on the processor: GPUs and CPUs with AMX multiply bf16 several times as fast as fp32; other CPUs convert
it to float32 on the way, and are slower with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from danlu.planning.gemm import measured_peak

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CANDIDATES: tuple[Precision, ...] = ("fp32", "bf16")
"""The candidates of auto. Not fp16: it needs loss scaling, and nothing has fast fp16 products and slow bf16 ones."""
NEAR = 1.1
"""Speeds that are less than this factor apart are as good as equal: measurements differ by some percent."""
SECONDS = 0.3  # for each measurement; several sizes of squares share it


def product_speeds(
    device: torch.device | str, *, also: str | None = None, cache: str | Path = "~/.cache/danlu"
) -> dict[str, float]:
    """FLOP/s of matrix products on `device` with the present number of threads, by precision.

    also: a further precision. Each is measured once per machine and then read from `cache`.
    """
    precisions = dict.fromkeys((*CANDIDATES, also or CANDIDATES[0]))
    return {name: measured_peak(DTYPES[name], device, SECONDS, cache) for name in precisions}


def fastest(speeds: Mapping[str, float]) -> Precision:
    """The faster one of fp32 and bf16; bf16 where they are near, as its activations take half the memory."""
    return "bf16" if speeds["bf16"] * NEAR > speeds["fp32"] else "fp32"


def slower(chosen: str, speeds: Mapping[str, float]) -> str | None:
    """Warns about a chosen precision with slower products here than another's; None where they are not slower."""
    best = max(speeds, key=lambda name: speeds[name])
    if speeds[chosen] * NEAR > speeds[best]:
        return None
    return (
        f"precision: {chosen} is slower than {best} on this machine: {in_gflops(speeds, chosen, best)}. "
        f"Use precision: {best}, or auto, which takes the faster of fp32 and bf16"
    )


def in_gflops(speeds: Mapping[str, float], *precisions: str) -> str:
    """Formats speeds: `matrix products of 122 GFLOP/s with bf16, 163 with fp32`."""
    first, *rest = precisions
    of_rest = [f"{speeds[name] / 1e9:,.0f} with {name}" for name in rest]
    return "matrix products of " + ", ".join([f"{speeds[first] / 1e9:,.0f} GFLOP/s with {first}", *of_rest])
