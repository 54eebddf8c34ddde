"""Gated DeltaNet (arXiv:2412.06464): a mixer of tokens that keeps a document in a state of fixed size.

T packed tokens · D model width · H value heads · J key heads, each of H / J value heads · K width of keys · V of values
W width of the convolutions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.core.layer_types import Attend, Axis, LayerCache
from danlu.models import ops
from danlu.models.causal_conv import causal_conv, causal_conv_step, last_inputs
from danlu.models.config import ModelConfig
from danlu.models.delta_rule import gated_delta_rule, gated_delta_rule_from, gated_delta_step
from danlu.models.delta_spec import Delta
from danlu.models.modules import Linear, RMSNorm, forward_shared
from danlu.models.recurrent_order import RecurrentOrder, RecurrentPart, RecurrentRuns
from danlu.models.rope import Rotation
from danlu.models.sublayer import RecomputePoints, Role


class CausalConv(nn.Module):
    """The convolution of each channel over time, followed by silu; `causal_conv` with its weight [F, 1, W]."""

    tensor_axes: ClassVar[Mapping[str, tuple[Axis | None, ...]]] = {"weight": ("outputs", None, None)}
    weight: Tensor

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def forward(self, x: Tensor, runs: RecurrentRuns) -> Tensor:
        """x [T, F] -> [T, F]; a document begins behind zeros."""
        return causal_conv(x, self.weight, runs.order)


class GatedDeltaNet(nn.Module):
    """Queries, keys and values go through a short convolution, then through the gated delta rule.

    How fast a head's state decays, exp(-exp(A_log) softplus(a + dt_bias)), and how much of a correction it takes,
    sigmoid(b), follow from the token. The heads' outputs are normed, multiplied by silu of a gate and projected. Names
    are those of flash-linear-attention. Cut over processes, each has some of the heads.
    """

    tensor_roles: ClassVar[Mapping[str, Role]] = {
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "gate_proj": "column",
        "b_proj": "column",
        "a_proj": "column",
        "o_proj": "row",
    }
    tensor_slots: ClassVar[Mapping[str, str]] = {
        "q_conv1d": "q_proj",
        "k_conv1d": "k_proj",
        "v_conv1d": "v_proj",
        "A_log": "a_proj",
        "dt_bias": "a_proj",
    }
    tensor_norms: ClassVar[Mapping[str, str]] = {}
    recompute_points: ClassVar[RecomputePoints] = {
        "elementwise": ("q_conv1d.forward", "k_conv1d.forward", "v_conv1d.forward", "gated"),
        "selective": ("mix_heads",),
    }

    def __init__(self, config: ModelConfig, spec: Delta, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.q_proj = Linear(width, spec.key_width, bias=False)
        self.k_proj = Linear(width, spec.key_width, bias=False)
        self.v_proj = Linear(width, spec.value_width, bias=False)
        self.gate_proj = Linear(width, spec.value_width, bias=False)
        self.b_proj = Linear(width, spec.heads, bias=False)
        self.a_proj = Linear(width, spec.heads, bias=False)
        self.q_conv1d = CausalConv(spec.key_width, spec.conv_width)
        self.k_conv1d = CausalConv(spec.key_width, spec.conv_width)
        self.v_conv1d = CausalConv(spec.value_width, spec.conv_width)
        self.A_log = nn.Parameter(torch.empty(spec.heads))
        self.dt_bias = nn.Parameter(torch.empty(spec.heads))
        self.o_norm = RMSNorm(spec.value_dim, config, offset=0.0)
        self.o_proj = Linear(spec.value_width, width, bias=False)
        self.layer = layer
        self.key_dim, self.value_dim = spec.key_dim, spec.value_dim

    @property
    def tensor_unit(self) -> Mapping[str, int]:
        """Features that stay together: of a key head, and of the value heads that it serves."""
        served = self.value_dim * len(self.A_log) * self.key_dim // len(self.k_conv1d.weight)
        keys, values = dict.fromkeys(("q_proj", "k_proj"), self.key_dim), ("v_proj", "gate_proj", "o_proj")
        return {**keys, **dict.fromkeys(values, served), "b_proj": 1, "a_proj": 1}

    @property
    def cache(self) -> LayerCache:
        """The values cached for a sequence: the last inputs of the convolutions, and the state of the heads that are
        here.
        """
        before = self.q_conv1d.weight.shape[-1] - 1
        heads = len(self.A_log)
        inputs = tuple((before, len(conv.weight)) for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d))
        return LayerCache((), None, states=(*inputs, (heads, self.key_dim, self.value_dim)))

    def forward(self, x: Tensor, rotations: Sequence[Rotation], attend: Attend) -> Tensor:
        """x [T, D] -> [T, D]; it has no rotations, and follows `attend.runs`."""
        # [T, J*K], [T, J*K], [T, H*V], [T, H*V], [T, H], [T, H]
        q, k, v, gate, b, a = forward_shared(
            x, self.q_proj, self.k_proj, self.v_proj, self.gate_proj, self.b_proj, self.a_proj
        )
        out: Tensor = self.o_proj(self.mix_heads(q, k, v, gate, b, a, attend))
        return out

    def mix_heads(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, b: Tensor, a: Tensor, attend: Attend) -> Tensor:
        """Everything between the projections: convolutions, the delta rule, norm and gate. Returns [T, H*V]."""
        wide = torch.promote_types(self.A_log.dtype, torch.float32)
        beta = torch.sigmoid(b.to(wide))
        # The logarithm of the decay; in float16 exp(A_log) could be infinite.
        g = -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))
        return self.gated(self._mix(q, k, v, g, beta, attend.runs), gate)

    def gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """mixed [T, H, V], normed, times silu of the gate [T, H*V] -> [T, H*V]."""
        return ops.gated_mlp_activation(gate, self.o_norm(mixed).flatten(1), "silu")

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, runs: RecurrentRuns) -> Tensor:
        """[T, H, V]"""
        if runs.parts:
            return torch.cat([self._mix_part(q, k, v, g, beta, part) for part in runs.parts])
        if runs.caches is None:
            q, k, v = self.q_conv1d(q, runs), self.k_conv1d(k, runs), self.v_conv1d(v, runs)
            return gated_delta_rule(*self._by_head(q, k, v), g, beta, runs.order)
        mixed = []
        for part in runs.caches:
            *before, state = part.read(self.layer)
            inputs = [x[part.tokens] for x in (q, k, v)]
            decay, correction = g[part.tokens], beta[part.tokens]
            weights = (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)
            pairs = list(zip(inputs, weights, before, strict=True))
            if (order := part.order) is None:
                convolved = [causal_conv_step(x, weight, earlier) for x, weight, earlier in pairs]
                after = [torch.cat((earlier[:, 1:], x.unsqueeze(1)), 1) for x, _, earlier in pairs]
                out, state = gated_delta_step(*self._by_head(*convolved), decay, correction, state)
            else:
                convolved = [causal_conv(x, weight, order, earlier) for x, weight, earlier in pairs]
                after = [last_inputs(x, order, earlier) for x, _, earlier in pairs]
                out, state = gated_delta_rule_from(*self._by_head(*convolved), decay, correction, order, state)
            part.write(self.layer, *after, state)
            mixed.append(out)
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _mix_part(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, part: RecurrentPart) -> Tensor:
        """`_mix` of some of the tokens, here or as some heads of all tokens of an exchange. Returns [part, H, V]."""
        q, k, v, g, beta = (x[part.tokens].contiguous() for x in (q, k, v, g, beta))
        order = part.order
        if isinstance(order, RecurrentOrder):
            return self._mix(q, k, v, g, beta, RecurrentRuns(order))
        convolved = []
        for x, conv in zip(self._by_head(q, k, v), (self.q_conv1d, self.k_conv1d, self.v_conv1d), strict=True):
            weight = conv.weight.chunk(order.size)[order.index]  # of the heads that come here
            convolved.append(causal_conv(order.to_heads(x).flatten(1), weight, order.order))
        decay, correction = (x.contiguous() for x in order.to_heads(torch.stack((g, beta), dim=-1)).unbind(-1))
        return order.to_tokens(gated_delta_rule(*self._by_head(*convolved), decay, correction, order.order))

    def _by_head(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = (-1, self.key_dim)
        return q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, (-1, self.value_dim))


@cache
def leave_recurrence_uncompiled() -> None:
    """Excludes the recurrence from torch.compile, as `attention.leave_attention_uncompiled` does for attention."""
    GatedDeltaNet._mix = torch.compiler.disable(GatedDeltaNet._mix)  # type: ignore[method-assign]
