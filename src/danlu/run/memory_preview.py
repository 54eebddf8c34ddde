"""The memory of a recipe's run, from configs alone; `danlu preview` shows it."""

from __future__ import annotations

import math
from dataclasses import fields

import torch

from danlu.assembly.devices import device_map_of
from danlu.assembly.memory_estimate import (
    BytesByDevice,
    MemoryEstimate,
    expected_lines,
    find_micro_batch,
    kernels_name,
    with_devices,
)
from danlu.core.errors import ModelError, RecipeError
from danlu.data.tokenizing import TokenizerInfo
from danlu.models.chunks import DeviceMap
from danlu.models.config import ModelConfig
from danlu.parallel.layout import Layout, layout_of
from danlu.planning.device_map import device_map_problems
from danlu.planning.pipeline_split import pipedream_problems, split_problems
from danlu.planning.rank_memory import rank_states, stage_step
from danlu.planning.workload import Workload
from danlu.recipe import Recipe
from danlu.run.preview_model import config_of
from danlu.run.read_workload import read_workload


def preview_lines(recipe: Recipe, tokenizer: TokenizerInfo | None) -> list[str]:
    """Lines on the memory of a recipe's run, for `danlu preview`: nothing is loaded but configs.

    tokenizer: None where it is not known. Raises RecipeError for a recipe that no run could begin with.
    """
    section, batch = recipe.parallel, recipe.batch
    try:
        config = config_of(recipe, tokenizer)
        if config is None:
            return []
        fewest = section.expert // math.gcd(section.expert, section.context.size) * section.replicate
        data = fewest if section.data == "auto" or section.workers == "threads" else section.data
        layout = layout_of(section, data * section.tensor * section.context.size * section.pipeline.stages)
        device_type = "cuda" if recipe.device != "cpu" and torch.cuda.is_available() else "cpu"
        of_one_pack = estimate_from_config(recipe, config, layout=layout, device_type=device_type, micro=1)
    except ModelError as error:
        return [f"memory: unknown, for the model cannot be read: {error}"]
    per_step = -(-batch.packs(recipe.data.max_length) // layout.data)
    micro = find_micro_batch(of_one_pack, per_step)
    estimate = estimate_from_config(recipe, config, layout=layout, device_type=device_type, micro=micro)
    lines = expected_lines(estimate, is_placed=False)
    if section.shard != "none" and section.data == "auto":
        taken = "one is taken" if data == 1 else f"{data} are taken"
        lines.append(f"memory: parallel.data tells here how many processes share the model; {taken}")
    return lines


def estimate_from_config(
    recipe: Recipe, config: ModelConfig, *, layout: Layout, device_type: str, micro: int
) -> MemoryEstimate:
    """Estimates a step of a recipe on the process of a layout that needs most, from the config of its model alone.

    Adapters below the one that is trained are left out, as are those of `adapter: continue`, which are described by
    their files and not by the recipe. micro: packed sequences in a micro-batch. Raises DanluError for adapters, device
    maps and pipelines that do not fit the model.
    """
    section = recipe.parallel
    problems = [*device_map_problems(section.device_map, config)]
    if section.pipeline.stages > 1:
        problems += [*split_problems(section.pipeline, config), *pipedream_problems(recipe, config)]
    if problems:
        raise RecipeError(problems)
    workload = read_workload(recipe, config, judges=layout.tensor == 1 and section.shard == "none")
    stages = (_of_stage(workload, layout, stage, device_type, micro) for stage in range(section.pipeline.stages))
    worst = max(stages, key=lambda estimate: estimate.parts.total)
    device_map = device_map_of(section.device_map, recipe.device, config)
    if device_map is None:
        return worst
    return with_devices(worst, device_map, _bytes_by_device(workload, device_map))


def _of_stage(workload: Workload, layout: Layout, stage: int, device_type: str, micro: int) -> MemoryEstimate:
    states = rank_states(workload, layout, stage=stage, device_type=device_type)
    step = stage_step(workload, stage, states.parts, device_type, kernels_name(device_type), micro)
    own = {each.name: getattr(step, each.name) for each in fields(step)}
    return MemoryEstimate(**own, offloaded_bytes=states.offloaded, processes=layout.world)


def _bytes_by_device(workload: Workload, device_map: DeviceMap) -> BytesByDevice:
    """The bytes on each device of the policy and of frozen models."""
    counted, policy, section = BytesByDevice(), workload.policy, workload.recipe.parallel
    for each in (*policy.tensors, *policy.originals):
        counted.weights[device_map.of_parameter(each.name)] += each.bytes
    for model in workload.frozen:
        own = device_map_of(section.device_map, workload.recipe.device, model.config, device_map.head)
        assert own is not None, "the recipe has a device map"
        for each in model.tensors:
            counted.weights[own.of_parameter(each.name)] += each.bytes
    for each in policy.tensors:
        counted.trained[device_map.of_parameter(each.name)] += each.bytes * each.trained
    if workload.recipe.adapter is not None:
        counted.adapter.update(counted.trained)
    return counted
