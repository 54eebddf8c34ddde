"""Online DPO as whole runs: a run on pairs as they are drawn is one of offline DPO on the same pairs; it learns."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import pytest
from builders.tiny_world import World, metrics
from safetensors.torch import load_file
from test_rl_runs import assert_goes_on, recipe_file, run, run_layouts, steps

from danlu.core.types import Pack
from danlu.data.batch import empty_like
from danlu.data.tokenizing import tokenizer_info
from danlu.recipe import Recipe, load
from danlu.rl.answer_pairs import LABEL, PairEstimator
from danlu.run.train import train as train_recipe
from danlu.stages.protocols import StageData
from danlu.stages.reader import tokenizer_of
from danlu.stages.table import STAGES
from danlu.verification.data import ItemList

PAIRS: dict[str, Any] = {
    "stage": "online-dpo",
    "rollout": {"samples": 3, "max_new_tokens": 6, "temperature": 0.9, "top_p": 0.95},
    "steps": 4,
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Pack]:
    """The items of all rollouts of this test's runs, in their order."""
    items: list[Pack] = []
    real = PairEstimator.estimate

    def recorded(*arguments: Any) -> Any:
        made, numbers = real(*arguments)
        items.extend(made)
        return made, numbers

    monkeypatch.setattr(PairEstimator, "estimate", recorded)
    return items


@dataclass(frozen=True)
class GivenPairs:
    """A `Reader` of trees that are there already."""

    recipe: Recipe
    given: Sequence[Pack]
    items = "pairs"
    counted = "tokens"

    def read(self, stream: TextIO) -> StageData:
        info = tokenizer_info(tokenizer_of(self.recipe))
        empty = empty_like(self.given[0].samples[0])
        return StageData(ItemList(self.given), len(self.given), None, [], tokenizer=info, empty=empty)

    def amount(self, items: int) -> str:
        return f"{items} pairs"

    def targets(self, items: int) -> int:
        return items * 128


def exchanged(item: Pack) -> Pack:
    """The item with the other answer chosen."""
    (sample,) = item.samples
    return Pack((replace(sample, facts={**sample.facts, LABEL: 1 - sample.facts[LABEL]}),))


TERMS = {
    "sigmoid": {"kind": "sigmoid", "beta": 0.5},
    "sum": [{"kind": "ipo"}, {"kind": "sft", "weight": 0.1}],
    "aot": {"kind": "aot", "beta": 0.5},
}


@pytest.mark.parametrize("name", TERMS)
def test_a_run_is_one_of_offline_dpo_on_the_pairs_that_were_drawn(
    tiny_world: World, tmp_path: Path, drawn: list[Pack], name: str
) -> None:
    shared = {"objective": TERMS[name], "reference": "frozen"}
    online = run(tiny_world, tmp_path / "online", **PAIRS, **shared)
    pairs = [len(item.samples[0].branches) == 3 for item in drawn]
    assert len(drawn) == 16 and sum(pairs) > 0
    turned = [exchanged(item) if number == pairs.index(True) else item for number, item in enumerate(drawn)]
    for folder, given in (("offline", drawn), ("turned", turned)):
        more = {"data": {"eval": None, "prompt": None}, "batch": {"rows": 4, "prompts": None}}
        more |= {"rollout": None, "rewards": None, "evaluation": None}
        given_file = recipe_file(tiny_world, tmp_path / folder, stage="dpo", steps=4, **shared, **more)
        stage = replace(STAGES["preference"], reader=lambda recipe, given=given: GivenPairs(recipe, given))  # type: ignore[misc]
        ended = train_recipe(load(given_file), log=lambda line: None, stream=io.StringIO(), stage=stage)
        assert ended.exit_code == 0
    offline, other = steps(tmp_path / "offline"), steps(tmp_path / "turned")
    assert [line["step"] for line in online] == [line["step"] for line in offline]
    for line, same in zip(online, offline, strict=True):
        for metric in ("loss", "grad_norm", "margin", "accuracy", "trained_tokens"):
            assert line[metric] == same[metric], metric
    weights, same_weights, other_weights = (
        load_file(tmp_path / folder / "model" / "model.safetensors") for folder in ("online", "offline", "turned")
    )
    assert all(weights[key].equal(same_weights[key]) for key in weights)
    assert not all(weights[key].equal(other_weights[key]) for key in weights)  # control
    assert offline[-1]["loss"] != pytest.approx(other[-1]["loss"], rel=1e-4)


def test_a_policy_learns_what_is_preferred_and_says_what_it_compared(tiny_world: World, tmp_path: Path) -> None:
    more = {"rollout": {"samples": 8}, "objective": {"kind": "sigmoid", "beta": 0.3}, "steps": 24}
    lines = run(tiny_world, tmp_path / "run", **{**PAIRS, **more})
    assert {"pairs", "no_signal", "reward", "reward/letters", "length", "truncated", "margin"} <= lines[0].keys()
    assert all(line["pairs"] == 4 * (1 - line["no_signal"]) for line in lines)
    held_out = [line["eval_reward"] for line in metrics(tmp_path / "run") if "eval_reward" in line]
    assert held_out[-1] > held_out[0] + 3  # of greedy answers with at most 6 letters


def test_a_run_stopped_in_a_rollout_goes_on_as_if_it_had_not_been(tiny_world: World, tmp_path: Path) -> None:
    more = {**PAIRS, "batch": {"prompts": 4, "micro": 1, "updates": 2}, "checkpoint": {"every": 1, "keep": 9}}
    more |= {"objective": {"kind": "bco"}, "numerics": "exact"}  # whose running mean goes on, too
    run(tiny_world, tmp_path / "whole", **more)
    assert_goes_on(tiny_world, tmp_path / "whole", 1, **more)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "zero3": (2, {"shard": "zero3"}),
    "pipeline": (2, {"pipeline": 2}),
}


@pytest.fixture(scope="module")
def layouts(tiny_world: World, tmp_path_factory: pytest.TempPathFactory, module_tokenises_here: None) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    run_layouts(tiny_world, folder, LAYOUTS, **PAIRS)
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_the_same(layouts: Path, layout: str) -> None:
    one = steps(layouts / "one")
    for line, other in zip(one, steps(layouts / layout), strict=True):
        for name in ("loss", "grad_norm", "reward", "margin", "pairs"):
            assert other[name] == pytest.approx(line[name], rel=2e-4, abs=2e-6), name
    assert one[0]["grad_norm"] != pytest.approx(one[1]["grad_norm"], rel=2e-4)  # control
