"""The state of each kind of optimizer: the tensors that it keeps for a parameter, checking saved state, and
loading it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.core.errors import CheckpointError
from danlu.optim.adamw import AdamW
from danlu.optim.moments import TensorSpec, TensorSpecs

if TYPE_CHECKING:
    from danlu.optim.galore import GaLore

    AnyOptimizer = torch.optim.Optimizer | AdamW | GaLore


def state_specs(optimizer: AnyOptimizer, parameter: Parameter) -> TensorSpecs:
    """The state that an optimizer keeps for a parameter after its first step; a test compares it with the real one."""
    shape, scalar = parameter.shape, TensorSpec(torch.Size([]))
    match optimizer:
        case AdamW():
            return optimizer.moments.specs(shape)
        case torch.optim.SGD():
            return {"momentum_buffer": TensorSpec(shape)} if optimizer.defaults["momentum"] else {}
        case torch.optim.Adafactor() if parameter.ndim > 1:
            rows, columns = torch.Size([*shape[:-1], 1]), torch.Size([*shape[:-2], 1, shape[-1]])
            return {"step": scalar, "row_var": TensorSpec(rows), "col_var": TensorSpec(columns)}
        case torch.optim.Adafactor():
            return {"step": scalar, "variance": TensorSpec(shape)}
        case torch.optim.Muon():
            return {"momentum_buffer": TensorSpec(shape)}
    from danlu.optim.galore import GaLore
    from danlu.optim.lion import Lion

    if isinstance(optimizer, GaLore):
        return optimizer.specs(parameter)
    if isinstance(optimizer, Lion):
        return {"exp_avg": TensorSpec(shape)}
    raise AssertionError(f"no state is known for {type(optimizer).__name__}")


def check_state(tensors: Mapping[str, Tensor], expected: TensorSpecs) -> None:
    """Raises CheckpointError for a state tensor that is missing, unknown, or of another shape or type."""
    problem = None
    if missing := sorted(expected.keys() - tensors.keys()):
        problem = f"{len(missing)} tensors are missing, the first is {missing[0]}"
    elif unknown := sorted(tensors.keys() - expected.keys()):
        problem = f"{len(unknown)} tensors belong to no trained parameter, the first is {unknown[0]}"
    else:
        for name, spec in expected.items():
            tensor = tensors[name]
            if (tensor.shape, tensor.dtype) != (spec.shape, spec.dtype):
                problem = f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {spec.dtype} {list(spec.shape)}"
                break
    if problem:
        raise CheckpointError(
            f"optimizer state of the checkpoint: {problem}. It was written by another model or recipe; "
            "resume with the recipe of the run, or start a new run from its weights."
        )


def replace_state(optimizer: AnyOptimizer, states: Mapping[Parameter, dict[str, Tensor]]) -> None:
    """Replaces an optimizer's state by its own method, which knows the device of each tensor.

    Some of torch's step counters stay on the host. `states` has the tensors kept for each parameter, by name.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer.load(states)
        return
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indexed = {index: states[parameter] for index, parameter in enumerate(ordered) if parameter in states}
    optimizer.load_state_dict({"state": indexed, "param_groups": optimizer.state_dict()["param_groups"]})
