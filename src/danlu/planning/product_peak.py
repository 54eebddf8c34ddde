"""The speed of matrix products on this machine: the peak that MFU is measured against, and the fastest precision.

The fastest precision (`precision: auto`, and a warning about a slower choice) depends on the processor: GPUs and CPUs
with AMX multiply bf16 several times as fast as fp32; other CPUs convert it to float32 on the way, and are slower with
it.

Importing this file does not import torch; the functions that measure do.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from danlu.core.atomic_write import write_atomically

if TYPE_CHECKING:
    import torch

_SIZES_CPU = (512, 1024, 2048)  # larger squares are no faster, and would take a quarter of a second each
_SIZES_CUDA = (2048, 4096, 8192)


@dataclass(frozen=True)
class Peak:
    """The peak that utilisation is measured against: FLOP/s of one process's matrix products."""

    dtype: torch.dtype
    measured: float
    specified: float | None
    """The peak of the maker's data sheet; None where `cards.py` does not know the device."""
    processes: int = 1

    @property
    def divisor(self) -> float:
        """FLOP/s at which `mfu` is 1: the measured peak of all processes, which every machine has."""
        return self.measured * self.processes

    def line(self) -> str:
        """`mfu: divided by the measured peak, 712 TFLOP/s with bfloat16, and not by ...`: for the console."""
        each = f" in each of {self.processes} processes" if self.processes > 1 else ""
        line = f"mfu: divided by the measured peak, {_format_flops(self.measured)} with {_name(self.dtype)}{each}"
        if self.specified is None:
            return f"{line}; no specification of this device is known"
        return f"{line}, and not by the device's specification, {_format_flops(self.specified)}"

    def to_json(self) -> dict[str, Any]:
        """Returns the fields for summary.json of a run."""
        return {
            "dtype": _name(self.dtype),
            "measured_flops": self.measured,
            "specified_flops": self.specified,
            "processes": self.processes,
            "mfu_divides_by": "measured_flops x processes",
        }


def peak_of(dtype: torch.dtype, device: torch.device | str, processes: int = 1) -> Peak:
    """The peak of each of several processes on devices like this one; measured once per machine."""
    return Peak(dtype, measured_peak(dtype, device), specified_peak(dtype, device), processes)


def specified_peak(dtype: torch.dtype, device: torch.device | str) -> float | None:
    """FLOP/s of dense products by the data sheet of a GPU; None for others, and for types wider than 16 bits."""
    import torch

    from danlu.planning.cards import card_of_device  # a table that a CPU has no use for

    device = torch.device(device)
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    card = card_of_device(torch.cuda.get_device_name(device))
    return None if card is None else card.peaks.get("fp16" if dtype == torch.float16 else "bf16")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _format_flops(flops: float) -> str:
    return f"{flops / 1e12:,.0f} TFLOP/s" if flops >= 1e13 else f"{flops / 1e9:,.0f} GFLOP/s"


def measured_peak(
    dtype: torch.dtype,
    device: torch.device | str,
    seconds: float = 0.5,
    cache: str | Path = "~/.cache/danlu",
    fresh: bool = False,
) -> float:
    """FLOP/s of square matrix products of `dtype` on `device` with the present number of threads.

    Measured once per machine, about `seconds` long, and then read from `gemm.json` in `cache` (unless `fresh`). A cache
    that cannot be read is replaced by a new measurement; one that cannot be written costs the next run the same time
    again.
    """
    import torch

    file = Path(cache).expanduser() / "gemm.json"
    key = machine_key(dtype, torch.device(device))
    known = _read(file)
    if fresh or key not in known:
        known[key] = measure(dtype, device, seconds)
        _write(file, known)
    return known[key]


def measure(dtype: torch.dtype, device: torch.device | str, seconds: float = 0.5) -> float:
    """The best of as many products as fit into `seconds`, over several sizes; FLOP/s.

    The best, because another process on the machine can only make a product slower; several sizes, because which one is
    fastest depends on caches. A size is left out when two products of it would take more than its share of the time.
    """
    import torch

    device = torch.device(device)
    sizes = _SIZES_CUDA if device.type == "cuda" else _SIZES_CPU
    share = seconds / len(sizes)
    best = 0.0
    for size in sizes:
        if best and 2 * _flops(size) / best > share:
            break
        best = max(best, _best_of(size, dtype, device, share))
    return best


def _best_of(size: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    import torch

    started = time.perf_counter()
    # A generator of its own: measuring must not move the run's random numbers.
    generator = torch.Generator(device).manual_seed(0)
    left, right, out = (torch.empty(size, size, dtype=dtype, device=device) for _ in range(3))
    for operand in (left, right):
        operand.uniform_(-1, 1, generator=generator)
    best = 0.0
    while True:
        product_started = time.perf_counter()
        torch.mm(left, right, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        product_ended = time.perf_counter()
        best = max(best, _flops(size) / (product_ended - product_started))
        if product_ended - started > seconds:
            return best


def _flops(size: int) -> int:
    return 2 * size**3


def machine_key(dtype: torch.dtype, device: torch.device) -> str:
    """The key of a measurement: everything that changes the speed of a product."""
    import torch

    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = f"{cpu_model()}, {torch.get_num_threads()} threads of {os.cpu_count()}"
    precision = f" ({torch.get_float32_matmul_precision()})" if dtype == torch.float32 else ""
    return f"{processor} | torch {torch.__version__} | {_name(dtype)}{precision}"


def cpu_model() -> str:
    """The name of the processor, as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # not Linux
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _read(file: Path) -> dict[str, float]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent, unreadable or torn: a cache is only ever a shortcut
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, float)}


def _write(file: Path, known: dict[str, float]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(known, indent=1, sort_keys=True).encode())
    except OSError:  # read-only or full: the number is still good, it is only not remembered
        return


Precision = Literal["fp32", "bf16", "fp16"]
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
    from danlu.numerics.dtypes import DTYPES

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
