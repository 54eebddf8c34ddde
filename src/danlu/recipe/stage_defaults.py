"""Defaults that depend on the stage: learning rate, weight decay, schedule and batch of a recipe that says none.

The defaults of the sections (`optimizers.py`, `training.py`) are those of pretraining. Every other stage has a learning
rate for AdamW here, one for all weights and one for an adapter; the other optimizers keep their ratio to AdamW. The
preference rates are those of DPO's and ORPO's papers and of TRL's trainers; the others are the usual rates of SFT, of
reward models and of policy gradients. Where rollouts round, the objective corrects their difference from the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from danlu.recipe.sections import (
    AdamW,
    BatchSize,
    Grpo,
    Objective,
    Optimizer,
    PreferenceObjective,
    Recipe,
    Section,
    default_section,
    value_at,
)
from danlu.recipe.sections.policy_gradient import PolicyGradientSection
from danlu.recipe.type_hints import variants_of
from danlu.recipe.yaml_tree import Node, Origin

ADAMW = default_section(AdamW)  # one that is validated would build AdamW's own validator, at each start


@dataclass(frozen=True)
class StageDefaults:
    """The defaults of one stage. A rate is AdamW's peak learning rate."""

    rate: float  # all weights are trained
    adapter_rate: float
    schedule: Literal["cosine", "linear", "constant"]
    warmup: float  # share of the run
    batch_unit: Literal["sequences", "rows", "prompts"]
    batch: int  # of batch_unit, in one optimizer step
    has_weight_decay: bool = False


STAGE_DEFAULTS = {
    "pretrain": StageDefaults(3e-4, 3e-4, "cosine", 0.05, "sequences", 8, has_weight_decay=True),
    "sft": StageDefaults(2e-5, 2e-4, "cosine", 0.03, "sequences", 16),
    "classify": StageDefaults(1e-3, 1e-3, "cosine", 0.05, "sequences", 128),
    "reward": StageDefaults(1e-5, 1e-4, "cosine", 0.03, "rows", 32),
    "preference": StageDefaults(5e-7, 5e-6, "linear", 0.1, "rows", 32),
    "orpo": StageDefaults(8e-6, 8e-5, "linear", 0.1, "rows", 32),
    "distill": StageDefaults(2e-5, 2e-4, "cosine", 0.03, "sequences", 16),
    "gkd": StageDefaults(1e-5, 1e-4, "cosine", 0.03, "sequences", 16),
    "rl": StageDefaults(1e-6, 1e-5, "constant", 0.05, "prompts", 16),
    "online-dpo": StageDefaults(5e-7, 5e-6, "linear", 0.1, "prompts", 16),
}
"""Defaults by stage. `preference` holds for dpo, kto, simpo, cpo and other comparisons of answers, `gkd` for distill
with `on_policy`, `rl` for every policy gradient (grpo, ppo, ...)."""

RATE_KEYS = ("optimizer.learning_rate", "optimizer.adamw_learning_rate")
STAGE_KEYS = (
    *RATE_KEYS,
    "optimizer.weight_decay",
    "schedule.kind",
    "schedule.warmup",
    *(f"batch.{unit}" for unit in BatchSize.one_of if unit != "tokens"),
)
"""The keys with a default that depends on the stage."""


def expand_defaults(tree: Node) -> None:
    """Writes the stage's defaults into a recipe in full form where it says nothing, in place.

    Each of them has the place of the stage as its origin, and names the stage that it is a default of. Defaults of an
    earlier call make room: overrides may have changed the stage, the optimizer or the adapter since.
    """
    _drop_defaults(tree)
    name = _stage_of(tree)
    stage = tree.child("stage")
    if name is None or stage is None:
        return
    adapter = tree.child("adapter")
    has_adapter = adapter is not None and adapter.value is not None
    about = f"stage {name}, {'an adapter' if has_adapter else 'all weights'} trained"
    origin = replace(stage.origin, default_of=about)
    kind, is_written = tree.nearest("optimizer.kind")
    optimizer = kind.value if is_written else ADAMW.kind
    for key, value in stage_values(name, has_adapter=has_adapter, optimizer=optimizer):
        _write_default(tree, key, value, origin)


def expand_importance(tree: Node) -> None:
    """Writes `importance: token` into the policy gradient of a recipe in full form, in place, where trainer and rollout
    round differently (`rollout.precision`, `rollout.cache`, `precision: fp8`) and the recipe says nothing of it.
    `importance: null` leaves it out.
    """
    stage, objective, numerics = (tree.child(name) for name in ("stage", "objective", "numerics"))
    if stage is None or stage.value != "rl" or (numerics is not None and numerics.value == "exact"):
        return
    rounding = _rounding_of_rl(tree)
    if rounding is None:
        return
    key, node = rounding
    kind = node.child("kind") or node
    origin = replace(node.origin, default_of=f"{key}: {kind.value}")
    assert isinstance(tree.value, dict), "a recipe is a mapping"
    if objective is None or objective.value is None:
        objective = tree.value["objective"] = Node([Node({"kind": Node(Grpo().kind, origin)}, origin)], origin)
    for term in objective.value if isinstance(objective.value, list) else []:
        name = term.child("kind")
        variant = None if name is None else variants_of(Objective).get(str(name.value))
        if variant is not None and issubclass(variant, PolicyGradientSection) and isinstance(term.value, dict):
            term.value.setdefault("importance", Node({"level": Node("token", origin)}, origin))


