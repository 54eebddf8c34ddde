"""What auto chooses, and what is said of a slower choice, by speeds that are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from danlu.planning import product_peak
from danlu.planning.product_peak import fastest, in_gflops, product_speeds, slower

NO_AMX, AMX, ALIKE = ({"fp32": 163e9, "bf16": bf16} for bf16 in (122e9, 1100e9, 155e9))


def test_auto_takes_the_faster_and_bf16_where_they_are_near() -> None:
    assert [fastest(speeds) for speeds in (NO_AMX, AMX, ALIKE)] == ["fp32", "bf16", "bf16"]


def test_a_slower_choice_is_told_with_both_speeds_and_what_to_use() -> None:
    assert slower("bf16", NO_AMX) == (
        "precision: bf16 is slower than fp32 on this machine: matrix products of 122 GFLOP/s with bf16, 163 with fp32. "
        "Use precision: fp32, or auto, which takes the faster of fp32 and bf16"
    )
    told = slower("fp32", AMX)
    assert told is not None and "1,100 with bf16" in told and "Use precision: bf16, or auto" in told
    told = slower("fp16", NO_AMX | {"fp16": 2e9})
    assert told is not None and told.startswith("precision: fp16 is slower than fp32")


@pytest.mark.parametrize(("chosen", "speeds"), [("fp32", NO_AMX), ("bf16", AMX), ("bf16", ALIKE), ("fp32", ALIKE)])
def test_nothing_is_said_of_a_choice_that_is_as_fast_as_any(chosen: str, speeds: dict[str, float]) -> None:
    assert slower(chosen, speeds) is None


def test_speeds_are_measured_once_and_shared_with_utilisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[torch.dtype] = []
    monkeypatch.setattr(
        product_peak, "measure", lambda dtype, device, seconds: measured.append(dtype) or 1e9 * len(measured)
    )
    assert product_speeds("cpu", cache=tmp_path) == {"fp32": 1e9, "bf16": 2e9}
    assert product_speeds("cpu", also="bf16", cache=tmp_path) == {"fp32": 1e9, "bf16": 2e9}
    assert product_speeds("cpu", also="fp16", cache=tmp_path) == {"fp32": 1e9, "bf16": 2e9, "fp16": 3e9}
    assert measured == [torch.float32, torch.bfloat16, torch.float16]
    assert product_peak.measured_peak(torch.bfloat16, "cpu", cache=tmp_path) == 2e9
    assert in_gflops({"fp32": 1e9}, "fp32") == "matrix products of 1 GFLOP/s with fp32"
    assert product_peak.SECONDS * len(product_peak.CANDIDATES) < 1
