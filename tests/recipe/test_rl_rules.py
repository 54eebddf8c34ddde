"""Stage rl: its short names and short forms, and rules of which each row of the table breaks exactly one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danlu.core.errors import RecipeError
from danlu.recipe import Recipe, load, resolved_yaml
from danlu.recipe.default_mappings import with_default_mappings
from danlu.recipe.json_schema import schema
from danlu.recipe.reference import resolve_reference
from danlu.recipe.rules import language_stage
from danlu.recipe.sections import (
    AdapterOff,
    BatchSize,
    Dapo,
    DrGrpo,
    Frozen,
    FunctionReward,
    Grpo,
    Gspo,
    Kl,
    MathReward,
    NoReference,
    Overlong,
    Ppo,
    Reinforce,
    Remax,
    Rloo,
    Section,
    Value,
)
from danlu.recipe.sections.base import VariantSection
from danlu.recipe.stage_names import OBJECTIVE_NAMES
from danlu.recipe.type_hints import field_types, subsection_types

Write = Callable[..., str]

BASE = {"stage": "grpo", "model": "base", "data": "rows.json", "rewards": "[my.py:short]", "output": "runs/x"}


def text(**changed: str) -> str:
    merged = {**BASE, **changed}
    return "\n".join(f"{key}: {value}" for key, value in merged.items() if value)


@pytest.fixture
def read(write: Write) -> Callable[..., Recipe]:
    Path("my.py").write_text("def short(completion, **row): return 0.0")
    return lambda **changed: load(write(text(**changed))).recipe


def problems(read: Callable[..., Recipe], **changed: str) -> list[str]:
    try:
        read(**changed)
    except RecipeError as error:
        return error.problems
    return []


IN_REWARD: dict[str, Any] = {"in": "reward", "estimator": "k1", "coefficient": 0.05}

KINDS = {
    "dapo": Dapo(), "dr-grpo": DrGrpo(), "grpo": Grpo(), "gspo": Gspo(), "ppo": Ppo(), "reinforce": Reinforce(),
    "remax": Remax(), "rloo": Rloo(),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_short_names(read: Callable[..., Recipe], name: str) -> None:
    short, full = read(stage=name), read(stage="rl", objective=f"[{{kind: {name}}}]")
    assert short == full
    assert (short.stage, short.objective, short.policy_gradient) == ("rl", [KINDS[name]], KINDS[name])
    assert short.batch == BatchSize(prompts=16) and short.batch.packs(1024) == 16
    assert short.data.packing.kind == "none" and short.row_type is None
    assert short != read(stage="grpo" if name != "grpo" else "ppo")


def test_every_objective_of_the_stage_has_a_short_name() -> None:
    assert {name for name, (stage, _) in OBJECTIVE_NAMES.items() if stage == "rl"} == {*KINDS, "online-dpo"}
    of_training = schema()
    while "else" in of_training:  # chains, and stages that do not train
        of_training = of_training["else"]
    assert set(KINDS) <= set(of_training["properties"]["stage"]["enum"])


def test_an_objective_without_a_kind_is_that_of_the_stage(read: Callable[..., Recipe]) -> None:
    assert read(stage="rl").objective == [Grpo()]
    assert read(stage="ppo", objective="{gae: 0.9}").objective == [Ppo(gae=0.9)]
    assert read(stage="rl", objective="{clip: [0.1, 0.3]}").objective == [Grpo(clip=(0.1, 0.3))]


def test_what_kinds_set() -> None:
    """The defaults that are a paper's, beside GRPO's."""
    differences = {
        "dapo": {"clip": (0.2, 0.28), "resample": 3},
        "dr-grpo": {"scale": "none", "normalise": "constant"},
        "grpo": {},
        "gspo": {"ratio": "sequence", "clip": (3e-4, 4e-4), "normalise": "sequences"},
        "ppo": {"baseline": "none", "scale": "none", "kl": Kl(estimator="k1", **{"in": "reward"})},
        "reinforce": {"baseline": "batch", "scale": "batch"},
        "remax": {"baseline": "greedy", "scale": "none", "normalise": "constant"},
        "rloo": {"baseline": "leave-one-out", "scale": "none", "normalise": "constant"},
    }
    grpo = dict(Grpo())
    for name, section in KINDS.items():
        mine = {key: value for key, value in dict(section).items() if key in grpo and key != "kind"}
        assert {key: value for key, value in mine.items() if value != grpo[key]} == differences[name], name
    assert Grpo().clip_bounds == (0.2, 0.2) and Dapo().clip_bounds == (0.2, 0.28)


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("rewards: my.py:short", "rewards", [FunctionReward(path="my.py:short")]),
        ("rewards: {kind: math, column: a}", "rewards", [MathReward(column="a")]),
        (
            "rewards: [{kind: math, column: a, weight: 2}, ./my.py:short, {kind: function, path: my.py:long}]",
            "rewards",
            [
                MathReward(column="a", weight=2.0),
                FunctionReward(path="./my.py:short"),
                FunctionReward(path="my.py:long"),
            ],
        ),
        ("objective: {kl: 0.1}", "objective", [Grpo(kl=Kl(coefficient=0.1))]),
        (
            "objective: {kl: {in: reward}}",
            "objective",
            [Grpo(kl=Kl(coefficient=0.05, estimator="k1", **{"in": "reward"}))],
        ),
        ("objective: {kl: 0.1}", "objective.0.kl", Kl(coefficient=0.1, estimator="k3", **{"in": "loss"})),
        ("objective: {kl: {in: reward, estimator: k3}}", "objective.0.kl.estimator", "k3"),
        # What a mapping says leaves the rest of what the kind's own default says.
        *(
            (f"stage: ppo\nobjective: {given}", "objective.0.kl", Kl(**{**IN_REWARD, **keys}))
            for given, keys in (
                ("{kl: 0.02}", {"coefficient": 0.02}),
                ("{kl: {target: 6}}", {"target": 6.0}),
                ("{kl: {estimator: k2}}", {"estimator": "k2"}),
                ("{kl: {in: loss}}", {"in": "loss", "estimator": "k3"}),
                ("{kind: grpo, kl: 0.02}", {"coefficient": 0.02, "in": "loss", "estimator": "k3"}),
            )
        ),
        ("stage: ppo\nobjective: {kl: null}", "objective.0.kl", None),
        ("objective: {overlong: 9}", "objective", [Grpo(overlong=Overlong(margin=9))]),
        ("value: policy\nstage: ppo", "value", Value()),
        ("batch: {updates: 4}", "batch", BatchSize(prompts=16, updates=4)),
        ("rollout: {stop_strings: x}", "rollout.stop_strings", ["x"]),
    ],
)
def test_short_forms(read: Callable[..., Recipe], line: str, key: str, value: object) -> None:
    changed = dict(part.split(": ", 1) for part in line.split("\n"))
    found: Any = read(**changed)
    for part in key.split("."):
        found = found[int(part)] if part.isdecimal() else getattr(found, part)
    assert found == value


def test_dropout_that_is_not_applied_is_told(write: Write) -> None:
    Path("my.py").write_text("def short(completion, **row): return 0.0")
    value = "{share: base, adapter: {kind: lora, dropout: 0.2}}"
    told = [
        load(
            write(text(stage=stage, adapter="{kind: lora, dropout: 0.1}", value=value if stage == "ppo" else ""))
        ).notes
        for stage in ("grpo", "ppo", "online-dpo")
    ]
    assert [[note.partition(" is not applied")[0] for note in notes] for notes in told] == [
        ["adapter.dropout: 0.1"],
        ["adapter.dropout: 0.1", "value.adapter.dropout: 0.2"],
        [],
    ]


def test_overrides_too_leave_the_rest_of_a_kinds_default(write: Write) -> None:
    Path("my.py").write_text("def short(completion, **row): return 0.0")
    (objective,) = load(write(text(stage="ppo")), ["objective.kl.coefficient=0.3"]).recipe.objective or ()
    assert isinstance(objective, Ppo) and objective.kl == Kl(**{**IN_REWARD, "coefficient": 0.3})
    assert "estimator: k1" in resolved_yaml(load(write(text(stage="ppo"))).recipe)


def test_no_mapping_takes_the_rest_of_a_default_away() -> None:
    """For every key of a recipe whose default is a mapping: one that gives a key has the default's others."""
    filled = {}
    for section in sections_below(Recipe):
        for name, field in section.model_fields.items():
            if isinstance(field.default, Section) and (own := field.default.model_fields_set - left_out(field.default)):
                kind = {"kind": field.default.kind} if isinstance(field.default, VariantSection) else {}
                found = with_default_mappings({name: {**kind}}, section)[name]
                assert {key: found[key] for key in own} == field.default.model_dump(include=own), (section, name)
                filled[section.__name__, name] = found
    assert filled == {("Ppo", "kl"): {"coefficient": 0.05, "in": "reward"}}
    # Control: keys of which one is to be given stay out, and so do those of a mapping that is none.
    partial = {"batch": {"micro": 9}, "log": None}
    assert with_default_mappings(partial, Recipe) == partial
    assert Recipe.model_fields["batch"].default.model_fields_set == {"sequences"}


