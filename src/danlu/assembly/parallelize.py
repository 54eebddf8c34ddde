"""Makes the trained model of a recipe, placed on the processes of a run: the order of `place` is the documentation.

In a single process this is a model in float32, or a frozen one with adapters. With several, each has its part: the
model is made on the meta device, cut and sharded, and only then are weights drawn or read, each process its boxes. A
frozen base is read layer by layer, each of which is cut and sharded (`LayerPlacer`) before the next one is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from danlu.assembly.parameter_roles import VALUE, role_of
from danlu.core.errors import RecipeError
from danlu.core.types import Pack, Sample
from danlu.data.batch import collate, pad_to_bucket
from danlu.memory import recompute
from danlu.memory.available_memory import available_bytes
from danlu.models.attend import attend_for
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import resolve_folder
from danlu.models.loading import build, load, load_boxes, meta_decoder
from danlu.models.modules import RMSNorm
from danlu.optim.build import Optimizers
from danlu.optim.build import build as build_optimizer
from danlu.optim.moments import StatePages, TensorSpecs
from danlu.parallel import data, tensor
from danlu.parallel.expert import ExpertDistributor, expert_names
from danlu.parallel.local_parameter import LocalParameter, local_parameters_of, sums_over_data
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.pipeline import Pipeline
from danlu.parallel.pipeline_split import StageParameters, split
from danlu.parallel.ranks import Ranks
from danlu.planning.pipeline_split import chunk_sizes, num_chunks
from danlu.planning.precision import DTYPES
from danlu.recipe import Recipe
from danlu.recipe.device_map import named_devices
from danlu.recipe.value import value_adapter, value_adapter_folder

if TYPE_CHECKING:
    from danlu.adapters.adapter_set import AdapterSet
    from danlu.assembly.base_model import Base
    from danlu.assembly.frozen_base import Adapted
    from danlu.models.device_map import DeviceMap
    from danlu.planning.device_map import Device


@dataclass(frozen=True)
class Subject:
    """The trained subject: a model, or the adapters of one that is frozen."""

    model: Decoder
    adapters: AdapterSet | None = None
    base: Base | None = None
    placer: LayerPlacer | None = None
    """Has cut and sharded the layers already, while they were read."""


@dataclass(frozen=True)
class Placed:
    """A subject on the processes of a run."""

    subject: Subject
    parallel: ParallelContext
    notes: tuple[str, ...] = ()
    """Lines for the console."""
    plan: recompute.Plan = ()
    """The recomputation of each layer in the backward pass."""
    device_map: DeviceMap | None = None
    """The device map of a model on several devices of one process; None elsewhere."""

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters of optimizers and averages, by name: this process's part of each."""
        if not self.parallel.local_parameters:
            return list(self.subject.model.named_parameters())
        return [(name, parameter.local) for name, parameter in self.parallel.local_parameters.items()]


def subject_of(
    recipe: Recipe,
    config: ModelConfig,
    device: torch.device,
    *,
    saved: Mapping[str, Tensor] | None = None,
    resumed: bool = False,
    encode: Callable[[str], list[int]] | None = None,
    ranks: Ranks | None = None,
) -> Subject:
    """The decoder in float32 with its first weights, or a frozen one with adapters.

    resumed: weights will be read from a checkpoint, so parameters are allocated without values. saved: the tensors of
    the adapter in that checkpoint. encode: text to tokens, for prompts that start from words. ranks: where it will be
    placed; on several processes or devices a model that is trained as a whole is on the meta device until then, and a
    frozen one is placed while it is read. Raises ModelError for folders that cannot be read, RecipeError as `place`.
    """
    by_layer = ranks is not None and layer_by_layer(recipe, ranks)
    if ranks is not None:
        device = loading_device(recipe, ranks, device)
    if recipe.adapter is not None:
        from danlu.assembly.adapter_training import adapted_model
        from danlu.assembly.value_adapter import value_on_base

        placer: LayerPlacer | None = None

        def layer_hook_factory(loading: Adapted) -> LayerPlacer:
            nonlocal placer
            assert ranks is not None
            placer = LayerPlacer(loading.model, loading.adapters, recipe, ranks, device)
            return placer

        adapted, base = adapted_model(
            recipe.model,
            recipe.adapter,
            recipe.quantization,
            dtype=DTYPES[recipe.precision],
            device=device,
            seed=recipe.seed,
            encode=encode,
            saved_adapter=saved,
            config=config,
            layer_hook_factory=layer_hook_factory if by_layer else None,
            value=value_on_base(recipe),
        )
        return Subject(adapted.model, adapted.adapters, base, placer)
    if recipe.model.adapters and not resumed:
        from danlu.assembly.adapter_training import merged_model

        return Subject(merged_model(recipe.model, device=device, config=config))
    if ranks is not None and (not ranks.alone or recipe.parallel.device_map is not None):
        return Subject(meta_decoder(config))
    if resumed:
        return Subject(build(config, device=device))
    if recipe.model.path is not None:
        return Subject(load(resolve_folder(recipe.model.path), device=device, config=config))
    from danlu.models.initialize import initialize

    model = build(config, device=device)
    initialize(model, recipe.seed)
    return Subject(model)


