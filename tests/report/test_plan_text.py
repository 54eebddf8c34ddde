"""The text of a plan, from fixed values."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from danlu.report.plan_text import change_lines, layout_lines, limit_lines, neighbour_lines, plan_lines

GIB = 2**30
MEMORY = {
    "parts": {"weights": 12 * GIB, "adapter": 0, "gradients": 3 * GIB, "activations": 40 * GIB},
    "by_role": {"policy": 8 * GIB, "teacher": 4 * GIB},
    "kv_cache": 0,
    "engine_copies": 0,
    "communication": GIB // 2,
    "allocated": 55 * GIB + GIB // 2,
    "reserved": None,
    "host": {"loading": GIB, "step": 0, "saving": 0},
}
VALUES: dict[str, Any] = {
    "format": 1,
    "machine": {"card": "H100-80G", "nodes": 2, "cards_per_node": 8, "memory_bytes": 79 * GIB},
    "layout": {"processes": 16, "degrees": "data 8 x pipeline 2", "pipeline": 2},
    "batch": {"micro": 4, "micro_batches": 2, "max_length": 2048, "tokens": 131_072},
    "documents": {"source": "token cache", "rows": 1000, "tokens": 321_000, "longest": 2048},
    "memory": {"stage": 1, **MEMORY},
    "stages": [{**MEMORY, "allocated": 40 * GIB}, MEMORY],
    "fits": True,
    "checkpoint_bytes": 90 * GIB,
    "seconds": {
        "compute": {"attention": 0.5, "product": 2.0, "clip": 0.001, "norm": 0.002},
        "communication": {"shard": 0.8, "pipeline": 0.1},
        "exposed": 0.25,
        "bubble": 0.25,
        "total": 3.0,
        "extrapolated": False,
    },
    "tokens_per_second": 43_690.7,
    "mfu": 0.471,
    "rollout": None,
    "training": {"steps": 1200, "tokens": 157_286_400, "hours": 1.0, "price": 40.0, "hours_per_billion_tokens": 6.36},
    "assumptions": ["an unmeasured link"],
}
TEXT = """\
sft.yaml on 2 nodes of 8 x H100-80G (79.0 GiB each): 16 processes (data 8 x pipeline 2)
a step: 2 micro-batches of 4 x 2,048 tokens in each data rank, 131,072 tokens in all
documents: 1,000 rows of 321,000 tokens from the token cache, 321 on average, at most 2,048
it fits: 55.50 GiB of 79.0 GiB (70.3%)

== memory of a process at the peak of a step, of pipeline stage 1, which needs most
  weights                12.00 GiB
  gradients               3.00 GiB
  activations            40.00 GiB
  communication buffers   0.50 GiB
  allocated              55.50 GiB
  models: policy 8.00 GiB, teacher 4.00 GiB
  by stage: 40.00 GiB, 55.50 GiB
  host memory: loading 1.00 GiB
  disk: 90.00 GiB each checkpoint

== seconds of a step: 3
  product                     2  66.7%
  attention                 0.5  16.7%
  other operations        0.003   0.1%
  communication, exposed   0.25   8.3%
  pipeline bubble          0.25   8.3%
  communication by axis, what computation hides included: shard 0.8, pipeline 0.1
  43,691 tokens/s, MFU 47.1%
  1,200 steps, 157,286,400 tokens: 1.00 hours, 40.00 in price

