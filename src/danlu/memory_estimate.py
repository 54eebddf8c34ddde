"""What a training step is expected to hold in memory, by part, before there is one.

A run asks with the model that it has placed; `danlu preview` with shapes of one (torch's meta device), which takes no
memory. Parameters are counted byte by byte, activations and logits by the formulas of `plan.memory`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from danlu.adapters.adapter_config import WEIGHTS, resolve_adapter
from danlu.adapters.adapter_set import BASE_CHANGING_INITS, AdapterSet
from danlu.adapters.lora import LowRank
from danlu.assembly.adapter_training import TRAINED
from danlu.assembly.base_model import find_base
from danlu.assembly.frozen_base import adapters_of
from danlu.data.tokenizing import TokenizerInfo
from danlu.errors import ModelError, RecipeError
from danlu.memory.available_memory import available_bytes, host_memory_bytes
from danlu.memory.recompute import Kind, LayerPlan, plan_of
from danlu.models.attention_kernels import kernels_of
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import CONFIG, read_config, read_json, resolve_folder
from danlu.models.loading import meta_decoder
from danlu.models.presets import from_scratch
from danlu.models.tensor_file import read_header
from danlu.numerics.bitsandbytes_config import read_config as read_quantization
from danlu.objectives.crossentropy import slice_bytes, workspace_bytes
from danlu.optim.build import build as build_optimizer
from danlu.parallel.layout import Layout, layout_of
from danlu.placing import kept_whole
from danlu.plan import memory
from danlu.plan.flops import Shape
from danlu.plan.methods import packed_bytes
from danlu.plan.precision import DTYPES
from danlu.recipe import Recipe, sections
from danlu.train.memory_parts import MemoryParts
from danlu.train.summary import parameters_of
from danlu.train.units import format_bytes, parameters_and_trained

# More tokens at once make CPU steps no faster (measured from 1024 to 8192), only larger.
MAX_CPU_TOKENS = 4096
_FLOAT32 = 4


def check_size(recipe: Recipe, config: ModelConfig, where: str, processes: int) -> None:
    """Refuse a model of which not even the weights fit into this machine, before anything is made of it.

    Raises ModelError. What training needs beside the weights is many times more, and is told elsewhere.
    """
    offload = recipe.memory.offload
    if "parameters" in offload and recipe.memory.folder is not None:
        return
    frozen = 0.5 if recipe.quantization is not None else 2.0 if recipe.precision != "fp32" else 4.0
    least = config.parameter_count() * (frozen if recipe.adapter is not None else 4.0)
    if recipe.parallel.shard != "none" or recipe.parallel.tensor > 1:
        least /= processes
    on_gpu = recipe.device != "cpu" and torch.cuda.is_available() and "parameters" not in offload
    room = torch.cuda.get_device_properties(0).total_memory if on_gpu else host_memory_bytes()
    if room is not None and least > room:
        name, size = config.largest_size
        need, machine = f"{least / 2**30:,.1f} GiB", "GPU" if on_gpu else "machine"
        raise ModelError(
            f"{where}: a model of {config.parameter_count():,} parameters, whose weights alone take {need} here; this "
            f"{machine} has {room / 2**30:,.1f} GiB. Take a smaller one (the "
            f"largest of its sizes is {name}, {size:,}), share it among more processes (parallel.shard: zero3), or "
            "train an adapter on a quantized base"
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """What a step of one process is expected to hold."""

    recipe: Recipe
    config: ModelConfig
    parts: MemoryParts  # on the device that computes
    elsewhere: int  # bytes of what `memory.offload` keeps in the host's memory or in files
    micro: int  # packs in a micro-batch
    processes: int
    device_type: str

    def available(self, held: int) -> int | None:
        """Bytes that tensors of one process may take; None where nothing tells.

        held: by its tensors already. Processes of one machine share the host's memory, but not devices.
        """
        free = available_bytes(torch.device(self.device_type))
        if free is None:
            return None
        return held + (free if self.device_type == "cuda" else free // _processes_here(self.processes))

    def lines(self, available: int | None) -> list[str]:
        """For the console: the parts, and what to set where they are more than there is.

        available: bytes that tensors may take, what the model takes already included; None where nobody knows.
        """
        each = " in each process" if self.processes > 1 else ""
        parts = " + ".join(f"{name} {format_bytes(value)}" for name, value in vars(self.parts).items() if value)
        of = f"micro-batches of {self.micro} x {self.recipe.data.max_length} tokens"
        found = [f"memory expected{each}: {parts} = {format_bytes(self.parts.total)} in tensors, for {of}"]
        if self.elsewhere:
            found.append(f"memory expected{each}: {format_bytes(self.elsewhere)} more wait where memory.offload says")
        if available is not None and self.parts.total > available:
            found.append(
                f"memory: {format_bytes(self.parts.total)}{each} are more than the {format_bytes(available)} that are "
                f"free. {self.advice()}"
            )
        return found

    def advice(self) -> str:
        """What to set, what saves most first."""
        return advice(self.recipe, self.parts, device_type=self.device_type, micro=self.micro)


def advice(recipe: Recipe, parts: MemoryParts | None, *, device_type: str, micro: int) -> str:
    """`Set batch.micro: 2 (...); or memory: {recompute: full} (...)`."""
    known = {} if parts is None else vars(parts)
    return f"Set {'; or '.join(memory.ways_to_save(recipe, known, device_type=device_type, micro=micro))}"


def _processes_here(world: int) -> int:
    """Processes of this run on this machine, as launchers tell; else all of them."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdigit() and int(told) else world


