"""Runs of stage rl that have to come out alike: adapters in exact numerics, any cache, any layout of trees, kills."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World, differences, last_state, start
from test_rl_runs import recipe_file, run

from danlu.inference.model_runner import ModelRunner
from danlu.stages import rollout

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

FILTERED = {"samples": 4, "max_new_tokens": 6, "temperature": 0.7, "top_p": 0.9}
LORA = {"kind": "lora", "rank": 4, "targets": "all-linear"}
TRAINED = {
    "lora bf16": {"adapter": LORA, "precision": "bf16"},
    "qlora bf16": {"adapter": LORA, "quantization": "nf4", "precision": "bf16"},
    "qlora fp32": {"adapter": LORA, "quantization": "nf4", "precision": "fp32"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_adapters_leave_no_gap_in_exact_numerics(tiny_world: World, tmp_path: Path, name: str) -> None:
    batch = {"prompts": 4, "micro": 1, "updates": 2}
    more = {"batch": batch, "steps": 8, "rollout": FILTERED, **TRAINED[name]}
    lines = run(tiny_world, tmp_path / "exact", numerics="exact", **more)
    assert [line["gap"] for line in lines[0::2]] == [0.0] * 4
    assert [line["ratio"] for line in lines[0::2]] == [1.0] * 4
    assert all(line["ratio"] != 1 for line in lines[1::2])  # control: the adapter has moved
    fast = run(tiny_world, tmp_path / "fast", **more)
    assert any(line["rollout_gap_max"] > 0 for line in fast)  # control: otherwise both round alike anyway


BLOCK = 4
BLOCK_GIB = 2 * 2 * 2 * 8 * 4 * BLOCK / 2**30
"""Keys and values of a block of the world's model: 2 layers, 2 heads of width 8, 4 bytes."""
LONG = {"samples": 4, "max_new_tokens": 24, "block": BLOCK}
CACHES = {
    "no prefix sharing": ({"prefix_sharing": False}, False),
    "preemption": ({"cache_gib": 20.5 * BLOCK_GIB}, True),
    "swapping": ({"cache_gib": 20.5 * BLOCK_GIB, "preempt": "swap"}, True),
}


@pytest.mark.slow
def test_answers_do_not_depend_on_the_cache(tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Any] = []
    real = rollout.rollout_engine

    def watched(*arguments: Any, **options: Any) -> Any:
        engines.append(real(*arguments, **options))
        return engines[-1]

    monkeypatch.setattr(rollout, "rollout_engine", watched)
    more = {"numerics": "exact", "steps": 4, "batch": {"prompts": 4, "micro": 1}}
    whole = run(tiny_world, tmp_path / "whole", rollout=LONG, **more)
    assert engines[-1].statistics.preemptions == 0
    written = (tmp_path / "whole" / "rollouts.jsonl").read_text()
    for name, (changed, preempts) in CACHES.items():
        folder = tmp_path / name.replace(" ", "-")
        lines = run(tiny_world, folder, rollout={**LONG, **changed}, **more)
        assert (engines[-1].statistics.preemptions > 0) == preempts, name
        assert (folder / "rollouts.jsonl").read_text() == written, name
        assert [line["loss"] for line in lines] == [line["loss"] for line in whole], name
    run(tiny_world, tmp_path / "other", rollout=LONG, seed=1, **more)
    assert (tmp_path / "other" / "rollouts.jsonl").read_text() != written  # control


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", "ppo"])
def test_trees_may_hold_their_prompt_once_or_with_each_answer(
    tiny_world: World, tmp_path: Path, objective: str
) -> None:
    more = {"stage": objective, "steps": 4, "batch": {"prompts": 4, "micro": 1, "updates": 2, "passes": 2}}
    once, each = (
        run(tiny_world, tmp_path / f"{shares}", data={"share_stem": shares}, **more) for shares in (True, False)
    )
    for line, other in zip(once, each, strict=True):
        for name in ("loss", "grad_norm", "reward", "entropy", "approx_kl"):
            assert other[name] == pytest.approx(line[name], rel=2e-4, abs=2e-6), name
    assert once[1]["grad_norm"] != pytest.approx(once[3]["grad_norm"], rel=2e-4)  # control


KILLED = {
    "batch": {"prompts": 4, "micro": 1, "updates": 2, "passes": 2},
    "rollout": FILTERED,
    "checkpoint": {"every": 1, "keep": 3},
    "steps": 12,
}


def die_in_forward_pass(number: int) -> None:
    """Kill this process when the engine is about to compute its `number`-th forward pass."""
    real, left = ModelRunner.run, [number]

    def run_or_die(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    ModelRunner.run = run_or_die  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", "ppo"])
def test_killed_in_the_middle_of_rollouts(tiny_world: World, tmp_path: Path, objective: str) -> None:
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log.txt"
    process = start(["train", recipe_file(tiny_world, whole, stage=objective, **KILLED)], log)
    process.join()
    assert process.exitcode == 0, log.read_text()
    recipe = recipe_file(tiny_world, killed, stage=objective, **KILLED)
    newest = []
    for passes in (3, 10, 12):  # of a process, whose rollouts take some seven each
        process = start(["train", recipe], log, partial(die_in_forward_pass, passes))
        process.join()
        assert process.exitcode == -signal.SIGKILL, log.read_text()
        newest.append(last_state(killed)[0].name if list((killed / "checkpoints").glob("step-*")) else "")
    assert newest[0] == "" and newest[0] < newest[1] < newest[2]  # nothing saved at first, and each came further
    process = start(["train", recipe], log)
    process.join()
    assert process.exitcode == 0, log.read_text()
    assert differences(whole, killed) == []
    assert (whole / "rollouts.jsonl").read_text() == (killed / "rollouts.jsonl").read_text()
