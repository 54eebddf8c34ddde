from __future__ import annotations

import errno
import json
import math
import os
import resource
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_world import reproducible

from danlu.core.errors import ResourceError
from danlu.core.types import StepMetrics
from danlu.training.metrics import TIMING_FIELDS, MetricsLog, peak_memory_bytes, read_metrics, step_fields


def metrics(step: int, loss: float = 2.5, **extra: float) -> StepMetrics:
    return StepMetrics(step, loss, 0.5, 1e-4, 100, 80, 1234.5 * step, 1 << 20, extra)


def test_one_valid_json_object_a_line(tmp_path: Path) -> None:
    with closing(MetricsLog(tmp_path / "run" / "metrics.jsonl")) as log:
        log.step(metrics(1, z_loss=0.25))
        log.evaluation(1, {"loss": 2.0, "perplexity": math.inf})
        log.event(2, "overflow", scale=0.1, reason="日本")
        log.step(metrics(2, loss=math.nan))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in log.path.read_text().splitlines()]
    assert lines[0] == {
        "step": 1, "loss": 2.5, "grad_norm": 0.5, "learning_rate": 1e-4, "tokens": 100, "trained_tokens": 80,
        "tokens_per_second": 1234.5, "memory_bytes": 1 << 20, "z_loss": 0.25,
    }  # fmt: skip
    assert lines[1] == {"step": 1, "eval_loss": 2.0, "eval_perplexity": "inf"}
    assert lines[2] == {"step": 2, "event": "overflow", "scale": 0.1, "reason": "日本"}
    assert lines[3]["loss"] == "nan"
    read = read_metrics(log.path)
    assert read[1]["eval_perplexity"] == math.inf
    assert math.isnan(read[3]["loss"])
    assert read[:1] == lines[:1]


def test_each_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.step(metrics(1))
    assert len(read_metrics(log.path)) == 1
    log.sync()
    log.close()
    log.close()


def test_floats_come_back_exactly(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1e-320, math.pi * 1e300]
    with closing(MetricsLog(tmp_path / "metrics.jsonl")) as log:
        log.evaluation(1, {str(index): value for index, value in enumerate(values)})
    assert [read_metrics(log.path)[0][f"eval_{index}"] for index in range(3)] == values


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b"x" * 200_000])
def test_a_torn_last_line_is_dropped(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(path)) as log:
        log.step(metrics(1))
        log.step(metrics(2))
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    MetricsLog(path).close()
    assert path.read_bytes() == whole
    path.write_bytes(tail)  # nothing but a torn line
    MetricsLog(path).close()
    assert path.read_bytes() == b""


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    def run(path: Path, first: int, last: int, speed: float, lines: int) -> None:
        with closing(MetricsLog(path)) as log:
            log.truncate(lines)
            for step in range(first, last + 1):
                log.step(StepMetrics(step, 1 / step, 0.5, 1e-4, 10, 9, speed, int(speed), {"mfu": speed}))
                if step % 3 == 0:
                    log.evaluation(step, {"loss": 2 / step})

    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    run(whole, 1, 10, speed=100.0, lines=0)
    run(parts, 1, 8, speed=90.0, lines=0)  # its last checkpoint is of step 6
    with parts.open("a") as file:
        file.write('{"step": 9')
    run(parts, 7, 10, speed=70.0, lines=8)
    resumed, uninterrupted = read_metrics(parts), read_metrics(whole)
    assert list(map(reproducible, resumed)) == list(map(reproducible, uninterrupted))
    assert resumed != uninterrupted
    assert {"tokens_per_second", "memory_bytes", "mfu"} <= TIMING_FIELDS


def test_lines_are_counted_and_cut(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.step(metrics(1))
    log.step(metrics(2))
    kept = log.lines
    log.evaluation(2, {"loss": 1.0})  # of the checkpoint's own step, but after it
    log.event(3, "rewind", to=1)
    assert log.truncate(kept) == 2
    log.step(metrics(3))
    log.close()
    again = MetricsLog(log.path)
    assert again.lines == 3
    assert [line["step"] for line in read_metrics(log.path)] == [1, 2, 3]
    assert again.truncate(5) == 0  # somebody shortened the file: what is there stays
    assert again.lines == 3


def test_extra_may_not_replace_a_field() -> None:
    with pytest.raises(ValueError, match="extra metrics may not replace loss, tokens"):
        step_fields(replace(metrics(1), extra={"tokens": 1.0, "loss": 2.0, "accuracy": 3.0}))


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ResourceError, match=r"metrics\.jsonl: cannot be written: Is a directory\. Choose another"):
        MetricsLog(tmp_path / "metrics.jsonl")


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = MetricsLog(tmp_path / "metrics.jsonl", said.append)
    log.step(metrics(1))
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
        log.step(metrics(2))  # it waits
        with pytest.raises(ResourceError, match="the disk is full"):
            log.sync()

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.step(metrics(3))
        with pytest.raises(ResourceError, match=r"cannot be written: No space left on device\."):
            log.sync()
        assert log.lines == 1 and [line["step"] for line in read_metrics(log.path)] == [1]
    log.step(metrics(4))
    assert log.lines == 4 and [line["step"] for line in read_metrics(log.path)] == [1, 2, 3, 4]
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.step(metrics(5))
    log.close()
    assert [line["step"] for line in read_metrics(log.path)] == [1, 2, 3, 4, 5]
    assert said == [
        f"{log.path}: cannot be written: the disk is full. Free some space, then resume. Lines of metrics wait in "
        "memory, and training goes on to the next checkpoint"
    ]  # once


def test_peak_memory_is_what_the_system_counts() -> None:
    peak = peak_memory_bytes(torch.device("cpu"))
    unit = 1 if sys.platform == "darwin" else 1024
    assert peak == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, rel=0.02)


def test_peak_memory_of_gpus_is_that_of_all_devices_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: [5, 0, 7][device])
    assert peak_memory_bytes(torch.device("cuda:2")) == 12
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: [0, 0, 7][device])  # of a layout's rank 2
    assert peak_memory_bytes(torch.device("cuda:2")) == 7
