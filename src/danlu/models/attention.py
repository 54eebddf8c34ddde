"""Self-attention over packed tokens: projections, rotation, and an `Attend` that mixes the tokens.

T packed tokens · D model width · H query heads · K key/value heads · C head width · R rotated features
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from danlu.core.layer_types import Attend, Keys, KeyValuePrefix, LayerCache
from danlu.models import ops
from danlu.models.config import ModelConfig
from danlu.models.mixer_spec import Heads
from danlu.models.modules import Linear, RecomputePoints, RMSNorm, forward_shared
from danlu.models.rope import Rotation


class Attention(nn.Module):
    """Multi-head (K = H), grouped-query or multi-query (K = 1) attention.

    Each head may have a sink, the score of one more key with a value of zero (gpt-oss, arXiv:2508.10925), and the
    heads' outputs may be gated (Qwen3-Next). The slot `prefix` may replace the keys and values of some tokens. Cut over
    processes, each has some of the heads.
    """

    prefix: KeyValuePrefix | None
    sinks: Tensor | None

    recompute_points: ClassVar[RecomputePoints] = {
        "elementwise": ("q_norm.forward", "k_norm.forward", "normed_values", "gated"),
        "selective": ("attend_heads",),
    }

    def __init__(self, config: ModelConfig, spec: Heads, layer: int) -> None:
        super().__init__()
        width, head = config.hidden_size, spec.head_dim
        self.q_proj = Linear(width, spec.query_width, bias=spec.qkv_bias)
        self.k_proj = Linear(width, spec.kv_width, bias=spec.qkv_bias)
        self.v_proj = None if spec.values_are_keys else Linear(width, spec.kv_width, bias=spec.qkv_bias)
        self.gate_proj = Linear(width, spec.query_width, bias=False) if spec.output_gate else None
        queries, keys = spec.normed_widths
        self.q_norm = RMSNorm(queries, config) if spec.qk_norm is not None else None
        self.k_norm = RMSNorm(keys, config) if spec.qk_norm is not None else None
        self.norms_all_heads = spec.qk_norm == "full"
        self.norms_rotated = spec.norm_behind_rope
        self.norms_values, self.eps = spec.value_norm, config.rms_norm_eps
        self.o_proj = Linear(spec.query_width, width, bias=spec.o_bias)
        self.register_module("prefix", None)
        self.spec, self.layer = spec, layer
        self.rope = None if spec.rope is None else config.ropes.index(spec.rope)
        """The index of the rotary embedding in `config.ropes` that turns queries and keys; None: they are not
        rotated.
        """
        self.head_dim = head
        self.tensor_cut = spec.tensor_cut
        self.scale = spec.attention_scale
        self.interleaved = 0 if spec.rope is None or not spec.interleaved else spec.rope.dim
        """Features of a head in which neighbours are a rotated pair; 0: halves of those that are rotated are."""
        self.window = spec.window
        self.softcap = spec.softcap
        self.register_parameter("sinks", nn.Parameter(torch.empty(spec.heads)) if spec.sinks else None)

    @property
    def cache(self) -> LayerCache:
        """The values cached for each token: its key and its value, of the heads that are here."""
        return self.spec.cache(self.spec.kv_width // self.k_proj.shape[0])

    def forward(self, x: Tensor, rotations: Sequence[Rotation], attend: Attend) -> Tensor:
        """x [T, D]; rotations: of each of the model's rotary embeddings, in x's dtype -> [T, D]."""
        rotation = None if self.rope is None else rotations[self.rope]
        others = [each for each in (self.v_proj, self.gate_proj) if each is not None]
        # [T, H*C], [T, K*C], [T, K*C] of values that are not the keys, and [T, H*C] of a gate
        q, k, *rest = forward_shared(x, self.q_proj, self.k_proj, *others)
        v = None if self.v_proj is None else rest.pop(0)
        out: Tensor = self.o_proj(self.attend_heads(q, k, v, rotation, attend, *rest))
        return out

    def normed_values(self, v: Tensor) -> Tensor:
        """Values [T, K, C], each divided by the root of its mean square."""
        return ops.rms_norm(v, None, self.eps)

    def gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Returns the heads' outputs times a sigmoid of the gate (arXiv:2505.06708); [T, H*C] each."""
        return mixed * torch.sigmoid(gate)

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        rotation: Rotation | None,
        attend: Attend,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Everything between the projections: norms, rotation, attention, the gate. q, gate [T, H*C]; k, v [T, K*C] ->
        [T, H*C]. v: None where values are keys."""
        v = k if v is None else v
        if self.norms_all_heads:
            q, k = self._normed(q, k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))  # [T, H, C], [T, K, C], [T, K, C]
        if not (self.norms_all_heads or self.norms_rotated):
            q, k = self._normed(q, k)
        if self.norms_values:
            v = self.normed_values(v)
        if self.interleaved:
            q, k = (ops.halves_of_pairs(x, self.interleaved) for x in (q, k))
        if rotation is not None:
            q, k = ops.apply_rope(q, k, rotation.cos, rotation.sin)
        if self.norms_rotated:
            q, k = self._normed(q, k)
        if rotation is not None and rotation.query_scale is not None:
            q = q * rotation.query_scale[:, None, None]
        if self.prefix is not None:
            k, v = self.prefix(k, v)
        mixed = self._mix(attend, q, k, v).flatten(1)
        return mixed if gate is None else self.gated(mixed, gate)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))

    def extra_repr(self) -> str:
        return f"window={self.window}, softcap={self.softcap}, rope={self.rope}"

    def _mix(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [T, H, C]
        keys = Keys((k, v))
        return attend(self.layer, q, keys, scale=self.scale, window=self.window, softcap=self.softcap, sinks=self.sinks)


@cache
def leave_attention_uncompiled(*attentions: type) -> None:
    """Excludes `_mix` of these classes from torch.compile.

    Compilation makes constants of the values that it reads: it would compile for every pack because of document
    lengths, and for every layer because of the layer's number, from the ninth on (torch's limit) not at all.
    """
    # No decorator of `_mix`: it would import torch._dynamo, a second that only a process which compiles should wait.
    for attention in attentions:
        attention._mix = torch.compiler.disable(attention._mix)  # type: ignore[attr-defined]