class LayerPlacer:
    """Leaves of a model the chunks of this process; then distributes its experts, cuts it among tensor ranks and shards
    it among data ranks, or moves it to the devices of one process, a layer at a time where it is read so."""

    def __init__(
        self, model: Decoder, adapters: AdapterSet | None, recipe: Recipe, ranks: Ranks, device: torch.device
    ) -> None:
        section = recipe.parallel
        self.model, self.adapters = model, adapters
        self.device_map = device_map_of(recipe, model.config, device)
        self.whole = kept_whole(model)  # of the whole model: which parameters its layers share
        self.pipeline = pipeline_of(recipe, ranks)
        self.stage = StageParameters()
        if not self.pipeline.alone:
            self.stage = split(model, adapters, chunk_sizes(section.pipeline, model.config), self.pipeline)
        self.experts = ExpertDistributor(model, adapters, ranks.expert)
        self.boxes = self.experts.own_boxes()
        self.cutter = tensor.Cutter(model, adapters, ranks.tensor, sequence=section.sequence, boxes=self.experts.boxes)
        self.sharder = None
        if section.shard != "none" and not ranks.dense_data.all.alone:
            self.sharder = data.Sharder(
                model,
                ranks,
                section,
                gathered=None if adapters is not None or recipe.precision == "fp32" else DTYPES[recipe.precision],
                whole=self.whole,
                expert_names=expert_names(model),
                offload=shards_on_host(recipe, device),
            )

    def layer_loaded(self, name: str) -> None:
        """Reduces a layer with loaded weights to this process's part."""
        self.cut_layer(name)
        self.shard_layer(name)
        if self.device_map is not None:
            from danlu.parallel.device_map import move_part

            move_part(self.model.layers[name], self.device_map.layers[int(name)])
        if self.adapters is not None:
            self.adapters.refresh_copies()

    def cut_layer(self, name: str) -> None:
        self.experts.layer(name)
        self.cutter.layer(name)

    def shard_layer(self, name: str) -> None:
        if self.sharder is not None:
            self.sharder.layer(f"layers.{name}", self.model.layers[name])


def pipeline_of(recipe: Recipe, ranks: Ranks) -> Pipeline:
    """The part of this process in the pipeline of a recipe."""
    if ranks.pipeline.alone:
        return Pipeline()
    section = recipe.parallel.pipeline
    chunks = num_chunks(section) // section.stages
    return Pipeline(section.schedule, chunks, ranks.pipeline, ranks.downstream, ranks.upstream, section.vertical_sync)


def shards_on_host(recipe: Recipe, device: torch.device) -> bool:
    """Whether shards of parameters are offloaded to the host's memory, which on a CPU they do not leave."""
    return "parameters" in recipe.memory.offload and device.type != "cpu"


