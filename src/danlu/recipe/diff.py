"""Differences between two recipes, and whether a run may go on across them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from danlu.recipe.sections import Recipe, Section
from danlu.recipe.sections.rollout import SAMPLING_KEYS

# Keys that may change while a run goes on: the result is the same up to rounding, or they are not about the result.
# Every other key matters. A key stands for everything below it.
HARMLESS: dict[str, str] = {
    "batch.memory": "decides the micro-batch only",
    "batch.micro": "the sum over a step's packed sequences is the same up to rounding",
    "checkpoint": "when the run is saved, not what is computed; but `every` matters with `watch: rewind` and pipedream",
    "compile": "the same mathematics, rounded differently",
    "data.cache": "where tokens are kept",
    "data.workers": "how many processes tokenise",
    "deterministic": "the same mathematics, rounded differently",
    "device": "the same mathematics, rounded differently",
    "environment.host": "where agents ask",
    "environment.port": "where agents ask",
    "environment.timeout_s": "how long environments are waited for",
    "environment.workers": "how many processes hold environments",
    "evaluation.every": "when the model is judged, not how it is trained; but it matters with early stop and pipedream",
    "evaluation.samples": "texts to read",
    "log": "what is written down",
    "memory": "what is kept where, and what is recomputed; the numbers are the same",
    "numerics": "the same mathematics, rounded differently",
    "output": "where the run writes; a run folder may be moved",
    "parallel": "the same sums, in another order; but `reduce` matters, and with pipedream what `pipeline` says",
    "reward_limits": "how rewards are waited for, and when the run stops",
    "rollout": "how answers are computed; but which are drawn matters: `samples`, `max_new_tokens`, `temperature` ...",
    "threads": "the same mathematics, rounded differently",
}

# Keys below those that matter all the same.
MATTERS_WITHIN: dict[str, str] = {
    **{f"rollout.{key}": "decides which answers stage rl is trained on" for key in SAMPLING_KEYS},
    "rollout.routing_replay": "decides which experts answers are trained on",
    "parallel.reduce": "bf16 sums of gradients lose digits: other steps, not the same ones rounded in another order",
}


# With PipeDream these too: which updates a step's weights have follows from the stages, and from the steps after which
# no micro-batch is in flight.
_MATTERS_WITH_PIPEDREAM = {
    "checkpoint.every",
    "evaluation.every",
    "parallel.pipeline.schedule",
    "parallel.pipeline.split",
    "parallel.pipeline.stages",
    "parallel.pipeline.vertical_sync",
}


@dataclass(frozen=True)
class Change:
    """One key with a value that differs. `old` and `new` are as YAML has them; None also stands for an absent entry."""

    key: str
    old: Any
    new: Any
    matters: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def changes(old: Recipe, new: Recipe) -> list[Change]:
    """Every key that differs, in the order of the sections. Resuming refuses when one of them `matters`."""
    old_values, new_values = dict(_flatten("", old)), dict(_flatten("", new))
    keys = list(new_values) + [key for key in old_values if key not in new_values]
    different = [key for key in keys if old_values.get(key) != new_values.get(key)]
    return [
        Change(key, old_values.get(key), new_values.get(key), any(matters(key, recipe) for recipe in (old, new)))
        for key in different
    ]


def matters(key: str, recipe: Recipe) -> bool:
    """Whether a run of `recipe` with another value at this key computes something else."""
    if key == "evaluation.every" and recipe.evaluation.early_stop is not None:
        return True
    if key == "checkpoint.every" and recipe.watch.policy == "rewind":
        return True
    if key in _MATTERS_WITH_PIPEDREAM and recipe.parallel.pipeline.updates_each_micro_batch:
        return True
    if key in MATTERS_WITHIN:
        return True
    return not any(key == harmless or key.startswith(f"{harmless}.") for harmless in HARMLESS)


def _flatten(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value as dotted keys. A model config in the recipe is one value: its keys are not the recipe's."""
    if isinstance(value, Section):
        for name in type(value).model_fields:
            yield from _flatten(f"{key}.{name}" if key else name, getattr(value, name))
    elif isinstance(value, list) and value and isinstance(value[0], Section):
        for index, entry in enumerate(value):
            yield from _flatten(f"{key}.{index}", entry)
    else:
        yield key, value
