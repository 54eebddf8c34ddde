"""Whole verifications on local processes: right layouts pass, and each known mistake is caught and named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from builders.adapter_folders import adapter_folder
from builders.digits import digits_folder
from builders.faults import FAULTS, injected, pipelines
from builders.small_config import small_config
from builders.tiny_world import CONFIG, tiny_world

from danlu.core.errors import RecipeError, TrainingError
from danlu.models.config import ModelConfig
from danlu.models.layer_spec import Mixer
from danlu.models.mixer_spec import Heads
from danlu.numerics.relative_error import worst_error
from danlu.parallel.layout import Layout
from danlu.recipe import Recipe, load, sections
from danlu.recipe.sections.base import RowType
from danlu.verification import decoder_proxy, verification
from danlu.verification.verification import Options, predict_traffic, verify

TIED = {"tokenizer": None, "config": {**CONFIG, "tie_word_embeddings": True}}
LORA = {"kind": "lora", "rank": 8, "dropout": 0.2}


def answers(number: int, row_type: RowType) -> dict[str, Any]:
    """A row of two answers, or of one that is desirable or not, of different lengths."""
    prompt, answer = f"{number} plus {number}?" * (1 + number % 3), f"{2 * number}." * (1 + number % 2)
    if row_type == "unpaired":
        return {"prompt": prompt, "completion": answer, "label": number % 2 == 0}
    return {"prompt": prompt, "chosen": answer, "rejected": "No idea, sorry."}


def recipe(
    folder: Path,
    *overrides: str,
    tied: bool = False,
    base: bool = False,
    below: bool = False,
    rows_of: RowType | None = None,
) -> Recipe:
    changes: dict[str, Any] = {"model": {"config": TIED["config"]}} if tied else {}
    if rows_of is not None:
        rows = folder / "rows.jsonl"
        rows.write_text("".join(f"{json.dumps(answers(number, rows_of))}\n" for number in range(24)))
        changes = {"stage": "dpo", "data": {"train": str(rows)}, "batch": None, "reference": "frozen"}
    file = tiny_world().recipe(folder / "run", folder / "recipe.yaml", **changes)
    if base:
        file.write_text(file.read_text().replace("model:\n", "unused:\n"))
        lines = file.read_text().split("unused:\n")
        rest = lines[1].split("\n")
        kept = rest[next(place for place, line in enumerate(rest) if line and not line.startswith(" ")) :]
        file.write_text(lines[0] + f"model: {tiny_world().base}\n" + "\n".join(kept))
    if below:
        adapter_folder(tiny_world().base, folder / "below", sections.Ia3())
        overrides = (*overrides, f"model.adapters={folder / 'below'}")
    return load(file, list(overrides)).recipe


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("overrides", "options", "layout"),
    [
        (["parallel=zero3", "precision=bf16"], {}, "zero3, data 2"),
        (["parallel={shard: zero2, tensor: 2, sequence: true}"], {"tied": True}, "zero2, data 2 x tensor 2, sequence"),
        (
            ["parallel={tensor: 2}", f"adapter={LORA}", "quantization=nf4"],
            {"base": True, "below": True},
            "tensor 2, lora, nf4",
        ),
        (
            ["parallel={tensor: 2}", "model.config.model_type=olmo2", "memory=selective"],
            {},
            "tensor 2, recompute selective",
        ),
    ],
    ids=["zero3", "zero2 x tensor", "qlora on ia3", "norms of all heads"],
)
def test_a_right_layout_is_the_same(
    overrides: list[str], options: dict[str, bool], layout: str, tmp_path: Path
) -> None:
    found, rows = verify("recipe.yaml", recipe(tmp_path, *overrides, **options), Options(steps=2, traffic=True))
    assert found.finding is None and all(check.holds for check in found.checks)
    assert found.layout == layout
    errors = {check.what: check.error for check in found.checks}
    assert worst_error([errors["loss"], errors["evaluation"]]) < 1e-6 and errors["gradients"] < 5e-6
    assert errors["first weights"] == errors["saved weights, loaded"] == 0
    assert rows and all(row.agrees for row in rows)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("overrides", "options", "layout"),
    [
        (["parallel={context: 2}"], {}, "context 2"),
        (["parallel={context: 2, shard: zero3}"], {"tied": True}, "zero3, data 2 x context 2"),
        (["parallel={context: {size: 2, method: ulysses}, tensor: 2}"], {}, "context 2 x tensor 2"),
        (["parallel={context: 2}", f"adapter={LORA}", "quantization=nf4"], {"base": True}, "context 2, lora, nf4"),
    ],
    ids=["context", "zero3 x context", "ulysses x tensor", "qlora"],
)
def test_context_ranks_are_verified(
    overrides: list[str], options: dict[str, bool], layout: str, tmp_path: Path
) -> None:
    verified, _ = verify("recipe.yaml", recipe(tmp_path, *overrides, **options), Options(steps=2))
    assert verified.finding is None and all(check.holds for check in verified.checks)
    assert verified.layout == layout
    errors = {check.what: check.error for check in verified.checks}
    assert worst_error([errors["loss"], errors["evaluation"]]) < 1e-6 and errors["gradients"] < 5e-6
    assert errors["saved weights, loaded"] == 0


KINDS_BY_ROWS: dict[RowType, list[str]] = {
    row_type: [
        term.model_fields["kind"].default
        for term in get_args(sections.PreferenceObjective)
        if row_type in term.row_types and term.model_fields["kind"].default != "sft"
    ]
    for row_type in ("preference", "unpaired")
}
"""The kinds of terms over pairs of answers, and over answers that were judged alone."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("row_type", "layout", "reference"),
    [
        ("preference", "parallel.data=2", "frozen"),
        ("preference", "parallel=zero3", "{kind: frozen, every: 1}"),
        ("preference", "parallel={shard: zero2, tensor: 2}", "cached"),
        ("preference", "parallel={tensor: 2, sequence: true}", "frozen"),
        ("unpaired", "parallel=zero3", "frozen"),
        ("unpaired", "parallel={tensor: 2}", "cached"),
    ],
)
def test_the_sum_of_all_preference_objectives_is_the_same(
    row_type: RowType, layout: str, reference: str, tmp_path: Path
) -> None:
    kinds = ", ".join([*KINDS_BY_ROWS[row_type], *(["sft"] if row_type == "preference" else [])])
    overrides = (layout, f"reference={reference}", f"objective=[{kinds}]")
    found, _ = verify("recipe.yaml", recipe(tmp_path, *overrides, rows_of=row_type), Options(steps=2))
    assert found.finding is None and all(check.holds for check in found.checks)
    errors = {check.what: check.error for check in found.checks}
    assert worst_error([errors["loss"], errors["evaluation"]]) < 1e-6 and errors["gradients"] < 5e-6


