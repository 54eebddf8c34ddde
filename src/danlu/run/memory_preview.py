"""The memory of a recipe's run, from configs alone; `danlu preview` shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from danlu.assembly.devices import device_map_of
from danlu.assembly.memory_estimate import (
    BytesByDevice,
    CriticPass,
    MemoryEstimate,
    activation_dtype,
    expected_lines,
    find_micro_batch,
    gathered_at_a_time,
    gathered_element_bytes,
    stage_config,
    with_devices,
)
from danlu.assembly.parameters import kept_whole
from danlu.assembly.recipe_adapters import base_config
from danlu.core.errors import ModelError, RecipeError
from danlu.core.types import MemoryParts
from danlu.data.tokenizing import TokenizerInfo
from danlu.memory.recompute import plan_of
from danlu.models.chunks import Chunks, DeviceMap
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.loading import meta_decoder
from danlu.optim.build import build as build_optimizer
from danlu.parallel.comm import Group
from danlu.parallel.expert import expert_names
from danlu.parallel.layout import Layout, layout_of
from danlu.parallel.pipeline import Pipeline
from danlu.planning.device_map import device_map_problems
from danlu.planning.pipeline_split import chunk_sizes, num_chunks, pipedream_problems, split_problems
from danlu.recipe import Recipe, sections
from danlu.recipe.value import value_share
from danlu.run.meta_model import MetaModel, config_of, frozen_parameter_bytes, meta_model
from danlu.stages.protocols import frozen_models
from danlu.stages.rewards import own_reward_bytes, shared_rewards
from danlu.stages.table import STAGES
from danlu.stages.value_model import own_config


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
    """Estimates a step of a recipe on one process of a layout, from the config of its model alone.

    Adapters below the one that is trained are left out, as are those of `adapter: continue`, which are described by
    their files and not by the recipe. micro: packed sequences in a micro-batch. Raises DanluError for adapters and
    device maps that do not fit the model.
    """
    config, first = _of_first_stage(recipe, config)
    if wrong := [*device_map_problems(recipe.parallel.device_map, config)]:
        raise RecipeError(wrong)
    meta = meta_model(recipe, config)
    whole = kept_whole(meta.model)
    shards = 1 if recipe.parallel.shard == "none" else layout.shard * layout.context
    tensor, experts = layout.tensor, expert_names(meta.model)

    def cut(name: str, size: int) -> int:
        """The size of a parameter of `size` bytes before data ranks that have the same shard divide it."""
        return size // (tensor * (layout.expert if name in experts else 1))

    def shards_of(name: str) -> int:
        """The number of data ranks that shard it: for experts those that have the same ones."""
        return shards // layout.expert if name in experts and shards > 1 else shards

    def local(name: str, size: int) -> int:
        """One process's bytes of a parameter of `size` bytes."""
        return size if name in whole else -(-cut(name, size) // shards_of(name))

    frozen_models = _frozen_models(recipe, config)
    frozen = sum(sum(of_model.values()) for _, of_model in frozen_models)
    critic = _critic_pass(recipe, config, meta.model)
    judges = () if shards > 1 or tensor > 1 else shared_rewards(recipe)
    weights = (sum(meta.replaced_bytes.values()) + frozen) // (shards * tensor) + own_reward_bytes(recipe, judges)
    gathered = {}
    if meta.own_critic is not None:
        weights += sum(parameter.nbytes for parameter in meta.own_critic.parameters()) // (shards * tensor)
    for name, parameter in (*meta.model.named_parameters(), *meta.model.named_buffers()):
        stored = meta.frozen_bytes.get(name, parameter.nbytes)
        weights += local(name, stored)
        if shards_of(name) > 1 and name not in whole and isinstance(parameter, nn.Parameter):
            count, is_frozen = parameter.numel(), name in meta.frozen_bytes
            size = stored if is_frozen else count * gathered_element_bytes(recipe, parameter)
            gathered[name] = (cut(name, size), cut(name, count) if parameter.requires_grad else 0)
    trained = sum(local(name, parameter.nbytes) for name, parameter in meta.trained)
    average = trained if recipe.ema is not None else 0
    optimizer = build_optimizer(meta.trained, _without_pages(recipe.optimizer))
    ratio = trained / max(1, sum(parameter.nbytes for _, parameter in meta.trained))
    gradients, state = int(ratio * optimizer.gradient_bytes()), int(ratio * optimizer.resident_state_bytes())
    whole_parameters, whole_gradients = gathered_at_a_time(gathered, recipe.parallel)
    offloaded = 0
    offload = recipe.memory.offload
    if device_type != "cpu" or recipe.memory.folder is not None:
        if "parameters" in offload and shards > 1:
            offloaded += weights + gradients + state + average
            weights = gradients = state = average = 0
        elif "optimizer" in offload:
            offloaded, state = state, 0
    if isinstance(recipe.optimizer, sections.PagedAdamW):
        offloaded, state = offloaded + state, 0
    section = recipe.memory.recompute
    fixed = MemoryParts(
        weights=weights - min(weights, meta.adapter_bytes),
        adapter=min(weights, meta.adapter_bytes),
        gradients=gradients + whole_gradients,
        optimizer=state,
        average=average,
        activations=0,
        logits=0,
        packed=_largest_workspace(meta, layout, device_type) * activation_dtype(recipe.precision).itemsize,
        gathered=whole_parameters,
        stash=0 if first is None else first.weight_delay * trained,
    )
    estimate = MemoryEstimate(
        recipe,
        config,
        fixed,
        plan=[] if section.kind == "planned" else plan_of(section, meta.model),
        micro=micro,
        device_type=device_type,
        offloaded_bytes=offloaded,
        processes=layout.world,
        critic=critic,
        in_flight=1.0 if first is None else first.micro_batches_in_flight,
    ).with_activations()
    device_map = device_map_of(recipe.parallel.device_map, recipe.device, config)
    if device_map is None:
        return estimate
    return with_devices(estimate, device_map, _bytes_by_device(recipe, meta, frozen_models, device_map))


def _bytes_by_device(
    recipe: Recipe,
    meta: MetaModel,
    frozen_models: Sequence[tuple[ModelConfig, Mapping[str, int]]],
    device_map: DeviceMap,
) -> BytesByDevice:
    """The bytes on each device of the policy and of frozen models, each given by (config, bytes by name)."""
    counted = BytesByDevice()
    for name, parameter in (*meta.model.named_parameters(), *meta.model.named_buffers()):
        counted.weights[device_map.of_parameter(name)] += meta.frozen_bytes.get(name, parameter.nbytes)
    for name, size in meta.replaced_bytes.items():
        counted.weights[device_map.of_parameter(name)] += size
    for frozen_config, of_model in frozen_models:
        own = device_map_of(recipe.parallel.device_map, recipe.device, frozen_config, device_map.head)
        assert own is not None, "the recipe has a device map"
        for name, size in of_model.items():
            counted.weights[own.of_parameter(name)] += size
    for name, parameter in meta.trained:
        counted.trained[device_map.of_parameter(name)] += parameter.nbytes
    if recipe.adapter is not None:
        counted.adapter.update(counted.trained)
    return counted


def _frozen_models(recipe: Recipe, policy: ModelConfig) -> list[tuple[ModelConfig, dict[str, int]]]:
    """The config of each frozen model, in a pipeline of its first stage, and the bytes of its parameters."""
    models = []
    for spec in frozen_models(STAGES[recipe.stage].models(recipe)).values():
        own = policy if spec.section.path is None else _of_first_stage(recipe, base_config(spec.section))[0]
        models.append((own, frozen_parameter_bytes(recipe, spec, own)))
    return models


def _of_first_stage(recipe: Recipe, config: ModelConfig) -> tuple[ModelConfig, Pipeline | None]:
    """Returns (the layers of a pipeline's first stage, its part in it: it has the most micro-batches in flight).

    Embedding and head are both counted, as if it had them. Raises RecipeError for layers that cannot be split.
    """
    section = recipe.parallel.pipeline
    if section.stages == 1:
        return config, None
    if wrong := [*split_problems(section, config), *pipedream_problems(recipe, config)]:
        raise RecipeError(wrong)
    stages = Group("pipeline", tuple(range(section.stages)))
    first = Pipeline(section.schedule, num_chunks(section) // section.stages, stages)
    chunks = Chunks.of_sizes(chunk_sizes(section, config), first.chunks)
    return stage_config(config, chunks), first


def _critic_pass(recipe: Recipe, config: ModelConfig, policy: Decoder) -> CriticPass | None:
    """The second pass with gradients that a model of values takes; policy: on the meta device."""
    section, share = recipe.memory.recompute, value_share(recipe)
    if share not in ("base", "none"):
        return None
    critic = config if share == "base" else own_config(recipe, config.vocab_size)
    model = policy if share == "base" else meta_decoder(critic)
    return CriticPass(critic, [] if section.kind == "planned" else plan_of(section, model))


def _largest_workspace(meta: MetaModel, layout: Layout, device_type: str) -> int:
    """Elements of the largest dense tensor that is made of weights stored in fewer bytes than activations take: one
    matrix; for experts on a GPU all of a process."""
    counts = [0]
    for name, parameter in meta.model.named_parameters():
        count = parameter.numel()
        if meta.frozen_bytes.get(name, 2 * count) < count * 1.5:
            is_of_experts = parameter.ndim == 3
            turns = 1 if not is_of_experts else len(parameter) if device_type == "cpu" else layout.expert
            counts.append(count // (turns * layout.tensor))
    return max(counts)


def _without_pages(section: Any) -> Any:
    """A section of an optimizer with the same state, without a file for its pages."""
    if not isinstance(section, sections.PagedAdamW):
        return section
    kind = sections.AdamW8bit if section.bits == 8 else sections.AdamW
    return kind(learning_rate=section.learning_rate)
