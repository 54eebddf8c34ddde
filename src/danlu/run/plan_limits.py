"""The largest batch, length and model with which a step of a recipe fits into a memory, each planned. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from danlu.core.errors import DanluError
from danlu.models.config import ModelConfig
from danlu.parallel.layout import divisors
from danlu.planning.cards import Card
from danlu.planning.cluster import Cluster
from danlu.planning.lengths import FULL_PACKS
from danlu.planning.model_sizes import MODELS, config_of_size
from danlu.planning.plan_values import taken_bytes
from danlu.planning.target import Target
from danlu.recipe import Recipe
from danlu.run.planned_step import planned_step

_LENGTH_STEP = 64
"""Lengths are tried in multiples of so many tokens."""

_Candidate = TypeVar("_Candidate")


def limits(recipe: Recipe, memory_bytes: int, cluster: Cluster | None) -> dict[str, Any]:
    """Returns the largest `micro`, `max_length` and `model` with which a step fits, each with the bytes that it takes;
    None for those with which nothing fits. Full packs count.

    Lengths and models are tried with micro-batches of one packed sequence. cluster: in place of one card that has
    `memory_bytes`; its cards count as having so many. Raises DanluError as `planned_step`.
    """
    card = Card(f"a card of {memory_bytes / 1e9:.4g} GB", memory_bytes, None, {})
    cluster = (
        Cluster.of_card(card)
        if cluster is None
        else replace(cluster, card=replace(cluster.card, memory_bytes=memory_bytes))
    )
    target = Target(cluster)

    def taken(micro: int, length: int | None = None, config: ModelConfig | None = None) -> int:
        batch = recipe.batch.model_copy(update={"micro": micro})
        data = recipe.data.model_copy(update={"max_length": length or recipe.data.max_length})
        own = recipe.model_copy(update={"batch": batch, "data": data})
        return taken_bytes(planned_step(own, target, FULL_PACKS, config=config).plan.worst.memory)

    first = planned_step(_with_micro(recipe, 1), target, FULL_PACKS)
    layout, own_config = first.plan.layout, first.workload.config
    per_step = -(-recipe.batch.packs(recipe.data.max_length) // layout.data)
    longest = own_config.context_length // _LENGTH_STEP
    micro = _largest(divisors(per_step), taken, memory_bytes)
    length = _largest(range(1, longest + 1), lambda count: taken(1, count * _LENGTH_STEP), memory_bytes)
    model = _largest(list(MODELS), lambda name: taken(1, config=_of_task(name, own_config)), memory_bytes)
    return {
        "memory_bytes": memory_bytes,
        "card": cluster.card.name,
        "processes": layout.world,
        "per_step": per_step,
        "context_length": own_config.context_length,
        "micro": None if micro is None else {"value": micro[0], "taken": micro[1]},
        "max_length": None if length is None else {"value": length[0] * _LENGTH_STEP, "taken": length[1]},
        "model": None
        if model is None
        else {"value": model[0], "taken": model[1], "parameters": config_of_size(model[0]).parameter_count()},
    }


def _with_micro(recipe: Recipe, micro: int) -> Recipe:
    return recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"micro": micro})})


def _of_task(name: str, own: ModelConfig) -> ModelConfig:
    return replace(config_of_size(name), task=own.task)


def _largest(
    candidates: Sequence[_Candidate], taken: Callable[[_Candidate], int], room: int
) -> tuple[_Candidate, int] | None:
    """The last of candidates that rise in memory which fits, with the bytes that it takes; None where none does.

    A candidate that the recipe cannot have, such as a model that the layout does not divide, counts as too large.
    """
    best = None
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        try:
            size = taken(candidates[middle])
        except DanluError:
            size = room + 1
        if size <= room:
            best, low = (candidates[middle], size), middle + 1
        else:
            high = middle
    return best
