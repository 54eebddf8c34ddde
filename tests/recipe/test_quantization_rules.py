"""`quantization.trained`: formats that can be trained, and what is refused with them."""

from __future__ import annotations

from typing import Any

import pytest

from danlu.recipe import rules
from danlu.recipe.sections import Recipe

SMALL: dict[str, Any] = {
    "stage": "sft",
    "model": {"path": "base"},
    "data": {"train": [{"path": "rows.jsonl"}]},
    "output": "run",
}
INT4: dict[str, Any] = {"kind": "int4", "group": 32, "trained": True}
LORA: dict[str, Any] = {"kind": "lora"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"precision": {"kind": "fp8", "recipe": "tile"}}, "precision.kind: products in 8 bits round weights"),
    ({"numerics": "exact"}, "numerics: the products of rounded weights"),
    ({"compile": True}, "compile: torch.compile does not trace"),
    ({"adapter": {"kind": "ia3"}}, "adapter.kind: the sum of base and adapter is rounded"),
    ({"adapter": {"kind": "dora"}}, "adapter.kind: dora scales the sum"),
    ({"adapter": {**LORA, "dropout": 0.1}}, "adapter.dropout: base and adapter are one matrix"),
    ({"adapter": {"kind": "pissa"}}, "adapter.init: pissa starts from another base"),
    ({"adapter": LORA, "model": {"path": "base", "adapters": ["first"]}}, "model.adapters: one adapter is rounded"),
    (
        {"parallel": {"shard": "zero3"}, "evaluation": {"samples": {"prompts": ["a"]}}},
        "parallel.shard: rollouts and samples gather weights",
    ),
]


def messages(**changes: Any) -> list[str]:
    recipe = Recipe.model_validate({**SMALL, **changes})
    return [f"{problem.key}: {problem.message}" for problem in rules.problems(recipe)]


@pytest.mark.parametrize(("changes", "text"), REFUSED)
def test_settings_that_weights_are_not_rounded_with(changes: dict[str, Any], text: str) -> None:
    """The control is the recipe without the format."""
    (message,) = messages(quantization=INT4, **changes)
    assert message.startswith(text) and "or leave quantization.trained out" in message
    assert not messages(**changes)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_formats_that_cannot_be_trained(kind: str) -> None:
    (message,) = messages(quantization={"kind": kind, "trained": True})
    assert message.startswith("quantization.trained: ") and message.endswith("int3, int2, fp8, mxfp8, mxfp4, nvfp4")
    assert not messages(quantization={"kind": kind}, adapter=LORA)


def test_what_goes_together() -> None:
    for changes in ({}, {"adapter": LORA}, {"parallel": {"shard": "zero3"}}, {"parallel": {"pipeline": {"stages": 2}}}):
        assert not messages(quantization=INT4, **changes)
    assert not messages(quantization={"kind": "nvfp4", "trained": True})
    assert messages(quantization={"kind": "nvfp4", "trained": True}, parallel={"tensor": 2})
    assert messages(quantization={"kind": "fp8", "group": 32, "trained": True})
    (unread,) = messages(quantization={"kind": "int4", "symmetric": False}, adapter=LORA)
    assert unread.startswith("quantization.symmetric: only read with trained")
    (frozen,) = messages(quantization={"kind": "int4"})
    assert "`trained: true` trains all weights for this format" in frozen


def test_qa_lora_has_groups_of_integers() -> None:
    """Of a base in few bits, or of dense numbers that were made of such a base."""
    adapter = {"kind": "qa-lora", "group": 64}
    assert not messages(adapter=adapter)
    assert not messages(adapter=adapter, quantization={"kind": "int4", "group": 32})
    (group,) = messages(adapter=adapter, quantization={"kind": "int4"})
    assert group.startswith("adapter.group: 64 inputs share a column of A, and 128 a scale")
    (kind,) = messages(adapter=adapter, quantization={"kind": "nf4"})
    assert kind.startswith("quantization.kind: nf4 has no zero")
    (init,) = messages(adapter={**adapter, "init": "pissa"})
    assert init.startswith("adapter.init: pissa takes its start out of single weights")
    (trained,) = messages(adapter=adapter, quantization=INT4)
    assert trained.startswith("adapter.kind: qa-lora merges into the zeros")