def left_out(section: Section) -> set[str]:
    """What is never taken from a default: its kind, and keys that exclude each other."""
    return {"kind", *section.one_of}


def sections_below(section: type[Section]) -> set[type[Section]]:
    """A section's class and all that its fields, and theirs, admit."""
    found, waiting = set[type[Section]](), [section]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += [below for hint in field_types(each).values() for below in subsection_types(hint)]
    return found


def test_a_recipe_that_is_written_out_reads_as_the_same(write: Write, read: Callable[..., Recipe]) -> None:
    recipe = read(
        stage="ppo", rewards="[my.py:short, {kind: judge, url: 'http://a', model: m, prompt: '{completion}'}]"
    )
    written = resolved_yaml(recipe)
    assert load(write(written)).recipe == recipe and "in: reward" in written
    assert (
        load(write(written.replace("in: reward", "in: loss").replace("estimator: k1", "estimator: k3"))).recipe
        != recipe
    )


def test_items_of_a_step() -> None:
    assert BatchSize(prompts=16, updates=4, passes=3).packs(1024) == 4


@pytest.mark.parametrize(
    ("changed", "reference"),
    [
        ({}, NoReference()),
        ({"objective": "{kl: 0}"}, NoReference()),
        ({"objective": "{kl: 0.1}"}, Frozen()),
        ({"objective": "{kl: 0.1}", "adapter": "lora"}, AdapterOff()),
        ({"objective": "{kl: 0.1}", "adapter": "lora", "reference": "frozen"}, Frozen()),
        ({"stage": "ppo"}, Frozen()),
        ({"stage": "ppo", "objective": "{kl: null}"}, NoReference()),
    ],
)
def test_reference_of_a_recipe(read: Callable[..., Recipe], changed: dict[str, str], reference: object) -> None:
    assert resolve_reference(read(**changed)) == reference


