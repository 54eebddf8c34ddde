from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from danlu.planning import product_peak


def test_a_measurement_is_positive_and_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    assert product_peak.measure(torch.float32, "cpu", seconds=0.02) > 1e8
    assert torch.equal(before, torch.get_rng_state())


def test_it_is_measured_once_per_machine_and_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(product_peak, "measure", lambda dtype, device, seconds: calls.append(dtype) or 1e9 * len(calls))
    for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.float32):
        product_peak.measured_peak(dtype, "cpu", cache=tmp_path)
    assert calls == [torch.float32, torch.bfloat16]
    kept = json.loads((tmp_path / "gemm.json").read_text())
    assert sorted(kept.values()) == [1e9, 2e9]
    assert any(key.endswith("bfloat16") for key in kept)
    assert product_peak.measured_peak(torch.bfloat16, "cpu", cache=tmp_path, fresh=True) == 3e9
    assert product_peak.measured_peak(torch.bfloat16, "cpu", cache=tmp_path) == 3e9
    assert [path.name for path in tmp_path.iterdir()] == ["gemm.json"]  # no half-written file


@pytest.mark.parametrize(
    ("name", "bfloat16", "float16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 989.4e12),
        ("NVIDIA H100 PCIe", 756e12, 756e12),
        ("NVIDIA H200", 989.4e12, 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 312e12),
        ("NVIDIA A10", 125e12, 125e12),
        ("NVIDIA A10G", None, None),
        ("NVIDIA A800-SXM4-80GB", 312e12, 312e12),
        ("NVIDIA H800", 989.4e12, 989.4e12),
        ("NVIDIA L4", 121e12, 121e12),
        ("NVIDIA L40S", 362e12, 362e12),
        ("Tesla T4", None, 65e12),
        ("Tesla V100-SXM2-32GB", None, 125e12),
        ("AMD Instinct MI300X", 1307.4e12, 1307.4e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA GH200 480GB", None, None),
    ],
)
def test_specifications_are_found_by_the_name_of_the_device(
    name: str, bfloat16: float | None, float16: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert product_peak.specified_peak(torch.bfloat16, "cuda") == bfloat16
    assert product_peak.specified_peak(torch.float16, "cuda") == float16
    assert product_peak.specified_peak(torch.float32, "cuda") is None
    assert product_peak.specified_peak(torch.bfloat16, "cpu") is None


def test_it_is_said_which_peak_divides() -> None:
    peak = product_peak.Peak(torch.bfloat16, 712.4e12, 989.4e12, processes=8)
    assert peak.divisor == 8 * 712.4e12
    assert peak.line() == (
        "mfu: divided by the measured peak, 712 TFLOP/s with bfloat16 in each of 8 processes, and not by the device's "
        "specification, 989 TFLOP/s"
    )
    assert product_peak.Peak(torch.float32, 81.2e9, None).line() == (
        "mfu: divided by the measured peak, 81 GFLOP/s with float32; no specification of this device is known"
    )


def test_the_key_tells_threads_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        keys.append(product_peak.machine_key(torch.float32, torch.device("cpu")))
    assert keys[0] != keys[1]


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"a": 1', '{"a": "x"}'])
def test_a_damaged_cache_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(product_peak, "measure", lambda *_: 5e9)
    (tmp_path / "gemm.json").write_text(content)
    assert product_peak.measured_peak(torch.float32, "cpu", cache=tmp_path) == 5e9
    assert list(json.loads((tmp_path / "gemm.json").read_text()).values()) == [5e9]


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_peak, "measure", lambda *_: 5e9)
    (tmp_path / "file").write_text("")
    assert product_peak.measured_peak(torch.float32, "cpu", cache=tmp_path / "file") == 5e9
