"""Pipeline parallelism: its short form, and rules of which each row of the table breaks exactly one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from danlu.core.errors import RecipeError
from danlu.parallel.schedules import KINDS, chunks_per_rank, schedule
from danlu.recipe import load
from danlu.recipe.sections import Pipeline

Write = Callable[..., str]

BASE = {"stage": "sft", "model": "base", "data": "rows.json", "output": "runs/x", "parallel": "{pipeline: 2}"}


def text(**changed: str) -> str:
    return "\n".join(f"{key}: {value}" for key, value in {**BASE, **changed}.items())


def test_schedules_that_put_weight_gradients_off_are_allowed(write: Write) -> None:
    for kind in set(KINDS) - {"pipedream"}:
        parallel = f"{{shard: zero2, pipeline: {{stages: 2, schedule: {kind}}}}}"
        section = load(write(text(parallel=parallel))).recipe.parallel
        actions = [action.kind for actions in schedule(kind, 2, chunks_per_rank(kind), 4) for action in actions]
        assert section.pipeline.defers_weight_gradients == ("weight" in actions)
        assert section.reduces_each_micro_batch == ("weight" not in actions)


def test_a_number_is_its_stages(write: Write) -> None:
    assert load(write(text())).recipe.parallel.pipeline == Pipeline(stages=2)
    full = "{pipeline: {stages: 2, schedule: interleaved, chunks: 3, split: cost}}"
    wanted = Pipeline(stages=2, schedule="interleaved", chunks=3, split="cost")
    assert load(write(text(parallel=full))).recipe.parallel.pipeline == wanted
    by_hand = load(write(text(parallel="{pipeline: {stages: 2, split: [3, 1]}}"))).recipe.parallel.pipeline
    assert by_hand.split == [3, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": "{pipeline: {stages: 1, schedule: gpipe}}"}, "parallel.pipeline.schedule: there is one stage"),
        (
            {"parallel": "{shard: zero2, accumulate: sharded, pipeline: {stages: 2, schedule: zbv}}"},
            "parallel.accumulate: zbv puts weight gradients off",
        ),
        (
            {"parallel": "{pipeline: {stages: 2, vertical_sync: true}}"},
            "parallel.pipeline.vertical_sync: with 1f1b all",
        ),
        ({"parallel": "{pipeline: {stages: 2, split: halves}}"}, "parallel.pipeline.split"),
        (
            {"compile": "true", "parallel": "{pipeline: {stages: 2, schedule: zb-h1}}"},
            "compile: zb-h1 puts weight gradients off",
        ),
        ({"parallel": "{pipeline: 2, workers: threads}"}, "parallel.pipeline: threads in one process"),
        ({"numerics": "exact"}, "numerics: whether bits are those of a rollout"),
        ({"adapter": "prompt"}, "adapter.kind: a soft prompt is at the embedding alone"),
    ],
)
def test_what_stages_cannot_do_is_refused(write: Write, changes: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(write(text(**changes)))
    assert [problem for problem in caught.value.problems if message in problem], caught.value.problems
    if "parallel" not in changes:  # control: in one stage it is allowed
        load(write(text(**changes, parallel="{pipeline: 1}")))


PIPEDREAM = "{data: 2, pipeline: {stages: 2, schedule: pipedream}}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": PIPEDREAM.replace("data", "shard: zero1, data")}, "parallel.shard: FSDP2 gathers the newest"),
        ({"precision": "fp16"}, "precision: whether fp16 overflows is known once all stages"),
        ({"compile": "true"}, "compile: whether compiled code reads the version of the weights"),
        ({"ema": "0.99"}, "ema: an average is of whole models after each step"),
        ({"watch": "skip"}, "watch.policy: skip decides by a step's loss"),
        ({"watch": "rewind"}, "watch.policy: rewind decides by a step's loss"),
        ({"memory": "{offload: [parameters]}"}, "memory.offload: pipedream keeps several versions"),
        ({"router": "step"}, "router: the load of experts is counted and balanced by steps"),
        (
            {
                "long_context": "{method: yarn, stages: [{steps: 5, length: 64}]}",
                "data": "{train: rows.json, max_length: 64}",
            },
            "long_context.stages: pipedream's step is one micro-batch of one size",
        ),
        (
            {"batch": "{sequences: 8, micro: 2}"},
            "batch.micro: pipedream's step is one micro-batch on each of 2 data ranks, and 8 sequences are more than 2 "
            "in each. Use 4 or auto",
        ),
        ({"stage": "dpo", "reference": "frozen", "batch": "{rows: 4}"}, "stage: pipedream begins steps before"),
    ],
)
def test_what_pipedream_cannot_do_is_refused(write: Write, changes: dict[str, str], message: str) -> None:
    values = {"batch": "{sequences: 8, micro: 4}", "parallel": PIPEDREAM, **changes}
    with pytest.raises(RecipeError) as caught:
        load(write(text(**values)))
    assert [problem for problem in caught.value.problems if message in problem], caught.value.problems
    synchronous = values | {"parallel": values["parallel"].replace("pipedream", "1f1b")}  # control
    if "stage" not in changes:
        load(write(text(**synchronous)))


def test_pipedream_has_a_step_in_each_micro_batch(write: Write) -> None:
    values = {"batch": "{sequences: 8, micro: 4}", "parallel": PIPEDREAM.replace("}}", ", vertical_sync: true}}")}
    section = load(write(text(**values))).recipe.parallel.pipeline
    assert section.updates_each_micro_batch and section.vertical_sync
    assert not Pipeline(stages=2).updates_each_micro_batch


DISTILL = {"stage": "distill", "teacher": "other", "objective": "forward"}
STAGES: dict[str, dict[str, str]] = {
    "reward": {"stage": "reward", "batch": "{rows: 4}"},
    "dpo": {"stage": "dpo", "batch": "{rows: 4}"},
    "dpo, frozen": {"stage": "dpo", "reference": "frozen", "batch": "{rows: 4}"},
    "simpo": {"stage": "simpo", "batch": "{rows: 4}"},
    "distill": DISTILL,
    "distill, on_policy": {**DISTILL, "on_policy": "0.5"},
    "grpo": {"stage": "grpo", "rewards": "[{kind: length, most: 9}]", "batch": "{prompts: 4}"},
    "ppo": {"stage": "ppo", "rewards": "[{kind: length, most: 9}]", "batch": "{prompts: 4}"},
    "grpo, asynchronous": {
        "stage": "grpo",
        "rewards": "[{kind: length, most: 9}]",
        "batch": "{prompts: 4}",
        "rollout": "{staleness: 1}",
    },
    "ppo, base": {
        "stage": "ppo",
        "rewards": "[{kind: length, most: 9}]",
        "batch": "{prompts: 4}",
        "adapter": "lora",
        "value": "base",
    },
    "online-dpo": {"stage": "online-dpo", "rewards": "[{kind: length, most: 9}]", "batch": "{prompts: 4}"},
    "samples": {"evaluation": "{every: 9, samples: hi}"},
}


@pytest.mark.parametrize("name", STAGES)
def test_stages_of_training_that_go_through_stages(write: Write, name: str) -> None:
    assert load(write(text(**STAGES[name]))).recipe.parallel.pipeline.stages == 2


def test_what_reads_whole_models_or_is_one_chunk_is_refused(write: Write) -> None:
    grpo = {"stage": "grpo", "rewards": "[{kind: length, most: 9}]", "batch": "{prompts: 4}"}
    ppo = {**grpo, "stage": "ppo"}
    refused = [
        (grpo | {"rollout": "{draft: {kind: model, model: one}}"}, "rollout.draft.kind: each stage would have to"),
        (ppo | {"adapter": "lora", "value": "{share: base, model: one}"}, "value.model: an adapter's folder is read"),
    ]
    for changes, message in refused:
        with pytest.raises(RecipeError) as caught:
            load(write(text(**changes)))
        assert [problem for problem in caught.value.problems if message in problem], caught.value.problems
        load(write(text(**changes, parallel="{pipeline: 1}")))  # control: in one stage it is allowed
    with pytest.raises(RecipeError, match="stage: lenet5 is one chunk"):
        load(write(text(stage="classify", model="lenet5")))


def test_a_timeline_is_of_one_step_of_several_stages(write: Write) -> None:
    pipeline = "{pipeline: {stages: 2, schedule: SCHEDULE}}"
    values = {"batch": "{sequences: 8, micro: auto}", "log": "{timeline: 5}"}
    assert load(write(text(**values, parallel=pipeline.replace("SCHEDULE", "zbv")))).recipe.log.timeline == 5
    with pytest.raises(RecipeError, match="log.timeline: a timeline .* with one stage nothing waits for another"):
        load(write(text(**values, parallel="{pipeline: 1}")))
    with pytest.raises(RecipeError, match="log.timeline: a timeline .* pipedream's steps overlap"):
        load(write(text(**values, parallel=pipeline.replace("SCHEDULE", "pipedream"))))
