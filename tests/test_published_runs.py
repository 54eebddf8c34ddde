"""What benchmarks/planner.py expects of published runs: habits by the facts of a run, and states to the byte."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of benchmarks/planner."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("architectures", "engines", "memory", "rows")
    modules = {name: importlib.import_module(f"planner.{name}") for name in names}
    return type("Planner", (), modules)


def run_of(planner: Any, **changes: Any) -> Any:
    shape = planner.architectures.Architecture(
        "tiny", 64, 2, 4, 4, 16, 128, 1000, False, True, "rms", 2, False, False, False, "rotary", False, 0, "a test"
    )
    rows = planner.rows
    run = rows.PublishedRun(
        id="r", group="", source="", engine="e", card=None, architecture=shape, method=rows.Method("full"),
        precision=rows.Precision("bf16", "bf16", "fp32", "bf16", "bf16"), optimizer="AdamW", length=32, lengths="exact",
        micro_batch=1, accumulation=1, gpus=1, layout=rows.Layout(), recompute="full", compiled=False,
        offload=frozenset(), optimizer_in_backward=False, chunked_loss=False,
        memory=rows.Memory(1.0, "allocated", True, False), speed=None, memory_left_out=None, speed_left_out=None,
    )  # fmt: skip
    return replace(run, **changes)


def engine_of(planner: Any, **habits: Any) -> Any:
    return planner.engines.Engine("e", {key: planner.engines.Habit(value, "a test") for key, value in habits.items()})


def test_the_first_habit_counts_whose_facts_all_hold(planner: Any) -> None:
    engine = engine_of(planner, logit_bytes={"compiled split": 1, "compiled": 2, "otherwise": 3}, kept_more=[])
    habit, layout = planner.memory.habit, planner.rows.Layout(tensor=2)
    assert habit(run_of(planner, compiled=True, layout=layout), engine, "logit_bytes", 0) == 1
    assert habit(run_of(planner, compiled=True), engine, "logit_bytes", 0) == 2
    assert habit(run_of(planner, layout=layout), engine, "logit_bytes", 0) == 3
    assert habit(run_of(planner), engine, "buffer_bytes", 7) == 7
    assert habit(run_of(planner), engine_of(planner, buffer_bytes={"compiled": 1}), "buffer_bytes", 7) == 7


def test_states_are_shared_as_the_layout_says(planner: Any) -> None:
    layout = planner.rows.Layout
    count = run_of(planner).architecture.parameters
    full, deepspeed = engine_of(planner), engine_of(planner, deepspeed="all runs but adapters on one GPU")

    def parts(engine: Any, **changes: Any) -> Any:
        return planner.memory.expected_memory(run_of(planner, **changes), engine).parts

    alone = parts(full)
    assert (alone["weights"], alone["optimizer"], alone["gathered"]) == (2 * count, 8 * count, 0)
    shared = parts(full, layout=layout(fsdp=4), gpus=4)
    assert (shared["weights"], shared["optimizer"]) == (2 * count / 4, 8 * count / 4) and shared["gathered"] > 0
    # ZeRO-2 shares float32 weights and states, and not the model's own.
    zero = parts(deepspeed, layout=layout(replicas=4), gpus=4)
    assert (zero["weights"], zero["optimizer"]) == (2 * count, 12 * count / 4)
    whole = parts(deepspeed, layout=layout(replicas=4, zero=3), gpus=4)
    assert (whole["weights"], whole["optimizer"]) == (2 * count / 4, 12 * count / 4)


def test_the_fullest_moment_counts(planner: Any) -> None:
    def moment(logit_bytes: float, update_bytes: float) -> str:
        engine = engine_of(planner, logit_bytes=logit_bytes, update_bytes=update_bytes)
        return planner.memory.expected_memory(run_of(planner), engine).moment  # type: ignore[no-any-return]

    assert moment(1e6, 0) == "loss" and moment(0, 1e6) == "update"
    assert moment(0, 0) == "end", "control: gradients are all there when the first layer ends"
