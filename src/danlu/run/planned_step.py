"""The plan of a recipe's step on a cluster or on this machine, from configs alone. No torch.

Everything that keeps a run from beginning in this layout is raised with the run's own message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from danlu.assembly.document_lengths import document_lengths, with_named_tokenizer
from danlu.core.errors import RecipeError
from danlu.memory.available_memory import host_available_bytes
from danlu.models.config import ModelConfig
from danlu.parallel.layout import Layout, layout_of
from danlu.planning.cards import nvidia_devices, nvidia_free_bytes
from danlu.planning.cluster import Cluster
from danlu.planning.device_map import Device as MappedDevice
from danlu.planning.layout_problems import layout_problems, policy_problems
from danlu.planning.lengths import Lengths
from danlu.planning.machine_profile import Device, MachineProfile
from danlu.planning.plan_values import plan_values
from danlu.planning.rollout_lengths import RolloutLengths
from danlu.planning.step import micro_batch, plan_step
from danlu.planning.step_plan import StepPlan
from danlu.planning.target import Target
from danlu.planning.workload import Workload
from danlu.recipe import Recipe
from danlu.recipe.sections import Parallel
from danlu.run.preview_model import planned_config
from danlu.run.read_workload import read_workload


@dataclass(frozen=True)
class PlannedStep:
    """The plan of a step, and what it is of."""

    workload: Workload
    target: Target
    plan: StepPlan

    @property
    def values(self) -> dict[str, Any]:
        """The plan as JSON."""
        return plan_values(self.plan, self.workload, self.target)


def planned_step(
    recipe: Recipe,
    target: Target | None = None,
    lengths: Lengths | None = None,
    rollout_lengths: RolloutLengths | None = None,
    *,
    config: ModelConfig | None = None,
) -> PlannedStep:
    """Plans a step of a recipe.

    target: the machine; None: this one. lengths: of the documents, by default those of the token cache.
    rollout_lengths: of drawn answers and their prompts, by default the longest. config: of another model in place of
    the recipe's. Raises RecipeError for a layout that the machine or the model cannot have, ModelError for a model that
    cannot be read.
    """
    workload, layout, target = _placed(recipe, target, lengths, rollout_lengths, config)
    return PlannedStep(workload, target, plan_step(workload, layout, target))


def planned_micro_batch(recipe: Recipe, target: Target) -> int:
    """The packed sequences of a micro-batch in the plan of a recipe's step, without the rest of it.

    Raises RecipeError as `planned_step` does, and where `batch.memory` does not hold the smallest micro-batch.
    """
    return micro_batch(*_placed(recipe, target))


def _placed(
    recipe: Recipe,
    target: Target | None,
    lengths: Lengths | None = None,
    rollout_lengths: RolloutLengths | None = None,
    config: ModelConfig | None = None,
) -> tuple[Workload, Layout, Target]:
    """The workload of a recipe in its layout on a machine; arguments and errors are those of `planned_step`."""
    check_planned(recipe)
    config = config or planned_config(_with_named_tokenizer(recipe))
    target = target or target_here(recipe)
    if recipe.parallel.device_map is not None and not target.devices:
        target = _on_one_node(target)
    layout = layout_of(recipe.parallel, target.cluster.ranks)
    if wrong := [*policy_problems(recipe, config)]:  # before anything else of it is read
        raise RecipeError(wrong)
    judges = layout.tensor == 1 and recipe.parallel.shard == "none"
    workload = planned_workload(recipe, lengths, rollout_lengths, config=config, judges=judges)
    if wrong := [*layout_problems(workload, layout, target.device_type)]:
        raise RecipeError(wrong)
    return workload, layout, target


def planned_workload(
    recipe: Recipe,
    lengths: Lengths | None = None,
    rollout_lengths: RolloutLengths | None = None,
    *,
    config: ModelConfig | None = None,
    judges: bool = True,
) -> Workload:
    """Reads what a recipe trains, for any layout; arguments are those of `planned_step` and `read_workload`."""
    check_planned(recipe)
    recipe = _with_named_tokenizer(recipe)
    config = config or planned_config(recipe)
    workload = read_workload(recipe, config, lengths or document_lengths(recipe), judges=judges)
    return replace(workload, rollout_lengths=rollout_lengths)


def _with_named_tokenizer(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"model": with_named_tokenizer(recipe.model)})


def check_planned(recipe: Recipe) -> None:
    """Raises RecipeError for a recipe that no plan is made of."""
    if recipe.stage == "classify":
        raise RecipeError("stage: classify trains no language model, and only steps of those are planned")


def target_here(
    recipe: Recipe,
    ranks: int | None = None,
    nodes: int = 1,
    *,
    free_bytes: int | None = None,
    measured: bool = True,
) -> Target:
    """This machine with a number of processes, or a cluster of several like it; by default as many processes as the
    recipe needs at least, and on GPUs as many as there are.

    free_bytes: those of one process that nothing else takes; by default what is free now. Its speeds are those that
    `danlu bench machine` has measured, if it has; without links of several processes they count as unknown. measured:
    whether these are read; memory alone needs none. Raises DataError for a torn profile.
    """
    device: Device = "cpu" if recipe.device == "cpu" or not nvidia_devices() else "cuda"
    is_one_process = recipe.parallel.workers == "threads" or recipe.parallel.device_map is not None
    if ranks is None:
        is_fewest = device == "cpu" or is_one_process
        ranks = fewest_processes(recipe.parallel) if is_fewest else len(nvidia_devices())
    here = ranks // nodes
    if free_bytes is None:
        free_bytes = _free_bytes(device, here)
    profile = None
    if measured:
        profile = MachineProfile.here(here, device=device) or MachineProfile.here(1, device=device)
    cluster = _several(Cluster.here(profile, here), nodes, ranks)
    devices = _devices(device, cluster.card.memory_bytes) if recipe.parallel.device_map is not None else ()
    if ranks > 1 and not cluster.links:
        unlinked = replace(_several(Cluster.here(None, here), nodes, ranks), links=())
        return Target(unlinked, free_bytes=free_bytes, devices=devices)
    return Target(cluster, profile, free_bytes, devices)


def _free_bytes(device: Device, processes: int) -> int | None:
    """Bytes of one process's memory that nothing takes now; None where the system does not tell."""
    if device == "cpu":
        free = host_available_bytes()
        return None if free is None else free // processes
    return min(nvidia_free_bytes(), default=None)


