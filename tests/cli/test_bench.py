from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from typer.testing import CliRunner

from danlu.cli.bench import app
from danlu.core.errors import RecipeError
from danlu.planning import measure_machine, product_peak
from danlu.planning.machine_profile import Collective, MachineProfile
from danlu.planning.measure_machine import Sizes

# The least sizes that the printed table looks up.
SMALL = Sizes(
    precisions=("fp32",),
    products=((1, 2), (16,), (16,)),
    gradients=((2,), (16,), (16,)),
    streamed_bytes=(1 << 14,),
    attention=((8, 16), (2,), (16,)),
    long_attention=(40,),
    grouped=((2,), (4,)),
    elements=(1 << 10,),
    message_bytes=(1 << 8, 1 << 12),
    pool_bytes=1 << 20,
)


@pytest.fixture(autouse=True)
def no_gpu_and_no_time(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(product_peak, "measure", lambda dtype, device, seconds: 2e12 / dtype.itemsize)
    monkeypatch.setitem(measure_machine.SIZES, "cpu", SMALL)
    monkeypatch.setattr("danlu.planning.measure_links.POINT_S", 1e-4)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_table_is_shown_and_kept_for_planning_and_training(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["machine", "--threads", "2"])
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.stdout.splitlines()
    assert lines[0].split() == ["fastest", "product", "with", "fp32", "500.0", "GFLOP/s"]
    assert any(line.startswith("products of one row, GFLOP/s") for line in lines)
    assert "a call " in outcome.stdout and "links" not in outcome.stdout
    (file,) = (tmp_path / ".cache" / "danlu" / "machine").iterdir()
    assert lines[-1] == f"kept in {file}"
    assert MachineProfile.read(file).machine.threads == 2
    assert len(json.loads((tmp_path / ".cache" / "danlu" / "gemm.json").read_text())) == 3


def test_json_is_the_profile() -> None:
    outcome = CliRunner().invoke(app, ["machine", "--json", "--threads", "1"])
    assert outcome.exit_code == 0, outcome.output
    content = json.loads(outcome.stdout)
    profile = MachineProfile.read(content.pop("file"))
    assert content == json.loads(json.dumps(profile.to_json()))
    assert MachineProfile.here(threads=1, device="cpu") == profile


@pytest.mark.distributed
def test_several_processes_have_a_profile_of_their_own() -> None:
    outcome = CliRunner().invoke(app, ["machine", "--processes", "2", "--threads", "1", "--json"])
    assert outcome.exit_code == 0, outcome.output
    first, second = (json.loads(line) for line in outcome.stdout.splitlines())
    assert [profile["machine"]["processes"] for profile in (first, second)] == [1, 2]
    assert set(second["tables"]) - set(first["tables"]) == {*get_args(Collective), "all_reduce_meanwhile"}
    profile = MachineProfile.here(2, threads=1, device="cpu")
    assert profile is not None and profile.machine == replace(profile.machine, processes=2, threads=1)
    link = profile.link()
    assert link is not None and math.isfinite(link[0]) and min(link) > 0
    assert profile.collective_seconds("all_reduce", 1 << 12, 2) > 0 and profile.product_seconds(2, 16, 16, "fp32") > 0


def test_a_device_that_is_not_there_is_said() -> None:
    outcome = CliRunner().invoke(app, ["machine", "--device", "cuda"])
    assert str(outcome.exception) == "--device cuda: torch sees no GPU here. Use --device cpu."
    assert CliRunner().invoke(app, ["machine", "--device", "tpu"]).exit_code == 2


def test_the_old_verb_names_the_new_one() -> None:
    outcome = CliRunner().invoke(app, ["gemm", "--threads", "1", "--json"])
    assert isinstance(outcome.exception, RecipeError)
    assert str(outcome.exception).startswith("danlu bench gemm is now danlu bench machine")
    assert "gemm" not in CliRunner().invoke(app, ["--help"]).stdout
