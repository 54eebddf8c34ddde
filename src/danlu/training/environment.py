"""environment.json: the environment of a run, and whether a resumption still can be exact there."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from danlu.core.atomic_write import write_atomically
from danlu.core.machine import total_memory_bytes, usable_cores

_PACKAGES = ("danlu", "torch", "numpy", "transformers", "tokenizers", "safetensors", "pydantic")
_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF",
)

_KEYS_THAT_DECIDE_BITS = ("packages.torch", "cpu.capability", "cpu.threads", "device.name", "device.cuda")
"""Dotted keys of environment.json; where one changes, the last bits of a sum can, and with them the rest of a run."""


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor, threads, memory and device of this process, ready for JSON; sizes in bytes.

    Call it after the number of threads is set.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "memory_bytes": total_memory_bytes(),
        },
        "device": _describe_device(device),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def write_environment(path: Path, environment: Mapping[str, Any]) -> None:
    """Write environment.json, whole or not at all."""
    write_atomically(path, (json.dumps(environment, indent=2) + "\n").encode())


def changes_that_matter(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The differences between two environments by which a resumed run may differ in its last bits; one line each."""
    return [
        f"{key}: {old!r} before, {new!r} now"
        for key in _KEYS_THAT_DECIDE_BITS
        if (old := _value_at(saved, key)) != (new := _value_at(current, key))
    ]


def _describe_device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"kind": device.type, "name": _cpu_model() if device.type == "cpu" else device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "kind": "cuda",
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _value_at(environment: Mapping[str, Any], key: str) -> object:
    value: Any = environment
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