def _devices(device: Device, memory_bytes: int) -> tuple[MappedDevice, ...]:
    """The devices of this machine that layers may be dealt to."""
    if device == "cpu":
        return (MappedDevice("cpu", host_available_bytes() or memory_bytes),)
    return tuple(MappedDevice(f"cuda:{number}", free) for number, free in enumerate(nvidia_free_bytes()))


def _on_one_node(target: Target) -> Target:
    """One process, with the cards of one node as the devices of its layers."""
    card = target.cluster.card
    devices = tuple(
        MappedDevice(f"cuda:{number}", card.memory_bytes) for number in range(target.cluster.cards_per_node)
    )
    return replace(target, cluster=replace(target.cluster, nodes=1, cards_per_node=1), devices=devices)


def _several(cluster: Cluster, nodes: int, ranks: int) -> Cluster:
    """The cluster with more nodes like its one; the links between them are those of the maker of its cards."""
    if nodes == 1:
        return cluster
    own = Cluster.of_card(cluster.card, nodes, ranks // nodes) if cluster.links else replace(cluster, nodes=nodes)
    return replace(own, host_memory_bytes=cluster.host_memory_bytes)


def fewest_processes(section: Parallel) -> int:
    """The fewest processes that a section's degrees can be had with."""
    if section.workers == "threads" or section.device_map is not None:
        return 1
    data = section.expert // math.gcd(section.expert, section.context.size) * section.replicate
    if section.data != "auto":
        data = section.data
    return data * section.tensor * section.context.size * section.pipeline.stages
