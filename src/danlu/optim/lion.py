"""Lion: the sign of a momentum as the update (Chen et al., arXiv:2302.06675, algorithm 2). torch has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from danlu.optim.gradients import chunks

# Elements of a parameter that are updated together. One temporary of this size is all a step needs, where a whole
# embedding of a wide vocabulary would be hundreds of megabytes. 256 KiB stay in a core's cache: 15 % faster than 1 MiB.
_CHUNK_CPU = 1 << 16
_CHUNK_CUDA = 1 << 26  # a launch costs more than the memory until here


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay, in place and chunk by chunk.

    With gradient g, momentum m, weight w, rate r and decay d::

        w <- w - r * (sign(beta1 * m + (1 - beta1) * g) + d * w)
        m <- beta2 * m + (1 - beta2) * g

    State of a parameter: `exp_avg` (m), of the parameter's shape and type. There is no step counter.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 3e-5,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient. A closure is not taken: nothing here evaluates twice."""
        assert closure is None, "Lion evaluates no closure"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                size = _CHUNK_CUDA if parameter.is_cuda else _CHUNK_CPU
                tensors = (parameter, parameter.grad, state["exp_avg"])
                for weight, grad, momentum in zip(*(chunks(tensor, size) for tensor in tensors), strict=True):
                    _update(weight, grad, momentum, group["lr"], group["betas"], group["weight_decay"])


def _update(
    weight: Tensor, grad: Tensor, momentum: Tensor, rate: float, betas: tuple[float, float], decay: float
) -> None:
    update = torch.lerp(momentum, grad, 1 - betas[0]).sign_()
    momentum.lerp_(grad, 1 - betas[1])
    weight.mul_(1 - rate * decay).add_(update, alpha=-rate)
