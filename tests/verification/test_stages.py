"""Verifications of reward models, distillation, and references that are no plain second model, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders.adapter_folders import adapter_folder
from builders.distillation_worker import teacher_folder
from builders.faults import injected
from builders.tiny_world import tiny_world, write_rows

from danlu.core.errors import RecipeError
from danlu.models.hf_folder import read_config
from danlu.numerics.relative_error import worst_error
from danlu.parallel.layout import Layout
from danlu.recipe import Recipe, load, sections
from danlu.verification.decoder_proxy import prepare_proxy
from danlu.verification.verification import Options, verify

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"data": 2},
    "zero3": {"shard": "zero3"},
    "zero2 x tensor": {"shard": "zero2", "tensor": 2},
    "tensor, sequence": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
    "ulysses, zero3": {"context": {"size": 2, "method": "ulysses"}, "shard": "zero3"},
    "pipeline": {"pipeline": 2},
}
LORA = {"adapter": {"kind": "lora", "rank": 8, "dropout": 0.2}}
QLORA = {**LORA, "quantization": "nf4"}
CASES = (
    "pairs",
    "steps of answers, lora",
    "two teachers, hidden states",
    "cached teacher",
    "quantized teacher, lora",
    "adapter-off",
    "nf4 reference, qlora",
)


def changes(case: str) -> dict[str, Any]:
    """What a recipe of the case has of its own."""
    teacher = teacher_folder(tiny_world())
    base = {"model": str(tiny_world().base)}
    second = {"model": teacher_folder(tiny_world(), "second-teacher", seed=8, hidden_size=32), "top_k": 20}
    match case:
        case "pairs":
            return {"stage": "reward", "objective": {"kind": "bradley-terry", "centring": 0.1}}
        case "steps of answers, lora":
            return {"stage": "reward", "objective": "stepwise", **base, **LORA}
        case "two teachers, hidden states":
            objective = [{"kind": "jensen-shannon", "beta": 0.3, "cross_entropy": 0.5}, {"kind": "hidden"}]
            return {"stage": "distill", "teacher": [teacher, {**second, "weight": 0.5}], "objective": objective}
        case "cached teacher":
            cached = {"model": teacher, "top_k": 12, "cache": True}
            return {"stage": "distill", "teacher": cached, "objective": {"kind": "reverse", "temperature": 1.5}}
        case "quantized teacher, lora":
            objective = {"kind": "forward", "temperature": 2.0, "cross_entropy": 0.3}
            quantized = {"model": teacher, "quantization": "nf4"}
            return {"stage": "distill", "teacher": quantized, "objective": objective, **base, **LORA}
        case "adapter-off":
            return {"stage": "dpo", "reference": "adapter-off", **base, **LORA}
    reference = {"kind": "frozen", "quantization": "nf4"}
    return {"stage": "dpo", "reference": reference, **base, **QLORA}


def row(number: int, stepwise: bool) -> dict[str, Any]:
    """A pair of answers with a margin, or an answer of one to three steps."""
    prompt = f"{number} plus {number}?" * (1 + number % 3)
    if stepwise:
        steps = range(1 + number % 3)
        labels = [(number + step) % 2 == 0 for step in steps]
        return {"prompt": prompt, "completions": [f"step {step} of {number}." for step in steps], "labels": labels}
    answer = f"{2 * number}." * (1 + number % 2)
    return {"prompt": prompt, "chosen": answer, "rejected": "No idea, sorry.", "margin": 0.1 * number}


def recipe(folder: Path, parallel: dict[str, Any], own: dict[str, Any]) -> Recipe:
    if own["stage"] != "distill":
        rows = [row(number, own["objective"] == "stepwise" if "objective" in own else False) for number in range(24)]
        own = {**own, "data": {"train": str(write_rows(folder / "rows.jsonl", rows))}, "batch": None}
    file = tiny_world().recipe(folder / "run", folder / "recipe.yaml", parallel=parallel, **own)
    return load(file).recipe


def grid() -> list[Any]:
    """Each case in each layout. Every second of them is slow, so that a quick run has three layouts of each case. Those
    of pipelines are slow but one: `parallel/test_pipeline_stages.py` has more."""

    def is_slow(line: int, column: int, layout: str) -> bool:
        return line > 0 if layout == "pipeline" else bool((line + column) % 2)

    return [
        pytest.param(
            case,
            layout,
            marks=[pytest.mark.slow] if is_slow(line, column, layout) else [],
            id=f"{case}: {layout}",
        )
        for line, case in enumerate(CASES)
        for column, layout in enumerate(LAYOUTS)
    ]


@pytest.mark.distributed
@pytest.mark.parametrize(("case", "layout"), grid())
def test_a_stage_is_the_same_in_every_layout(case: str, layout: str, tmp_path: Path) -> None:
    found, _ = verify("recipe.yaml", recipe(tmp_path, LAYOUTS[layout], changes(case)), Options(steps=1))
    assert found.finding is None and all(check.holds for check in found.checks)
    assert "data: the recipe's own data" in found.about[1]
    errors = {check.what: check.error for check in found.checks}
    assert worst_error([errors["loss"], errors["evaluation"]]) < 1e-6 and errors["gradients"] < 5e-6
    assert errors["saved weights, loaded"] == 0


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "fault", "cause"),
    [
        ("pairs", "divisors-per-rank", "one process's own pairs"),
        ("steps of answers, lora", "divisors-per-rank", "one process's own pairs"),
        ("two teachers, hidden states", "frozen-models-differ", "not the same on all processes"),
        ("nf4 reference, qlora", "frozen-models-differ", "not the same on all processes"),
    ],
)
def test_mistakes_of_these_stages_are_caught(case: str, fault: str, cause: str, tmp_path: Path) -> None:
    found, _ = verify(
        "recipe.yaml", recipe(tmp_path, LAYOUTS["ddp"], changes(case)), Options(steps=1, fault=injected(fault))
    )
    assert found.finding is not None and found.finding.stage == "loss of step 1"
    assert cause in found.finding.cause


@pytest.mark.usefixtures("tokenising_here")
def test_teachers_get_small_and_keep_what_tells_them_apart(tmp_path: Path) -> None:
    wide = teacher_folder(tiny_world(), "more-rows", seed=9, hidden_size=64, vocab_size=408)
    teachers = [
        {"model": wide, "quantization": "nf4", "top_k": 300, "weight": 2.0},
        teacher_folder(tiny_world()),
    ]
    own = {"stage": "distill", "teacher": teachers, "objective": "forward"}
    loaded = recipe(tmp_path, {"data": 2}, own)
    prepared = prepare_proxy(loaded, Layout(replicate=2), 3, tmp_path / "small", full=False)
    first, second = prepared.recipe.teacher or []
    assert first.weight == 2.0 and first.quantization is not None and first.top_k == 64
    policy, wider, plain = (
        read_config(Path(str(path))) for path in (prepared.recipe.model.path, first.model, second.model)
    )
    assert (policy.vocab_size, wider.vocab_size, plain.vocab_size) == (256, 264, 256)
    assert wider.hidden_size != policy.hidden_size != plain.hidden_size
    assert [note for note in prepared.notes if "teacher" in note] == [
        "teacher is a small model with weights of its own",
        "teacher.1 is a small model with weights of its own",
    ]
    with pytest.raises(RecipeError, match=r"parallel\.tensor cuts the rows of all embeddings alike"):
        prepare_proxy(recipe(tmp_path, {"tensor": 2}, own), Layout(tensor=2), 3, tmp_path / "cut", full=False)


def test_a_teacher_upon_adapters_is_one_of_small_ones(tmp_path: Path) -> None:
    adapter_folder(tiny_world().base, tmp_path / "tuned", sections.Ia3())
    own = {"stage": "distill", "teacher": str(tmp_path / "tuned"), "objective": "forward"}
    loaded = recipe(tmp_path, {"data": 2}, own)
    prepared = prepare_proxy(loaded, Layout(replicate=2), 3, tmp_path / "small", full=False)
    (teacher,) = prepared.recipe.teacher or []
    assert json.loads((Path(teacher.model) / "adapter_config.json").read_text())["peft_type"] == "IA3"
    assert any("with adapters of the same kinds: ia3" in note for note in prepared.notes)


@pytest.mark.parametrize("case", ["pairs", "cached teacher"])
def test_traffic_of_these_stages_is_refused_in_words(case: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--traffic: there are no formulas for stage (reward|distill)"):
        verify("recipe.yaml", recipe(tmp_path, LAYOUTS["ddp"], changes(case)), Options(traffic=True))
