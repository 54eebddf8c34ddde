"""What changed between two recipes, and what of it forbids going on."""

from __future__ import annotations

from danlu.recipe import Recipe, changes
from danlu.recipe.diff import HARMLESS, MATTERS_WITHIN, matters
from danlu.recipe.explanation import keys
from danlu.recipe.sections import (
    AdamW,
    BatchSize,
    Data,
    EarlyStop,
    Evaluation,
    Lion,
    Model,
    Parallel,
    Pipeline,
    Source,
    Watch,
)

OLD = Recipe(
    stage="sft",
    model=Model(path="base"),
    data=Data(train=[Source(path="a.json"), Source(path="b.json")]),
    optimizer=AdamW(learning_rate=1e-4),
    batch=BatchSize(sequences=8, micro=2),
    output="runs/x",
)


def test_no_change() -> None:
    assert changes(OLD, OLD.model_copy(deep=True)) == []


def test_changes_by_key() -> None:
    new = OLD.model_copy(
        update={
            "optimizer": Lion(learning_rate=1e-4),
            "data": OLD.data.model_copy(update={"train": [Source(path="a.json", rows=5)], "workers": 2}),
            "batch": BatchSize(sequences=8, micro=4),
            "output": "runs/y",
        }
    )
    found = {change.key: change for change in changes(OLD, new)}
    assert (found["data.train.0.rows"].old, found["data.train.0.rows"].new) == (None, 5)
    assert (found["data.train.1.path"].old, found["data.train.1.path"].new) == ("b.json", None)
    assert str(found["optimizer.kind"]) == "optimizer.kind: 'adamw' -> 'lion'"
    assert {key for key, change in found.items() if not change.matters} == {"data.workers", "batch.micro", "output"}
    assert found["optimizer.eps"].matters


def test_the_table_names_keys_that_exist() -> None:
    assert set(HARMLESS) <= set(keys())
    for key in (
        "model.path",
        "data.max_length",
        "optimizer.learning_rate",
        "schedule.warmup",
        "batch.tokens",
        "epochs",
    ):
        assert matters(key, OLD)
    for key in (
        "precision",
        "loss.z_loss",
        "seed",
        "evaluation.early_stop.patience",
        "gradient_clipping",
        "watch.policy",
    ):
        assert matters(key, OLD)
    for key in ("log.every", "checkpoint.keep_best", "device", "threads", "data.cache", "evaluation.samples.prompts"):
        assert not matters(key, OLD)
    assert set(MATTERS_WITHIN) <= set(keys()) and matters("parallel.reduce", OLD)
    for key in keys():
        if key.startswith("parallel.") and key not in MATTERS_WITHIN:  # the same sums, in another order
            assert not matters(key, OLD)
    assert matters("data.cached", OLD)  # a name that only begins like a harmless one


def test_when_to_save_and_judge_matters_where_the_run_hangs_on_it() -> None:
    for key, changed in (
        ("evaluation.every", OLD.model_copy(update={"evaluation": Evaluation(early_stop=EarlyStop())})),
        ("checkpoint.every", OLD.model_copy(update={"watch": Watch(policy="rewind")})),
    ):
        assert not matters(key, OLD)
        assert matters(key, changed)
    for key in ("rollout.samples", "rollout.temperature", "rollout.staleness"):
        assert matters(key, OLD)
    assert not matters("rollout.cache_gib", OLD) and not matters("reward_limits.timeout_s", OLD)
    assert not matters("checkpoint.keep", OLD.model_copy(update={"watch": Watch(policy="rewind")}))


def test_with_pipedream_stages_and_flushes_matter() -> None:
    pipedream = OLD.model_copy(update={"parallel": Parallel(pipeline=Pipeline(stages=2, schedule="pipedream"))})
    for key in ("checkpoint.every", "evaluation.every", "parallel.pipeline.stages", "parallel.pipeline.split"):
        assert matters(key, pipedream) and not matters(key, OLD)
    assert not matters("checkpoint.keep", pipedream) and not matters("parallel.data", pipedream)
    synchronous = OLD.model_copy(update={"parallel": Parallel(pipeline=Pipeline(stages=2))})
    for pair in ((pipedream, synchronous), (synchronous, pipedream)):
        assert [change.key for change in changes(*pair) if change.matters] == ["parallel.pipeline.schedule"]
    assert not any(change.matters for change in changes(OLD, synchronous))  # control
