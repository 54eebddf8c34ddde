"""What processes of a group do with wrapped layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from builders.recompute import RecomputeCase, full, step
from danlu.memory import parameter_offload
from danlu.memory.layer_plan import LayerPlan
from danlu.memory.parameter_offload import offload_parameters
from danlu.memory.recompute import wrap


def sharded_steps(plans: Sequence[Sequence[LayerPlan]]) -> list[dict[str, Tensor]]:
    """This process's gradients under FSDP2: without recomputation, with each plan, and of other data."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def gradients(plan: Sequence[LayerPlan], seed: int = 0) -> dict[str, Tensor]:
        case = full()
        wrap(case.model, plan)
        for layer in case.model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(case.model, mesh=mesh)
        sharded = RecomputeCase(case.model, dict(case.model.named_parameters()), case.dropout_state)
        gradients_by_name: dict[str, Tensor] = {}
        for number in range(2):  # the second goes by what the first left
            gradients_by_name = step(sharded, seed=10 * (number + 1) + dist.get_rank() + seed).gradients
        assert all(isinstance(gradient, DTensor) for gradient in gradients_by_name.values())
        return {
            name: gradient.to_local() for name, gradient in gradients_by_name.items() if isinstance(gradient, DTensor)
        }

    torch.manual_seed(0)
    return [gradients([]), *(gradients(plan) for plan in plans), gradients([], seed=1)]


def sharded_in_files(folder: str, intermediate_size: int, *, filled_up_too: bool = False) -> tuple[Any, ...]:
    """Weights after two steps under FSDP2 in memory, in a file, and of other data; bytes of the file that are resident
    after them, once all weights were read, and altogether.

    filled_up_too: with a mistake: shares that FSDP2 fills up go to the file. For a process that ends with it.
    """
    if filled_up_too:
        parameter_offload._can_move = lambda tensor, local: local.nbytes > parameter_offload._MIN_BYTES
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def weights(place: Path | None, seed: int = 0) -> tuple[Any, ...]:
        case = full(hidden_size=128, intermediate_size=intermediate_size)
        for layer in case.model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(case.model, mesh=mesh)
        offloaded = None if place is None else offload_parameters(case.model, place)
        sharded = RecomputeCase(case.model, dict(case.model.named_parameters()), case.dropout_state)
        # As an optimizer has them: taken before the first pass.
        shares = {
            name: parameter.to_local().detach()
            for name, parameter in sharded.trained.items()
            if isinstance(parameter, DTensor)
        }
        for number in range(2):
            gradients = step(sharded, seed=10 * (number + 1) + dist.get_rank() + seed).gradients
            for name, gradient in gradients.items():
                assert isinstance(gradient, DTensor)
                shares[name].sub_(gradient.to_local(), alpha=1e-3)
        if offloaded is not None:
            offloaded.release()
        resident = resident_bytes(folder)
        local = {name: share.clone() for name, share in shares.items()}
        return local, resident, resident_bytes(folder), 0 if offloaded is None else offloaded.bytes

    plain, other = weights(None)[0], weights(None, seed=1)[0]
    filed, *sizes = weights(Path(folder))
    return plain, filed, other, *sizes


def resident_bytes(folder: str | Path) -> int:
    """Of the mappings of files in `folder`."""
    resident, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = str(folder) in line
        elif ours and line.startswith("Rss:"):
            resident += 1024 * int(line.split()[1])
    return resident
