"""From a recipe to what is trained, placed on the processes of a run: the order of `place` is the documentation.

Alone this is a model in float32, or a frozen one with adapters. Of several processes each holds its part: the model is
made as shapes, cut and sharded, and only then are weights drawn or read, one whole tensor at a time. A frozen base
comes layer by layer, each of which is cut and sharded (`Parts`) before the next one is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from danlu.adapters.adapter_set import AdapterSet
from danlu.assembly.adapter_training import adapted_model, merged_model
from danlu.assembly.base_model import Base
from danlu.assembly.frozen_base import Adapted
from danlu.data.batch import collate, pad_to_bucket
from danlu.errors import RecipeError
from danlu.memory import activation_offload, recompute, recompute_planner
from danlu.memory.paged_state import paged_state
from danlu.memory.parameter_offload import offload_parameters
from danlu.models.attend import attend_for
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import resolve_folder
from danlu.models.initialize import initial_value, initialize
from danlu.models.loading import build, load, meta_decoder, stored_values
from danlu.models.modules import RMSNorm
from danlu.optim.build import Optimizers
from danlu.optim.build import build as build_optimizer
from danlu.parallel import data, tensor
from danlu.parallel.comm import Group
from danlu.parallel.local_parameter import LocalParameter, local_parameters_of
from danlu.parallel.ranks import Ranks
from danlu.parallel.step_parallel import StepParallel
from danlu.parallel.threads import NOTE
from danlu.plan.precision import DTYPES
from danlu.recipe import Recipe
from danlu.train.checkpoints.loading import read_group
from danlu.types import Pack, Sample


@dataclass(frozen=True)
class Subject:
    """What is trained: a model, or the adapters of one that is frozen."""

    model: Decoder
    adapters: AdapterSet | None = None
    base: Base | None = None
    parts: Parts | None = None
    """Which has cut and sharded its layers already, while they were read."""


@dataclass(frozen=True)
class Placed:
    """A subject on the processes of a run."""

    subject: Subject
    parallel: StepParallel
    notes: tuple[str, ...] = ()
    """For the console."""
    plan: recompute.Plan = ()
    """What each layer makes again in the backward pass."""

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What optimizers and averages work on, by name: as much of each parameter as is here."""
        if not self.parallel.local_parameters:
            return list(self.subject.model.named_parameters())
        return [(name, one.local) for name, one in self.parallel.local_parameters.items()]


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

    resumed: weights will be read from a checkpoint, so there is only memory for them. saved: of adapters, what the
    checkpoint holds. ranks: where it will be placed; on several processes a model that is trained as a whole has only
    shapes until then, and a frozen one is placed while it is read.
    """
    if recipe.adapter is not None:
        parts: Parts | None = None

        def layer_hook_factory(coming: Adapted) -> Callable[[str], None]:
            nonlocal parts
            assert ranks is not None
            parts = Parts(coming.model, coming.adapters, recipe, ranks, device)
            return parts.layer_loaded

        adapted, base = adapted_model(
            recipe.model,
            recipe.adapter,
            recipe.quantization,
            dtype=DTYPES[recipe.precision],
            device=device,
            seed=recipe.seed,
            encode=encode,
            saved_adapter=saved,
            layer_hook_factory=layer_hook_factory if ranks is not None and layer_by_layer(recipe, ranks) else None,
        )
        return Subject(adapted.model, adapted.adapters, base, parts)
    if recipe.model.adapters and not resumed:
        return Subject(merged_model(recipe.model, device=device))
    if ranks is not None and not ranks.alone:
        return Subject(meta_decoder(config))
    if resumed:
        return Subject(build(config, device=device))
    if recipe.model.path is not None:
        return Subject(load(resolve_folder(recipe.model.path), device=device))
    model = build(config, device=device)
    initialize(model, recipe.seed)
    return Subject(model)


class Parts:
    """Cuts a model among tensor ranks and shards it among data ranks, a layer at a time where its weights come so."""

    def __init__(
        self, model: Decoder, adapters: AdapterSet | None, recipe: Recipe, ranks: Ranks, device: torch.device
    ) -> None:
        section = recipe.parallel
        self.model, self.adapters = model, adapters
        self.whole = kept_whole(model)
        self.cutter = tensor.Cutter(model, adapters, ranks.tensor, sequence=section.sequence)
        self.sharder = None
        if section.shard != "none" and ranks.data.size > 1:
            self.sharder = data.Sharder(
                model,
                ranks,
                section,
                gathered=None if adapters is not None or recipe.precision == "fp32" else DTYPES[recipe.precision],
                whole=self.whole,
                offload=shards_on_host(recipe, device),
            )

    def layer_loaded(self, name: str) -> None:
        """Leaves of a layer that has its weights what belongs here."""
        self.cutter.layer(name)
        self.shard_layer(name)
        if self.adapters is not None:
            self.adapters.refresh_copies()

    def shard_layer(self, name: str) -> None:
        if self.sharder is not None:
            self.sharder.layer(f"layers.{name}", self.model.layers[name])


def shards_on_host(recipe: Recipe, device: torch.device) -> bool:
    """Whether shards of parameters wait in the host's memory, which on a CPU is where they are anyway."""
    return "parameters" in recipe.memory.offload and device.type != "cpu"


