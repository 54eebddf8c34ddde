"""`make gpu`, as far as it can be tried without a GPU: packages, limits, and blocks at small sizes on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from danlu.recipe.sections import Memory

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])  # as of a script there
    return module


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_blocks_have_limits_of_ten_minutes_together(gpu: ModuleType) -> None:
    assert list(gpu.LIMITS_S) == list(gpu.BLOCKS)
    assert sum(gpu.LIMITS_S.values()) <= 600


@pytest.mark.parametrize(
    ("wheel", "fits"),
    [
        ("pytest-9.2.0-py3-none-any.whl", True),
        ("bitsandbytes-0.50.2-py3-none-manylinux_2_24_x86_64.whl", True),
        ("safetensors-0.8.0-cp310-abi3-manylinux_2_17_x86_64.whl", True),
        ("numpy-2.4.6-cp{0}{1}-cp{0}{1}-manylinux_2_28_x86_64.whl", True),
        ("numpy-2.4.6-cp39-cp39-manylinux_2_28_x86_64.whl", False),
    ],
)
def test_which_wheels_are_for_this_python(gpu: ModuleType, wheel: str, fits: bool) -> None:
    assert gpu.fits(wheel.format(*sys.version_info)) is fits


def test_what_is_missing_comes_out_of_the_wheels_or_is_named(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(gpu, "INSTALLED", tmp_path / "packages")
    monkeypatch.setattr(gpu, "NEEDED", {"nowhere_a": "nowhere-a", "nowhere_b": "nowhere-b", "json": "json"})
    gpu.WHEELS.mkdir()
    with zipfile.ZipFile(gpu.WHEELS / "nowhere_a-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("nowhere_a/__init__.py", "")
    assert gpu.missing(gpu.NEEDED) == ["nowhere-a", "nowhere-b"]
    assert gpu.bring() == ["nowhere-b"]
    assert (gpu.INSTALLED / "nowhere_a" / "__init__.py").is_file()


def test_each_measurement_is_a_line_at_once_and_a_failure_too(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu.run_block("loss", tmp_path, "cpu", True) == 0
    found = lines(tmp_path / "gpu-loss.jsonl")
    assert len(found) == 7 and found[-1]["what"] == "end"
    assert all(one["ms"] > 0 for one in found[:-1])

    def failing(write: Any, device: Any, tiny: bool) -> None:
        write("first", number=1)
        raise RuntimeError("no more")

    monkeypatch.setitem(gpu.BLOCKS, "loss", failing)
    assert gpu.run_block("loss", tmp_path, "cpu", True) == 1
    first, failed, _ = lines(tmp_path / "gpu-loss.jsonl")
    assert first["number"] == 1 and "no more" in failed["error"] and "in failing" in failed["traceback"]


@pytest.mark.slow
def test_a_block_is_ended_at_its_limit_and_the_others_go_on(tmp_path: Path) -> None:
    # torch alone takes longer to import than this limit.
    code = f"""
import sys
sys.argv = ["gpu.py", "--tiny", "--device", "cpu", "--only", "loss", "preflight"]
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import gpu
gpu.LIMITS_S["loss"] = 0.3
sys.exit(gpu.main())
"""
    environ = {**os.environ, "OUT": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "not all right: loss" in done.stdout
    assert lines(tmp_path / "gpu-loss.jsonl") == [{"block": "loss", "what": "ended at its limit", "s": 0.3}]
    assert lines(tmp_path / "gpu-preflight.jsonl")[-1]["what"] == "end", done.stderr[-2000:]


@pytest.mark.slow
def test_the_gpu_tests_and_blocks_run_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [one for one in lines(tmp_path / "gpu-adapters.jsonl") if one["what"] == "step"]
    assert {(one["kind"], one["recompute"]) for one in steps} == {
        (kind, recompute) for kind in ("lora", "qlora") for recompute in ("none", "selective", "full")
    }
    assert all(one["predicted_bytes"] > 0 for one in steps)


@pytest.mark.slow
def test_what_is_imported_is_what_preflight_asks_for(gpu: ModuleType) -> None:
    code = """
import sys, torch
with_torch = {name.split(".")[0] for name in sys.modules}
import builders.tiny_run, danlu.training.loop, danlu.inference.embedded, danlu.assembly.machine_memory
import danlu.parallel.data, danlu.numerics.bitsandbytes_kernels, danlu.objectives.linear_cross_entropy
names = {name.split(".")[0] for name in sys.modules} - with_torch - set(sys.stdlib_module_names)
names = {name for name in names if not name.startswith("_sysconfigdata")}
print(*sorted(name for name in names if getattr(sys.modules.get(name), "__file__", None)))
"""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    # sympy and mpmath are torch's own.
    assert set(done.stdout.split()) <= {*gpu.NEEDED, *gpu.OPTIONAL, "danlu", "builders", "sympy", "mpmath"}


@pytest.fixture
def planned_figures(gpu: ModuleType) -> ModuleType:
    return importlib.import_module("planned_figures")


def test_the_plan_stands_next_to_what_was_measured(
    gpu: ModuleType, planned_figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an H100, of which the table has figures: the same step, and one that recomputes all layers."""
    card = SimpleNamespace(total_memory=85_021_556_736)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    config, device = gpu.config_of("8B", 4, 4096), torch.device("cuda")
    whole = planned_figures.planned_figures(gpu.trained_in_full(4096), config, device)
    assert whole["predicted_bytes"] == sum(whole["predicted"].values()) > 16 * config.parameter_count()
    assert whole["predicted_tokens_per_second"] > 1000
    recomputed = gpu.trained_in_full(4096).model_copy(
        update={"memory": Memory.model_validate({"recompute": {"kind": "full"}})}
    )
    less = planned_figures.planned_figures(recomputed, config, device)  # control
    assert less["predicted_bytes"] < whole["predicted_bytes"]
    assert less["predicted_tokens_per_second"] < whole["predicted_tokens_per_second"]


def test_errors_beyond_what_is_allowed_are_marked(planned_figures: ModuleType) -> None:
    measured = {"peak_bytes": 2**30, "tokens_per_second": 100.0}
    close = planned_figures.comparison(
        {**measured, "predicted_bytes": 1.09 * 2**30, "predicted_tokens_per_second": 81.0}
    )
    assert close == ("1.09 GiB expected, 1 measured: +9.0%; 81 tokens/s expected, 100 measured: -19.0%")
    far = planned_figures.comparison({**measured, "predicted_bytes": 0.89 * 2**30, "predicted_tokens_per_second": 121})
    assert far.count("(!)") == 2 and "-11.0% (!)" in far and "+21.0% (!)" in far
    assert planned_figures.comparison({**measured, "predicted_tokens_per_second": None}) is None
    plan = {"memory": {"allocated": 7}, "tokens_per_second": None}
    assert planned_figures.figures_of_plan(plan) == {"predicted_bytes": 7, "predicted_tokens_per_second": None}
    assert planned_figures.figures_of_plan(None) == {}
