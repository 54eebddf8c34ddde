"""`precision`: its forms, and what products in 8 bits are refused with."""

from __future__ import annotations

from typing import Any

import pytest

from danlu.recipe import rules
from danlu.recipe.sections import Fp8Products, Recipe

SMALL: dict[str, Any] = {
    "stage": "sft",
    "model": {"path": "base"},
    "data": {"train": [{"path": "rows.jsonl"}]},
    "output": "run",
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("tile", {"quantization": {"kind": "nf4"}, "adapter": {"kind": "lora"}}, "quantization: a quantized base is"),
    ("tile", {"numerics": "exact"}, "numerics: blocks along tokens share a scale"),
    ("tile", {"compile": True}, "compile: torch.compile does not trace"),
    ("tile", {"parallel": {"tensor": 2}}, "parallel.tensor: scales are of blocks of features"),
    ("row", {"parallel": {"context": {"size": 2}}}, "parallel.context.size: scales are of blocks of tokens"),
    ("tile", {"parallel": {"expert": 2}}, "parallel.expert: scales are of blocks of rows"),
]


def messages(precision: Any, **changes: Any) -> list[str]:
    recipe = Recipe.model_validate({**SMALL, "precision": precision, **changes})
    return [f"{problem.key}: {problem.message}" for problem in rules.problems(recipe)]


@pytest.mark.parametrize(("fp8", "changes", "text"), REFUSED)
def test_settings_that_have_no_8_bit_products_are_refused(fp8: str, changes: dict[str, Any], text: str) -> None:
    """The control is bf16."""
    (message,) = messages({"kind": "fp8", "recipe": fp8}, **changes)
    assert message.startswith(text) and "or precision: bf16" in message
    assert not messages("bf16", **changes)


def test_shards_and_pipelines_have_8_bit_products() -> None:
    for parallel in ({"shard": "zero3"}, {"pipeline": {"stages": 2}}):
        assert not messages({"kind": "fp8", "recipe": "tile"}, parallel=parallel)


@pytest.mark.parametrize("stage", ["rl", "distill"])
def test_answers_of_the_policy_are_refused(stage: str) -> None:
    own = {"on_policy": True} if stage == "distill" else {}
    key = "stage" if stage == "rl" else "on_policy"
    assert any(
        text.startswith(f"{key}: the engine multiplies") for text in messages({"kind": "fp8"}, stage=stage, **own)
    )
    assert not any("the engine multiplies" in text for text in messages("bf16", stage=stage, **own))


def test_the_type_of_activations_and_the_name_of_products() -> None:
    narrow = Recipe.model_validate({**SMALL, "precision": {"kind": "fp8"}})
    assert (narrow.precision, narrow.activations, narrow.precision_name) == (Fp8Products(), "bf16", "fp8")
    wide = Recipe.model_validate({**SMALL, "precision": {"kind": "fp8", "activations": "fp32"}})
    assert wide.activations == "fp32"
    plain = Recipe.model_validate({**SMALL, "precision": "fp16"})
    assert (plain.fp8, plain.activations, plain.precision_name) == (None, "fp16", "fp16")
