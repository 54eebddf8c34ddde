"""How AdamW keeps its two moments between steps: as they are, here; as 8-bit codes, in `eight_bit.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

State = dict[str, Tensor]
TensorSpecs = dict[str, "TensorSpec"]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor that an optimizer keeps."""

    shape: torch.Size
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        """Bytes of such a tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def zeros(self, device: torch.device) -> Tensor:
        """Such a tensor of zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


class Moments(Protocol):
    """A way of keeping the two moments. The state of a parameter is a dictionary of tensors, all zeros at first."""

    def specs(self, shape: torch.Size) -> TensorSpecs:
        """Returns the specs of the tensors kept for a parameter of this shape."""

    def update(
        self, group: Mapping[str, Any], weights: Sequence[Any], gradients: Sequence[Any], states: Sequence[State]
    ) -> None:
        """One step of AdamW on each weight and its state, in place; `group` holds lr, betas, eps and weight_decay."""

    def by_row(self, state: State, rows: int) -> State | None:
        """Returns views [rows, ...] of the state of each row of a matrix; None if rows share some of it."""


class StatePages(Protocol):
    """The storage of parameters' state, where it is not with them (`memory.paged_state`)."""

    def zeros(self, parameter: Parameter) -> State:
        """The state of a parameter at its beginning."""

    def fill(self, parameter: Parameter, saved: Mapping[str, Tensor]) -> State:
        """The state of a parameter as it was saved."""

    def fetched(self, parameter: Parameter) -> AbstractContextManager[State]:
        """Puts the state on the parameter's device within the block; changes to it are kept."""

    def release(self, parameter: Parameter) -> None:
        """The state is not in use any more, and may leave memory."""

    def tensors(self, parameter: Parameter) -> State:
        """The state in its pages, whatever they hold."""


class Float32Moments:
    """`step` (shape []), `exp_avg` and `exp_avg_sq` (of the parameter's shape), all float32: torch's own state."""

    def specs(self, shape: torch.Size) -> TensorSpecs:
        return {"step": TensorSpec(torch.Size([])), "exp_avg": TensorSpec(shape), "exp_avg_sq": TensorSpec(shape)}

    def update(
        self, group: Mapping[str, Any], weights: Sequence[Any], gradients: Sequence[Any], states: Sequence[State]
    ) -> None:
        first, second, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        fused_adamw(group, weights, gradients, first, second, steps)

    def by_row(self, state: State, rows: int) -> State | None:
        return {name: state[name] for name in ("exp_avg", "exp_avg_sq")}


def fused_adamw(
    group: Mapping[str, Any],
    weights: Sequence[Any],
    gradients: Sequence[Any],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
) -> None:
    """torch's fused kernel: weights, moments and step counters in place."""
    if not weights:
        return
    beta1, beta2 = group["betas"]
    adamw(
        list(weights), list(gradients), first, second, [], steps, fused=True, amsgrad=False, maximize=False,
        lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], beta1=beta1, beta2=beta2,
    )  # fmt: skip