def layer_by_layer(recipe: Recipe, ranks: Ranks) -> bool:
    """Whether a frozen base can be cut and sharded while it is read, so that no process ever holds all of it.

    Adapters below are put on a base that is whole, and plans are measured on one.
    """
    section = recipe.parallel
    parted = ranks.tensor.size > 1 or (section.shard != "none" and ranks.data.size > 1)
    return parted and not recipe.model.adapters and recipe.memory.recompute.kind != "planned"


def check_placing(recipe: Recipe, ranks: Ranks, device: torch.device) -> None:
    """Raises RecipeError for what no model can be placed with, before one is loaded."""
    section = recipe.parallel
    if recipe.optimizer.kind == "galore" and not ranks.alone:
        raise RecipeError(
            "optimizer.kind: galore projects a gradient as soon as it is there, before other processes have added "
            "theirs. Use adamw or adamw8bit, or one process"
        )
    sharded = section.shard != "none" and ranks.data.size > 1
    if shards_on_host(recipe, device) and not sharded:
        raise RecipeError(
            "memory.offload: parameters leave a GPU as shards, which takes parallel.shard: zero3 (or zero1, zero2) and "
            "two processes or more. On one GPU offload optimizer and activations"
        )


def place(
    subject: Subject,
    recipe: Recipe,
    ranks: Ranks,
    device: torch.device,
    *,
    resumed: bool = False,
) -> Placed:
    """Puts a subject on the processes, in place. Everything here does nothing along an axis of one.

    Raises RecipeError as `check_placing`, and for a model that cannot be cut.
    """
    check_placing(recipe, ranks, device)
    model, adapters, section = subject.model, subject.adapters, recipe.parallel
    empty = any(parameter.is_meta for parameter in model.parameters())
    parts = subject.parts or Parts(model, adapters, recipe, ranks, device)
    if subject.parts is None:
        for name in model.layers:
            parts.cutter.layer(name)
    cuts = parts.cutter.rest()
    plan = recompute.plan_of(recipe.memory.recompute, model, lambda: _cheapest_plan(subject, recipe, ranks, device))
    recompute.wrap(model, plan, gathered=token_shares(recipe, ranks) > 1)
    notes = [recompute.describe(plan)] if recipe.memory.recompute.kind != "none" else []
    notes += [NOTE] if section.workers == "threads" else []
    notes += offload_notes(recipe, device)
    if section.shard != "none" and ranks.data.alone:
        notes.append(
            f"parallel.shard: {section.shard} changes nothing with one data rank: start danlu with --processes N"
        )
    if parts.sharder is not None:
        if subject.parts is None:
            for name in model.layers:
                parts.shard_layer(name)
        parts.sharder.rest(list(model.layers.values()))
    if empty:
        data.to_empty(model, device, offload=parts.sharder is not None and shards_on_host(recipe, device))
    if adapters is not None:
        adapters.refresh_copies()
    held = {} if ranks.alone else local_parameters_of(model, ranks, cuts.boxes)
    if empty and not resumed:
        fill(held, first_values(recipe, model.config, {name: one.box.global_shape for name, one in held.items()}))
    folder = None if recipe.memory.folder is None else Path(recipe.memory.folder).expanduser()
    in_file = None
    if "parameters" in recipe.memory.offload and folder is not None and device.type == "cpu":
        folder.mkdir(parents=True, exist_ok=True)
        in_file = offload_parameters(model, folder, prefetch_layers=section.prefetch)
        held = {} if ranks.alone else local_parameters_of(model, ranks, cuts.boxes)
    sums: list[tuple[Group, str]] = []
    if parts.sharder is not None:
        sums += [(ranks.data, name) for name in held if name in parts.whole]
    sums += [(group, name) for name, group in cuts.partial.items()]
    parallel = StepParallel(ranks, held, tuple(sums))
    if in_file is not None:
        parallel = replace(parallel, release_pages=in_file.release)
    if parts.sharder is not None:
        parallel = data.sharded_step(parallel, model, section)
    return Placed(subject, parallel, tuple(notes), plan)


def offload_notes(recipe: Recipe, device: torch.device) -> list[str]:
    """What of `memory.offload` changes nothing on this device."""
    section = recipe.memory
    folder = None if section.folder is None else Path(section.folder).expanduser()
    found = []
    if "activations" in section.offload and (line := activation_offload.unused_note(device, folder)) is not None:
        found.append(line)
    idle = [part for part in section.offload if part != "activations"]
    if idle and device.type == "cpu" and folder is None:
        found.append(
            f"memory.offload: {', '.join(idle)}: on a CPU they are in the host's memory already, and stay there; with "
            "memory.folder they would go to a file on that disk"
        )
    return found