@pytest.mark.distributed
def test_precision_auto_is_decided_before_it_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "product_speeds", lambda device: {"fp32": 1e9, "bf16": 2e9})
    auto = recipe(tmp_path, "parallel=zero2", "precision=auto")
    found, _ = verify("recipe.yaml", auto, Options(steps=1, precision="recipe"))
    assert found.finding is None
    assert "precision: auto is bf16 on this machine" in found.about
    assert "in bf16, which hides differences below 0.1" in found.about
    _, about = verification._task(auto, Options(steps=1), tmp_path)
    assert "float32 instead of auto, to tell mistakes from rounding (--precision recipe)" in about


SHARDED, TENSOR = "parallel=zero2", "parallel={tensor: 2, sequence: true}"
WITH_LORA = f"adapter={LORA}"
CONTEXT = "parallel={context: 2}"
DIAGNOSES = {
    "adapter-in-reference": "the policy with its adapter",
    "average-counted-from-zero": "how many updates it has taken in",
    "average-not-restored": "the moving average does not come back as it was saved",
    "branch-sums-per-rank": "one context rank's tokens alone",
    "bucket-dropped": "over data ranks is missing",
    "clipped-to-larger-norm": "squares of a part",
    "divisors-per-rank": "one process's own pairs",
    "document-leak": "documents that see each other",
    "document-lengths-lost": "a length of the part on a rank",
    "doubled": "too large by a constant",
    "frozen-models-differ": "not the same on all processes",
    "local-clip": "the norm of what it holds",
    "local-norm-statistics": "mean square of one rank's heads",
    "mean-of-means": "mean over data ranks of their own means",
    "mean-of-micro-batches": "each micro-batch counts alike",
    "mean-over-context-ranks": "divides by the weight of its own targets",
    "metrics-of-one-rank": "a metric of one process's rows alone",
    "missing-norm-sum": "is missing",
    "never-filled": "never filled",
    "not-finite-hidden": "is hidden from others",
    "overlapping-parts": "be cut afterwards",
    "parts-doubled-in-export": "the exported result is not",
    "positions-begin-anew": "positions or frequencies that begin again",
    "repeated-rows": "more than once",
    "same-masks": "dropout",
    "stale": "out of date",
    "state-of-another-shard": "optimizer's state",
    "statistics-per-micro-batch": "a sort or a mean over a micro-batch",
    "target-lost-at-cut": "lost between two chunks",
    "untied": "tie",
    "visible-siblings": "branches of a tree that see one another",
    "window-at-border": "off by one there",
}
"""A part of the cause that a verification reports for each mistake."""
FACTORS = "short_factor: [1, 1.1, 1.2, 1.3], long_factor: [1, 2, 4, 8]"
LONGROPE = (
    "model.config.model_type=phi3",
    "model.config.pad_token_id=0",
    f"model.config.rope_scaling={{type: longrope, {FACTORS}}}",
    "model.config.original_max_position_embeddings=4096",
    "model.config.max_position_embeddings=131072",
)
DYNAMIC = "model.config.rope_scaling={rope_type: dynamic, factor: 4}"
STAGES = "long_context={method: dynamic, stages: [{length: 96, steps: 2}, {length: 512, steps: 2}]}"
CASES = {
    "adapter-in-reference": (
        ("parallel.data=2", WITH_LORA, "reference=adapter-off"),
        {"base": True, "rows_of": "preference"},
        "layers.0.attention.q_proj.adapter.default.lora_A",
    ),
    "average-counted-from-zero": ((SHARDED, "ema=0.9"), {}, None),
    "average-not-restored": ((SHARDED, "ema=0.9"), {}, "embed_tokens.weight"),
    "branch-sums-per-rank": ((CONTEXT,), {"rows_of": "preference"}, "embed_tokens.weight"),
    "bucket-dropped": (("parallel.data=2",), {}, "norm.weight"),
    "clipped-to-larger-norm": (("parallel.data=2",), {}, None),
    "divisors-per-rank": (("parallel.data=2",), {"rows_of": "preference"}, "embed_tokens.weight"),
    "document-leak": ((CONTEXT,), {}, "embed_tokens.weight"),
    "document-lengths-lost": ((CONTEXT, *LONGROPE), {}, "embed_tokens.weight"),
    "doubled": ((TENSOR,), {}, "embed_tokens.weight"),
    "frozen-models-differ": ((SHARDED,), {"rows_of": "preference"}, "embed_tokens.weight"),
    "local-clip": ((SHARDED,), {}, None),
    "local-norm-statistics": (("parallel={tensor: 2}", "model.config.model_type=olmo2"), {}, "embed_tokens.weight"),
    "mean-of-means": (("parallel.data=2",), {}, "embed_tokens.weight"),
    "mean-of-micro-batches": ((SHARDED,), {}, "embed_tokens.weight"),
    "mean-over-context-ranks": ((CONTEXT,), {}, "embed_tokens.weight"),
    "metrics-of-one-rank": ((SHARDED,), {}, None),
    "missing-norm-sum": ((TENSOR,), {}, "layers.0.attention_norm.weight"),
    "never-filled": ((SHARDED,), {}, None),
    "not-finite-hidden": ((SHARDED,), {}, "embed_tokens.weight"),
    "overlapping-parts": ((SHARDED,), {}, "embed_tokens.weight"),
    "parts-doubled-in-export": ((SHARDED,), {}, "model/model.embed_tokens.weight"),
    "positions-begin-anew": ((CONTEXT,), {}, "embed_tokens.weight"),
    "repeated-rows": ((SHARDED,), {}, "embed_tokens.weight"),
    "same-masks": (
        ("parallel.data=2", WITH_LORA),
        {"base": True},
        "layers.0.attention.q_proj.adapter.default.lora_B",
    ),
    "stale": ((SHARDED,), {}, "embed_tokens.weight"),
    "state-of-another-shard": ((SHARDED,), {}, "embed_tokens.weight"),
    "statistics-per-micro-batch": ((SHARDED, "objective=aot"), {"rows_of": "preference"}, "embed_tokens.weight"),
    "target-lost-at-cut": ((CONTEXT,), {}, "embed_tokens.weight"),
    "untied": ((SHARDED,), {"tied": True}, "embed_tokens.weight"),
    "visible-siblings": (("parallel={tensor: 2}",), {"rows_of": "preference"}, "embed_tokens.weight"),
    "window-at-border": (
        (CONTEXT, "model.config.model_type=mistral", "model.config.sliding_window=3"),
        {},
        "embed_tokens.weight",
    ),
}


