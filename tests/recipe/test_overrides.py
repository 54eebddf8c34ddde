"""`section.key=value`: what an override replaces and what it leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from danlu.core.errors import RecipeError
from danlu.recipe import Recipe, load
from danlu.recipe.sections import AdamW, Ema, Evaluation, Lion, Source

Write = Callable[..., str]

TEXT = """\
stage: sft
model: base
data: {train: [rows.json, more.jsonl], max_length: 64, packing: {kind: best-fit, window: 8}}
optimizer: {kind: adamw, learning_rate: 1e-3, betas: [0.8, 0.9]}
epochs: 2
batch: {sequences: 4, micro: 2}
output: runs/x
"""


def changed(write: Write, *overrides: str, text: str = TEXT) -> Recipe:
    return load(write(text), overrides).recipe


def refused(write: Write, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(write(TEXT), overrides)
    return caught.value.problems


def test_values_are_yaml(write: Write) -> None:
    recipe = changed(write, "seed=7", "compile=true", "gradient_clipping=null", "optimizer.betas=[0.5, 0.6]", "ema=0.9")
    assert (recipe.seed, recipe.compile, recipe.gradient_clipping, recipe.ema) == (7, True, None, Ema(decay=0.9))
    assert recipe.optimizer == AdamW(learning_rate=1e-3, weight_decay=0.0, betas=(0.5, 0.6))


def test_a_key_below_a_short_form_keeps_it(write: Write) -> None:
    model = changed(write, "model.tokenizer=words").model
    assert (model.path, model.tokenizer) == ("base", "words")


def test_a_bare_value_keeps_the_rest_of_its_section(write: Write) -> None:
    recipe = changed(write, "data=rows.json", "data.packing=none", "data.packing.window=4096")
    assert recipe.data.train == [Source(path="rows.json")]
    assert recipe.data.max_length == 64
    assert changed(write, "data.packing=true").data.packing.window == 8


def test_a_mapping_replaces_its_section(write: Write) -> None:
    assert changed(write, "data={train: rows.json}").data.max_length == 1024


EVALUATED = (
    "stage: sft\nmodel: base\ndata: {train: rows.json, eval: 0.1}\nepochs: 1\noutput: runs/x\n"
    "evaluation: {every: 5, early_stop: 3, metric: accuracy%s}\ncheckpoint: {keep_best: true, keep: 3}\n"
)


@pytest.mark.parametrize("off", ["data.eval=0", "data.eval=false", "evaluation=null", "evaluation=false"])
def test_evaluation_is_turned_off_with_all_that_hangs_on_it(write: Write, off: str) -> None:
    recipe = changed(write, off, text=EVALUATED % "")
    assert recipe.data.eval is None and recipe.evaluation == Evaluation()
    assert not recipe.checkpoint.keep_best and recipe.checkpoint.keep == 3
    sampled = changed(write, off, text=EVALUATED % ", samples: hi").evaluation
    assert (sampled.every, sampled.samples is None) == ((5, False) if off.startswith("data") else (None, True))
    on = changed(write, "data.eval=1", text=EVALUATED % "")
    assert on.data.eval == 1 and on.evaluation.early_stop is not None and on.checkpoint.keep_best
    assert changed(write, "evaluation=7", text=EVALUATED % "").evaluation.every == 7


def test_columns_one_by_one(write: Write) -> None:
    data = changed(write, "data.columns.prompt=ques", 'data.columns.completion="{a}\\n{b}"').data
    assert data.columns == {"prompt": "ques", "completion": "{a}\n{b}"}
    assert changed(write, "data.columns={text: null}").data.columns == {"text": None}
    assert changed(write, "data.train.1.columns.text=body").data.train[1].columns == {"text": "body"}


def test_lists_by_index(write: Write) -> None:
    train = changed(write, "data.train.1.path=rows.json#5", "data.train.2.path=more.jsonl#9").data.train
    assert [source.path for source in train] == ["rows.json", "rows.json#5", "more.jsonl#9"]


def test_keys_that_exclude_each_other(write: Write) -> None:
    recipe = changed(write, "steps=10", "batch.tokens=256", "model.preset=tiny", "model.tokenizer=words")
    assert (recipe.steps, recipe.epochs) == (10, None)
    assert (recipe.batch.tokens, recipe.batch.sequences, recipe.batch.micro) == (256, None, 2)
    assert (recipe.model.preset, recipe.model.path) == ("tiny", None)
    assert refused(write, "steps=10", "epochs=1") == [
        "override 'steps=10' steps: the run's length is given twice: keep steps or epochs"
    ]


@pytest.mark.parametrize("override", ["optimizer=lion", "optimizer.kind=lion", "optimizer={kind: lion}"])
def test_another_kind_starts_anew(write: Write, override: str) -> None:
    assert changed(write, override).optimizer == Lion(learning_rate=2e-6, weight_decay=0.0)
    recipe = changed(write, "optimizer.learning_rate=5e-5", override, text=TEXT)
    expected = 2e-6 if "{" in override else 5e-5  # another override stays, unless a mapping replaces it
    assert recipe.optimizer.learning_rate == expected
    assert changed(write, "optimizer=adamw").optimizer == AdamW(learning_rate=1e-3, weight_decay=0.0, betas=(0.8, 0.9))


def test_sections_that_the_file_leaves_out(write: Write) -> None:
    text = "stage: sft\nmodel: base\ndata: rows.json\noutput: runs/x\n"
    recipe = changed(write, "batch.micro=4", "optimizer.learning_rate=1e-5", "schedule.warmup=0", text=text)
    assert (recipe.batch.sequences, recipe.batch.micro) == (16, 4)
    assert recipe.optimizer == AdamW(learning_rate=1e-5, weight_decay=0.0)
    nested = changed(write, "evaluation.early_stop.patience=9", "data.eval.0.path=more.jsonl", text=text)
    assert nested.evaluation.early_stop is not None
    assert nested.evaluation.early_stop.patience == 9
    assert nested.data.eval == [Source(path="more.jsonl")]


def test_a_config_may_be_changed_inside(write: Write) -> None:
    text = TEXT.replace("model: base", "model: {config: {hidden_size: 8, rope: [1, 2]}, tokenizer: words}")
    config = changed(write, "model.config.hidden_size=16", "model.config.rope.1=3", text=text).model.config
    assert config == {"hidden_size": 16, "rope": [1, 3]}


def test_the_only_entry_of_a_list_needs_no_number(write: Write) -> None:
    text = TEXT.replace("stage: sft", "stage: dpo")
    for key in ("objective.beta", "objective.0.beta"):
        objective = changed(write, f"{key}=0.3", "batch={rows: 4}", "data={train: rows.json}", text=text).objective
        assert objective is not None and [term.model_dump()["beta"] for term in objective] == [0.3]


def test_what_is_refused(write: Write) -> None:
    assert refused(
        write, "data.train.path=x", "data.train.7.path=x", "=3", "a..b=1", "data=[x", "steps=", "data.eval= "
    ) == [
        "override 'data.train.path=x' data.train.path: this is a list: say which entry, from 0 to 1, instead of 'path'",
        "override 'data.train.7.path=x' data.train.7.path: the list has 2 entries, so the next one is 2, not 7",
        "override '=3': write it as section.key=value, for example steps=100",
        "override 'a..b=1': write it as section.key=value, for example steps=100",
        "override 'data=[x': not valid YAML: expected ',' or ']', but got '<stream end>' (inside { } and [ ], quote a "
        "value that holds ${VAR}, a comma or a bracket)",
        "override 'steps=' steps: nothing stands after the '='. Write steps=VALUE, or steps=null to take the file's "
        "value away",
        "override 'data.eval= ' data.eval: nothing stands after the '='. Write data.eval=VALUE, or data.eval=null to "
        "take the file's value away",
    ]
