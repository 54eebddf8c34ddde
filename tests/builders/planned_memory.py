"""The memory of a placed model's states, counted of its modules, and the plan of the same recipe next to it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from danlu.assembly.machine_memory import gathered_element_bytes
from danlu.assembly.parallelize import shards_on_host
from danlu.core.dtensor import is_dtensor, local_tensor
from danlu.core.memory_parts import MemoryParts
from danlu.models.config import ModelConfig
from danlu.numerics.quantized_weight import QuantizedModule
from danlu.optim.build import Optimizers
from danlu.parallel.layout import Layout
from danlu.planning.cards import Card
from danlu.planning.cluster import Cluster
from danlu.planning.device_map import Device
from danlu.planning.gathered_memory import ShardedSizes, gathered_at_a_time
from danlu.planning.lengths import FULL_PACKS, Lengths
from danlu.planning.step import plan_step
from danlu.planning.step_plan import StepPlan
from danlu.planning.target import CPU, Target
from danlu.recipe import Recipe
from danlu.run.read_workload import read_workload
from danlu.stages.placed import PlacedDecoder
from danlu.stages.step_budget import DecoderBudget

ALONE = Layout()
LARGE = 1 << 50
"""More bytes than any test's step takes."""


def machine(layout: Layout, device_type: str = "cpu", *, room: int = LARGE, devices: tuple[Device, ...] = ()) -> Target:
    """Processors, or cards of which only the memory is known, without speeds."""
    card = Card(CPU if device_type == "cpu" else "a card", room, None, {})
    return Target(Cluster(card, 1, layout.world, ()), devices=devices)


def planned(
    recipe: Recipe,
    config: ModelConfig,
    layout: Layout = ALONE,
    device_type: str = "cpu",
    *,
    micro: int | None = None,
    lengths: Lengths = FULL_PACKS,
    room: int = LARGE,
    devices: tuple[Device, ...] = (),
) -> StepPlan:
    """The plan of a recipe's step, from the config of its model alone; micro: in place of the recipe's."""
    judges = layout.tensor == 1 and recipe.parallel.shard == "none"
    workload = read_workload(recipe, config, lengths, judges=judges)
    target = machine(layout, device_type, room=room, devices=devices)
    return plan_step(workload, layout, target, micro=micro)


def planned_parts(
    recipe: Recipe, config: ModelConfig, layout: Layout = ALONE, device_type: str = "cpu", *, micro: int = 1
) -> MemoryParts:
    """The parts of the process that needs most."""
    return planned(recipe, config, layout, device_type, micro=micro).worst.memory.parts


def counted_states(placed: PlacedDecoder, optimizer: Optimizers, reward_bytes: int = 0) -> tuple[MemoryParts, int]:
    """The parts of a step of this process that its micro-batches do not change, and the bytes that are offloaded, as
    the tensors of its modules and of its optimizer say it."""
    recipe, ranks = placed.recipe, placed.parallel.ranks
    average = sum(parameter.nbytes for parameter in optimizer.parameters.values()) if recipe.ema is not None else 0
    states = DecoderBudget(placed, reward_bytes).resident(placed.weights(), optimizer, average)
    elsewhere = optimizer.state_bytes() - optimizer.resident_state_bytes()
    if not ranks.dense_data.all.alone and shards_on_host(recipe.memory, placed.device):
        elsewhere += states.total
        states = replace(states, weights=0, adapter=0, gradients=0, optimizer=0, average=0)
    gathered, gradients = gathered_parameters(placed.model, recipe)
    gathered += sum(gathered_parameters(each.subject.model, recipe)[0] for each in placed.frozen.values())
    if placed.own_critic is not None:
        of_critic = gathered_parameters(placed.own_critic.subject.model, recipe)
        gathered, gradients = gathered + of_critic[0], gradients + of_critic[1]
    modules = (module for own in placed.modules() for module in own.modules())
    packed = max((each.workspace_elements for each in modules if isinstance(each, QuantizedModule)), default=0)
    states = replace(
        states,
        gradients=states.gradients + gradients,
        packed=packed * placed.dtype.itemsize,
        gathered=gathered,
    )
    return states, elsewhere


def gathered_parameters(model: nn.Module, recipe: Recipe) -> tuple[int, int]:
    """Bytes of whole parameters, and of whole gradients besides those of shards, that a process of a sharded model has
    at a time."""
    sharded = {
        name: ShardedSizes(
            parameter.numel() * gathered_element_bytes(recipe, parameter),
            parameter.numel() * parameter.requires_grad,
            local_tensor(parameter).numel() * parameter.requires_grad,
        )
        for name, parameter in model.named_parameters()
        if is_dtensor(parameter)
    }
    return gathered_at_a_time(sharded, recipe.parallel)
