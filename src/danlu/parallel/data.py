"""Data parallelism: sums where every rank has all of the model, FSDP2 where data ranks shard it (ZeRO 1, 2 and 3).

======  =========================================  ================================  =====================
shard   parameters                                 gradients between micro-batches   optimizer state
======  =========================================  ================================  =====================
none    whole                                      whole                             whole
zero1   a shard; whole from forward to backward    whole                             a shard
zero2   a shard; whole from forward to backward    a shard                           a shard
zero3   a shard; one layer whole at a time         a shard                           a shard
======  =========================================  ================================  =====================

(arXiv:1910.02054; hybrid sharding, arXiv:2304.11277.) All of them sum gradients: the one division by the step's weight
comes with clipping. Weights of norms are not sharded but summed by `ParallelContext`: they are few, FSDP2 would round
them to the type of activations where one process does not, and under sequence parallelism their gradients are sums over
tensor ranks too. Nor are parameters that several layers share (VeRA's projections, the network behind a prefix), for
FSDP2 shards a parameter with one unit.

`torch.distributed.fsdp` is imported where it is used: only processes that shard pay for what it imports (`dtensor.py`).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from danlu.core.dtensor import is_dtensor
from danlu.models.decoder import Decoder
from danlu.numerics.quantized_weight import QuantizedModule
from danlu.parallel.layout import expert_shard_dim
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import DataGroups, Ranks
from danlu.recipe.sections import Parallel


class Sharder:
    """FSDP2 over a model, a unit for each layer and one for the rest; parameters may be on meta.

    A layer can be sharded before the next one has its weights.

    gathered: the type in which parameters are gathered and used; None for their own.
    whole: names of parameters that stay whole on each rank.
    expert_names: of parameters [E, ..] that are distributed among `ranks.expert`; modules with nothing but such are
        units of their own, sharded among the ranks that have the same experts.
    offload: whether shards, their gradients and optimizer state are kept in the host's memory.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        section: Parallel,
        *,
        gathered: torch.dtype | None,
        whole: Iterable[str],
        expert_names: Collection[str] = (),
        offload: bool = False,
    ) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

        self.model, self.section, self.whole = model, section, frozenset(whole)
        self.expert_names = expert_names
        self._dense, self._expert = ranks.dense_data, ranks.expert_data
        reduce = torch.bfloat16 if section.reduce == "bf16" else torch.float32
        self._options: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduce, cast_forward_inputs=False),
            "offload_policy": CPUOffloadPolicy(pin_memory=self._dense.mesh.device_type == "cuda")
            if offload
            else OffloadPolicy(),
        }
        # Hidden states are a view where they enter a head that tensor parallelism cuts; nothing changes them in place.
        warnings.filterwarnings("ignore", message=".*returned a view tensor.*", category=UserWarning)

    def layer(self, name: str, layer: nn.Module) -> None:
        """Shards one layer, `name` in the model; its whole parameters are freed unless something refers to them."""
        reshard = self.section.shard == "zero3"
        _share_codes(layer)
        # Experts that only one rank of a copy has are whole there; where all have them they are of the layer's unit.
        if not self._expert.shard.alone and self._expert.all.ranks != self._dense.all.ranks:
            for path, experts in self._expert_modules(name, layer):
                self._shard(experts, f"{path}.", self._expert, reshard=reshard)
        self._shard(layer, f"{name}.", self._dense, reshard=reshard)

    def _expert_modules(self, name: str, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yields the outermost modules of a layer that have only parameters distributed among experts' ranks,
        by name.
        """
        names = [f"{name}.{path}" for path, _ in layer.named_parameters()]

        def has_experts_alone(path: str) -> bool:
            own = [parameter for parameter in names if parameter.startswith(f"{path}.")]
            return bool(own) and all(parameter in self.expert_names for parameter in own)

        for path, module in layer.named_modules(prefix=name):
            if has_experts_alone(path) and not has_experts_alone(path.rpartition(".")[0]):
                yield path, module

    def rest(self, *chunks: Sequence[nn.Module]) -> None:
        """Shards the parameters outside of layers, and lets each layer of a chunk gather the next ones ahead of time.

        chunks: the layers that have been sharded, each chunk in the order of the forward pass.
        """
        _share_codes(self.model)
        self._shard(self.model, "", self._dense, reshard=False)
        for module in _units(self.model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        for layers in chunks:
            for layer, ahead in _with_following(layers, self.section.prefetch):
                layer.set_modules_to_forward_prefetch(ahead)
            for layer, ahead in _with_following(layers[::-1], self.section.prefetch):
                layer.set_modules_to_backward_prefetch(ahead)

    def _shard(self, unit: nn.Module, prefix: str, groups: DataGroups, *, reshard: bool) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard

        whole = {parameter for name, parameter in unit.named_parameters() if self._stays_whole(prefix + name)}
        experts = {parameter for name, parameter in unit.named_parameters() if prefix + name in self.expert_names}

        def placement(parameter: nn.Parameter) -> Shard | None:
            return Shard(expert_shard_dim(parameter.shape, groups.shard.size)) if parameter in experts else None

        with _integer_parameters():
            fully_shard(
                unit,
                mesh=groups.mesh,
                reshard_after_forward=reshard,
                ignored_params=whole,
                shard_placement_fn=placement if experts else None,
                **self._options,
            )

    def _stays_whole(self, name: str) -> bool:
        return name in self.whole or (name in self.expert_names and self._expert.shard.alone)


def sharded_step(parallel: ParallelContext, model: nn.Module, section: Parallel) -> ParallelContext:
    """`parallel` of a model that a `Sharder` has sharded: when its gradients are reduced and its parameters gathered.

    Parameters that are gathered (zero1 and zero2) stay so from the first forward to the last backward pass of a step.
    """
    root: Any = model
    lowest, *others = parallel.chunks  # the last backward pass of a step is one of the lowest
    # Parameters outside of layers are those of the first chunk or, on the stage of the head alone, of the last one.
    outermost = lowest if lowest == 0 else parallel.chunks[-1]

    def prepare(units: Iterable[Any], is_last: bool, *, frees: bool) -> None:
        """is_last: whether the gradients are complete after this backward pass. frees: whether it ends the step."""
        for unit in units:
            unit.set_requires_gradient_sync(is_last or section.reduces_each_micro_batch, recurse=False)
            unit.set_requires_all_reduce(is_last, recurse=False)  # over copies of the sharded model
            if section.shard != "zero3":
                unit.set_reshard_after_backward(frees, recurse=False)  # gathered once a step

    units = {chunk: _units_of_chunk(model, chunk) for chunk in parallel.chunks} if others else {}
    outside = [unit for unit in _units(model) if unit not in itertools.chain.from_iterable(units.values())]

    def prepare_backward(is_last: bool, chunk: int) -> None:
        root.set_is_last_backward(is_last and chunk == lowest)
        # Each backward pass gathers them again: the last one of the step frees them, or the next step has old values.
        prepare(outside, is_last and chunk == outermost, frees=is_last and chunk == lowest)
        prepare(units.get(chunk, ()), is_last, frees=is_last)
        # FSDP2 ends each backward pass with all units; those of chunks that are still to come have to stay gathered.
        for lower in (other for other in units if other < chunk and section.shard != "zero3"):
            for unit in units[lower]:
                unit.set_reshard_after_backward(False, recurse=False)

    def finish_weight_pass(is_last: bool, chunk: int) -> None:
        prepare_backward(is_last, chunk)
        # What FSDP2 does at the end of a backward pass, of which autograd tells it: it takes up gradients, and reduces
        # them if it is to. torch.distributed.pipelining calls it too (2.13).
        root._get_fsdp_state()._root_post_backward_final_callback()

    return replace(
        parallel,
        prepare_backward=prepare_backward,
        finish_weight_pass=finish_weight_pass,
        reshard=lambda: reshard(model),
    )


def to_empty(model: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Allocates the parameters of a model on meta, without values: on `device`, but offloaded shards on the host.

    FSDP2 refuses offloaded shards on a GPU; parameters that it does not shard (weights of norms, those that layers
    share) are used where they lie, and stay on the device.
    """

    def empty(tensor: Tensor) -> Tensor:
        on_host = offload and is_dtensor(tensor)
        return torch.empty_like(tensor, device=torch.device("cpu") if on_host else device)

    # `Module.to_empty` calls it too. FSDP2 pins shards on the host in it, so local tensors keep the memory they have.
    model._apply(empty)


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters, so that the next forward pass gathers the shards' present values."""
    for module in _units(model):
        module.reshard()


@contextmanager
def gathered_once(model: nn.Module, section: Parallel) -> Iterator[None]:
    """Keeps parameters gathered after a forward pass without gradients, so that later passes in the block send nothing.

    Afterwards it is sharded again. The first pass gathers, so all data ranks make that one at the same time.
    """
    reshard(model)  # gathered parameters may be older than the shards
    for unit in _units(model):
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in _units(model):
            unit.set_reshard_after_forward(unit is not model and section.shard == "zero3", recurse=False)
        reshard(model)


def replicated_step(parallel: ParallelContext, section: Parallel) -> ParallelContext:
    """`parallel` of whole models on data and context ranks: gradients are summed in buckets; else `parallel` itself.

    Made once all that is trained is among `parallel.local_parameters`, for it puts hooks on parameters. Gradients of
    experts that not all data ranks have are left alone.
    """
    every = parallel.ranks.dense_data.all
    if every.alone or section.shard != "none":
        return parallel
    from danlu.parallel.gradient_buckets import GradientBuckets

    local_parameters = parallel.local_parameters.items()
    own = [
        (name, local.parameter)
        for name, local in local_parameters
        if local.parameter.requires_grad and local.gradient_group.ranks == every.ranks
    ]
    by_chunk: dict[int, list[tuple[str, nn.Parameter]]] = {chunk: [] for chunk in parallel.chunks}
    for name, parameter in own:
        by_chunk[parallel.chunk_of.get(name, parallel.chunks[0])].append((name, parameter))
    dtype = torch.bfloat16 if section.reduce == "bf16" else None
    buckets = {chunk: GradientBuckets(members, every, dtype=dtype) for chunk, members in by_chunk.items()}

    def prepare_backward(is_last: bool, chunk: int) -> None:
        buckets[chunk].prepare_backward(is_last)

    def finish_backward() -> None:
        for of_chunk in buckets.values():
            of_chunk.finish()

    def finish_weight_pass(is_last: bool, chunk: int) -> None:
        buckets[chunk].finish_weight_pass(is_last)

    return replace(
        parallel,
        prepare_backward=prepare_backward,
        finish_weight_pass=finish_weight_pass,
        finish_backward=finish_backward,
    )


def _share_codes(unit: nn.Module) -> None:
    """Makes parameters of the codes of quantized weights, which are sharded like others."""
    for module in unit.modules():
        if isinstance(module, QuantizedModule):
            module.share_codes()


@contextmanager
def _integer_parameters() -> Iterator[None]:
    """Lets fully_shard of torch 2.11 shard frozen integers, the codes of quantized weights.

    It makes each shard a parameter that requires gradients, and only then asks whether it should, which fails for
    integers. Later versions ask first.
    """
    if torch.__version__ >= "2.12":
        yield
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())

    module: Any = _fsdp_param
    module.nn = SimpleNamespace(Module=nn.Module, Parameter=parameter)
    try:
        yield
    finally:
        module.nn = nn


def _units(model: nn.Module) -> Iterator[Any]:
    """The modules that FSDP2 gathers and reshards as one."""
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _units_of_chunk(model: nn.Module, chunk: int) -> list[Any]:
    """Those in the layers of one chunk of a decoder."""
    assert isinstance(model, Decoder), "what is in several chunks is a decoder"
    return [unit for layer in model.chunks.layers[chunk] for unit in _units(model.layers[str(layer)])]


def _with_following(layers: Sequence[Any], count: int) -> Iterator[tuple[Any, list[Any]]]:
    """Each layer with the units of the `count` layers that follow it: these, and their experts."""
    for index, layer in enumerate(layers):
        yield layer, [unit for following in layers[index + 1 : index + 1 + count] for unit in _units(following)]