def test_verbs_that_read_answers_refuse_the_stage(read: Callable[..., Recipe]) -> None:
    with pytest.raises(RecipeError, match="stage: rl draws its answers while it trains, and this verb is for rows"):
        language_stage(read(), "this verb")
    assert language_stage(read(stage="dpo", rewards=""), "this verb") == "preference"


JUDGE = "kind: judge, model: m, "
BROKEN = [
    ({"rewards": ""}, "rewards: missing: stage rl learns from them. Give one, such as {kind: math, column: answer}"),
    ({"rewards": "[]"}, "rewards: the list is empty: stage rl learns from them"),
    ({"rewards": "{kind: math, column: a, weight: 0}"}, "rewards: every weight is 0: nothing would be learnt"),
    (
        {"rewards": "[{kind: math, column: a}, my.py:short, {kind: math, column: b}]"},
        "rewards.2: called math as rewards.0 is. Give one of both a name of its own",
    ),
    ({"rewards": "your.py:short"}, "rewards.0.path: no file or folder 'your.py' in"),
    ({"rewards": "my.py:1st"}, "rewards.0.path: 'my.py:1st' names no function: write its file and its name, as in"),
    ({"rewards": "mathh"}, "rewards.0.kind: unknown kind 'mathh'. Did you mean 'math'?"),
    ({"rewards": "{kind: format, pattern: '('}"}, "rewards.0.pattern: '(' is no regular expression: missing )"),
    ({"rewards": "{kind: length}"}, "rewards.0: every length is within bounds, so it is always 0. Give most, fewest"),
    (
        {"rewards": "{kind: length, fewest: 9, most: 8}"},
        "rewards.0.fewest: no answer has 9 tokens or more and 8 or less",
    ),
    (
        {"rewards": f"{{{JUDGE} url: 'a:1', prompt: '{{completion}}'}}"},
        "rewards.0.url: 'a:1' is no address of a server: it begins with http:// or https://",
    ),
    (
        {"rewards": f"{{{JUDGE} url: 'http://a', prompt: '{{completion}}', pattern: '[0-9]+'}}"},
        "rewards.0.pattern: '[0-9]+' has no group that is the mark. Put it in parentheses, as in (\\d+)/10",
    ),
    (
        {"rewards": f"{{{JUDGE} url: 'http://a', prompt: '{{completion}}', bounds: [10, 0]}}"},
        "rewards.0.bounds: [10.0, 0.0]: the lowest mark comes first, and is below the highest",
    ),
    (
        {"rewards": f"{{{JUDGE} url: 'http://a', prompt: Good}}"},
        "rewards.0.prompt: names nothing, so every answer would get the same mark. Name {completion}",
    ),
    (
        {"data": "{train: {path: rows.json, format: alpaca}, prompt: '{a}'}"},
        "data.train.0.format: not read with data.prompt, which says what prompts are made of. Leave it out",
    ),
    (
        {"data": "{train: rows.json, eval: {path: more.jsonl, format: text}}"},
        "data.eval.0.format: rows of format text have no prompt. Say what it is made of with data.prompt",
    ),
    ({"data": "{train: rows.json, prompt: '{a'}"}, "data.prompt: a '{' without its partner at character 1. Write '{{'"),
    ({"data": "{train: rows.json, prompt: a}"}, "data.prompt: names no column, so every prompt would be the same"),
    (
        {"data": "{train: rows.json, streaming: true}", "steps": "5"},
        "data.streaming: stage rl reads its rows before it begins. Leave streaming out",
    ),
    ({"data": "{train: rows.json, overlong: split}"}, "data.overlong: a prompt cannot be split. Use truncate, which"),
    (
        {"data": "{train: rows.json, train_on: all}"},
        "data.train_on: stage rl trains the answers that the policy draws and nothing else. Leave train_on out",
    ),
    ({"data": "{train: rows.json, packing: best-fit}"}, "data.packing.kind: a step of stage rl counts rows, which lie"),
    ({"data": "{train: rows.json, append_eos: false}"}, "data.append_eos: not read with stage rl: answers end where"),
    ({"loss": "{z_loss: 0.1}"}, "loss: additions to a cross-entropy, which stage rl has none of. Leave it out, or see"),
    ({"batch": "8"}, "batch.sequences: a step of stage rl is counted in prompts. Give batch.prompts instead"),
    ({"batch": "{rows: 8}"}, "batch.rows: a step of stage rl is counted in prompts. Give batch.prompts instead"),
    (
        {"batch": "{prompts: 16, updates: 5}"},
        "batch.updates: 5 does not divide the 16 prompts of a rollout. Use 4 or 8",
    ),
    ({"batch": "{prompts: 2, updates: 4}"}, "batch.updates: 4 does not divide the 2 prompts of a rollout. Use 2"),
    (
        {"rollout": "{staleness: 1, engine: vllm, url: http://x, server: {hand_over: group}}"},
        "rollout.server.hand_over: group: with rollout.staleness above 0 a process next to the trainer hands weights "
        "on, which is in no group with the server",
    ),
    (
        {"rollout": "{processes: 2}"},
        "rollout.processes: only read with rollout.staleness above 0: the trainer itself answers. Leave it out",
    ),
    (
        {"rollout": "{routing_replay: true, engine: vllm, url: 'http://a:1'}"},
        "rollout.routing_replay: vllm does not say which experts tokens went to. Use engine: embedded, or http with",
    ),
    (
        {"router": "{balance: step, capacity: 2}"},
        "router.capacity: full experts would drop tokens in training which they took in the rollout",
    ),
    ({"rollout": "{temperature: 0}"}, "rollout.temperature: 0 takes the likeliest token each time, so all answers to"),
    (
        {"rollout": "{max_new_tokens: 1024}"},
        "rollout.max_new_tokens: 1024 leaves no room for a prompt in data.max_length 1024, which both share. Lower",
    ),
    ({"rollout": "{stop_strings: ['']}"}, "rollout.stop_strings: an empty text ends every answer before it begins"),
    (
        {"rollout": "{engine: vllm, url: 'http://a:1', top_p: 0.9}"},
        "rollout.top_p: vllm does not say which tokens a filter left to choose from, and the policy that is trained",
    ),
    ({"rollout": "{top_p: 0}"}, "rollout.top_p: expected a number above 0"),
    (
        {"rollout": "{samples: 1}"},
        "rollout.samples: 1, and objective.baseline: group compares the answers to a prompt with each other. Use 2",
    ),
    (
        {"stage": "rloo", "rollout": "{samples: 1}"},
        "rollout.samples: 1, and objective.baseline: leave-one-out compares",
    ),
    (
        {"objective": "{baseline: none, scale: group}", "rollout": "{samples: 1}"},
        "rollout.samples: 1, and objective.scale: group compares",
    ),
    (
        {"stage": "ppo", "objective": "{resample: 2, kl: null}", "rollout": "{samples: 1}"},
        "rollout.samples: 1, and objective.resample: 2 compares",
    ),
    (
        {"objective": "{overlong: 300}"},
        "objective.0.overlong.margin: 300 is more than the 256 tokens of rollout.max_new_tokens",
    ),
    ({"value": "policy"}, "value: grpo has no values, only ppo has. Leave it out, or set objective: ppo"),
    ({"stage": "ppo", "value": "base"}, "value.share: base: the policy trains all of the model"),
    (
        {"stage": "ppo", "objective": "{baseline: group}"},
        "objective.0.baseline: ppo has the value of each token in place of a baseline. Leave it out, or set objective",
    ),
    ({"stage": "ppo", "objective": "{scale: batch}"}, "objective.0.scale: ppo has the value of each token in place"),
    ({"objective": "{rewards_apart: true}"}, "objective.0.rewards_apart: there is one reward, and nothing to keep it"),
    (
        {"stage": "ppo", "objective": "{process_supervision: true}"},
        "objective.0.process_supervision: ppo takes rewards where steps end by itself. Leave it out",
    ),
    (
        {"objective": "{process_supervision: true, baseline: leave-one-out}"},
        "objective.0.baseline: leave-one-out compares whole answers, and process_supervision steps. Use group, batch",
    ),
    (
        {"objective": "{scale: mean}"},
        "objective.0.scale: mean: reward short may be negative, and a negative mean turns",
    ),
    *(
        (
            {"objective": f"{{scale: mean{more}}}", "rewards": rewards} | others,
            f"objective.0.scale: mean: {why}, and a negative mean turns the signs of advantages. Use group, batch or",
        )
        for rewards, more, others, why in (
            ("[{kind: math, column: a}, {kind: length, most: 9}]", "", {}, "reward length may be negative"),
            ("[{kind: exact, column: a, weight: -0.5}]", "", {}, "reward exact has the weight -0.5"),
            ("[{kind: exact, column: a}]", ", overlong: 9", {}, "overlong is negative"),
            ("[{kind: exact, column: a}]", ", kl: {in: reward}", {}, "a KL is taken from rewards"),
            (
                "[{kind: exact, column: a}]",
                "",
                {"environment": "my.py:short"},
                "the environment's reward may be negative",
            ),
        )
    ),
    ({"objective": "{process_supervision: true, scale: mean}"}, "objective.0.scale: mean is of whole answers, and"),
    (
        {"objective": "{process_supervision: true, rewards_apart: true}", "rewards": "[my.py:a, my.py:b]"},
        "objective.0.rewards_apart: process_supervision keeps rewards apart by itself. Leave it out",
    ),
    (
        {"objective": "{process_supervision: true, overlong: 9}"},
        "objective.0.overlong: one number for an answer, and process_supervision compares steps. Leave it out",
    ),
    (
        {"objective": "{process_supervision: true, kl: {in: reward}}"},
        "objective.0.kl.in: reward: one number for an answer, and process_supervision compares steps. Use in: loss",
    ),
    ({"objective": "[grpo, rloo]"}, "objective: 2 terms: stage rl has one policy gradient. Give one"),
    ({"objective": "[sigmoid, {kind: grpo}]"}, "objective: 2 terms: stage rl has one policy gradient. Give one"),
    ({"objective": "hidden"}, "objective.0.kind: hidden is an objective of stage distill, not of stage rl"),
    ({"objective": "forward"}, "objective.0.kind: forward is a term next to a policy gradient, as in [grpo, forward]"),
    (
        {"objective": "[reverse, {kind: grpo}]", "teacher": "large"},
        "objective.0.kind: the policy gradient comes first: write [grpo, reverse]",
    ),
    (
        {"objective": "[sigmoid, reverse]", "teacher": "large"},
        "objective.1.kind: reverse is a term next to a policy gradient, and sigmoid compares pairs. Leave it out",
    ),
    (
        {"objective": "[grpo, reverse, forward]", "teacher": "large"},
        "objective.2.kind: forward next to reverse: there is one divergence. Leave one out",
    ),
    ({"objective": "[grpo, reverse]"}, "teacher: missing: objective reverse is the distance from one. Name its folder"),
    ({"teacher": "large"}, "teacher: the objective has no divergence from one, so nothing is learnt from it. Give one"),
    (
        {"objective": "[grpo, reverse]", "teacher": "{model: large, top_k: 9, cache: true}"},
        "teacher.0.cache: true: answers are drawn while training, so nothing is known of them before. Leave it out",
    ),
    (
        {"objective": "[grpo, {kind: reverse, policy_gradient: true}]", "teacher": "{model: large, top_k: 9}"},
        "teacher.0.top_k: not read with policy_gradient: true, which asks of the drawn tokens alone. Leave it out",
    ),
    (
        {"objective": "[grpo, {kind: reverse, policy_gradient: true, temperature: 2}]", "teacher": "large"},
        "objective.1.temperature: not read with policy_gradient: true: tokens are compared as they were drawn",
    ),
    (
        {"objective": "[grpo, {kind: reverse, cross_entropy: 0.3}]", "teacher": "large"},
        "objective.1.cross_entropy: 0.3: the likelihood of rows, which stage rl has none of. Leave it out",
    ),
    (
        {"objective": "[grpo, reverse]", "teacher": "large", "adapter": "prefix"},
        "adapter.kind: prefix puts virtual tokens before every document, which a teacher in memory does not know. Take",
    ),
    (
        {"stage": "online-dpo", "objective": "kto"},
        "objective.0.kind: kto takes answers judged one by one, and stage rl compares the best and the worst answer",
    ),
    (
        {"stage": "online-dpo", "rollout": "{samples: 1}"},
        "rollout.samples: 1, and a pair is the best and the worst of a prompt's answers. Use 2 or more",
    ),
    (
        {"stage": "online-dpo", "reference": "cached"},
        "reference.kind: cached: answers are drawn while training, so nothing is known of them before. Use frozen",
    ),
    (
        {"stage": "online-dpo", "objective": "nca", "reference": "none"},
        "reference.kind: none, but objective.0 (nca) compares the policy with one",
    ),
    (
        {"stage": "online-dpo", "objective": "simpo", "reference": "frozen"},
        "reference: simpo compares the policy with nothing. Leave it out",
    ),
    (
        {"stage": "online-dpo", "adapter": "prefix"},
        "adapter.kind: prefix puts virtual tokens before every document, which a frozen reference does not know",
    ),
    (
        {"stage": "online-dpo", "environment": "my.py:short"},
        "environment: pairs are of answers in one turn. Leave the environment out, or take a policy gradient",
    ),
    ({"stage": "online-dpo", "value": "{rate_ratio: 2.0}"}, "value: pairs of answers are compared without values"),
    (
        {"objective": "{kl: {in: reward, ratio: true}}"},
        "objective.0.kl.ratio: rewards are computed at the policy that drew the answers, where the ratio is 1. Leave",
    ),
    (
        {"objective": "{kl: {estimator: k1}}"},
        "objective.0.kl.estimator: k1: the mean of its gradient in the loss is 0, so nothing would hold the policy to",
    ),
    ({"objective": "{kl: {target: 6}}"}, "objective.0.kl.target: the coefficient is adapted from rollout to rollout"),
    (
        {"objective": "{kl: {in: reward, target: 6, coefficient: 0}}"},
        "objective.0.kl.coefficient: 0 stays 0, for it is adapted by factors. Give what it starts from, such as 0.05",
    ),
    ({"objective": "{kl: {in: reward, horizon: 5}}"}, "objective.0.kl.horizon: only read with a target"),
    ({"objective": "{clip: [2, 1]}"}, "objective.0.clip: 2.0 below 1 is a negative ratio, which there is none of"),
    ({"objective": "{loss: cispo}"}, "objective.0.clip: 0.2: cispo takes one number above 1, the largest ratio itself"),
    ({"objective": "{loss: cispo, clip: [0.2, 5]}"}, "objective.0.clip: [0.2, 5.0]: cispo takes one number above 1"),
    ({"objective": "{loss: sapo, clip: 0.3}"}, "objective.0.clip: not read with loss: sapo. Leave it out"),
    ({"objective": "{kind: dapo, loss: sapo, clip: 0.3}"}, "objective.0.clip: not read with loss: sapo. Leave it out"),
    ({"objective": "{loss: vespo, dual_clip: 3}"}, "objective.0.dual_clip: not read with loss: vespo. Leave it out"),
    (
        {"objective": "{sapo_temperatures: [1, 2]}"},
        "objective.0.sapo_temperatures: only read with loss: sapo; this is clip. Leave it out",
    ),
    (
        {"objective": "{loss: sapo, vespo_shapes: [1, 2]}"},
        "objective.0.vespo_shapes: only read with loss: vespo; this is sapo. Leave it out",
    ),
    (
        {"objective": "{loss: cispo, clip: 5, vespo_rates: [1, 2]}"},
        "objective.0.vespo_rates: only read with loss: vespo; this is cispo. Leave it out",
    ),
    (
        {"objective": "{loss: sapo, sapo_temperatures: [1, 0]}"},
        "objective.0.sapo_temperatures.1: expected a number above 0, not 0",
    ),
    (
        {"objective": "{clip: [0.2, 2], dual_clip: 3}"},
        "objective.0.dual_clip: 3.0 is not above 1 + 2.0, the upper bound of clip. Use 3",
    ),
    (
        {"objective": "{importance: {low: 2, high: 2}}"},
        "objective.0.importance.low: 2.0 is not below high, which is 2.0: nothing would be trained",
    ),
    (
        {"objective": "{loss: vespo, importance: sequence}"},
        "objective.0.importance.level: sequence: loss: vespo multiplies the weights of an answer's tokens itself. Use",
    ),
    (
        {"objective": "{loss: vespo, ratio: sequence}"},
        "objective.0.ratio: not read with loss: vespo, which multiplies the ratios of an answer. Leave it out",
    ),
    (
        {
            "objective": "{rewards_apart: true, kl: {in: reward}}",
            "rewards": "[my.py:short, {kind: math, column: a}]",
        },
        "objective.0.kl.in: reward: subtracted from the sum of rewards, and rewards_apart has none. Use in: loss",
    ),
    (
        {"rewards": "{kind: math, column: a, name: ''}"},
        "rewards.0.name: empty: metrics are called by it. Give one, or leave it out",
    ),
    ({"rewards": "{kind: function, path: my.py}"}, "rewards.0.path: 'my.py' names no function: write its file and it"),
    ({"num_generations": "4"}, "num_generations: unknown key. danlu's key for it is rollout.samples"),
    (
        {"reference": "frozen"},
        "reference: objective.0.kl is 0, and nothing else is compared with a reference. Leave it",
    ),
    (
        {"reference": "none", "objective": "{kl: 0.1}"},
        "reference.kind: none, but objective.0.kl holds the policy to one. Leave it out, or set kl: null",
    ),
    (
        {"reference": "cached", "stage": "ppo"},
        "reference.kind: cached: answers are drawn while training, so nothing is known of them before. Use frozen",
    ),
    (
        {"reference": "adapter-off", "stage": "ppo"},
        "reference.kind: adapter-off: there is no adapter to switch off. Use reference: frozen",
    ),
    (
        {"adapter": "prefix", "stage": "ppo"},
        "adapter.kind: prefix puts virtual tokens before every document, which a frozen reference does not know. Use",
    ),
    ({"stage": "sft"}, "rewards: only read with stage rl; this is sft"),
    ({"stage": "sft", "rewards": "", "reward_limits": "{workers: 1}"}, "reward_limits: only read with stage rl"),
    ({"stage": "sft", "rewards": "", "value": "policy"}, "value: only read with stage rl; this is sft"),
    (
        {"stage": "sft", "rewards": "", "data": "{train: rows.json, prompt: '{a}'}"},
        "data.prompt: only read with stage rl; this is sft",
    ),
    (
        {"stage": "sft", "rewards": "", "rollout": "{samples: 4}", "evaluation": "{every: 9, samples: hi}"},
        "rollout.samples: only read with stage rl; this is sft; evaluation.samples has settings of its own",
    ),
    (
        {"stage": "sft", "rewards": "", "batch": "{prompts: 4}"},
        "batch.prompts: only stage rl counts prompts; stage sft takes batch.sequences",
    ),
    ({"stage": "sft", "rewards": "", "batch": "{sequences: 4, passes: 2}"}, "batch.passes: only read with stage rl"),
    ({"stage": "sft", "rewards": "", "objective": "grpo"}, "objective: not read with stage sft: an objective of stage"),
]