== assumed
  an unmeasured link"""


def test_a_plan_as_text() -> None:
    assert "\n".join(plan_lines(VALUES, "sft.yaml")) == TEXT


def test_what_is_not_known_is_said() -> None:
    values = deepcopy(VALUES)
    values |= {"seconds": None, "fits": False, "assumptions": [], "stages": []}
    values["documents"] |= {"source": "full packs", "rows": None}
    values["training"] |= {"hours": None, "price": None}
    lines = list(plan_lines(values, "sft.yaml"))
    assert "documents: full packs, as the token cache has no rows of this recipe (danlu preview fills it)" in lines
    assert "it does NOT fit: 55.50 GiB of 79.0 GiB (70.3%)" in lines
    assert lines[-2].startswith("== seconds of a step: unknown, as this machine was not measured. Run danlu bench mach")
    assert lines[-1] == "  1,200 steps, 157,286,400 tokens"


def test_changes_that_fit_come_alone() -> None:
    fits = {"change": "batch.micro=1", "taken": 30 * GIB, "seconds": 3.21, "note": "", "fits": True}
    saves = {"change": "adapter=lora", "taken": 81 * GIB, "seconds": None, "note": "few weights", "fits": False}
    assert list(change_lines([fits, saves])) == [
        "== each of these changes alone makes it fit",
        "  batch.micro=1  30.00 GiB  3.21 s a step",
    ]
    assert list(change_lines([saves])) == [
        "== no single change makes it fit; these save most",
        "  adapter=lora  81.00 GiB    few weights",
    ]
    assert list(change_lines([])) == ["== nothing that was tried saves memory: take more or larger cards (--on)"]


def test_phases_of_a_rollout() -> None:
    values = deepcopy(VALUES)
    values["memory"] |= {"kv_cache": 2 * GIB, "engine_copies": GIB}
    phases = {"hand_over_s": None, "rollout_s": 3.0, "update_s": 1.0}
    values["rollout"] = {"steps": 2, "phases": phases, "total": 3.0, "slower": "rollouts"}
    text = "\n".join(plan_lines(values, "grpo.yaml"))
    for line in (
        "  KV cache of rollouts            2.00 GiB",
        "  copies of weights in rollouts   1.00 GiB",
        "== seconds of a rollout and of the 2 steps that train on it: 3",
        "  hand_over_s  unknown",
        "  rollout_s          3  100.0%",
        "  update_s           1   33.3%",
        "  answers are drawn while the trainer works: the trainer waits for answers",
    ):
        assert line in text.splitlines(), f"{line}\n{text}"
    assert "== seconds of a step" not in text and "documents:" not in text and "1,200 steps" in text
    values["rollout"] |= {"steps": 1, "slower": None}
    text = "\n".join(plan_lines(values, "grpo.yaml"))
    assert "the step that trains on it: 3" in text and "drawn while" not in text


def test_limits_as_text() -> None:
    model = {"value": "Qwen3-0.6B", "taken": 14 * GIB, "parameters": 596_049_920}
    limits = {"memory_bytes": 22 * GIB, "card": "a card of 24 GB", "processes": 1, "per_step": 16}
    limits |= {"context_length": 32768, "micro": {"value": 2, "taken": 15 * GIB}, "max_length": None, "model": model}
    assert list(limit_lines(limits, "sft.yaml")) == [
        "sft.yaml on a card of 24 GB with 22.00 GiB: one process",
        "  largest batch.micro                         2  15.00 GiB  of 16 in a step",
        "  largest data.max_length  64 tokens do not fit             of 32,768 positions",
        "  largest model                      Qwen3-0.6B  14.00 GiB  of published sizes, with batch.micro=1",
    ]


def test_neighbours_as_text() -> None:
    faster = {"change": "parallel.tensor=2", "taken": 40 * GIB, "seconds": 2.7, "exposed": 0.3, "bubble": 0.1}
    assert list(neighbour_lines([faster], VALUES)) == [
        "== neighbouring layouts, fastest first",
        "                       GiB          seconds          exposed  bubble",
        "  this layout        55.50                3             0.25    0.25",
        "  parallel.tensor=2  40.00  -15.50      2.7  -10.0%      0.3     0.1",
    ]
    unknown = dict.fromkeys(("seconds", "exposed", "bubble"))
    lines = list(neighbour_lines([{**faster, **unknown}], {**VALUES, "seconds": None}))
    assert [line.split() for line in lines[2:]] == [
        ["this", "layout", "55.50"],
        ["parallel.tensor=2", "40.00", "-15.50"],
    ]


def test_layouts_as_text() -> None:
    slower = deepcopy(VALUES)
    slower |= {"seconds": {**VALUES["seconds"], "total": 13.25}, "mfu": None, "tokens_per_second": 9891.0}
    layouts = [{"settings": ["parallel.tensor=2", "batch.micro=4"], "plan": VALUES}, {"settings": [], "plan": slower}]
    assert list(layout_lines(layouts, "sft.yaml")) == [
        "sft.yaml on 2 nodes of 8 x H100-80G (79.0 GiB each): the fastest layouts of 16 processes that fit",
        "     seconds  tokens/s    MFU    GiB  settings",
        "  1        3    43,691  47.1%  55.50  parallel.tensor=2 batch.micro=4",
        "  2    13.25     9,891         55.50",
    ]
