"""Attention of layers that share keys and values: one layer makes them, and later ones have queries alone (Gemma 4;
arXiv:2405.12981).

The keys and values that are shared are finished, normed and rotated: `models.carried` takes them from layer to layer.
A cache has them once, at the layer that made them.

T packed tokens · D model width · H query heads · K key/value heads · C head width
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from danlu.core.layer_types import Attend, Keys
from danlu.models import ops
from danlu.models.attention import Attention
from danlu.models.config import ModelConfig
from danlu.models.mixer_spec import Heads
from danlu.models.modules import AttentionSublayer, Linear, RecomputePoints, RMSNorm, forward_shared
from danlu.models.rope import Rotation


def sharing_attention(config: ModelConfig, spec: Heads, layer: int) -> AttentionSublayer:
    """The module of a layer that gives keys, or that reads those of another one."""
    if spec.reads_keys:
        return ReadingAttention(config, spec, layer)  # type: ignore[return-value]
    return GivingAttention(config, spec, layer)  # type: ignore[return-value]


class GivingAttention(Attention):
    """Attention that also returns its keys and values, which are not recomputed: later layers keep them."""

    recompute_points: ClassVar[RecomputePoints] = {
        "elementwise": ("q_norm.forward", "k_norm.forward", "normed_values"),
        "selective": ("attend_queries",),
    }

    def forward(  # type: ignore[override]
        self, x: Tensor, rotations: Sequence[Rotation], attend: Attend
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [T, D]; rotations: of each of the model's rotary embeddings -> [T, D], keys and values [T, K, C]."""
        rotation = None if self.rope is None else rotations[self.rope]
        values = () if self.v_proj is None else (self.v_proj,)
        q, k, *rest = forward_shared(x, self.q_proj, self.k_proj, *values)
        keys = self.finished_keys(k, rest[0] if rest else k, rotation)
        out: Tensor = self.o_proj(self.attend_queries(q, *keys, rotation, attend))
        return out, keys

    def finished_keys(self, k: Tensor, v: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Keys and values as they are attended to, [T, K, C] each, of the products [T, K*C]."""
        k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (k, v))
        k = k if self.k_norm is None else self.k_norm(k)
        v = self.normed_values(v) if self.norms_values else v
        return k if rotation is None else ops.rotate(k, rotation.cos, rotation.sin), v

    def attend_queries(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, attend: Attend
    ) -> Tensor:  # [T, H*C]
        """Attention of queries [T, H*C], neither normed nor rotated yet."""
        q = _finished_queries(q, self.q_norm, self.head_dim, rotation)
        return self._mix(attend, q, k, v).flatten(1)


class ReadingAttention(nn.Module):
    """Attention of queries to the keys and values of an earlier layer."""

    recompute_points: ClassVar[RecomputePoints] = {
        "elementwise": ("q_norm.forward",),
        "selective": ("attend_queries",),
    }

    def __init__(self, config: ModelConfig, spec: Heads, layer: int) -> None:
        super().__init__()
        self.q_proj = Linear(config.hidden_size, spec.query_width, bias=spec.qkv_bias)
        self.q_norm = RMSNorm(spec.head_dim, config) if spec.qk_norm is not None else None
        self.o_proj = Linear(spec.query_width, config.hidden_size, bias=spec.o_bias)
        self.rope = None if spec.rope is None else config.ropes.index(spec.rope)
        self.layer, self.head_dim, self.tensor_cut = layer, spec.head_dim, spec.tensor_cut
        self.scale, self.window, self.softcap = spec.attention_scale, spec.window, spec.softcap
        self.cache = spec.cache()

    def forward(
        self,
        x: Tensor,
        rotations: Sequence[Rotation],
        attend: Attend,
        source: int,
        keys: tuple[Tensor, Tensor],
    ) -> Tensor:
        """x [T, D]; keys: keys and values [T, K, C] of the layer `source` -> [T, D]."""
        rotation = None if self.rope is None else rotations[self.rope]
        out: Tensor = self.o_proj(self.attend_queries(self.q_proj(x), *keys, rotation, attend, source))
        return out

    def attend_queries(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, attend: Attend, source: int
    ) -> Tensor:  # [T, H*C]
        """Attention of queries [T, H*C], neither normed nor rotated yet."""
        q = _finished_queries(q, self.q_norm, self.head_dim, rotation)
        return self._mix(attend, q, Keys((k, v), layer=source)).flatten(1)

    def _mix(self, attend: Attend, q: Tensor, keys: Keys) -> Tensor:  # [T, H, C]
        return attend(self.layer, q, keys, scale=self.scale, window=self.window, softcap=self.softcap)

    def extra_repr(self) -> str:
        return f"window={self.window}, softcap={self.softcap}, rope={self.rope}"


def _finished_queries(q: Tensor, norm: nn.Module | None, width: int, rotation: Rotation | None) -> Tensor:
    """Queries [T, H, C], normed and rotated."""
    q = q.unflatten(-1, (-1, width))
    q = q if norm is None else norm(q)
    if rotation is None:
        return q
    q = ops.rotate(q, rotation.cos, rotation.sin)
    return q if rotation.query_scale is None else q * rotation.query_scale[:, None, None]
