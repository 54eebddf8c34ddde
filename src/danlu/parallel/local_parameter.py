"""The local part of each of a model's parameters, as a plain tensor, and the box of the whole parameter that it is.

FSDP2 keeps its shards as DTensors. Optimizers, clipping, averages and checkpoints want plain tensors: `local` shares
the memory of the DTensor's local part, and gets its gradient after the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from danlu.dtensor import is_dtensor, local_tensor
from danlu.parallel.ranks import Ranks
from danlu.shard_box import ShardBox


@dataclass(frozen=True)
class LocalParameter:
    """The part of one parameter that this process has."""

    name: str  # in the whole model
    parameter: Parameter  # of the module; a DTensor where FSDP2 shards it
    local: Parameter  # the same memory as a plain tensor; `parameter` itself where that is plain
    box: ShardBox  # of the whole parameter

    def take_gradient(self) -> None:
        """Moves the gradient from `parameter` to `local`; a shard without rows has an empty one."""
        if self.local is not self.parameter and self.parameter.grad is not None:
            grad = self.parameter.grad
            self.local.grad = local_tensor(grad)
            self.parameter.grad = None


def local_parameters_of(
    model: nn.Module, ranks: Ranks, tensor_boxes: Mapping[str, ShardBox]
) -> dict[str, LocalParameter]:
    """Every parameter of a placed model, by name. tensor_boxes: what tensor parallelism left of those that it cut."""
    return {
        name: _local_parameter(name, parameter, ranks, tensor_boxes.get(name))
        for name, parameter in model.named_parameters()
    }


def replicated_parameter(name: str, tensor: Tensor, ranks: Ranks) -> LocalParameter:
    """A parameter or buffer that every process has whole, and the first one saves; a buffer by its memory."""
    box = ShardBox.full(tensor.shape, replicas=ranks.world.size, is_writer=ranks.world.index == 0)
    parameter = tensor if isinstance(tensor, Parameter) else Parameter(tensor, requires_grad=False)
    return LocalParameter(name, parameter, parameter, box)


def _local_parameter(name: str, parameter: Parameter, ranks: Ranks, box: ShardBox | None) -> LocalParameter:
    tensor = ranks.tensor
    box = box or ShardBox.full(parameter.shape, replicas=tensor.size, is_writer=tensor.index == 0)
    is_sharded = is_dtensor(parameter)
    if not is_sharded:
        box = replace(box, replicas=box.replicas * ranks.data.size, is_writer=box.is_writer and ranks.data.index == 0)
        return LocalParameter(name, parameter, parameter, box)
    with torch.no_grad():
        data = local_tensor(parameter)
    # Codes of quantized weights are whole numbers, which cannot require gradients.
    local = Parameter(data, requires_grad=parameter.requires_grad and data.is_floating_point())
    # fully_shard splits rows as torch.chunk does: ceil(rows / shards) to each of the first ranks, fewer to the last.
    rows = box.sizes[0]
    chunk = -(-rows // ranks.shard.size)
    first = min(rows, chunk * ranks.shard.index)
    count = min(rows, first + chunk) - first
    assert count == len(data), f"{name}: {len(data)} rows are here, {count} were expected"
    rows_box = ShardBox(
        box.global_shape,
        (box.offsets[0] + first, *box.offsets[1:]),
        (count, *box.sizes[1:]),
        replicas=box.replicas * ranks.replicate.size,
        is_writer=box.is_writer and ranks.replicate.index == 0,
    )
    return LocalParameter(name, parameter, local, rows_box)
