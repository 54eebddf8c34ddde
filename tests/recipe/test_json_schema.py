"""The schema for editors admits what danlu loads, in short and full form, and little else."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from danlu.core.shipped_files import shipped_folder
from danlu.recipe import Recipe, library, resolved_yaml
from danlu.recipe.json_schema import schema
from danlu.recipe.yaml_reader import parse
from tests.recipe.strategies import RECIPES

SCHEMA = schema()


def admits(rule: dict[str, Any], value: Any) -> bool:
    """JSON Schema, as far as the recipe's schema uses it."""
    if "$ref" in rule:
        return admits(SCHEMA["$defs"][rule["$ref"].rpartition("/")[2]], value)
    if "if" in rule:
        return admits(rule["then" if admits(rule["if"], value) else "else"], value)
    if "anyOf" in rule:
        return any(admits(option, value) for option in rule["anyOf"])
    if "enum" in rule:
        return value in rule["enum"]
    if "const" in rule:
        return bool(value == rule["const"] and type(value) is type(rule["const"]))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    types = {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "integer": number and value == int(value),
        "number": number,
        "null": value is None,
    }
    if "type" in rule and not types[rule["type"]]:
        return False
    if isinstance(value, dict):
        known, others = rule.get("properties", {}), rule.get("additionalProperties", True)
        return set(rule.get("required", ())) <= set(value) and all(
            admits(known[key], entry) if key in known else others is not False for key, entry in value.items()
        )
    if isinstance(value, list):
        places = [*rule.get("prefixItems", ()), *[rule.get("items", {})] * len(value)]
        fits = all(admits(place, entry) for place, entry in zip(places, value, strict=False))
        return fits and len(value) >= rule.get("minItems", 0) and len(value) <= rule.get("maxItems", len(value))
    if number:
        return (
            rule.get("minimum", value) <= value <= rule.get("maximum", value)
            and (value > rule["exclusiveMinimum"] if "exclusiveMinimum" in rule else True)
            and (value < rule["exclusiveMaximum"] if "exclusiveMaximum" in rule else True)
        )
    return True


def plain(text: str) -> Any:
    tree = parse(text, "recipe.yaml", [])
    assert tree is not None
    return tree.plain


SHORT = """
stage: sft
model: base
data: [a.json, {path: b.json, weight: 2}]
optimizer: adamw
schedule: cosine
batch: 8
watch: skip
ema: 0.9
evaluation: {every: 5, early_stop: 2, samples: hello}
rollout: vllm
checkpoint: 100
log: 5
output: x
"""


@pytest.mark.parametrize("name", library.shipped())
def test_the_recipes_that_come_with_danlu(name: str) -> None:
    assert admits(SCHEMA, plain((shipped_folder() / f"{name}.yaml").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "change",
    [
        "",
        "rollout: {draft: ngram}",
        "rollout: {draft: {kind: model, model: small}}",
        "data: a.json",
        "data: {train: a.json, packing: false, eval: b.json}",
        "data: {train: [a], eval: 5}",
        "{stage: grpo, rewards: 'my.py:short'}",
        "{stage: rl, rewards: ['my.py:short', {kind: math, column: a}], objective: {kl: 0.1, clip: [0.1, 0.2]}}",
        "{stage: ppo, rewards: [{kind: length, most: 9}], objective: {kl: {in: reward}, clip: 0.1}, value: policy}",
    ],
)
def test_short_forms(change: str) -> None:
    assert admits(SCHEMA, {**plain(SHORT), **(yaml.safe_load(change) or {})})


@pytest.mark.parametrize(
    "change",
    [
        "seedd: 1",
        "optimizer: adam",
        "optimizer: {kind: adamw, momentum: 0.9}",
        "data: {train: a.json, packing: maybe}",
        "data: {train: a.json, max_length: 0}",
        "checkpoint: often",
        "ema: 1.5",
        "compile: 'yes'",
        "rollout: paged",
        "rollout: {draft: {kind: ngram, model: small}}",
        "rollout: {cache_gib: 0}",
        "rewards: {kind: math}",
        "objective: {kind: grpo, kl: {in: advantage}}",
        "objective: {kind: grpo, gae: 0.9}",
    ],
)
def test_what_an_editor_underlines(change: str) -> None:
    assert not admits(SCHEMA, {**plain(SHORT), **yaml.safe_load(change)})


CHAIN: dict[str, Any] = {
    "output": "x",
    "data": {"max_length": 64},
    "stages": [{"name": "a", "stage": "sft", "model": "m", "data": "a.json"}, {"stage": "dpo", "from": "a"}],
}


def test_a_chain() -> None:
    assert admits(SCHEMA, CHAIN)
    for change in ({"output": None}, {"stages": []}, {"stages": "sft"}, {"seedd": 1}, {"stages": [{"form": "a"}]}):
        assert not admits(SCHEMA, {**CHAIN, **change}), change
    rounding = {"stage": "quantize", "from": "a", "quantization": "nearest"}
    assert admits(SCHEMA, {**CHAIN, "stages": [*CHAIN["stages"], rounding]})
    for change in ({"quantization": None}, {"steps": 3}, {"output": "x"}):
        assert not admits(SCHEMA, {**CHAIN, "stages": [*CHAIN["stages"], {**rounding, **change}]}), change
    assert not admits(SCHEMA, {**plain(SHORT), "data": {"max_length": 64}})  # only a chain may leave rows to its stages


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipe=RECIPES)
def test_full_forms(recipe: Recipe) -> None:
    assert admits(SCHEMA, plain(resolved_yaml(recipe)))