def layer_by_layer(recipe: Recipe, ranks: Ranks) -> bool:
    """Whether a frozen base can be cut and sharded while it is read, so that no process (of several devices, none)
    ever has all of it.

    Adapters that are read (`model.adapters`, `value.model`) and measured plans of recomputation need a whole base.
    """
    section = recipe.parallel
    reads_adapters = bool(recipe.model.adapters) or value_adapter_folder(recipe) is not None
    shares_layers = ranks.pipeline.size > 1 or ranks.tensor.size > 1 or ranks.expert.size > 1
    shares_layers = shares_layers or section.device_map is not None
    is_divided = shares_layers or (section.shard != "none" and not ranks.dense_data.all.alone)
    return is_divided and not reads_adapters and recipe.memory.recompute.kind != "planned"


def loading_device(recipe: Recipe, ranks: Ranks, device: torch.device) -> torch.device:
    """The device on which a model is loaded: the host for a model with a device map that is not loaded layer by layer,
    since no device may have room for all of it."""
    is_divided = recipe.parallel.device_map is not None and not layer_by_layer(recipe, ranks)
    return torch.device("cpu") if is_divided else device


@cache
def visible_devices(device: str) -> tuple[Device, ...]:
    """The devices that a device map may deal layers to, with the memory that was free when this was first asked: the
    GPUs that torch sees, or the CPU.

    By the same numbers a model that follows the policy's weights lies where the policy does.

    device: `recipe.device`.
    """
    from danlu.planning.device_map import Device

    if device == "cpu" or not torch.cuda.is_available():
        return (Device("cpu", available_bytes(torch.device("cpu"))),)
    names = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return tuple(Device(name, available_bytes(torch.device(name))) for name in names)


def check_devices(recipe: Recipe) -> None:
    """Raises RecipeError for a device map that names a GPU which torch does not see."""
    section = recipe.parallel.device_map
    if section is None or isinstance(section, str):
        return
    seen = [device.name for device in visible_devices(recipe.device) if device.name != "cpu"]
    for device, key in named_devices(section).items():
        if device not in ("cpu", *seen):
            sees = f"{len(seen)} GPU{'' if len(seen) == 1 else 's'}" if seen else "no GPU"
            instead = f"Use {seen[-1]}" if seen else "Use cpu, or device_map: auto"
            raise RecipeError(f"parallel.device_map: {key!r} is on {device}, and torch sees {sees}. {instead}")


def device_map_of(
    recipe: Recipe, config: ModelConfig, loss_device: torch.device | str | None = None
) -> DeviceMap | None:
    """The devices of a model's parts as the recipe says it; None for a model on one device.

    loss_device: of its head, where another model has decided it.
    """
    section = recipe.parallel.device_map
    if section is None:
        return None
    from danlu.planning.device_map import device_map_of as make_device_map

    name = None if loss_device is None else str(loss_device)
    return make_device_map(section, config, visible_devices(recipe.device), loss_device=name)


def check_placing(recipe: Recipe, ranks: Ranks, device: torch.device) -> None:
    """Raises RecipeError for settings with which no model can be placed, before one is loaded."""
    section = recipe.parallel
    if recipe.optimizer.kind == "galore" and not ranks.alone:
        raise RecipeError(
            "optimizer.kind: galore projects a gradient as soon as it is there, before other processes have added "
            "theirs. Use adamw or adamw8bit, or one process"
        )
    is_sharded = section.shard != "none" and not ranks.dense_data.all.alone
    if shards_on_host(recipe, device) and not is_sharded:
        raise RecipeError(
            "memory.offload: parameters leave a GPU as shards, which takes parallel.shard: zero3 (or zero1, zero2) and "
            "two processes or more. On one GPU offload optimizer and activations"
        )


