"""Gated DeltaNet (arXiv:2412.06464): a mixer of tokens that keeps a document in a state of fixed size.

T packed tokens · D model width · H value heads · J key heads, each of H / J value heads · K width of keys · V of values
W width of the convolutions · F features of their inputs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.core.layer_types import Attend, Axis, LayerCache
from danlu.models import ops
from danlu.models.config import ModelConfig
from danlu.models.delta_rule import gated_delta_rule, gated_delta_rule_from, gated_delta_step
from danlu.models.mixer_spec import Delta
from danlu.models.modules import Linear, RecomputePoints, RMSNorm, forward_shared
from danlu.models.recurrent_order import RecurrentOrder, RecurrentPart, RecurrentRuns, Windows
from danlu.models.rope import Rotation


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
        self.spec, self.layer = spec, layer
        self.key_dim, self.value_dim = spec.key_dim, spec.value_dim
        self.tensor_cut = spec.tensor_cut

    @property
    def cache(self) -> LayerCache:
        """The values cached for a sequence: the last inputs of the convolutions, and the state of the heads that are
        here.
        """
        return self.spec.cache(self.spec.heads // len(self.A_log))

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


def causal_conv(x: Tensor, weight: Tensor, order: RecurrentOrder, before: Tensor | None = None) -> Tensor:
    """Computes silu of the convolution; a document is preceded by zeros. Differentiable in x and weight.

    Args:   x [T, F]; weight [F, 1, W] float32 or wider, or of x's type: sums are made in the wider one;
            before [runs, W - 1, F]: the inputs that precede each run, where runs continue others; it gets no gradient.
    Returns [T, F] in x's type.
    """
    windows = order.windows(weight.shape[-1] - 1, x.device)
    if torch.is_grad_enabled():
        assert before is None, "a state that is given has no gradient"
        y: Tensor = _CausalConv.apply(x, weight, windows)
        return y
    rows = _rows(x, windows, before, _sum_dtype(x, weight))
    return F.silu(_convolved(rows, weight)).index_select(0, windows.places - _before(weight)).to(x.dtype)


def causal_conv_step(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """`causal_conv` of one token of each of T sequences; before [T, W - 1, F]."""
    wide = _sum_dtype(x, weight)
    taps = weight.to(wide).squeeze(1).t()  # [W, F]
    y = (before.to(wide) * taps[:-1]).sum(1) + x.to(wide) * taps[-1]
    return F.silu(y).to(x.dtype)


def last_inputs(x: Tensor, order: RecurrentOrder, before: Tensor) -> Tensor:
    """Returns the last inputs of each run, [runs, W - 1, F], for its continuation; arguments as in `causal_conv`."""
    width = before.shape[1]
    ends = torch.tensor([run.stop for run in order.runs], device=x.device)
    windows = order.windows(width, x.device)
    rows = _rows(x, windows, before, x.dtype)
    last = windows.places[ends - 1].unsqueeze(1) + torch.arange(1 - width, 1, device=x.device)
    return rows[last]


def _before(weight: Tensor) -> int:
    return weight.shape[-1] - 1


def _sum_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Float32, or the wider one of both: sums that are rounded to bfloat16 at each step lose digits."""
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def _rows(x: Tensor, windows: Windows, before: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the tokens, each run with the inputs that precede it in front, [T + runs * (W - 1), F]."""
    rows = x.new_zeros(windows.count, x.shape[1], dtype=dtype)
    rows.index_copy_(0, windows.places, x.to(dtype))
    if windows.shared is not None:
        target, tokens = windows.shared
        rows.index_copy_(0, target, x.index_select(0, tokens).to(dtype))
    if before is not None:
        target, of_runs = windows.earlier
        rows.index_copy_(0, target, before.flatten(0, 1).index_select(0, of_runs).to(dtype))
    return rows


def _convolved(rows: Tensor, weight: Tensor) -> Tensor:
    """[rows - (W - 1), F]: of each row from the W-th on, the sum over it and those before it."""
    taps = weight.to(rows.dtype).squeeze(1).t().contiguous()  # [W, F]
    count = len(rows) - _before(weight)
    y = rows[:count] * taps[0]
    for place in range(1, len(taps)):
        y.addcmul_(rows[place : place + count], taps[place])
    return y


class _CausalConv(torch.autograd.Function):
    """Saves x alone; the sums are made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, windows: Windows) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.windows = windows
        y = F.silu(_convolved(_rows(x, windows, None, _sum_dtype(x, weight)), weight))
        return y.index_select(0, windows.places - _before(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        windows: Windows = ctx.windows
        rows = _rows(x, windows, None, _sum_dtype(x, weight))
        y = _convolved(rows, weight)
        grad_y = torch.zeros_like(y)
        grad_y.index_copy_(0, windows.places - _before(weight), grad.to(y.dtype))
        grad_y = torch.ops.aten.silu_backward(grad_y, y)
        taps = weight.to(y.dtype).squeeze(1).t().contiguous()
        grad_rows, grad_taps = torch.zeros_like(rows), torch.empty_like(taps)
        for place, tap in enumerate(taps):
            seen = slice(place, place + len(y))
            grad_rows[seen].addcmul_(grad_y, tap)
            grad_taps[place] = (grad_y * rows[seen]).sum(0)
        grad_x = grad_rows.index_select(0, windows.places)
        if windows.shared is not None:
            of_rows, tokens = windows.shared
            grad_x.index_add_(0, tokens, grad_rows.index_select(0, of_rows))
        return grad_x.to(x.dtype), grad_taps.t().unsqueeze(1).to(weight.dtype), None
