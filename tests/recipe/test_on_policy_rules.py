"""Stage distill with `on_policy`: its short forms, and rules of which each row of the table breaks exactly one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from danlu.core.errors import RecipeError
from danlu.recipe import Recipe, load, resolved_yaml

Write = Callable[..., str]

BASE = {
    "stage": "distill", "model": "base", "data": "rows.json", "teacher": "large", "on_policy": "0.5", "output": "runs/x"
}  # fmt: skip


@pytest.fixture
def read(write: Write) -> Callable[..., Recipe]:
    def of(**changed: str) -> Recipe:
        merged = {**BASE, **changed}
        return load(write("\n".join(f"{key}: {value}" for key, value in merged.items() if value))).recipe

    return of


def problems(read: Callable[..., Recipe], **changed: str) -> list[str]:
    try:
        read(**changed)
    except RecipeError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("given", "share", "packing"),
    [("true", 1, "none"), ("0.5", 0.5, "none"), ("1", 1, "none"), ("false", 0, "best-fit"), ("", 0, "best-fit")],
)
def test_a_share_or_a_switch(read: Callable[..., Recipe], write: Write, given: str, share: float, packing: str) -> None:
    recipe = read(on_policy=given)
    assert float(recipe.on_policy) == share and recipe.data.packing.kind == packing
    assert load(write(resolved_yaml(recipe))).recipe == recipe


BROKEN: list[tuple[dict[str, str], str]] = [
    ({"objective": "{kind: forward, weight: 0.5}"}, "objective.0.weight: only read with stage rl, next to a policy"),
    (
        {"objective": "{kind: reverse, policy_gradient: true}"},
        "objective.0.policy_gradient: only read with stage rl. Leave it out; on_policy has the same gradient in the",
    ),
    ({"on_policy": "1.5"}, "on_policy: expected"),
    ({"stage": "sft", "teacher": ""}, "on_policy: only read with stage distill; this is sft"),
    (
        {"stage": "grpo", "teacher": "", "rewards": "{kind: math, column: a}"},
        "on_policy: only read with stage distill; this is rl: all of its answers are the policy's own",
    ),
    (
        {"teacher": "{model: large, top_k: 8, cache: true}"},
        "teacher.0.cache: true: what the policy will answer is not known before training. Leave it out, or on_policy",
    ),
    (
        {"objective": "{kind: reverse, cross_entropy: 0.3}"},
        "objective.0.cross_entropy: 0.3: the likelihood of rows, and with on_policy the policy would learn its own",
    ),
    ({"data": "{train: rows.json, packing: true}"}, "data.packing.kind: best-fit: with on_policy each row is an item"),
    (
        {"data": "{train: rows.json, streaming: true}", "steps": "10"},
        "data.streaming: on_policy answers rows that are read before training begins. Leave streaming out",
    ),
    (
        {"data": "{train: rows.json, overlong: split}"},
        "data.overlong: with on_policy a row is a prompt that is answered, and cannot be split. Use truncate or drop",
    ),
    ({"data": "{train: rows.json, train_on: all}"}, "data.train_on: all: with on_policy the policy writes what is"),
    (
        {"data": "{train: [{path: rows.json, format: text}]}"},
        "data.train.0.format: rows of format text have no prompt, and on_policy answers one. Use conversations",
    ),
    ({"rollout": "{stop_strings: ['']}"}, "rollout.stop_strings: an empty text ends every answer before it begins"),
    ({"rollout": "{samples: 4}"}, "rollout.samples: only read with stage rl; this is distill"),
    ({"rollout": "{staleness: 1}"}, "rollout.staleness: only read with stage rl; this is distill"),
    (
        {"on_policy": "0.0", "rollout": "{temperature: 0.5}", "evaluation": "{every: 2, samples: hi}"},
        "rollout.temperature: only read with stage rl; this is distill; evaluation.samples has settings of its own",
    ),
    ({"batch": "{prompts: 4}"}, "batch.prompts: only stage rl counts prompts; stage distill takes batch.sequences"),
]


@pytest.mark.parametrize(("changed", "message"), BROKEN)
def test_one_broken_rule(read: Callable[..., Recipe], changed: dict[str, str], message: str) -> None:
    said = problems(read, **changed)
    assert len(said) == 1, said
    assert message in said[0]


@pytest.mark.parametrize(
    "changed",
    [
        {"on_policy": "true", "rollout": "{temperature: 0, max_new_tokens: 2000, stop_strings: [END]}"},
        {"teacher": "[{model: large, top_k: 8, weight: 2}, {model: other, quantization: nf4}]"},
        {"objective": "[{kind: jensen-shannon, beta: 0.1}, hidden]"},
        {"rollout": "{engine: vllm, url: 'http://a:1', top_p: 0.9}", "numerics": "fast"},
        {"data": "{train: rows.json, packing: none, overlong: drop, train_on: last, eval: 5}", "numerics": "exact"},
    ],
)
def test_what_keeps_the_rules(read: Callable[..., Recipe], changed: dict[str, str]) -> None:
    assert problems(read, **changed) == []