def largest_micro(one: MemoryEstimate, per_step: int, *, held: int = 0) -> int:
    """Packs in a micro-batch: as the recipe says, or the most whose activations fit into what memory the rest leaves.

    one: what a step holds with one pack at a time. held: bytes of it that this process holds already.
    Raises RecipeError where `batch.memory` does not hold one pack, with the recomputation that would.
    """
    recipe, batch = one.recipe, one.recipe.batch
    if batch.micro != "auto":
        return min(batch.micro, per_step)
    each = one.parts.activations
    fixed = one.parts.total - each - one.parts.logits + slice_bytes(one.device_type)
    length = recipe.data.max_length
    if batch.memory is not None:
        budget: float = batch.memory * 2**30 - fixed
        if budget < each:
            raise RecipeError(
                f"batch.memory: {batch.memory} GiB do not hold one packed sequence: weights, gradients, optimizer and "
                f"one of {length} tokens need about {(fixed + each) / 2**30:.2f} GiB. {_smaller(one, budget)}"
            )
    else:
        free = one.available(held)
        budget = math.inf if free is None else 0.8 * (free - fixed)
    most = per_step if one.device_type != "cpu" else min(per_step, max(1, MAX_CPU_TOKENS // length))
    return memory.largest_micro(each, budget, most)


def _smaller(one: MemoryEstimate, budget: float) -> str:
    """What would make one pack fit into a budget of activations: the recomputation that costs least time, or more."""
    kinds: tuple[Kind, ...] = ("selective", "full")
    for kind in kinds:
        plan = [LayerPlan(layer, kind) for layer in range(one.config.layers)]
        need = expected_activations(one.recipe, one.config, 1, plan=plan, device_type=one.device_type)
        if need <= budget and need < one.parts.activations:
            total = (need + one.parts.total - one.parts.activations) / 2**30
            return f"With memory: {{recompute: {kind}}} they need about {total:.2f} GiB; or give more."
    return "Give more, or lower data.max_length."


# ── activations ──


def shape_of(config: ModelConfig) -> Shape:
    """The sizes that formulas go by."""
    return Shape(
        hidden_size=config.hidden_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        windows=config.windows,
    )


def expected_activations(
    recipe: Recipe, config: ModelConfig, micro: int, *, plan: Sequence[LayerPlan], device_type: str
) -> int:
    """Bytes that autograd keeps of a micro-batch of so many full packs, each one document."""
    length, section = recipe.data.max_length, recipe.parallel
    told = memory.ActivationPlan(
        recompute=[(one.kind, one.segment) for one in plan],
        keeps_scores=keeps_scores(device_type, config.attention_softcap),
        offload="activations" in recipe.memory.offload and (device_type != "cpu" or recipe.memory.folder is not None),
        in_flight=device_type != "cpu",
        tensor=section.tensor,
        sequence=section.sequence,
    )
    return memory.activation_bytes(shape_of(config), [length] * micro, _dtype(recipe).itemsize, told)


def keeps_scores(device_type: str, softcap: float | None) -> Callable[[int, int | None], bool]:
    """For which documents `models.attend` keeps attention's probabilities: those that no flash kernel attends.

    Of a GPU that is not here the usual kernels are taken for granted.
    """
    if device_type == "cpu":
        short = kernels_of(torch.device("cpu")).short_document
        return lambda length, window: length <= short or softcap is not None or (window is not None and window < length)
    kernels = kernels_of(torch.device(device_type)) if torch.cuda.is_available() else None
    windows = kernels is not None and kernels.varlen is None
    capped = kernels is not None and softcap is not None and kernels.flex is None
    return lambda length, window: capped or (windows and window is not None and window < length)


def expected_logits(recipe: Recipe, config: ModelConfig, micro: int, *, device_type: str) -> int:
    """Bytes that the head's loss takes beside its inputs, if every token is trained."""
    return workspace_bytes(
        micro * recipe.data.max_length,
        config.hidden_size,
        config.vocab_size // recipe.parallel.tensor,
        element_bytes=_dtype(recipe).itemsize,
        device_type=device_type,
        frozen=recipe.adapter is not None,
    )


# ── a model that is placed ──


def gathered_of(model: nn.Module, recipe: Recipe) -> tuple[int, int]:
    """(bytes of whole parameters, bytes of whole gradients) that a process of a sharded model has at a time."""
    sharded = {
        name: (one.numel() * _gathered_bytes(recipe, one), one.numel() if one.requires_grad else 0)
        for name, one in model.named_parameters()
        if isinstance(one, DTensor)
    }
    return _gathered(sharded, recipe)


def _gathered_bytes(recipe: Recipe, parameter: torch.Tensor) -> int:
    narrow = recipe.adapter is None and parameter.is_floating_point()
    return _dtype(recipe).itemsize if narrow else parameter.itemsize


def _gathered(sharded: Mapping[str, tuple[int, int]], recipe: Recipe) -> tuple[int, int]:
    """sharded: of each parameter by name, bytes as it is gathered, and numbers that are trained."""
    section = recipe.parallel
    if not sharded:
        return 0, 0
    by_unit: dict[str, list[tuple[int, int]]] = {}
    for name, sizes in sharded.items():
        parts = name.split(".")
        by_unit.setdefault(parts[1] if parts[0] == "layers" else "", []).append(sizes)
    rest = by_unit.pop("", [])
    layers = [[sum(column) for column in zip(*sizes, strict=True)] for sizes in by_unit.values()]
    gathered = memory.gathered_bytes(
        [sizes[0] for sizes in layers],
        sum(size for size, _ in rest),
        shard=section.shard,
        prefetch=section.prefetch,
    )
    trained = [sizes[1] for sizes in layers] + [sum(count for _, count in rest)]
    local = section.accumulate == "local" or (section.accumulate == "auto" and section.shard == "zero1")
    # Whole gradients wait for the last micro-batch, or for the reduction of one unit after the other.
    return gathered, _FLOAT32 * (sum(trained) if local else max(trained))


# ── a model of shapes ──


def preview_parameters(recipe: Recipe, tokenizer: TokenizerInfo | None) -> str | None:
    """How many parameters a run would have, and train, for `danlu preview`: `44,192 parameters, all trained`.

    None where the model cannot be read, or its vocabulary is not known. Raises RecipeError as a run would.
    """
    try:
        config = _config(recipe, tokenizer)
        if config is None:
            return None
        model, _, _, trained, _ = _shapes(recipe, config)
        own = sum(one.numel() for _, one in trained)
        if isinstance(recipe.adapter, sections.Continue):  # its files say more than the recipe
            header = read_header(resolve_adapter(recipe.model.adapters[-1]) / WEIGHTS)
            own = sum(math.prod(one.shape) for one in header.values())
            return parameters_and_trained(parameters_of(model) + own, own)
        return parameters_and_trained(parameters_of(model), own)
    except ModelError:  # the estimate of memory says so
        return None


def _config(recipe: Recipe, tokenizer: TokenizerInfo | None) -> ModelConfig | None:
    """Of the model that is trained; None where it hangs on a tokenizer that is not known."""
    if recipe.model.path is not None:
        return read_config(resolve_folder(recipe.model.path))
    if tokenizer is None:
        return None
    return from_scratch(recipe.model, tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)


def preview_lines(recipe: Recipe, tokenizer: TokenizerInfo | None) -> list[str]:
    """What a run of a recipe would hold in memory, for `danlu preview`: nothing is loaded but configs.

    tokenizer: None where it is not known. Raises RecipeError for what no run could begin with.
    """
    section, batch = recipe.parallel, recipe.batch
    try:
        config = _config(recipe, tokenizer)
        if config is None:
            return []
        data = 1 if section.data == "auto" or section.workers == "threads" else section.data
        layout = layout_of(section, data * section.tensor)
        device_type = "cuda" if recipe.device != "cpu" and torch.cuda.is_available() else "cpu"
        one = estimate(recipe, config, layout=layout, device_type=device_type, micro=1)
    except ModelError as error:
        return [f"memory: unknown, for the model cannot be read: {error}"]
    per_step = -(-batch.packs(recipe.data.max_length) // layout.data)
    micro = largest_micro(one, per_step)
    found = estimate(recipe, config, layout=layout, device_type=device_type, micro=micro)
    lines = found.lines(found.available(0))
    if section.shard != "none" and section.data == "auto":
        lines.append("memory: parallel.data tells here how many processes share the model; one is taken")
    return lines


def estimate(recipe: Recipe, config: ModelConfig, *, layout: Layout, device_type: str, micro: int) -> MemoryEstimate:
    """Of a recipe and the config of its model, without weights: what a run of it would hold.

    Adapters below the one that is trained are left out, as are those of `adapter: continue`, whose files say more than
    the recipe. Raises DanluError for adapters that do not fit the model.
    """
    model, quantized, adapter, trained, originals = _shapes(recipe, config)
    whole = kept_whole(model)
    shards, tensor = layout.shard, layout.tensor

    def here(name: str, count: int) -> int:
        """Of so many bytes what one process has."""
        cut = count // tensor if name not in whole else count
        return -(-cut // shards) if name not in whole else cut

    weights, gathered = originals // (shards * tensor), {}
    for name, one in _all(model):
        stored = quantized.get(name, one.nbytes)
        weights += here(name, stored)
        if shards > 1 and name not in whole and isinstance(one, nn.Parameter):
            size = stored if name in quantized else one.numel() * _gathered_bytes(recipe, one)
            gathered[name] = (size // tensor, one.numel() // tensor if one.requires_grad else 0)
    average = sum(here(name, one.nbytes) for name, one in trained) if recipe.ema is not None else 0
    optimizer = build_optimizer(trained, _in_memory(recipe.optimizer))
    ratio = sum(here(name, one.nbytes) for name, one in trained) / max(1, sum(one.nbytes for _, one in trained))
    gradients, state = int(ratio * optimizer.gradient_bytes()), int(ratio * optimizer.resident_state_bytes())
    whole_parameters, whole_gradients = _gathered(gathered, recipe)
    elsewhere = 0
    offload = recipe.memory.offload
    if device_type != "cpu" or recipe.memory.folder is not None:
        if "parameters" in offload and shards > 1:
            elsewhere += weights + gradients + state + average
            weights = gradients = state = average = 0
        elif "optimizer" in offload:
            elsewhere, state = state, 0
    if isinstance(recipe.optimizer, sections.PagedAdamW):
        elsewhere, state = elsewhere + state, 0
    plan = [] if recipe.memory.recompute.kind == "planned" else plan_of(recipe.memory.recompute, model)
    activations = expected_activations(recipe, config, micro, plan=plan, device_type=device_type)
    if recipe.memory.recompute.budget is not None:
        activations = min(activations, int(recipe.memory.recompute.budget * 2**30))
    parts = MemoryParts(
        weights=weights - min(weights, adapter),
        adapter=min(weights, adapter),
        gradients=gradients + whole_gradients,
        optimizer=state,
        average=average,
        activations=activations,
        logits=expected_logits(recipe, config, micro, device_type=device_type),
        packed=_largest_matrix(model, quantized) * _dtype(recipe).itemsize // tensor,
        gathered=whole_parameters,
    )
    return MemoryEstimate(recipe, config, parts, elsewhere, micro, layout.world, device_type)


def _shapes(
    recipe: Recipe, config: ModelConfig
) -> tuple[Decoder, dict[str, int], int, list[tuple[str, nn.Parameter]], int]:
    """A model on the meta device; bytes of its frozen matrices by name; of its adapter; what is trained; and bytes of
    parameters that stepped aside for copies of theirs that are trained."""
    model = meta_decoder(config)
    if recipe.adapter is None:
        return model, {}, 0, list(model.named_parameters()), 0
    adapters = adapters_of(model, seed=recipe.seed, device="meta", encode=lambda text: [0])
    if not isinstance(recipe.adapter, sections.Continue):
        adapters.add(TRAINED, recipe.adapter)
        _begin(adapters, recipe.adapter)
        adapters.finish_loading()
        adapters.train_only(TRAINED)
    whole = adapters.fully_trained()
    linears = {f"{site.name}.weight" for site in adapters.sites if site.group in ("attention", "mlp")} - whole
    section, base = recipe.quantization, adapters.base_parameters()
    stored = None
    if recipe.model.path is not None:
        folder = find_base(recipe.model.path).folder
        stored = read_quantization(read_json(folder / CONFIG), str(folder / CONFIG))
    if stored is not None:
        section = (sections.Nf4 if stored.kind == "nf4" else sections.Fp4)(double=stored.double)
    sizes = {}
    for name, one in base.items():
        if name in linears and section is not None:
            sizes[name] = packed_bytes((one.shape[0], one.shape[1]), section)
        elif one.ndim == 2 and name not in whole:
            sizes[name] = one.numel() * _dtype(recipe).itemsize
    originals = sum(copy.original.nbytes for added in adapters.added.values() for copy in added.copies)
    held = adapters.tensors(TRAINED).values() if adapters.added else ()
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    return model, sizes, sum(one.nbytes for one in held), trained, originals


def _begin(adapters: AdapterSet, section: Any) -> None:
    """What an adapter gets once the base's weights are there: its start, and norms that DoRA measures."""
    for module in adapters.added[TRAINED].modules.values():
        if not isinstance(module, LowRank):
            continue
        if section.init in BASE_CHANGING_INITS:
            module.begin(module.lora_A.detach(), module.lora_B.detach())
        if module.lora_magnitude_vector is not None:
            module.weight_norm = torch.empty_like(module.lora_magnitude_vector)


def _all(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _largest_matrix(model: Decoder, packed: Mapping[str, int]) -> int:
    """Numbers of the largest matrix that is kept in fewer bytes than a number takes in the type of activations."""
    shapes = {name: one for name, one in model.named_parameters() if name in packed}
    return max((one.numel() for name, one in shapes.items() if packed[name] < one.numel() * 1.5), default=0)


def _in_memory(section: Any) -> Any:
    """The same state, without a file for its pages."""
    if not isinstance(section, sections.PagedAdamW):
        return section
    kind = sections.AdamW8bit if section.bits == 8 else sections.AdamW
    return kind(learning_rate=section.learning_rate)


def _dtype(recipe: Recipe) -> torch.dtype:
    return DTYPES["bf16" if recipe.precision == "auto" else recipe.precision]