def place(subject: Subject, recipe: Recipe, ranks: Ranks, device: torch.device, *, resumed: bool = False) -> Placed:
    """Places a subject on the processes, in place; each line does nothing along an axis with one process.

    resumed: weights will be read from a checkpoint, so a model on the meta device gets no values here.
    Raises RecipeError as `check_placing`, and for a model that cannot be cut.
    """
    check_placing(recipe, ranks, device)
    model, adapters, section = subject.model, subject.adapters, recipe.parallel
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    placer = subject.placer or LayerPlacer(model, adapters, recipe, ranks, device)
    if subject.placer is None:
        for name in model.layers:
            placer.cut_layer(name)
    cuts = placer.cutter.rest()
    boxes, experts = placer.experts.boxes_by_name | cuts.boxes, expert_names(model)
    plan = recompute.plan_of(
        recipe.memory.recompute, model, lambda: _cheapest_plan(subject, recipe, ranks, placer.pipeline, device)
    )
    recompute.wrap(model, plan, gathered=token_shares(recipe, ranks) > 1)
    notes = [recompute.describe(plan)] if recipe.memory.recompute.kind != "none" else []
    if section.workers == "threads":
        from danlu.parallel.threads import NOTE

        notes.append(NOTE)
    notes += offload_notes(recipe, device)
    if section.shard != "none" and ranks.dense_data.all.alone:
        notes.append(
            f"parallel.shard: {section.shard} changes nothing with one data rank: start danlu with --processes N"
        )
    if placer.sharder is not None:
        if subject.placer is None:
            for name in model.layers:
                placer.shard_layer(name)
        placer.sharder.rest(*(model.layers_of(chunk) for chunk in model.chunks.local))
    device_map = placer.device_map
    if device_map is not None:
        from danlu.parallel.device_map import allocate, move_activations, move_parameters

        notes.append(f"device_map: {device_map}")
        if len(device_map.devices) == 1:
            notes.append("parallel.device_map changes nothing with one device")
        if on_meta:
            allocate(model, device_map)
        else:
            move_parameters(model, adapters, device_map)
        move_activations(model, device_map)
    elif on_meta:
        data.to_empty(model, device, offload=placer.sharder is not None and shards_on_host(recipe, device))
    if adapters is not None:
        adapters.refresh_copies()
    stage = placer.stage

    def local_parameters() -> dict[str, LocalParameter]:
        return stage.named_in_whole(local_parameters_of(model, ranks, boxes, experts), ranks.pipeline.index)

    local = {} if ranks.alone else local_parameters()
    if on_meta and not resumed:
        fill(local or local_parameters(), recipe, model.config)
    if placer.pipeline.updates_each_micro_batch:
        check_updated_alone(stage, local)
        notes.append(pipedream_note(recipe))
    folder = None if recipe.memory.folder is None else Path(recipe.memory.folder).expanduser()
    offloaded = None
    if "parameters" in recipe.memory.offload and folder is not None and device.type == "cpu":
        from danlu.memory.parameter_offload import offload_parameters

        offloaded = offload_parameters(model, folder, prefetch_layers=section.prefetch)
        local = {} if ranks.alone else local_parameters()  # their memory is in the file now
    partial_gradients = [
        *sums_over_data(local, ranks, in_buckets=section.shard == "none"),
        *((group, stage.renamed.get(name, name)) for name, group in cuts.partial.items()),
        *stage.sums_over_stages(ranks),
    ]
    parallel = ParallelContext(
        ranks,
        local,
        tuple(partial_gradients),
        pipeline=placer.pipeline,
        elsewhere=stage.elsewhere,
        chunk_of=stage.chunk_of,
    )
    if offloaded is not None:
        parallel = replace(parallel, release_pages=offloaded.release)
    if placer.sharder is not None:
        parallel = data.sharded_step(parallel, model, section)
    return Placed(subject, parallel, tuple(notes), plan, device_map)


def check_updated_alone(stage: StageParameters, local: Mapping[str, LocalParameter]) -> None:
    """Raises RecipeError for trained parameters that several stages have, where each updates its own (PipeDream).

    A tied embedding is refused earlier, by the model's config; parameters that adapters share or train in full are only
    known here.
    """
    everywhere = {**stage.elsewhere, **local}
    if names := sorted(name for name in stage.shared if everywhere[name].parameter.requires_grad):
        raise RecipeError(
            f"parallel.pipeline.schedule: pipedream updates each stage by itself, and {', '.join(names)} is trained on "
            "several stages. Use 1f1b, or an adapter that shares nothing between layers"
        )