def _rounding_of_rl(tree: Node) -> tuple[str, Node] | None:
    """The first key by which rollouts round otherwise than the trainer, and its node."""
    for key in ("rollout.precision", "rollout.cache", "precision"):
        node, is_written = tree.nearest(key)
        if is_written and (node.child("kind") or node).value in ("int8", "fp8"):
            return key, node
    return None


def stage_values(name: str, *, has_adapter: bool, optimizer: object = "adamw") -> Iterator[tuple[str, Any]]:
    """Dotted keys of the recipe and the values that they have by default in a stage, a key of `STAGE_DEFAULTS`.

    optimizer: the `kind` of the optimizer; one that does not exist has no defaults, and is reported by validation.
    """
    defaults = STAGE_DEFAULTS[name]
    variant = variants_of(Optimizer).get(str(optimizer))
    if variant is not None:
        ratio = (defaults.adapter_rate if has_adapter else defaults.rate) / ADAMW.learning_rate
        yield "optimizer.kind", str(optimizer)
        for key in RATE_KEYS:
            if (field := variant.model_fields.get(key.partition(".")[2])) is not None:
                yield key, float(f"{field.default * ratio:.1e}")
        decay = variant.model_fields["weight_decay"].default
        yield "optimizer.weight_decay", decay if defaults.has_weight_decay else 0.0
    yield "schedule.kind", defaults.schedule
    yield "schedule.warmup", defaults.warmup
    yield f"batch.{defaults.batch_unit}", defaults.batch


def former_values(name: str, optimizer: str) -> dict[str, Any]:
    """Defaults before they depended on the stage, by dotted key, for runs that began then and are resumed."""
    variant = variants_of(Optimizer)[optimizer]
    decay = variant.model_fields["weight_decay"].default
    former = {"schedule.kind": "cosine", "schedule.warmup": 0.05, "optimizer.weight_decay": decay}
    for key in RATE_KEYS:
        if (field := variant.model_fields.get(key.partition(".")[2])) is not None:
            former[key] = 2e-4 if field.default == ADAMW.learning_rate else field.default
    if (unit := STAGE_DEFAULTS[name].batch_unit) != "prompts":
        former[f"batch.{unit}"] = 8
    return former


def stage_of(recipe: Recipe) -> str:
    """The key of `STAGE_DEFAULTS` that a recipe has its defaults from."""
    return _name(recipe.stage, [term.kind for term in recipe.objective or ()], on_policy=bool(recipe.on_policy))


def with_values(section: Section | list[Section], values: dict[str, Any]) -> Any:
    """A section, or a list of them, with other values at dotted keys, each of which it has."""
    for key, value in values.items():
        part, _, rest = key.partition(".")
        old = section[int(part)] if isinstance(section, list) else value_at(section, part)
        new = with_values(old, {rest: value}) if rest else value
        if isinstance(section, list):
            section = [new if number == int(part) else each for number, each in enumerate(section)]
        else:
            section = section.model_copy(update={part: new})
    return section


@cache
def _preference_kinds() -> frozenset[str]:
    """Objectives that compare or judge answers, which stage rl takes for its own answers (online-dpo)."""
    return frozenset(variants_of(PreferenceObjective))


def _stage_of(tree: Node) -> str | None:
    """The key of `STAGE_DEFAULTS` for a recipe in full form; None where its stage is missing or wrong."""
    stage, objective, on_policy = tree.child("stage"), tree.child("objective"), tree.child("on_policy")
    if stage is None or not isinstance(stage.value, str):
        return None
    terms = objective.value if objective is not None and isinstance(objective.value, list) else []
    kinds = [kind.value for term in terms if (kind := term.child("kind")) is not None and isinstance(kind.value, str)]
    name = _name(stage.value, kinds, on_policy=on_policy is not None and bool(on_policy.value))
    return name if name in STAGE_DEFAULTS else None


def _name(stage: str, objectives: list[str], *, on_policy: bool) -> str:
    if stage == "preference" and "orpo" in objectives:
        return "orpo"
    if stage == "distill" and on_policy:
        return "gkd"
    if stage == "rl" and objectives and set(objectives) <= _preference_kinds():
        return "online-dpo"
    return stage


def _drop_defaults(tree: Node) -> None:
    """Takes the values that `expand_defaults` has written out of the tree."""
    assert isinstance(tree.value, dict), "a recipe is a mapping"
    for section_name in dict.fromkeys(key.partition(".")[0] for key in STAGE_KEYS):
        section = tree.child(section_name)
        if section is None or not isinstance(section.value, dict):
            continue
        for name in [name for name, child in section.value.items() if child.origin.default_of]:
            del section.value[name]
        if section.origin.default_of and not section.value:
            del tree.value[section_name]


def _write_default(tree: Node, key: str, value: Any, origin: Origin) -> None:
    """Writes a value at a key of two parts, unless the recipe has it, or another key that excludes it."""
    section_name, _, name = key.partition(".")
    assert isinstance(tree.value, dict), "a recipe is a mapping"
    section = tree.child(section_name)
    if section is None:
        section = tree.value[section_name] = Node({}, origin)
    if not isinstance(section.value, dict):
        return
    excluding = BatchSize.one_of if section_name == "batch" else (name,)
    if all((child := section.child(other)) is None or child.value is None for other in excluding):
        section.value[name] = Node(value, origin)