OF_EXPERTS = (
    "balance-of-one-share",
    "balance-on-each-tensor-rank",
    "counted-filler",
    "counts-of-one-rank",
    "counts-of-recomputed-rows",
    "expert-gradients-times-expert",
    "experts-not-in-norm",
    "idle-expert-without-gradient",
    "large-gradients-not-summed",
    "router-by-balance-alone",
    "routes-not-replayed",
)
"""Mistakes of models with experts: in `test_experts.py`."""
OF_PIPELINES = tuple(pipelines.FAULTS)
"""In `test_pipelines.py`."""
OF_SINKS = "sink-on-each-rank"


def test_every_mistake_has_a_case() -> None:
    assert (
        list(CASES)
        == list(DIAGNOSES)
        == [name for name in FAULTS if name not in (*OF_EXPERTS, *OF_PIPELINES, OF_SINKS)]
    )
    assert list(FAULTS) == sorted(FAULTS) and set(OF_EXPERTS) <= set(FAULTS)


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_a_known_mistake_is_caught_and_named(name: str, tmp_path: Path) -> None:
    overrides, options, parameter = CASES[name]
    found, _ = verify("recipe.yaml", recipe(tmp_path, *overrides, **options), Options(steps=2, fault=injected(name)))
    assert found.finding is not None
    assert found.finding.parameter == parameter
    assert DIAGNOSES[name] in found.finding.cause
    assert not all(check.holds for check in found.checks)


