"""Makes the trained model of a recipe, placed on the processes of a run: the order of `place` is the documentation.

In a single process this is a model in float32, or a frozen one with adapters. With several, each has its part: the
model is made on the meta device, cut and sharded, and only then are weights drawn or read, each process its boxes. A
frozen base is read layer by layer, each of which is cut and sharded (`LayerPlacer`) before the next one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from danlu.assembly.base_model import weight_layouts
from danlu.assembly.devices import device_map_of, layer_by_layer, loading_device
from danlu.assembly.parameters import kept_whole
from danlu.assembly.recipe_adapters import model_folder
from danlu.core.errors import RecipeError
from danlu.core.shard_box import ShardBox
from danlu.memory import recompute
from danlu.memory.layer_plan import Plan
from danlu.models.chunks import DeviceMap
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.initialize import initial_value, initialize
from danlu.models.loading import build, load, load_boxes, meta_decoder
from danlu.numerics.dtypes import DTYPES
from danlu.parallel import data, tensor
from danlu.parallel.comm import Group
from danlu.parallel.expert import ExpertDistributor, expert_names
from danlu.parallel.layout import placing_problems
from danlu.parallel.local_parameter import LocalParameter, local_parameters_of, sums_over_data
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.pipeline import Pipeline
from danlu.parallel.pipeline_split import StageParameters, split
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.recipe.sections import Memory, Model, Parallel

if TYPE_CHECKING:
    from danlu.adapters.adapter_set import AdapterSet
    from danlu.assembly.base_model import Base
    from danlu.assembly.frozen_base import Adapted


@dataclass(frozen=True)
class Subject:
    """The trained subject: a model, or the adapters of one that is frozen."""

    model: Decoder
    adapters: AdapterSet | None = None
    base: Base | None = None
    placer: LayerPlacer | None = None
    """Has cut and sharded the layers already, while they were read."""

    @property
    def virtual_token_ids(self) -> tuple[int, ...]:
        """The tokens that the adapters put before every document."""
        return () if self.adapters is None else self.adapters.virtual_token_ids


@dataclass(frozen=True)
class Placed:
    """A subject on the processes of a run."""

    subject: Subject
    parallel: ParallelContext
    notes: tuple[str, ...] = ()
    """Lines for the console."""
    plan: Plan = ()
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
        from danlu.assembly.adapter_training import adapted_model, value_on_base

        placer: LayerPlacer | None = None

        def layer_hook_factory(loading: Adapted) -> LayerPlacer:
            nonlocal placer
            assert ranks is not None
            placer = LayerPlacer(loading.model, loading.adapters, recipe, ranks, device)
            return placer

        adapted, base = adapted_model(
            recipe.model,
            recipe.adapter,
            recipe.base_quantization,
            # As it is stored: what is rounded is the sum that merging makes.
            dtype=torch.float32 if recipe.trained_quantization is not None else DTYPES[recipe.activations],
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
        folder = model_folder(recipe.model)
        return Subject(load(folder, device=device, config=config, layouts=weight_layouts(folder)))
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
        self.device_map = device_map_of(section.device_map, recipe.device, model.config, device)
        self.whole = kept_whole(model)  # of the whole model: which parameters its layers share
        self.pipeline: Pipeline | None = None  # None where each process has all layers
        self.stage = StageParameters()
        if not ranks.pipeline.alone:
            from danlu.planning.pipeline_split import chunk_sizes, num_chunks

            stages = section.pipeline
            chunks = num_chunks(stages) // stages.stages
            self.pipeline = Pipeline(
                stages.schedule, chunks, ranks.pipeline, ranks.downstream, ranks.upstream, stages.vertical_sync
            )
            self.stage = split(model, adapters, chunk_sizes(stages, model.config), self.pipeline)
        self.boxes: Mapping[str, ShardBox] = {}
        self.experts = self.cutter = self.sharder = None
        if not ranks.expert.alone:
            self.experts = ExpertDistributor(model, adapters, ranks.expert)
            self.boxes = self.experts.own_boxes()
        if not ranks.tensor.alone:
            boxes = None if self.experts is None else self.experts.boxes
            self.cutter = tensor.Cutter(model, adapters, ranks.tensor, sequence=section.sequence, boxes=boxes)
        if section.shard != "none" and not ranks.dense_data.all.alone:
            self.sharder = data.Sharder(
                model,
                ranks,
                section,
                gathered=DTYPES[recipe.activations]
                if adapters is None and recipe.gathers_activation_type and recipe.activations != "fp32"
                else None,
                whole=self.whole,
                expert_names=expert_names(model),
                offload=shards_on_host(recipe.memory, device),
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
        if self.experts is not None:
            self.experts.layer(name)
        if self.cutter is not None:
            self.cutter.layer(name)

    def cut_rest(self) -> tensor.Cuts:
        """Cuts the parameters outside of layers, and returns how everything is divided, experts included."""
        cuts = tensor.Cuts() if self.cutter is None else self.cutter.rest()
        return cuts if self.experts is None else replace(cuts, boxes=self.experts.boxes_by_name | cuts.boxes)

    def shard_layer(self, name: str) -> None:
        if self.sharder is not None:
            self.sharder.layer(f"layers.{name}", self.model.layers[name])


def shards_on_host(section: Memory, device: torch.device) -> bool:
    """Whether shards of parameters are offloaded to the host's memory, which on a CPU they do not leave."""
    return "parameters" in section.offload and device.type != "cpu"