def test_recipes_of_quantize() -> None:
    short = {
        "stage": "quantize",
        "model": "runs/sft",
        "calibration": "rows.json#9",
        "quantization": "gptq",
        "output": "o",
    }
    full = {
        **short,
        "calibration": {"data": ["rows.json"], "tokens": 600, "on_bad_row": "skip"},
        "quantization": [{"kind": "smoothquant", "alpha": 0.5}, {"kind": "awq", "group": 64}],
        "export": "mxfp8",
    }
    assert admits(SCHEMA, short) and admits(SCHEMA, full)
    for change in (
        {"steps": 3},
        {"export": "gguf"},
        {"calibration": {"tokens": 9}},
        {"quantization": "nf4"},
        {"stage": "sft"},
    ):
        assert not admits(SCHEMA, {**full, **change}), change


def test_recipes_of_curate() -> None:
    recipe = {
        "stage": "curate",
        "data": [{"path": "crawl", "format": "text"}, "rows.jsonl#9"],
        "steps": [
            "repair",
            {"kind": "language", "keep": ["en", "zh"]},
            {"kind": "quality", "rules": ["c4", {"kind": "gopher", "words": [30, 1000]}]},
            {"kind": "deduplicate", "by": ["exact", "minhash"], "bands": [14, 8]},
            {"kind": "decontaminate", "against": "test.jsonl"},
        ],
        "output": "o",
    }
    assert admits(SCHEMA, recipe)
    for change in (
        {"steps": 3},
        {"steps": ["repiar"]},
        {"steps": [{"kind": "personal", "kinds": ["name"]}]},
        {"model": "m"},
    ):
        assert not admits(SCHEMA, {**recipe, **change}), change


def test_recipes_of_synthesize() -> None:
    short = {"stage": "synthesize", "model": "runs/sft", "data": "seeds.jsonl", "steps": "answer", "output": "o"}
    server = {"url": "http://localhost:8000/v1", "name": "large", "key": "env:API_KEY", "price": [0.1, 0.4]}
    steps = [{"kind": "self-instruct", "rows": 9, "shots": {"seed": 2, "made": 0}}, {"kind": "answer", "model": "a"}]
    full = {**short, "model": server, "steps": steps, "budget": {"tokens": 5e6}}
    assert admits(SCHEMA, short) and admits(SCHEMA, full)
    for change in ({"batch": {"rows": 3}}, {"steps": [{"kind": "answr"}]}, {"budget": 3.5}, {"stage": "quantize"}):
        assert not admits(SCHEMA, {**full, **change}), change


def test_descriptions() -> None:
    schema = SCHEMA["else"]
    while "else" in schema:  # of stages that do not train
        schema = schema["else"]
    assert schema["properties"]["output"]["description"] == "The run folder."
    source = SCHEMA["$defs"]["Source"]["anyOf"][0]["properties"]["rows"]
    assert source["description"].startswith("Take only this many rows")