@pytest.mark.distributed
@pytest.mark.parametrize("scaled", [DYNAMIC, STAGES], ids=["dynamic", "stages"])
def test_a_length_that_is_lost_where_a_document_is_cut_is_named(scaled: str, tmp_path: Path) -> None:
    by_length = recipe(tmp_path, CONTEXT, scaled, *(["steps=null", "data.max_length=512"] if scaled == STAGES else []))
    found, _ = verify("recipe.yaml", by_length, Options(steps=2))
    assert found.finding is None and all(check.holds for check in found.checks)
    assert any(line.startswith("rotations by length as of a model that was trained at") for line in found.about)
    assert ("stages of 96, 512 tokens, a step of each" in found.about) == (scaled == STAGES)
    found, _ = verify("recipe.yaml", by_length, Options(steps=2, fault=injected("document-lengths-lost")))
    assert found.finding is not None and DIAGNOSES["document-lengths-lost"] in found.finding.cause


@pytest.mark.distributed
def test_averages_and_the_result_are_compared(tmp_path: Path) -> None:
    averaged = recipe(tmp_path, "parallel={shard: zero3, tensor: 2}", "ema=0.9")
    found, _ = verify("recipe.yaml", averaged, Options(steps=1))
    assert found.finding is None
    checks = {check.what: check.error for check in found.checks}
    assert checks["saved average, loaded"] == checks["exported result"] == checks["gradient not finite"] == 0
    assert checks["moving average"] < 1e-5 and checks["metrics"] < 1e-5


@pytest.mark.distributed
def test_a_sink_that_each_rank_of_a_ring_counts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(*args: Any) -> ModelConfig:
        return small_config(vocab_size=400).with_layers(lambda layer: replace(layer, mixer=with_sinks(layer.mixer)))

    def with_sinks(mixer: Mixer) -> Heads:
        assert isinstance(mixer, Heads)
        return replace(mixer, sinks=True)

    monkeypatch.setattr(decoder_proxy, "_config", config)
    found, _ = verify("recipe.yaml", recipe(tmp_path, CONTEXT), Options(steps=2))
    assert found.finding is None and all(check.holds for check in found.checks)
    found, _ = verify("recipe.yaml", recipe(tmp_path, CONTEXT), Options(steps=2, fault=injected(OF_SINKS)))
    assert found.finding is not None and "a sink on each rank" in found.finding.cause
    assert found.finding.parameter == "embed_tokens.weight"
    gathered = recipe(tmp_path, "parallel={context: {size: 2, method: gather}}")
    with pytest.raises(RecipeError, match=f"--inject {injected(OF_SINKS)}: not a mistake that this layout can make"):
        verify("recipe.yaml", gathered, Options(steps=2, fault=injected(OF_SINKS)))


def images(folder: Path, *overrides: str) -> Recipe:
    digits = digits_folder(folder / "digits", train=64, test=8)
    file = folder / "recipe.yaml"
    file.write_text(
        f"stage: classify\nmodel: {{preset: lenet5}}\ndata: {digits}\nbatch: {{sequences: 16}}\nsteps: 4\n"
        f"output: {folder / 'run'}\n"
    )
    return load(file, list(overrides)).recipe


