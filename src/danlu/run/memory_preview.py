"""The memory and the parameters of a recipe's run, from configs alone: a model of shapes, on torch's meta device.

`danlu preview` shows it; nothing is loaded but configs and the headers of weight files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from danlu.adapters.adapter_config import WEIGHTS, resolve_adapter
from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.lora import LowRank
from danlu.adapters.low_rank_init import BASE_CHANGING_INITS
from danlu.assembly.base_model import find_base
from danlu.assembly.devices import device_map_of
from danlu.assembly.frozen_base import adapter_sites, adapters_of, stored_quantization
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
from danlu.assembly.parameters import TRAINED, VALUE, kept_whole, own_name, parameters_of
from danlu.assembly.recipe_adapters import base_config
from danlu.core.errors import ModelError, RecipeError
from danlu.core.safetensors_format import read_header
from danlu.data.tokenizing import TokenizerInfo
from danlu.memory.recompute import plan_of
from danlu.models.chunks import Chunks, DeviceMap
from danlu.models.config import ModelConfig, is_matrix
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import FOUR_BIT, expected_tensors, own_tensors
from danlu.models.loading import meta_decoder
from danlu.models.long_context import with_long_context
from danlu.models.presets import from_scratch
from danlu.optim.build import build as build_optimizer
from danlu.parallel.comm import Group
from danlu.parallel.expert import expert_names
from danlu.parallel.layout import Layout, layout_of
from danlu.parallel.pipeline import Pipeline
from danlu.planning.activation_memory import packed_bytes
from danlu.planning.device_map import device_map_problems
from danlu.planning.pipeline_split import chunk_sizes, num_chunks, pipedream_problems, split_problems
from danlu.recipe import Recipe, sections
from danlu.recipe.value import value_adapter, value_share
from danlu.stages.protocols import ModelSpec
from danlu.stages.rewards import own_reward_bytes, shared_rewards
from danlu.stages.table import STAGES
from danlu.stages.value_model import own_config
from danlu.training.memory_parts import MemoryParts
from danlu.training.units import parameters_and_trained


def preview_parameters(recipe: Recipe, tokenizer: TokenizerInfo | None) -> str | None:
    """Counts the parameters of a run, and the trained ones, for `danlu preview`: `44,192 parameters, all trained`.

    None where the model cannot be read, or its vocabulary is not known. Raises RecipeError as a run would.
    """
    try:
        config = _config(recipe, tokenizer)
        if config is None:
            return None
        meta = _meta_model(recipe, config)
        total, trained = parameters_of(meta.model), sum(parameter.numel() for _, parameter in meta.trained)
        if isinstance(recipe.adapter, sections.Continue):  # its files say more than the recipe
            header = read_header(resolve_adapter(recipe.model.adapters[-1]) / WEIGHTS)
            trained = sum(math.prod(entry.shape) for entry in header.values())
            total += trained
        return parameters_and_trained(total, trained)
    except ModelError:  # the estimate of memory says so
        return None


def _config(recipe: Recipe, tokenizer: TokenizerInfo | None) -> ModelConfig | None:
    """The config of the model that is trained; None where it depends on a tokenizer that is not known."""
    if recipe.model.path is not None:
        config = base_config(recipe.model)
    elif tokenizer is not None:
        config = from_scratch(recipe.model, tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)
    else:
        return None
    config = with_long_context(config, recipe.long_context, recipe.data.max_length)
    return replace(config, task=STAGES[recipe.stage].task(recipe))  # one that classifies has no head over a vocabulary


def preview_lines(recipe: Recipe, tokenizer: TokenizerInfo | None) -> list[str]:
    """Lines on the memory of a recipe's run, for `danlu preview`: nothing is loaded but configs.

    tokenizer: None where it is not known. Raises RecipeError for a recipe that no run could begin with.
    """
    section, batch = recipe.parallel, recipe.batch
    try:
        config = _config(recipe, tokenizer)
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
    meta = _meta_model(recipe, config)
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

    beside = [spec for spec in STAGES[recipe.stage].models(recipe).values() if isinstance(spec, ModelSpec)]
    frozen_models = [_frozen_parameter_bytes(recipe, spec, config) for spec in beside]
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
        stash=first.weight_delay * trained,
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
        in_flight=first.micro_batches_in_flight,
    ).with_activations()
    device_map = device_map_of(recipe.parallel.device_map, recipe.device, config)
    if device_map is None:
        return estimate
    return with_devices(estimate, device_map, _bytes_by_device(recipe, meta, frozen_models, device_map))


def _bytes_by_device(
    recipe: Recipe,
    meta: _MetaModel,
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


def _of_first_stage(recipe: Recipe, config: ModelConfig) -> tuple[ModelConfig, Pipeline]:
    """Returns (the layers of a pipeline's first stage, its part in it: it has the most micro-batches in flight).

    Embedding and head are both counted, as if it had them. Raises RecipeError for layers that cannot be split.
    """
    section = recipe.parallel.pipeline
    if section.stages == 1:
        return config, Pipeline()
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


class _MetaModel(NamedTuple):
    """A model without values, and the types in which a run would keep its parts."""

    model: Decoder
    frozen_bytes: dict[str, int]
    """Bytes of frozen matrices, by name: packed, or in the type of activations."""
    adapter_bytes: int
    trained: list[tuple[str, nn.Parameter]]
    replaced_bytes: dict[str, int]
    """Bytes of frozen parameters, by name, that trained copies replace (`modules_to_save`)."""
    own_critic: Decoder | None = None
    """PPO's model of values, where that is a decoder of its own."""


def _meta_model(recipe: Recipe, config: ModelConfig) -> _MetaModel:
    """The model on the meta device, with the adapter that the recipe trains."""
    model = meta_decoder(config)
    critic = meta_decoder(own_config(recipe, config.vocab_size)) if value_share(recipe) == "none" else None
    of_critic = [] if critic is None else [(own_name(name), each) for name, each in critic.named_parameters()]
    if recipe.adapter is None:
        return _MetaModel(model, {}, 0, [*model.named_parameters(), *of_critic], {}, critic)
    adapters = adapters_of(model, seed=recipe.seed, device="meta", encode=lambda text: [0])
    if not isinstance(recipe.adapter, sections.Continue):
        adapters.add(TRAINED, recipe.adapter)
        _initialize(adapters, recipe.adapter)
        adapters.finish_loading()
        if (values := value_adapter(recipe)) is not None:
            adapters.activate()
            adapters.add(VALUE, values)
        adapters.train_only(*adapters.added)
    whole = adapters.fully_trained()
    linears = {f"{site.name}.weight" for site in adapters.sites if site.layer is not None} - whole
    section = recipe.quantization
    if (stored := _stored_quantization(recipe)) is not None:
        section, linears = stored, linears & _stored_in_four_bits(recipe, config)
    frozen_bytes = {}
    for name, parameter in adapters.base_parameters().items():
        if name in linears and section is not None:
            frozen_bytes[name] = packed_bytes(parameter.shape, section)
        elif is_matrix(name, parameter.ndim) and name not in whole:
            frozen_bytes[name] = parameter.numel() * activation_dtype(recipe.precision).itemsize
    return _MetaModel(
        model,
        frozen_bytes,
        sum(tensor.nbytes for name in adapters.added for tensor in adapters.tensors(name).values()),
        [*((name, each) for name, each in model.named_parameters() if each.requires_grad), *of_critic],
        {copy.name: copy.original.nbytes for added in adapters.added.values() for copy in added.copies},
        critic,
    )


def _frozen_parameter_bytes(recipe: Recipe, spec: ModelSpec, policy: ModelConfig) -> tuple[ModelConfig, dict[str, int]]:
    """Returns (config, bytes of each parameter) of a frozen model, over all processes (in a pipeline, of the first
    stage); its adapters are left out.

    policy: the config of the policy, for a model from scratch.
    """
    config = policy if spec.section.path is None else _of_first_stage(recipe, base_config(spec.section))[0]
    model, sizes = meta_decoder(config), {}
    linears = {f"{site.name}.weight" for site in adapter_sites(model) if site.layer is not None}
    for name, parameter in model.named_parameters():
        if name in linears and spec.quantization is not None:
            sizes[name] = packed_bytes(parameter.shape, spec.quantization)
        elif is_matrix(name, parameter.ndim) and spec.mixing is None:
            sizes[name] = parameter.numel() * activation_dtype(recipe.precision).itemsize
        else:
            sizes[name] = parameter.nbytes
    return config, sizes


def _stored_quantization(recipe: Recipe) -> sections.QuantizationSection | None:
    """The quantization in which the base's own folder stores its linear layers, if in 4 bits."""
    if recipe.model.path is None:
        return None
    return stored_quantization(find_base(recipe.model.path).folder)


def _stored_in_four_bits(recipe: Recipe, config: ModelConfig) -> set[str]:
    """Names of the parameters that the base's own folder has in 4 bits."""
    assert recipe.model.path is not None, "a folder says how it stores them"
    stored = own_tensors(find_base(recipe.model.path).folder, config)
    tensors = (tensor for tensor in expected_tensors(config, stored) if tensor.name in stored)
    return {name for tensor in tensors if stored[tensor.name].dtype == FOUR_BIT for name in tensor.parameters}


def _initialize(adapters: AdapterSet, section: Any) -> None:
    """Initializes an adapter once the base's weights are there, with norms that DoRA measures."""
    for module in (module for added in adapters.added.values() for module in added.modules.values()):
        if not isinstance(module, LowRank):
            continue
        if section.init in BASE_CHANGING_INITS:
            module.set_initial_factors(module.lora_A.detach(), module.lora_B.detach())
        if module.lora_magnitude_vector is not None:
            module.base_row_squares = torch.empty_like(module.lora_magnitude_vector)


def _largest_workspace(meta: _MetaModel, layout: Layout, device_type: str) -> int:
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
