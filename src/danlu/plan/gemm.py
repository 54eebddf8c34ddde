"""The matrix-product speed this machine really reaches: what utilisation (MFU) is measured against."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import torch

_SIZES_CPU = (512, 1024, 2048)  # larger squares are no faster, and would take a quarter of a second each
_SIZES_CUDA = (2048, 4096, 8192)


def measured_peak(
    dtype: torch.dtype,
    device: torch.device | str,
    seconds: float = 0.5,
    cache: str | Path = "~/.cache/danlu",
    fresh: bool = False,
) -> float:
    """FLOP/s of square matrix products of `dtype` on `device` with the present number of threads.

    Measured once per machine, about `seconds` long, and then read from `gemm.json` in `cache` (unless `fresh`). A cache
    that cannot be read is measured anew; one that cannot be written costs the next run the same time again.
    """
    file = Path(cache).expanduser() / "gemm.json"
    key = machine(dtype, torch.device(device))
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
    started = time.perf_counter()
    # A generator of its own: measuring must not move the run's random numbers.
    generator = torch.Generator(device).manual_seed(0)
    left, right, out = (torch.empty(size, size, dtype=dtype, device=device) for _ in range(3))
    for operand in (left, right):
        operand.uniform_(-1, 1, generator=generator)
    best = 0.0
    while True:
        before = time.perf_counter()
        torch.mm(left, right, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        best = max(best, _flops(size) / (now - before))
        if now - started > seconds:
            return best


def _flops(size: int) -> int:
    return 2 * size**3


def machine(dtype: torch.dtype, device: torch.device) -> str:
    """The key of a measurement: everything that changes the speed of a product."""
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = f"{_cpu_model()}, {torch.get_num_threads()} threads of {os.cpu_count()}"
    precision = f" ({torch.get_float32_matmul_precision()})" if dtype == torch.float32 else ""
    return f"{processor} | torch {torch.__version__} | {str(dtype).removeprefix('torch.')}{precision}"


def _cpu_model() -> str:
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
    """Into place by a rename, so that a reader never sees half a file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")
        part.replace(file)
    except OSError:  # read-only or full: the number is still good, it is only not remembered
        return