@pytest.mark.parametrize(("changed", "message"), BROKEN)
def test_one_broken_rule(read: Callable[..., Recipe], changed: dict[str, str], message: str) -> None:
    said = problems(read, **changed)
    assert len(said) == 1, said
    assert message in said[0]
    assert said[0].startswith("recipe.yaml:")


SOUND = [
    {},
    {"objective": "[grpo, {kind: jensen-shannon, beta: 0.3, weight: 0.1}]", "teacher": "[large, {model: x, top_k: 9}]"},
    {"stage": "ppo", "objective": "[{gae: 0.9}, {kind: reverse, policy_gradient: true}]", "teacher": "large"},
    {"objective": "[grpo, reverse]", "teacher": "large", "rewards": "{kind: length, most: 9, weight: 0}"},
    {"stage": "ppo", "rollout": "{samples: 1}", "value": "{rate_ratio: 10.0}"},
    {"stage": "ppo", "objective": "{kl: {in: reward, estimator: k1, target: 6.0, horizon: 500}, value_clip: null}"},
    {"stage": "remax", "rollout": "{samples: 1}"},
    {"stage": "reinforce", "rollout": "{samples: 1}"},
    {"stage": "dapo", "objective": "{overlong: {margin: 256, weight: 0.5}, mask_truncated: true}"},
    {"objective": "{loss: cispo, clip: 5}"},
    {"objective": "{loss: sapo, ratio: token, sapo_temperatures: [0.5, 2]}"},
    {"objective": "{loss: vespo, importance: token, vespo_shapes: [1, 2], vespo_rates: [2, 1]}"},
    {"stage": "gspo", "objective": "{loss: vespo, clip: [3.0e-4, 4.0e-4]}"},
    {
        "objective": "{rewards_apart: true, kl: {in: loss}}",
        "rewards": "[my.py:short, {kind: math, column: a}]",
    },
    {"objective": "{dual_clip: 3, off_policy: 0.1, importance: {level: sequence, low: 0.5, masks: true}}"},
    {"objective": "{rewards_apart: true}", "rewards": "[my.py:short, {kind: length, most: 100, weight: -0.1}]"},
    {"objective": "{kl: {ratio: true, estimator: k1}}"},
    {
        "objective": "{scale: mean, kl: 0.1}",
        "rewards": "[{kind: math, column: a}, {kind: exact, column: a}, {kind: format, pattern: a}]",
    },
    {"objective": "{scale: mean}", "rewards": "[{kind: code, column: a}]"},
    {"objective": "{scale: mean}", "rewards": "[{kind: numeric, column: a}]"},
    {"objective": "{kl: {ratio: true, estimator: k3}}", "reference": "{kind: frozen, every: 10}"},
    {"rollout": "{max_new_tokens: 1023, top_k: 20, min_p: 0.1}", "numerics": "exact"},
    {"rollout": "{engine: vllm, url: 'http://a:1', samples: 16, temperature: 0.7}"},
    {"rollout": "{engine: sglang, url: 'http://a:1', top_p: 0.9}"},
    {"batch": "{prompts: 12, updates: 12, passes: 2, micro: 2}"},
    {"data": "{train: rows.json, eval: more.jsonl, prompt: '{{ {Body} {Question}', overlong: drop}"},
    {"data": "{train: {path: rows.json, format: sharegpt}}"},
    {"stage": "online-dpo"},
    {"stage": "online-dpo", "reference": "none"},
    {"stage": "online-dpo", "objective": "[{kind: ipo, beta: 0.2}, {kind: sft, weight: 0.1}]", "adapter": "lora"},
    {"stage": "online-dpo", "objective": "simpo", "adapter": "prefix", "rollout": "{samples: 2, top_p: 0.9}"},
    {"stage": "rl", "objective": "{kind: aot, beta: 0.2}", "reference": "{kind: frozen, every: 8}"},
    {
        "stage": "online-dpo",
        "rollout": "{engine: vllm, url: 'http://a:1', top_p: 0.9}",
    },
    {"reference": "none"},
    {"adapter": "prefix"},
    {"adapter": "lora", "objective": "{kl: 0.1}", "reference": "adapter-off"},
]