def place(subject: Subject, recipe: Recipe, ranks: Ranks, device: torch.device, *, resumed: bool = False) -> Placed:
    """Places a subject on the processes, in place; each line does nothing along an axis with one process.

    resumed: weights will be read from a checkpoint, so a model on the meta device gets no values here.
    Raises RecipeError for `parallel.layout.placing_problems`, and for a model that cannot be cut.
    """
    if wrong := [*placing_problems(recipe, ranks.layout, device.type)]:
        raise RecipeError(wrong)
    model, adapters, section = subject.model, subject.adapters, recipe.parallel
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    placer = subject.placer or LayerPlacer(model, adapters, recipe, ranks, device)
    if subject.placer is None:
        for name in model.layers:
            placer.cut_layer(name)
    cuts = placer.cut_rest()
    _set_products(recipe, placer, ranks)

    def planned() -> Plan:
        from danlu.assembly.planned_recompute import fastest_plan

        in_flight = 1.0 if placer.pipeline is None else placer.pipeline.micro_batches_in_flight
        return fastest_plan(model, adapters, recipe, ranks, in_flight, device)

    plan = recompute.plan_of(recipe.memory.recompute, model, planned)
    recompute.wrap(model, plan, gathered=token_shares(section, ranks) > 1)
    notes = _notes_of_settings(recipe, ranks, plan, device)
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
        data.to_empty(model, device, offload=placer.sharder is not None and shards_on_host(recipe.memory, device))
    if adapters is not None:
        adapters.refresh_copies()
    stage = placer.stage

    def local_parameters() -> dict[str, LocalParameter]:
        own = local_parameters_of(model, ranks, cuts.boxes, expert_names(model))
        return stage.named_in_whole(own, ranks.pipeline.index)

    local = {} if ranks.alone else local_parameters()
    if on_meta and not resumed:
        fill(local or local_parameters(), model.config, recipe.model, recipe.seed)
    if placer.pipeline is not None and placer.pipeline.updates_each_micro_batch:
        check_updated_alone(stage, local)
        notes.append(pipedream_note(recipe.gradient_clipping))
    folder = None if recipe.memory.folder is None else Path(recipe.memory.folder).expanduser()
    offloaded = None
    if "parameters" in recipe.memory.offload and folder is not None and device.type == "cpu":
        from danlu.memory.parameter_offload import offload_parameters

        offloaded = offload_parameters(model, folder, prefetch_layers=section.prefetch)
        local = {} if ranks.alone else local_parameters()  # their memory is in the file now
    partial_gradients: tuple[tuple[Group, str], ...] = ()
    if not ranks.alone:
        partial_gradients = (
            *sums_over_data(local, ranks, in_buckets=section.shard == "none"),
            *((group, stage.renamed.get(name, name)) for name, group in cuts.partial.items()),
            *stage.sums_over_stages(ranks),
        )
    parallel = ParallelContext(
        ranks,
        local,
        partial_gradients,
        pipeline=placer.pipeline,
        elsewhere=stage.elsewhere,
        chunk_of=stage.chunk_of,
    )
    if offloaded is not None:
        parallel = replace(parallel, release_pages=offloaded.release)
    if placer.sharder is not None:
        parallel = data.sharded_step(parallel, model, section)
    return Placed(subject, parallel, tuple(notes), plan, device_map)


