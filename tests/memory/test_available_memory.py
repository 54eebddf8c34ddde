from __future__ import annotations

from pathlib import Path

import pytest
import torch

from danlu.memory import available_memory

GIB = 2**30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 8 GiB available, without control groups."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable: {8 * 2**20} kB\n")
    monkeypatch.setattr(available_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(available_memory, "_CGROUPS", tmp_path)
    return tmp_path


def on_cpu() -> int | None:
    return available_memory.available_bytes(torch.device("cpu"))


def group(folder: Path, limit: str, used: int, cached: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")


def test_of_host_and_container_the_smaller_counts(system: Path) -> None:
    assert on_cpu() == 8 * GIB
    group(system, str(4 * GIB), used=3 * GIB, cached=GIB)
    assert on_cpu() == 2 * GIB
    group(system, str(40 * GIB), used=3 * GIB, cached=0)
    assert on_cpu() == 8 * GIB
    group(system, "max", used=3 * GIB, cached=0)
    assert on_cpu() == 8 * GIB
    group(system, str(GIB), used=3 * GIB, cached=0)
    assert on_cpu() == 0


def test_a_container_of_the_older_kind(system: Path) -> None:
    (system / "memory").mkdir()
    (system / "memory" / "memory.limit_in_bytes").write_text(str(2 * GIB))
    (system / "memory" / "memory.usage_in_bytes").write_text(str(GIB))
    (system / "memory" / "memory.stat").write_text(f"total_inactive_file {GIB // 2}\n")
    assert on_cpu() == GIB + GIB // 2


def test_a_system_that_tells_nothing_is_no_error(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (system / "meminfo").unlink()

    def unknown() -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(available_memory, "free_memory_bytes", unknown)
    assert on_cpu() is None
