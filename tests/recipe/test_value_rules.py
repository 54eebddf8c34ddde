"""The model of values of PPO: each row of the table breaks one rule; and what follows from what is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from danlu.core.errors import RecipeError
from danlu.recipe import Recipe, load
from danlu.recipe.sections import Lora, RsLora
from danlu.recipe.value import value_adapter, value_rate, value_share

BASE = {"stage": "ppo", "model": "base", "data": "rows.json", "rewards": "[my.py:short]", "output": "runs/x"}
Write = Callable[..., str]


@pytest.fixture
def read(write: Write) -> Callable[..., Recipe]:
    Path("my.py").write_text("def short(completion, **row): return 0.0")
    lines = lambda changed: "\n".join(f"{key}: {value}" for key, value in {**BASE, **changed}.items() if value)  # noqa: E731
    return lambda **changed: load(write(lines(changed))).recipe


WRONG = {
    "{share: base}": ({}, "value.share: base: the policy trains all of the model"),
    "{share: base, rate_ratio: 2}": (
        {"adapter": "prefix", "objective": "{kl: null}"},
        "value.share: base: adapter: prefix puts virtual tokens",
    ),
    "{share: base, warmup: 1}": (
        {"adapter": "{kind: lora, modules_to_save: [lm_head]}"},
        "value.share: base: adapter: modules_to_save puts trained copies",
    ),
    "{share: base, adapter: {kind: lora, bias: all}}": ({"adapter": "lora"}, "value.adapter: bias puts trained copies"),
    "{share: base, adapter: prompt}": ({"adapter": "lora"}, "value.adapter: prompt puts virtual tokens"),
    "{share: base, adapter: pissa}": ({"adapter": "lora"}, "value.adapter.init: pissa takes its start out of the base"),
    "{share: base, adapter: continue}": ({"adapter": "lora"}, "value.adapter.kind: continue: the last of"),
    "{share: base, adapter: dora}": ({"adapter": "pissa"}, "value.adapter.kind: dora scales the weights"),
    "{share: base, adapter: lora, model: runs/reward}": (
        {"adapter": "lora"},
        "value.adapter: not read with value.model",
    ),
    "{share: none, adapter: lora}": ({}, "value.adapter: share: none trains a model of its own as a whole"),
    "{adapter: lora}": ({}, "value.adapter: share: policy is a head on the policy itself"),
    "{warmup: 3}": ({}, "value.warmup: share: policy is a head on the policy itself"),
    "{share: base, adapter: {kind: lora, svd_iterations: 4}}": (
        {"adapter": "lora"},
        "value.adapter.svd_iterations: only read with init: pissa",
    ),
    "{share: none, warmup: 5}": ({"steps": "5"}, "value.warmup: the policy is held for 5 steps, and there are 5"),
    "{learning_rate: 1.0e-3, rate_ratio: 2}": ({}, "value.rate_ratio: value.learning_rate says it already"),
    "{learning_rate: 1.0e-3}": ({"optimizer": "{learning_rate: 0.0}"}, "value.learning_rate: is reached as a multiple"),
}


@pytest.mark.parametrize("value", WRONG)
def test_each_wrong_model_of_values_is_told(read: Callable[..., Recipe], value: str) -> None:
    more, message = WRONG[value]
    with pytest.raises(RecipeError) as error:
        read(value=value, **more)
    (problem,) = error.value.problems
    assert message in problem


def test_what_follows_from_what_is_given(read: Callable[..., Recipe]) -> None:
    assert value_share(read()) == "policy" and value_share(read(stage="grpo")) is None
    base = read(
        value="{share: base, learning_rate: 1.0e-3, warmup: 3}", adapter="rslora", optimizer="{learning_rate: 1.0e-4}"
    )
    assert value_share(base) == "base" and value_adapter(base) == Lora() and value_rate(base) == pytest.approx(10)
    assert value_adapter(read(value="{share: base, adapter: rslora}", adapter="lora")) == RsLora()
    assert value_adapter(read(value="{share: base, model: runs/reward}", adapter="lora")) is None
    assert value_rate(read(value="{rate_ratio: 3}")) == 3 and value_adapter(read(value="none")) is None
