"""The gated feed-forward network of a decoder layer.

T packed tokens · D model width
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from danlu.core.layer_types import Recomputed
from danlu.models import ops
from danlu.models.config import ModelConfig
from danlu.models.mlp_spec import Dense
from danlu.models.modules import Linear, forward_shared
from danlu.models.sublayer import RecomputePoints, Role


class MLP(nn.Module):
    """x [T, D] -> down(activation(gate(x)) * up(x)) [T, D], a gated linear unit (arXiv:2002.05202)."""

    tensor_roles: ClassVar[Mapping[str, Role]] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
    tensor_slots: ClassVar[Mapping[str, str]] = {}
    tensor_norms: ClassVar[Mapping[str, str]] = {}
    tensor_unit = 1
    recompute_points: ClassVar[RecomputePoints] = {
        "elementwise": ("gated_activation",),
        "selective": ("gated_activation",),
    }

    def __init__(self, config: ModelConfig, spec: Dense) -> None:
        super().__init__()
        width, mlp = config.hidden_size, spec.intermediate_size
        self.gate_proj = Linear(width, mlp, bias=spec.bias)
        self.up_proj = Linear(width, mlp, bias=spec.bias)
        self.down_proj = Linear(mlp, width, bias=spec.bias)
        self.activation = spec.activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = forward_shared(x, self.gate_proj, self.up_proj)
        out: Tensor = self.down_proj(self.gated_activation(gate, up), Recomputed(self.gated_activation, (gate, up)))
        return out

    def gated_activation(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.gated_mlp_activation(gate, up, self.activation)
