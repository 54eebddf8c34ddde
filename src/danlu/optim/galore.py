"""GaLore: AdamW on gradients projected to a low rank, for all weights of a matrix (Zhao et al., arXiv:2403.03507).

out, in: dimensions of a weight · R rank · the low-rank gradient is [out, R] where out >= in, else [R, in]
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.optim.adamw import Moments, State
from danlu.optim.gradients import non_finite
from danlu.optim.state_shapes import low_rank_shape


@dataclass
class LowRankGradient:
    """Stands for the gradient of a matrix until the step: like a parameter's own, it is scaled and clipped there."""

    grad: Tensor | None = None


class GaLore:
    """GaLore's Adam over matrices [out, in]; the whole gradient of at most one of them is in memory at a time.

    As soon as the backward pass has finished a gradient G, a hook projects it, adds it to a sum of low rank, and drops
    it. With out >= in and P [R, in] the first right singular vectors of G, that sum is of G P^T, and the step does::

        N = AdamW's direction for the sum, from moments of low rank
        w <- (w - rate * scale * N P) * (1 - rate * decay)

    (out < in: P [out, R] the first left singular vectors, P^T G and P N.) Projecting is linear, so summing projected
    micro-batches is exact; a global norm and clipping see the low-rank gradient, the one that is applied.

    Compiled code returns the gradients of a compiled region together: then these are whole at the same time.

    P is recomputed at every `update_every`-th step, from the gradient of the step's first micro-batch (the paper's
    whole gradient when there is one micro-batch); the moments stay. The singular vectors are exact: a randomised method
    took 0.09 s instead of 0.9 for 2048 x 2048, and found another subspace. A new P counts once a step is made with it;
    a step that is left out leaves nothing behind.

    Args:
        groups:  "params" (2-D) and "weight_decay" of each.
        moments: how the state of AdamW is kept, of low rank.

    State of a parameter: `projector` (P) and that of `moments` for the low-rank gradient.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        *,
        rank: int,
        update_every: int,
        scale: float,
        moments: Moments,
    ) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, "betas": betas, "eps": eps, **group} for group in groups]
        self.state: dict[Parameter, State] = {}
        self.rank = rank
        self.update_every = update_every
        self.scale = scale
        self.moments = moments
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.gradients = {parameter: LowRankGradient() for parameter in parameters}
        self._new_projectors: dict[Parameter, Tensor] = {}  # of the present step, not yet in the state
        self._steps = dict.fromkeys(parameters, 0)  # those made; the state's own counters may be on a device
        for parameter in parameters:
            _project_after_backward(parameter, self)

    @torch.no_grad()
    def project_gradient(self, parameter: Parameter) -> None:
        """Adds the whole gradient of a parameter, projected, to its low-rank one, and drops it."""
        low = self.gradients[parameter]
        low.grad = self._accumulated(parameter)
        parameter.grad = None

    @torch.no_grad()
    def step(self, free_gradients: bool = False) -> None:
        """Updates every parameter that has a gradient, low-rank or (assigned, without a backward pass) whole."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = self._accumulated(parameter)
                if gradient is not None:
                    self._update(group, parameter, gradient)
                if free_gradients:
                    self.gradients[parameter].grad = parameter.grad = None

    def zero_grad(self) -> None:
        """Drops low-rank gradients, and projectors that no step was made with."""
        for low in self.gradients.values():
            low.grad = None
        self._new_projectors.clear()

    def load(self, states: Mapping[Parameter, Mapping[str, Tensor]]) -> None:
        """Replaces the whole state; tensors on the device of their parameter become it."""
        self.zero_grad()
        self.state.clear()
        self._steps = dict.fromkeys(self._steps, 0)
        for parameter, state in states.items():
            self.state[parameter] = {name: tensor.to(parameter.device) for name, tensor in state.items()}
            self._steps[parameter] = int(state["step"])

    def _accumulated(self, parameter: Parameter) -> Tensor | None:
        """The low-rank gradient with the projected whole one added, in place where there is one already."""
        low, whole = self.gradients[parameter].grad, parameter.grad
        if whole is None:
            return low
        if low is None and self._renews_projector(parameter):
            self._new_projectors.pop(parameter, None)
            if not non_finite([("", whole)]):  # else it has no singular vectors, and the step will be left out
                self._new_projectors[parameter] = leading_vectors(whole, self.rank)
        if self._renews_projector(parameter) and parameter not in self._new_projectors:
            # The first micro-batch's gradient is not finite. NaN makes the norm so too, and the step is left out.
            return whole.new_full(low_rank_shape(tuple(parameter.shape), self.rank), math.nan)
        projector = self._projector(parameter)
        # G P^T for a tall matrix, P^T G for a wide one
        pair = (whole, projector.T) if whole.shape[0] >= whole.shape[1] else (projector.T, whole)
        return torch.mm(*pair) if low is None else low.addmm_(*pair)

    def _renews_projector(self, parameter: Parameter) -> bool:
        """Whether the present step takes a new projector."""
        return self._steps[parameter] % self.update_every == 0

    def _projector(self, parameter: Parameter) -> Tensor:
        if self._renews_projector(parameter):
            return self._new_projectors[parameter]
        return self.state[parameter]["projector"]

    def _update(self, group: Mapping[str, Any], parameter: Parameter, gradient: Tensor) -> None:
        projector = self._projector(parameter)
        state = self.state.get(parameter)
        if state is None:
            specs = self.moments.specs(gradient.shape)
            state = self.state[parameter] = {name: spec.zeros(gradient.device) for name, spec in specs.items()}
        state["projector"] = projector
        # AdamW moves a weight by -lr x direction: weights of 0 at a rate of 1 become the negative direction.
        direction = torch.zeros_like(gradient)
        self.moments.update({**group, "lr": 1.0, "weight_decay": 0.0}, [direction], [gradient], [state])
        pair = (direction, projector) if parameter.shape[0] >= parameter.shape[1] else (projector, direction)
        parameter.addmm_(*pair, alpha=group["lr"] * self.scale)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        self._new_projectors.pop(parameter, None)
        self._steps[parameter] += 1


def leading_vectors(gradient: Tensor, rank: int) -> Tensor:
    """The first right singular vectors as rows [R, in] if out >= in, else the first left ones as columns [out, R]."""
    u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
    vectors = vh[:rank] if gradient.shape[0] >= gradient.shape[1] else u[:, :rank]
    # Row-major, as a checkpoint gives it back: products with other strides may be rounded otherwise.
    return vectors.clone(memory_format=torch.contiguous_format)


def _project_after_backward(parameter: Parameter, optimizer: GaLore) -> None:
    # Parameters outlive their optimizer: a hook that held it would keep its state, and project for nobody.
    owner = weakref.ref(optimizer)

    def project(parameter: Tensor) -> None:
        alive = owner()
        if alive is not None:
            assert isinstance(parameter, Parameter), "only parameters have this hook"
            alive.project_gradient(parameter)

    handle = parameter.register_post_accumulate_grad_hook(project)
    weakref.finalize(optimizer, handle.remove)