@pytest.mark.distributed
def test_a_classifier_of_images_is_verified_as_it_is(tmp_path: Path) -> None:
    found, rows = verify("recipe.yaml", images(tmp_path, "parallel=zero2"), Options(steps=2, traffic=True))
    assert found.finding is None and all(check.holds for check in found.checks)
    assert found.about[0] == "model: LeNet-5, which is small as it is; 61,706 parameters"
    assert "the recipe's own data; 2 steps of 5 images for 2 data ranks" in found.about[1]
    errors = {check.what: check.error for check in found.checks}
    assert errors["gradients"] < 5e-6 and errors["saved weights, loaded"] == 0
    assert [module.name for module in found.modules] == ["c1", "c3", "c5", "f6", "output"]
    assert rows and all(row.agrees for row in rows)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fault", "ratio"),
    [
        ("mean-of-means", "images count 0.83 to 1.25 times, by rank 1.25, 0.83"),
        ("repeated-rows", "6 targets instead of 5"),
    ],
)
def test_mistakes_with_images_are_named(fault: str, ratio: str, tmp_path: Path) -> None:
    found, _ = verify("recipe.yaml", images(tmp_path, "parallel.data=2"), Options(steps=1, fault=injected(fault)))
    assert found.finding is not None and found.finding.parameter == "c1.weight"
    assert found.finding.ratio == ratio and DIAGNOSES[fault] in found.finding.cause


def test_images_that_are_not_there_are_made(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    layout, rows = predict_traffic(images(tmp_path, f"data={tmp_path / 'nothing'}", "parallel=zero3"), 8, Options())
    assert layout == Layout(shard=8) and rows and all(row.agrees for row in rows)


@pytest.mark.slow
def test_a_step_of_512_fake_processes_is_counted(tmp_path: Path) -> None:
    layout, rows = predict_traffic(recipe(tmp_path, "parallel={shard: zero3, replicate: 8, tensor: 4}"), 512, Options())
    assert layout == Layout(replicate=8, shard=16, tensor=4)
    assert {row.axis for row in rows} == {"replicate", "replicate x shard", "shard", "tensor"}
    assert all(row.agrees for row in rows)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["parallel={tensor: 3}"], {}, "parallel.tensor: 3 does not divide the model's 4 attention heads. Use 2 or 4"),
        (["parallel={tensor: 2}"], {"processes": 3}, "parallel.tensor: 2 does not divide the 3 processes"),
        ([], {"processes": 1}, "there is nothing to compare it with"),
        (["parallel.workers=threads"], {}, "parallel.workers: threads are one process"),
        (["parallel.device_map=auto"], {}, "parallel.device_map: it divides one process"),
        (
            ["parallel.data=2"],
            {"fault": injected("stale")},
            "--inject builders.faults:stale: not a mistake that",
        ),
        (["parallel.data=2"], {"fault": injected("nothing")}, "--inject builders.faults:nothing: not a mistake"),
    ],
)
def test_what_does_not_fit_is_told(overrides: list[str], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        verify("recipe.yaml", recipe(tmp_path, *overrides), Options(**options))
    assert message in str(error.value)


def test_traffic_without_a_formula_is_told(tmp_path: Path) -> None:
    pairs = recipe(tmp_path, "parallel.data=2", rows_of="preference")
    with pytest.raises(RecipeError, match="--traffic: there are no formulas for stage preference"):
        verify("recipe.yaml", pairs, Options(traffic=True))
    with pytest.raises(RecipeError, match="--traffic: there are no formulas for stage preference"):
        predict_traffic(pairs, 8, Options())


@pytest.mark.distributed
def test_many_data_ranks_are_verified_on_few(tmp_path: Path) -> None:
    found, _ = verify("recipe.yaml", recipe(tmp_path, "parallel={data: 64}"), Options(steps=1))
    assert found.processes == 2 and "2 data ranks instead of 64 (--processes)" in found.about


@pytest.mark.distributed
def test_processes_that_do_not_come_to_an_end_are_told(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"there is no result of layout-0, layout-1, reference-0, perturbed-0"):
        verify("recipe.yaml", recipe(tmp_path, "parallel.data=2"), Options(timeout_s=0.01))


@pytest.mark.distributed
def test_a_wrong_adapter_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"adapter\.targets: 'q_prj' matches no layer"):
        verify(
            "recipe.yaml",
            recipe(tmp_path, "parallel.data=2", "adapter={kind: lora, targets: [q_prj]}", base=True),
            Options(),
        )