def _cheapest_plan(subject: Subject, recipe: Recipe, ranks: Ranks, device: torch.device) -> list[recompute.LayerPlan]:
    """Of kind `planned`: measured on this model, or on one layer like its where that has no weights yet.

    All processes measure, for cut layers communicate; the first one's numbers make the plan for all. It is measured on
    micro-batches of full packs, of one document each, as a step fills them up.
    """
    model, section, micro = subject.model, recipe.memory.recompute, recipe.batch.micro
    assert isinstance(micro, int) and section.budget is not None, "the recipe's rules ask for both"
    shares = token_shares(recipe, ranks)
    if any(parameter.is_meta for parameter in model.parameters()):
        config = replace(model.config, layers=1, windows=model.config.windows[:1])
        probe = build(config, device=device)
        initialize(probe, recipe.seed)
        tensor.cut(probe, None, ranks.tensor, sequence=recipe.parallel.sequence)
    else:
        probe = model
    length = recipe.data.max_length
    full = Pack((Sample(np.zeros(length, dtype=np.int32), np.zeros(length, dtype=np.float32), "full"),))
    virtual = () if subject.adapters is None else subject.adapters.virtual_token_ids
    batch = pad_to_bucket(collate([full] * micro, device, virtual_token_ids=virtual), shares)
    attend = attend_for(batch)
    dropout_state = None if subject.adapters is None else subject.adapters.build_context.dropout_state
    if dropout_state is not None:  # what dropout makes is kept too
        dropout_state.begin(0, [(0, len(batch.tokens))])
    costs = recompute_planner.measure_layers(
        probe, batch.tokens, batch.positions, attend, DTYPES[recipe.precision], gathered=shares > 1
    )
    if dropout_state is not None:
        dropout_state.end()
    if probe is not model:
        costs = [replace(costs[0], layer=int(name)) for name in model.layers]
    return ranks.world.from_first(lambda: recompute_planner.fastest_plan(costs, int((section.budget or 0) * 2**30)))


def token_shares(recipe: Recipe, ranks: Ranks) -> int:
    """Processes among which tokens are cut where attention, MLP and head are not at work."""
    return ranks.tensor.size if recipe.parallel.sequence else 1


def optimizer_of(parameters: Iterable[tuple[str, nn.Parameter]], recipe: Recipe, device: torch.device) -> Optimizers:
    """The optimizer of a recipe over what is here of the parameters, its state where `memory` says."""
    memory, ratio = recipe.memory, getattr(recipe.adapter, "rate_ratio", 1.0)  # LoRA+: what B's rate is multiplied by
    return build_optimizer(
        parameters,
        recipe.optimizer,
        rate_of=None if ratio == 1 else lambda name: ratio if name.endswith("lora_B") else 1.0,
        offload="optimizer" in memory.offload and (device.type == "cuda" or memory.folder is not None),
        folder=memory.folder,
        paged_state=paged_state,
    )


def replica_devices(recipe: Recipe, device: torch.device) -> list[torch.device]:
    """Of data parallelism in one process: every GPU, or as many copies on the CPU as `parallel.data` says."""
    count = recipe.parallel.data
    if device.type == "cpu":
        return [device] * (2 if count == "auto" else count)
    there = torch.cuda.device_count()
    if count != "auto" and count > there:
        raise RecipeError(f"parallel.data: {count}, but torch sees {there} GPUs. Use {there} or less")
    return [torch.device("cuda", number) for number in range(there if count == "auto" else count)]


def kept_whole(model: Decoder) -> set[str]:
    """Names of parameters that data ranks do not share among them.

    Weights of norms, which are few and used in float32; and what adapters of several layers have in common, for FSDP2
    shards a parameter with one layer.
    """
    norms = {one for module in model.modules() if isinstance(module, RMSNorm) for one in module.parameters()}
    layers = Counter(one for layer in model.layers.values() for one in layer.parameters())
    every = model.named_parameters(remove_duplicate=False)
    return {name for name, one in every if one in norms or layers[one] > 1}


def first_values(
    recipe: Recipe, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a whole model by name: read from the folder it starts from, or drawn."""
    if recipe.model.path is not None:
        yield from stored_values(resolve_folder(recipe.model.path), config)
        return
    for name, shape in shapes.items():
        yield name, initial_value(config, name, shape, recipe.seed)


@torch.no_grad()
def fill(held: Mapping[str, LocalParameter], values: Iterator[tuple[str, Tensor]]) -> None:
    """Copies of each whole tensor the box that is here."""
    for name, value in values:
        one = held[name]
        one.local.copy_(one.box.view_of(value))


def saved_adapter(path: Path) -> Mapping[str, Tensor]:
    """The tensors of the adapter that a checkpoint holds."""
    return read_group(path, "model")
