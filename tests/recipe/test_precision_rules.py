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
    ("tensor", {"numerics": "exact"}, "precision.recipe: one scale of a whole tensor changes"),
    ("tile", {"compile": True}, "compile: torch.compile does not trace"),
    ("tensor", {"parallel": {"expert": 2}}, "parallel.expert: an expert's rows are of several micro-batches"),
    ("mxfp8", {"parallel": {"context": {"size": 2}}}, "parallel.context.size: a rank has a part of the tokens"),
    ("mxfp8", {"parallel": {"expert": 2}}, "parallel.expert: a rank has a part of the rows"),
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


def test_layouts_have_8_bit_products() -> None:
    for parallel in ({"shard": "zero3"}, {"pipeline": {"stages": 2}}, {"expert": 2}, {"context": {"size": 2}}):
        assert not messages({"kind": "fp8", "recipe": "tile"}, parallel=parallel)
    for kind in ("mxfp8", "tensor"):
        assert not messages({"kind": "fp8", "recipe": kind}, parallel={"tensor": 2, "sequence": True})


def test_a_policy_gradient_corrects_what_its_rollouts_do_not_round() -> None:
    """numerics: exact rounds alike, and pairs of answers have no ratio to what they were drawn from."""
    rl = {"stage": "rl", "rewards": [{"kind": "exact", "column": "answer"}]}

    def refused(**changes: Any) -> bool:
        return any("nothing corrects" in text for text in messages({"kind": "fp8"}, **rl, **changes))

    assert refused(objective=[{"kind": "grpo"}])
    assert not refused(objective=[{"kind": "grpo", "importance": {"level": "token"}}])
    assert not refused(numerics="exact") and not refused(objective=[])
    server = {"engine": "http", "urls": ["http://localhost:8000"]}
    by_server = messages({"kind": "fp8"}, **rl, numerics="exact", rollout=server)
    assert any(text.startswith("rollout.engine: a server multiplies") for text in by_server)


def test_the_type_of_activations_and_the_name_of_products() -> None:
    narrow = Recipe.model_validate({**SMALL, "precision": {"kind": "fp8"}})
    assert (narrow.precision, narrow.activations, narrow.precision_name) == (Fp8Products(), "bf16", "fp8")
    wide = Recipe.model_validate({**SMALL, "precision": {"kind": "fp8", "activations": "fp32"}})
    assert wide.activations == "fp32"
    plain = Recipe.model_validate({**SMALL, "precision": "fp16"})
    assert (plain.fp8, plain.activations, plain.precision_name) == (None, "fp16", "fp16")