def pipedream_note(recipe: Recipe) -> str:
    """Describes the peculiarities of a run with updates of stages after each micro-batch, for the console."""
    clipping = recipe.gradient_clipping
    clips = "" if clipping is None else f"; each stage clips its own gradient to a norm of {clipping:g}"
    return (
        "pipedream: each step is one micro-batch, trained on weights that miss the updates of those in flight, which "
        f"is not synchronous SGD{clips}. Evaluations and checkpoints wait until none is in flight; lines of metrics "
        "are written then"
    )


def offload_notes(recipe: Recipe, device: torch.device) -> list[str]:
    """Notes on parts of `memory.offload` that change nothing on this device."""
    section = recipe.memory
    folder = None if section.folder is None else Path(section.folder).expanduser()
    notes = []
    if "activations" in section.offload:
        from danlu.memory.activation_offload import unused_note

        if (note := unused_note(device, folder)) is not None:
            notes.append(note)
    unmoved = [part for part in section.offload if part != "activations"]
    if unmoved and device.type == "cpu" and folder is None:
        notes.append(
            f"memory.offload: {', '.join(unmoved)}: on a CPU they are in the host's memory already, and stay there; "
            "with memory.folder they would go to a file on that disk"
        )
    return notes


def _cheapest_plan(
    subject: Subject, recipe: Recipe, ranks: Ranks, pipeline: Pipeline, device: torch.device
) -> list[recompute.LayerPlan]:
    """The plan of recompute kind `planned`: the fastest within the budget, by measurements.

    They are made on this model, or on one layer of each kind of its config where it is on the meta device; with
    micro-batches of full packs of one document each, padded as in a step. All processes measure, for layers that are
    cut communicate, and the numbers of the first one with the same layers make the plan of all that have them.
    """
    from danlu.memory import recompute_planner

    model, section, micro = subject.model, recipe.memory.recompute, recipe.batch.micro
    assert isinstance(micro, int) and section.budget is not None, "the recipe's rules ask for both"
    shares = token_shares(recipe, ranks)
    if any(parameter.is_meta for parameter in model.parameters()):
        from danlu.models.initialize import initialize

        config = replace(model.config, layers=model.config.kinds)
        probe = build(config, device=device)
        initialize(probe, recipe.seed)
        tensor.cut(probe, None, ranks.tensor, sequence=recipe.parallel.sequence)
    else:
        probe = model
    length = recipe.data.max_length
    full = Pack((Sample(np.zeros(length, dtype=np.int32), np.zeros(length, dtype=np.float32), "full"),))
    virtual = () if subject.adapters is None else subject.adapters.virtual_token_ids
    batch = pad_to_bucket(collate([full] * micro, device, virtual_token_ids=virtual), shares)
    exact = recipe.numerics == "exact"
    attend = attend_for(batch, exact=exact)
    recomputing = attend_for(batch, exact=exact, recomputed_layers=range(len(model.config.layers)))
    dropout_state = None if subject.adapters is None else subject.adapters.build_context.dropout_state
    if dropout_state is not None and recipe.drops_out:  # masks are saved for the backward pass too
        dropout_state.begin(0, [(0, len(batch.tokens))])
    costs = recompute_planner.measure_layers(
        probe,
        batch.tokens,
        batch.positions,
        attend,
        DTYPES[recipe.precision],
        recomputing=recomputing,
        gathered=shares > 1,
    )
    if dropout_state is not None:
        dropout_state.end()
    if probe is not model:
        of_kind = dict(zip(model.config.kinds, costs, strict=True))
        costs = [replace(of_kind[layer], layer=index) for index, layer in enumerate(model.config.layers)]
    costs = [each for each in costs if str(each.layer) in model.layers]
    plan: list[recompute.LayerPlan] | RecipeError
    try:
        plan = recompute_planner.fastest_plan(costs, int(section.budget * 2**30), pipeline.micro_batches_in_flight)
    except RecipeError as error:
        plan = error
    plans = ranks.world.all_gather_objects((pipeline.stages.index, plan))
    if (problem := next((each for _, each in plans if isinstance(each, RecipeError)), None)) is not None:
        raise problem
    return next(each for stage, each in plans if stage == pipeline.stages.index)


