"""The local part of each of a model's parameters, as a plain tensor: its box in the whole parameter, and the ranks that
have other boxes.

A parameter's groups decide how it is treated: over which processes its gradient is summed, among which it is sharded,
and how many processes hold the same box, the number by which clipping divides. Dense parameters are on all data ranks;
experts, where they are distributed, on those data ranks that have the same ones.

FSDP2 keeps its shards as DTensors. Optimizers, clipping, averages and checkpoints want plain tensors: `local` shares
the memory of the DTensor's local part, and gets its gradient after the backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from danlu.core.dtensor import is_dtensor, local_tensor, sharded_dim
from danlu.core.shard_box import ShardBox
from danlu.parallel.comm import Group
from danlu.parallel.ranks import DataGroups, Ranks


@dataclass(frozen=True)
class LocalParameter:
    """The part of one parameter that this process has."""

    name: str  # in the whole model
    parameter: Parameter  # of the module; a DTensor where FSDP2 shards it
    local: Parameter  # the same memory as a plain tensor; `parameter` itself where that is plain
    box: ShardBox  # of the whole parameter
    data_groups: DataGroups = field(default_factory=DataGroups)

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the parameter, and sums its gradient while it scatters that."""
        return self.local is not self.parameter

    @property
    def gradient_group(self) -> Group:
        """The processes that take different rows through it, over which its gradient is summed."""
        return self.data_groups.all

    def take_gradient(self) -> None:
        """Moves the gradient from `parameter` to `local`; a shard without rows has an empty one."""
        if self.local is not self.parameter and self.parameter.grad is not None:
            grad = self.parameter.grad
            self.local.grad = local_tensor(grad)
            self.parameter.grad = None


def local_parameters_of(
    model: nn.Module,
    ranks: Ranks,
    cut_boxes: Mapping[str, ShardBox],
    expert_names: Collection[str] = (),
) -> dict[str, LocalParameter]:
    """Returns every parameter of a parallelized model, by name.

    cut_boxes: the boxes of parameters that tensor and expert parallelism have cut; `replicas` and `is_writer` are among
        tensor ranks alone. expert_names: the parameters that are distributed among the ranks of `ranks.expert`.
    """
    dense = ranks.dense_data
    return {
        name: _local_parameter(
            name, parameter, ranks, cut_boxes.get(name), ranks.expert_data if name in expert_names else dense
        )
        for name, parameter in model.named_parameters()
    }


def sums_over_data(
    local_parameters: Mapping[str, LocalParameter], ranks: Ranks, *, in_buckets: bool
) -> Iterator[tuple[Group, str]]:
    """Yields (group, name) of each parameter with a gradient that the backward pass does not sum over the group.

    FSDP2 sums those that it shards; where nothing is sharded, those that all data and context ranks have are
    summed in buckets.
    """
    for name, local in local_parameters.items():
        group = local.gradient_group
        is_summed = local.is_sharded or (in_buckets and group.ranks == ranks.dense_data.all.ranks)
        if not is_summed and not group.alone:
            yield group, name


def replicated_parameter(name: str, tensor: Tensor, ranks: Ranks) -> LocalParameter:
    """A parameter or buffer that every process of a pipeline stage has whole, and the first one saves; a buffer by its
    memory."""
    copies = ranks.world.size // ranks.pipeline.size  # stages are the outermost axis
    box = ShardBox.full(tensor.shape, replicas=copies, is_writer=ranks.world.index % copies == 0)
    parameter = tensor if isinstance(tensor, Parameter) else Parameter(tensor, requires_grad=False)
    return LocalParameter(name, parameter, parameter, box, ranks.dense_data)


def _local_parameter(
    name: str, parameter: Parameter, ranks: Ranks, box: ShardBox | None, groups: DataGroups
) -> LocalParameter:
    tensor = ranks.tensor
    box = box or ShardBox.full(parameter.shape, replicas=tensor.size, is_writer=tensor.index == 0)
    is_sharded: bool = is_dtensor(parameter)
    if not is_sharded:
        return LocalParameter(name, parameter, parameter, _copied(box, groups.all), groups)
    with torch.no_grad():
        data = local_tensor(parameter)
    # Codes of quantized weights are whole numbers, which cannot require gradients.
    local = Parameter(data, requires_grad=parameter.requires_grad and data.is_floating_point())
    shard = box.shard(sharded_dim(parameter), groups.shard.size, groups.shard.index)  # as fully_shard splits it
    assert shard.sizes == data.shape, f"{name}: {list(data.shape)} is here, {list(shard.sizes)} was expected"
    return LocalParameter(name, parameter, local, _copied(shard, groups.replicate), groups)


def _copied(box: ShardBox, group: Group) -> ShardBox:
    """The box where every process of a group has it, the first of which saves it."""
    return replace(box, replicas=box.replicas * group.size, is_writer=box.is_writer and group.index == 0)
