"""Data parallelism: DDP where every rank holds all of the model, FSDP2 where data ranks share it (ZeRO 1, 2 and 3).

======  =========================================  ================================  =====================
shard   parameters                                 gradients between micro-batches   optimizer state
======  =========================================  ================================  =====================
none    whole                                      whole                             whole
zero1   a share; whole from forward to backward    whole                             a share
zero2   a share; whole from forward to backward    a share                           a share
zero3   a share; one layer whole at a time         a share                           a share
======  =========================================  ================================  =====================

(arXiv:1910.02054; hybrid sharding, arXiv:2304.11277.) All of them sum: the one division by the step's weight comes with
clipping. Weights of norms are left to us: they are few, FSDP2 would round them to the type of activations where one
process does not, and under sequence parallelism their gradients are sums over other ranks too. So are parameters that
several layers share (VeRA's projections, the network behind a prefix): FSDP2 shards a parameter with one unit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from danlu.numerics.quantized_weight import QuantizedWeightModule
from danlu.parallel.comm import Group
from danlu.parallel.ranks import Ranks
from danlu.parallel.step_parallel import StepParallel
from danlu.recipe.sections import Parallel

BUCKET_MB = 25


class Sharder:
    """FSDP2 over a model, a unit for each layer and one for the rest; parameters may be on meta.

    A layer can be sharded before the next one has its weights.

    gathered: the type in which whole parameters are gathered and used; None for their own.
    whole: names of parameters that stay whole on each rank.
    offload: keep shards, their gradients and optimizer state in the host's memory.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        section: Parallel,
        *,
        gathered: torch.dtype | None,
        whole: Iterable[str],
        offload: bool = False,
    ) -> None:
        self.model, self.section, self.whole = model, section, frozenset(whole)
        reduce = torch.bfloat16 if section.reduce == "bf16" else torch.float32
        self._options: dict[str, Any] = {
            "mesh": ranks.mesh["replicate", "shard"] if ranks.replicate.size > 1 else ranks.mesh["shard"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduce, cast_forward_inputs=False),
            "offload_policy": CPUOffloadPolicy(pin_memory=ranks.mesh.device_type == "cuda")
            if offload
            else OffloadPolicy(),
        }
        # Hidden states are a view where they enter a head that is cut; nothing changes them in place.
        warnings.filterwarnings("ignore", message=".*returned a view tensor.*", category=UserWarning)

    def layer(self, name: str, layer: nn.Module) -> None:
        """Shards one layer, `name` in the model. What was whole of it is freed, unless something else holds it."""
        self._shard(layer, f"{name}.", reshard=self.section.shard == "zero3")

    def rest(self, layers: Sequence[nn.Module] = ()) -> None:
        """Shards what lies outside of `layers`, the sharded ones in the order in which they follow each other."""
        self._shard(self.model, "", reshard=False)
        for module in _units(self.model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        for here, ahead in zip(layers, _following(layers, self.section.prefetch), strict=True):
            here.set_modules_to_forward_prefetch(ahead)  # type: ignore[operator]
        backwards = list(reversed(layers))
        for here, ahead in zip(backwards, _following(backwards, self.section.prefetch), strict=True):
            here.set_modules_to_backward_prefetch(ahead)  # type: ignore[operator]

    def _shard(self, unit: nn.Module, prefix: str, *, reshard: bool) -> None:
        for module in unit.modules():
            if isinstance(module, QuantizedWeightModule):
                module.share_codes()
        own = {parameter for name, parameter in unit.named_parameters() if prefix + name in self.whole}
        with _codes_as_parameters():
            fully_shard(unit, reshard_after_forward=reshard, ignored_params=own, **self._options)


def sharded_step(parallel: StepParallel, model: nn.Module, section: Parallel) -> StepParallel:
    """`parallel` of a model that a `Sharder` has sharded: when its gradients are reduced and its parameters gathered.

    Parameters that are gathered (zero1 and zero2) stay so from the first forward to the last backward pass of a step.
    """
    local = section.accumulate == "local" or (section.accumulate == "auto" and section.shard == "zero1")
    root: Any = model

    def micro_batch(is_last: bool) -> AbstractContextManager[None]:
        root.set_is_last_backward(is_last)
        root.set_requires_gradient_sync(is_last or not local)
        root.set_requires_all_reduce(is_last)  # over copies of the sharded model
        if section.shard != "zero3":
            root.set_reshard_after_backward(is_last)  # gathered once a step
        return nullcontext()

    return replace(parallel, micro_batch=micro_batch, reshard=lambda: reshard(model))


def to_empty(model: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Gives a model of shapes memory, without values: on `device`, but shards that are offloaded on the host.

    FSDP2 refuses offloaded shards on a GPU; what it does not manage (weights of norms, what layers share) is used where
    it lies, and stays on the device.
    """

    def empty(tensor: Tensor) -> Tensor:
        on_host = offload and isinstance(tensor, DTensor)
        return torch.empty_like(tensor, device=torch.device("cpu") if on_host else device)

    # As `Module.to_empty` does. FSDP2 pins what lies on the host within it, so local tensors are what they stay.
    model._apply(empty)


def reshard(model: nn.Module) -> None:
    """Frees parameters that are whole, so that the next forward pass gathers what shards hold now."""
    for module in _units(model):
        module.reshard()


def replicate(task: nn.Module, ranks: Ranks, section: Parallel) -> DistributedDataParallel:
    """DDP over the data ranks: gradients are summed in buckets while the backward pass goes on."""
    with warnings.catch_warnings():
        # torch 2.13 announces another name for broadcast_buffers, which 2.11 does not have.
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = DistributedDataParallel(
            task,
            process_group=ranks.data.handle,
            broadcast_buffers=False,
            init_sync=False,  # every rank starts from the same seed or the same files
            gradient_as_bucket_view=True,
            bucket_cap_mb=BUCKET_MB,
        )
    # A lambda: torch compares annotations of hooks, and ours are strings.
    wrapped.register_comm_hook((ranks.data, section.reduce), lambda state, bucket: _sum_bucket(state, bucket))
    return wrapped


def settle(wrapped: DistributedDataParallel, *inputs: Any) -> None:
    """Goes through DDP once, for nothing: it then puts its buckets into the order in which gradients come.

    It would do so after the first step, which then rounds its sums in another way than all later ones: a run that goes
    on from a checkpoint would not end where an uninterrupted one does.
    """
    wrapped(*inputs).total.backward()
    for parameter in wrapped.parameters():
        parameter.grad = None


def replicated_step(parallel: StepParallel, wrapped: DistributedDataParallel) -> StepParallel:
    """`parallel` of a model under DDP: gradients are accumulated locally and reduced in a step's last backward pass."""
    return replace(parallel, micro_batch=lambda is_last: nullcontext() if is_last else wrapped.no_sync())


def _sum_bucket(state: tuple[Group, str], bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's own reduction divides by the number of ranks; a sum is what is wanted."""
    group, reduce = state
    buffer: Tensor = bucket.buffer()
    if reduce == "fp32":
        return group.all_reduce_async(buffer)
    narrow = group.all_reduce_async(buffer.to(torch.bfloat16))
    return narrow.then(lambda done: buffer.copy_(done.value()))  # type: ignore[no-any-return]


@contextmanager
def _codes_as_parameters() -> Iterator[None]:
    """Lets torch 2.11 shard frozen whole numbers: it lets each shard require gradients first and asks whether it should
    afterwards, which fails for the codes of a quantized weight. Later versions ask first.
    """
    if torch.__version__ >= "2.12":
        yield
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())

    there: Any = _fsdp_param
    there.nn = SimpleNamespace(Module=nn.Module, Parameter=parameter)
    try:
        yield
    finally:
        there.nn = nn


def _units(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _following(layers: Sequence[nn.Module], count: int) -> list[list[nn.Module]]:
    return [list(layers[place + 1 : place + 1 + count]) for place in range(len(layers))]