def _set_products(recipe: Recipe, placer: LayerPlacer, ranks: Ranks) -> None:
    """Gives linear layers products in 8 bits, or with weights that are rounded to the format they are trained for."""
    if recipe.fp8 is not None:
        from danlu.assembly.arithmetic import set_arithmetic
        from danlu.parallel.fp8_cuts import fp8_problems

        # Of models that no stage has checked before it read them, too: those that other tools place.
        parallel, cutter = recipe.parallel, placer.cutter
        if wrong := [*fp8_problems(recipe.fp8, placer.model.config, parallel.tensor, parallel.context.size)]:
            raise RecipeError(wrong)
        context = tuple(each for each in (ranks.ulysses, ranks.ring) if not each.alone)
        if cutter is None:
            set_arithmetic(placer.model, recipe.fp8, context=context)
        else:
            set_arithmetic(placer.model, recipe.fp8, cutter.linears, cutter.group, context)
    if recipe.trained_quantization is not None:
        from danlu.assembly.trained_quantization import set_trained_quantization

        # Shards are gathered into the same memory, and PipeDream swaps weights, without torch's count of changes.
        is_swapped = placer.pipeline is not None and placer.pipeline.updates_each_micro_batch
        keeps = placer.sharder is None and not is_swapped
        set_trained_quantization(placer.model, recipe.trained_quantization, keeps=keeps)


def _notes_of_settings(recipe: Recipe, ranks: Ranks, plan: Plan, device: torch.device) -> list[str]:
    """Lines for the console on recomputation, threads, and settings that change nothing here."""
    notes = [recompute.describe(plan)] if recipe.memory.recompute.kind != "none" else []
    if recipe.parallel.workers == "threads":
        from danlu.parallel.threads import NOTE

        notes.append(NOTE)
    if recipe.memory.offload:
        from danlu.memory.activation_offload import unused_notes

        notes += unused_notes(recipe.memory, device)
    if recipe.parallel.shard != "none" and ranks.dense_data.all.alone:
        notes.append(
            f"parallel.shard: {recipe.parallel.shard} changes nothing with one data rank: start danlu with "
            "--processes N"
        )
    return notes


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


def pipedream_note(clipping: float | None) -> str:
    """Describes the peculiarities of a run with updates of stages after each micro-batch, for the console."""
    clips = "" if clipping is None else f"; each stage clips its own gradient to a norm of {clipping:g}"
    return (
        "pipedream: each step is one micro-batch, trained on weights that miss the updates of those in flight, which "
        f"is not synchronous SGD{clips}. Evaluations and checkpoints wait until none is in flight; lines of metrics "
        "are written then"
    )


def token_shares(section: Parallel, ranks: Ranks) -> int:
    """Processes among which tokens are cut outside of attention, MLP and head (sequence parallelism)."""
    return ranks.tensor.size if section.sequence else 1


@torch.no_grad()
def fill(local: Mapping[str, LocalParameter], config: ModelConfig, model: Model, seed: int) -> None:
    """Gives this process's box of each parameter its first values: read from the folder that the model starts from, or
    drawn from the seed."""
    if model.path is not None:
        targets = {name: (parameter.local, parameter.box) for name, parameter in local.items()}
        folder = model_folder(model)
        load_boxes(folder, config, targets, layouts=weight_layouts(folder))
        return
    for name, parameter in local.items():
        parameter.local.copy_(initial_value(config, name, parameter.box, seed))
