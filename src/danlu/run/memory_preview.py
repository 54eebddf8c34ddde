"""The memory of a recipe's run, from configs alone; `danlu preview` shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from danlu.assembly.devices import device_map_of
from danlu.assembly.memory_estimate import (
    BytesByDevice,
    CriticPass,
    MemoryEstimate,
    activation_dtype,
    expected_lines,
    find_micro_batch,
    gathered_at_a_time,
    stage_config,
    with_devices,
)
from danlu.assembly.parameters import own_name
from danlu.assembly.recipe_adapters import base_config
from danlu.core.errors import ModelError, RecipeError
from danlu.core.types import MemoryParts
from danlu.data.tokenizing import TokenizerInfo
from danlu.memory.layer_plan import LayerPlan, plan_of_layers
from danlu.models.chunks import Chunks, DeviceMap
from danlu.models.config import ModelConfig, parameter_shapes
from danlu.optim.state_shapes import FLOAT32_BYTES, optimizer_bytes
from danlu.parallel.comm import Group
from danlu.parallel.layout import Layout, layout_of
from danlu.parallel.pipeline import Pipeline
from danlu.planning.device_map import device_map_problems
from danlu.planning.model_tensors import ModelTensor, ModelTensors, frozen_tensors
from danlu.planning.pipeline_split import chunk_sizes, num_chunks, pipedream_problems, split_problems
from danlu.recipe import Recipe, sections
from danlu.recipe.value import value_share
from danlu.run.preview_model import config_of, tensors_of
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
    policy = tensors_of(recipe, config)
    shards = 1 if recipe.parallel.shard == "none" else layout.shard * layout.context
    tensor = layout.tensor

    def cut(of: ModelTensor, size: int) -> int:
        """The size of a tensor of `size` bytes before data ranks that have the same shard divide it."""
        return size // (tensor * (layout.expert if of.of_experts else 1))

    def shards_of(of: ModelTensor) -> int:
        """The number of data ranks that shard it: for experts those that have the same ones."""
        return shards // layout.expert if of.of_experts and shards > 1 else shards

    def local(of: ModelTensor, size: int) -> int:
        """One process's bytes of a tensor of `size` bytes."""
        return size if of.is_whole else -(-cut(of, size) // shards_of(of))

    frozen_models = _frozen_models(recipe, config)
    frozen = sum(sum(of_model.values()) for _, of_model in frozen_models)
    own_critic = own_config(recipe, config.vocab_size) if value_share(recipe) == "none" else None
    critic = {} if own_critic is None else parameter_shapes(own_critic)
    critic_bytes = sum(FLOAT32_BYTES * math.prod(shape) for shape in critic.values())
    judges = () if shards > 1 or tensor > 1 else shared_rewards(recipe)
    weights = (sum(policy.replaced.values()) + frozen) // (shards * tensor) + own_reward_bytes(recipe, judges)
    weights += critic_bytes // (shards * tensor)
    gathered = {}
    for each in policy.tensors:
        weights += local(each, each.bytes)
        if shards_of(each) > 1 and not each.is_whole and each.is_parameter:
            narrow = recipe.adapter is None
            size = each.elements * activation_dtype(recipe.precision).itemsize if narrow else each.bytes
            gathered[each.name] = (cut(each, size), cut(each, each.elements) if each.trained else 0)
    trained = sum(local(each, each.bytes) for each in policy.tensors if each.trained) + critic_bytes
    average = trained if recipe.ema is not None else 0
    shapes = policy.trained | {own_name(name): shape for name, shape in critic.items()}
    optimizer = optimizer_bytes(recipe.optimizer, shapes, paged=False)
    ratio = trained / max(1, sum(FLOAT32_BYTES * math.prod(shape) for shape in shapes.values()))
    gradients, state = int(ratio * optimizer.gradients), int(ratio * optimizer.resident)
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
    fixed = MemoryParts(
        weights=weights - min(weights, policy.adapter_bytes),
        adapter=min(weights, policy.adapter_bytes),
        gradients=gradients + whole_gradients,
        optimizer=state,
        average=average,
        activations=0,
        logits=0,
        packed=_largest_workspace(policy, layout, device_type) * activation_dtype(recipe.precision).itemsize,
        gathered=whole_parameters,
        stash=0 if first is None else first.weight_delay * trained,
    )
    estimate = MemoryEstimate(
        recipe,
        config,
        fixed,
        plan=_plan(recipe, config),
        micro=micro,
        device_type=device_type,
        offloaded_bytes=offloaded,
        processes=layout.world,
        critic=_critic_pass(recipe, config, own_critic),
        in_flight=1.0 if first is None else first.micro_batches_in_flight,
    ).with_activations()
    device_map = device_map_of(recipe.parallel.device_map, recipe.device, config)
    if device_map is None:
        return estimate
    return with_devices(estimate, device_map, _bytes_by_device(recipe, policy, frozen_models, device_map))


def _bytes_by_device(
    recipe: Recipe,
    policy: ModelTensors,
    frozen_models: Sequence[tuple[ModelConfig, Mapping[str, int]]],
    device_map: DeviceMap,
) -> BytesByDevice:
    """The bytes on each device of the policy and of frozen models, each given by (config, bytes by name)."""
    counted = BytesByDevice()
    for name, size in (*((each.name, each.bytes) for each in policy.tensors), *policy.replaced.items()):
        counted.weights[device_map.of_parameter(name)] += size
    for frozen_config, of_model in frozen_models:
        own = device_map_of(recipe.parallel.device_map, recipe.device, frozen_config, device_map.head)
        assert own is not None, "the recipe has a device map"
        for name, size in of_model.items():
            counted.weights[own.of_parameter(name)] += size
    for each in policy.tensors:
        counted.trained[device_map.of_parameter(each.name)] += each.bytes * each.trained
    if recipe.adapter is not None:
        counted.adapter.update(counted.trained)
    return counted


def _frozen_models(recipe: Recipe, policy: ModelConfig) -> list[tuple[ModelConfig, dict[str, int]]]:
    """The config of each frozen model, in a pipeline of its first stage, and the bytes of its parameters."""
    models = []
    for spec in frozen_models(STAGES[recipe.stage].models(recipe)).values():
        own = policy if spec.section.path is None else _of_first_stage(recipe, base_config(spec.section))[0]
        in_float32 = spec.mixing is not None
        models.append((own, frozen_tensors(own, recipe.precision, spec.quantization, in_float32=in_float32)))
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


def _critic_pass(recipe: Recipe, policy: ModelConfig, own: ModelConfig | None) -> CriticPass | None:
    """The second pass with gradients that a model of values takes; own: the config of one that is a whole decoder."""
    if value_share(recipe) not in ("base", "none"):
        return None
    config = own or policy
    return CriticPass(config, _plan(recipe, config))


def _plan(recipe: Recipe, config: ModelConfig) -> list[LayerPlan]:
    """The recomputation of a model's layers; empty where it is not known before layers are measured."""
    section, layers = recipe.memory.recompute, range(len(config.layers))
    return [] if section.kind == "planned" else plan_of_layers(section, layers, [layers])


def _largest_workspace(policy: ModelTensors, layout: Layout, device_type: str) -> int:
    """Elements of the largest dense tensor that is made of weights stored in fewer bytes than activations take: one
    matrix; for experts on a GPU all of a process."""
    counts = [0]
    for each in policy.tensors:
        if each.is_parameter and not each.trained and each.bytes < each.elements * 1.5:
            turns = 1 if not each.of_experts else each.shape[0] if device_type == "cpu" else layout.expert
            counts.append(each.elements // (turns * layout.tensor))
    return max(counts)