def token_shares(recipe: Recipe, ranks: Ranks) -> int:
    """Processes among which tokens are cut outside of attention, MLP and head (sequence parallelism)."""
    return ranks.tensor.size if recipe.parallel.sequence else 1


def optimizer_of(
    parameters: Iterable[tuple[str, nn.Parameter]], recipe: Recipe, device: torch.device, *, objective_rate: float = 1.0
) -> Optimizers:
    """Builds the optimizer of a recipe over this process's part of the parameters, its state placed as in `memory`.

    objective_rate: factor on the learning rate of the objective's own parameters and of a value model.
    """
    memory = recipe.memory
    # LoRA+: what B's rate is multiplied by.
    ratio, values_ratio = (getattr(adapter, "rate_ratio", 1.0) for adapter in (recipe.adapter, value_adapter(recipe)))

    def rate_of(name: str) -> float:
        is_of_values = role_of(name) == VALUE
        own = objective_rate if is_of_values or name.startswith("objective.") else 1.0
        if name.endswith("lora_B"):
            own *= float(values_ratio if is_of_values else ratio)
        return own

    return build_optimizer(
        parameters,
        recipe.optimizer,
        rate_of=None if ratio == values_ratio == objective_rate == 1 else rate_of,
        offload="optimizer" in memory.offload and (device.type == "cuda" or memory.folder is not None),
        folder=memory.folder,
        paged_state=partial(
            _paged_state, field="memory.folder" if _is_offloaded_to_folder(recipe) else "optimizer.folder"
        ),
    )


def _paged_state(specs: Mapping[nn.Parameter, TensorSpecs], folder: str | None, *, field: str) -> StatePages:
    from danlu.memory.paged_state import paged_state

    return paged_state(specs, folder, field=field)


def _is_offloaded_to_folder(recipe: Recipe) -> bool:
    """Whether the folder of the optimizer's state is that of `memory`, and not one of its own."""
    own = getattr(recipe.optimizer, "folder", None)
    return own is None and recipe.memory.folder is not None and "optimizer" in recipe.memory.offload


def replica_devices(recipe: Recipe, device: torch.device) -> list[torch.device]:
    """The devices of data parallelism in one process: GPUs, or the CPU as often as `parallel.data` says.

    Raises RecipeError for more GPUs than torch sees.
    """
    count = recipe.parallel.data
    if device.type == "cpu":
        return [device] * (2 if count == "auto" else count)
    gpus = torch.cuda.device_count()
    if count != "auto" and count > gpus:
        raise RecipeError(f"parallel.data: {count}, but torch sees {gpus} GPUs. Use {gpus} or less")
    return [torch.device("cuda", number) for number in range(gpus if count == "auto" else count)]


def kept_whole(model: Decoder) -> set[str]:
    """Names of the parameters that are not sharded among data ranks.

    They are the weights of norms and routers, which are few and used in float32, and parameters that adapters of
    several layers share, for FSDP2 shards a parameter with one layer.
    """
    kinds: tuple[type[nn.Module], ...] = (RMSNorm,)
    if model.config.has_experts:
        from danlu.models.router import Router

        kinds = (RMSNorm, Router)
    modules = (module for module in model.modules() if isinstance(module, kinds))
    in_float32 = {weight for module in modules for weight in module.parameters()}
    layers_of = Counter(parameter for layer in model.layers.values() for parameter in layer.parameters())
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if parameter in in_float32 or layers_of[parameter] > 1}


@torch.no_grad()
def fill(local: Mapping[str, LocalParameter], recipe: Recipe, config: ModelConfig) -> None:
    """Gives this process's box of each parameter its first values: read from the folder that the model starts from, or
    drawn from the seed."""
    if recipe.model.path is not None:
        targets = {name: (parameter.local, parameter.box) for name, parameter in local.items()}
        load_boxes(resolve_folder(recipe.model.path), config, targets)
        return
    from danlu.models.initialize import initial_value

    for name, parameter in local.items():
        parameter.local.copy_(initial_value(config, name, parameter.box, recipe.seed))
