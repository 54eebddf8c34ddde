from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from danlu.cli.bench import _thread_counts, app
from danlu.planning import machine_profile


@pytest.fixture(autouse=True)
def no_gpu_and_no_time(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine_profile, "measure", lambda dtype, device, seconds: 2e12 / dtype.itemsize)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_line_for_each_type_and_number_of_threads() -> None:
    found = CliRunner().invoke(app, ["gemm", "--threads", "1", "--threads", "2"])
    assert found.exit_code == 0, found.output
    assert [line.split() for line in found.stdout.splitlines()][:2] == [
        ["float32", "1", "thread", "500.0", "GFLOP/s"],
        ["bfloat16", "1", "thread", "1000.0", "GFLOP/s"],
    ]
    assert found.stdout.count("2 threads") == 3


def test_json_lines_are_kept_for_training_too(tmp_path) -> None:
    found = CliRunner().invoke(app, ["gemm", "--threads", "1", "--json"])
    first = json.loads(found.stdout.splitlines()[0])
    assert first == {
        "dtype": "float32", "device": "cpu", "threads": 1, "flops_per_second": 5e11, "specified_flops_per_second": None,
    }  # fmt: skip
    assert len(json.loads((tmp_path / ".cache" / "danlu" / "gemm.json").read_text())) == 3


def test_a_device_that_is_not_there_is_said() -> None:
    found = CliRunner().invoke(app, ["gemm", "--device", "cuda"])
    assert str(found.exception) == "--device cuda: torch sees no GPU here. Use --device cpu."
    assert CliRunner().invoke(app, ["gemm", "--device", "tpu"]).exit_code == 2


def test_thread_counts_double_up_to_all_cores() -> None:
    assert [_thread_counts(cores) for cores in (1, 2, 6)] == [[1], [1, 2], [1, 2, 4, 6]]