@pytest.mark.parametrize("changed", SOUND)
def test_what_only_just_keeps_the_rules(read: Callable[..., Recipe], changed: dict[str, str]) -> None:
    assert problems(read, **changed) == []


ROLLOUTS_THAT_ROUND = ("{precision: int8}", "{precision: fp8}", "{cache: int8}")


@pytest.mark.parametrize("rollout", ROLLOUTS_THAT_ROUND)
def test_rollouts_that_round_are_corrected_by_default(read: Callable[..., Recipe], rollout: str) -> None:
    corrected = read(rollout=rollout).policy_gradient
    assert corrected is not None and corrected.importance is not None and corrected.importance.level == "token"
    for objective in ("[{kind: grpo, importance: null}]", "[{kind: grpo, importance: {level: sequence}}]"):
        written = read(rollout=rollout, objective=objective).policy_gradient
        assert written is not None
        assert (written.importance is None) == ("null" in objective)
        assert written.importance is None or written.importance.level == "sequence"
    usual = read(rollout="{cache: auto}").policy_gradient
    assert usual is None or usual.importance is None
    assert problems(read, rollout=rollout, stage="online-dpo") == []


@pytest.mark.parametrize("precision", ["fp8", "{kind: fp8, recipe: row}"])
def test_training_in_8_bits_is_corrected_by_default(read: Callable[..., Recipe], precision: str) -> None:
    corrected = read(precision=precision).policy_gradient
    assert corrected is not None and corrected.importance is not None
    exact = read(precision=precision, numerics="exact").policy_gradient
    assert exact is None or exact.importance is None


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"numerics": "exact"}, "rollout.precision: int8 rounds weights and activations that training multiplies"),
        ({"adapter": "lora", "quantization": "nf4"}, "rollout.precision: int8: the base is quantized already"),
        ({"parallel": "{shard: zero3}"}, "rollout.precision: int8: weights that are gathered layer by layer would be"),
    ],
)
def test_where_weights_cannot_be_encoded(read: Callable[..., Recipe], others: dict[str, str], message: str) -> None:
    (problem,) = problems(read, rollout="{precision: int8}", **others)
    assert message in problem
    assert problems(read, rollout="{precision: auto}", **others) == []


def test_gathered_weights_are_encoded(read: Callable[..., Recipe]) -> None:
    assert problems(read, rollout="{precision: int8, gather: all}", parallel="{shard: zero3}") == []
