"""Weights of a model that follow the policy's: the moving reference of TR-DPO (arXiv:2404.09656)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from danlu.assembly.parallelize import Placed
from danlu.core.types import Role
from danlu.parallel.local_parameter import LocalParameter
from danlu.parallel.parallel_context import ParallelContext
from danlu.recipe.roles import Mixing


@dataclass(frozen=True)
class MovingWeights:
    """The weights of one moving role, and the policy's. Both are placed alike: each process mixes its own shards."""

    role: Role
    policy: Mapping[str, Tensor]  # by name in the policy
    own: Mapping[str, Tensor]  # of the same names, in float32
    mixing: Mixing
    parallel: ParallelContext  # of the model that moves

    @torch.no_grad()
    def updated(self, step: int) -> None:
        """Mixes the weights (equation 2) after each `mixing.every` steps."""
        if step % self.mixing.every:
            return
        for name, tensor in self.own.items():
            tensor.lerp_(self.policy[name], self.mixing.share)
        self.parallel.reshard()

    def tensors(self) -> dict[str, Tensor]:
        """The model's tensors in a checkpoint, live: "reference.NAME"."""
        return {f"{self.role}.{name}": tensor for name, tensor in self.own.items()}


def moving_weights(role: Role, policy: Placed, model: Placed, mixing: Mixing) -> MovingWeights:
    """The weights of a placed model that follow the policy's."""
    own, followed = ({name: tensor.detach() for name, tensor in placed.parameters()} for placed in (model, policy))
    return MovingWeights(role, followed, own, mixing, model.parallel)


def with_moving(parallel: ParallelContext, moving: Mapping[Role, MovingWeights]) -> ParallelContext:
    """The step of the policy with the local parameters of models that move, which no optimizer changes."""

    def reshard() -> None:
        parallel.reshard()
        for weights in moving.values():
            weights.parallel.reshard()

    local: dict[str, LocalParameter] = {
        f"{role}.{name}": replace(parameter, name=f"{role}.{name}")
        for role, weights in moving.items()
        for name, parameter in weights.parallel.local_parameters.items()
    }
    return replace(parallel, local_parameters={**parallel.local_parameters, **local}, reshard=reshard)
