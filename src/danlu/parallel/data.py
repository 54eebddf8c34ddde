"""Data parallelism: DDP where every rank has all of the model, FSDP2 where data ranks shard it (ZeRO 1, 2 and 3).

======  =========================================  ================================  =====================
shard   parameters                                 gradients between micro-batches   optimizer state
======  =========================================  ================================  =====================
none    whole                                      whole                             whole
zero1   a shard; whole from forward to backward    whole                             a shard
zero2   a shard; whole from forward to backward    a shard                           a shard
zero3   a shard; one layer whole at a time         a shard                           a shard
======  =========================================  ================================  =====================

(arXiv:1910.02054; hybrid sharding, arXiv:2304.11277.) All of them sum gradients: the one division by the step's weight
comes with clipping. Weights of norms are not sharded but summed by `StepParallel`: they are few, FSDP2 would round them
to the type of activations where one process does not, and under sequence parallelism their gradients are sums over
tensor ranks too. Nor are parameters that several layers share (VeRA's projections, the network behind a prefix), for
FSDP2 shards a parameter with one unit.

`torch.distributed.fsdp` is imported where it is used: only processes that shard pay for what it imports (`dtensor.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from danlu.dtensor import is_dtensor
from danlu.numerics.quantized_weight import QuantizedWeightModule
from danlu.parallel.comm import Group
from danlu.parallel.layout import expert_shard_dim
from danlu.parallel.ranks import DataGroups, Ranks
from danlu.parallel.step_parallel import StepParallel
from danlu.recipe.sections import Parallel
from danlu.types import Loss, Totals

BUCKET_MB = 25

L = TypeVar("L")


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
        # Experts that only one rank of a copy has are whole there; where all have them they are of the layer's unit.
        if not self._expert.shard.alone and self._expert.all.ranks != self._dense.all.ranks:
            for path, experts in self._expert_modules(name, layer):
                self._shard(experts, f"{path}.", self._expert, reshard=reshard)
        self._shard(layer, f"{name}.", self._dense, reshard=reshard)

    def _expert_modules(self, name: str, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The outermost modules of a layer all of whose parameters are distributed among experts' ranks, by name."""
        names = [f"{name}.{path}" for path, _ in layer.named_parameters()]

        def has_experts_alone(path: str) -> bool:
            own = [parameter for parameter in names if parameter.startswith(f"{path}.")]
            return bool(own) and all(parameter in self.expert_names for parameter in own)

        for path, module in layer.named_modules(prefix=name):
            if has_experts_alone(path) and not has_experts_alone(path.rpartition(".")[0]):
                yield path, module

    def rest(self, layers: Sequence[nn.Module] = ()) -> None:
        """Shards what lies outside of `layers`, and lets each gather the next ones ahead of time.

        layers: those that have been sharded, in the order of the forward pass.
        """
        self._shard(self.model, "", self._dense, reshard=False)
        for module in _units(self.model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        for layer, ahead in _with_following(layers, self.section.prefetch):
            layer.set_modules_to_forward_prefetch(ahead)
        for layer, ahead in _with_following(layers[::-1], self.section.prefetch):
            layer.set_modules_to_backward_prefetch(ahead)

    def _shard(self, unit: nn.Module, prefix: str, groups: DataGroups, *, reshard: bool) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard

        for module in unit.modules():
            if isinstance(module, QuantizedWeightModule):
                module.share_codes()
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
    """Frees gathered parameters, so that the next forward pass gathers what is in the shards then."""
    for module in _units(model):
        module.reshard()


@contextmanager
def gathered_once(model: nn.Module, section: Parallel) -> Iterator[None]:
    """Within it what a forward pass without gradients gathers stays gathered, so that later ones send nothing.

    Afterwards it is sharded again. The first pass gathers, so all data ranks make that one at the same time.
    """
    reshard(model)  # what is gathered now may be older than the shards
    for unit in _units(model):
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in _units(model):
            unit.set_reshard_after_forward(unit is not model and section.shard == "zero3", recurse=False)
        reshard(model)


def replicated(learner: L, trained: Iterable[object], section: Parallel) -> L:
    """A learner whose loss goes through DDP, where every data rank has all of the model; else the learner itself.

    learner: a dataclass that is a `train.learner.Learner`, with `compute_loss(batch, totals, gradient_scale)` and a
    field `replicated`, which is called in its place where there are gradients. trained: the model and the objective,
    which may be a module with parameters or not.
    """
    learner_of: Any = learner
    parallel: StepParallel = learner_of.parallel
    if parallel.ranks.data.alone or section.shard != "none":
        return learner
    module, apart = _LossModule(trained, learner_of.compute_loss), summed_apart(parallel)
    if not any(parameter.requires_grad and parameter not in apart for parameter in module.parameters()):
        return learner  # DDP would have nothing to sum
    wrapped = replicate(module, parallel.ranks, section, apart)
    # DDP rebuilds its buckets, in the order in which gradients come, after its first backward pass. In the first step
    # it would round sums differently from all later steps: a run that resumes would not end where an uninterrupted one
    # does. So it goes through an empty batch first.
    statistics = [(buffer, buffer.clone()) for buffer in wrapped.buffers()]
    divisors = dict.fromkeys(learner_of.totals([]).divisors, 1.0)
    totals = Totals(1.0, 2, 2, (1, 1), divisors)  # of no real step: they may be divided by
    wrapped(learner_of.collate([]), totals, 1.0).total.backward()
    for parameter in wrapped.parameters():
        parameter.grad = None
    for buffer, value in statistics:
        buffer.copy_(value)
    return replace(learner_of, replicated=wrapped, parallel=replicated_step(parallel, wrapped))  # type: ignore[no-any-return]


class _LossModule(nn.Module):
    """What is trained as one module whose forward is the loss: what DDP can be put around."""

    def __init__(self, trained: Iterable[object], compute_loss: Callable[..., Loss]) -> None:
        super().__init__()
        self.trained = nn.ModuleList(module for module in trained if isinstance(module, nn.Module))
        self._compute_loss = compute_loss

    def forward(self, batch: Any, totals: Totals, gradient_scale: float) -> Loss:
        return self._compute_loss(batch, totals, gradient_scale)


def summed_apart(parallel: StepParallel) -> set[nn.Parameter]:
    """Whole parameters that not all data ranks have: experts, whose gradients are sums over some of them."""
    every = parallel.ranks.data.ranks
    local_parameters = parallel.local_parameters.values()
    return {local.parameter for local in local_parameters if local.gradient_group.ranks != every}


def replicate(
    module: nn.Module, ranks: Ranks, section: Parallel, ignored: Collection[nn.Parameter] = ()
) -> DistributedDataParallel:
    """DDP around a module, over the data ranks: gradients are summed in buckets during the backward pass.

    ignored: parameters whose gradients it leaves as they are.
    """
    names = [name for name, parameter in module.named_parameters() if parameter in ignored]
    # Private, but there is no other way to tell DDP, and FSDP2's `replicate` calls it too.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    with warnings.catch_warnings():
        # torch 2.13 announces another name for broadcast_buffers, which 2.11 does not have.
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = DistributedDataParallel(
            module,
            process_group=ranks.data.handle,
            broadcast_buffers=False,
            init_sync=False,  # every rank starts from the same seed or the same files
            gradient_as_bucket_view=True,
            bucket_cap_mb=BUCKET_MB,
        )
    # A lambda: torch compares annotations of hooks, and ours are strings.
    wrapped.register_comm_hook((ranks.data, section.reduce), lambda state, bucket: _sum_bucket(state, bucket))
    return wrapped


def replicated_step(parallel: StepParallel, wrapped: DistributedDataParallel) -> StepParallel:
    """`parallel` of a model under DDP: gradients are accumulated locally and reduced in a step's last backward pass."""
    return replace(parallel, micro_batch=lambda is_last: nullcontext() if is_last else wrapped.no_sync())


def _sum_bucket(state: tuple[Group, str], bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: sums a bucket, where DDP's own reduction divides by the number of ranks."""
    group, reduce = state
    buffer: Tensor = bucket.buffer()
    if reduce == "fp32":
        return group.all_reduce_async(buffer)
    narrow = group.all_reduce_async(buffer.to(torch.bfloat16))
    return narrow.then(lambda future: buffer.copy_(future.value()))  # type: ignore[no-any-return]


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


def _with_following(layers: Sequence[Any], count: int) -> Iterator[tuple[Any, list[Any]]]:
    """Each layer with the units of the `count` layers that follow it: these, and their experts."""
    for index, layer in enumerate(layers):
        yield layer, [unit for following in layers[index + 1 : index + 1 + count] for unit in _units(following)]
