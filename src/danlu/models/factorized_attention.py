"""Multi-matrix factorization attention: many wide heads with one key and one value (arXiv:2412.19255).

T packed tokens · S cached tokens · D model width · H query heads · C head width · Q rank of the queries
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from danlu.core.layer_types import Attend, Keys, LayerCache
from danlu.models import ops
from danlu.models.config import ModelConfig
from danlu.models.mixer_spec import Factorized
from danlu.models.modules import Linear, RecomputePoints, RMSNorm, forward_shared
from danlu.models.rope import Rotation, rotary_tables


class FactorizedAttention(nn.Module):
    """Multi-matrix factorization attention, with a value of its own a token or one that is made of its key (key reuse).

    Cut over processes, each has some of the query heads, and the key and the value whole.
    """

    recompute_points: ClassVar[RecomputePoints] = {
        "elementwise": ("q_a_norm.forward",),
        "selective": ("q_a_norm.forward", "attend_heads"),
    }

    def __init__(self, config: ModelConfig, spec: Factorized, layer: int) -> None:
        super().__init__()
        width, head = config.hidden_size, spec.head_dim
        self.q_a_proj = Linear(width, spec.query_rank, bias=False)
        self.q_a_norm = RMSNorm(spec.query_rank, config) if spec.query_norm else None
        self.q_b_proj = Linear(spec.query_rank, spec.query_width, bias=False)
        self.k_proj = Linear(width, head, bias=False)
        self.v_proj = self.key_reuse = None
        if spec.key_reuse:
            self.key_reuse = Linear(head, head, bias=False)
        else:
            self.v_proj = Linear(width, head, bias=False)
        self.register_parameter("key_reuse_gate", nn.Parameter(torch.empty(head)) if spec.key_reuse else None)
        self.o_proj = Linear(spec.query_width, width, bias=False)
        self.spec, self.layer = spec, layer
        self.rope = spec.rope
        self.rope_index = None if spec.rope is None else config.ropes.index(spec.rope)
        """The index of the rotary embedding in `config.ropes` that turns queries and keys; None: they are not
        rotated.
        """
        self.head_dim = head
        self.tensor_cut = spec.tensor_cut
        self.scale = spec.attention_scale

    @property
    def cache(self) -> LayerCache:
        """The values cached for each token: its key and its value, or its key before rotation, from which both are
        computed.
        """
        return self.spec.cache()

    def forward(self, x: Tensor, rotations: Sequence[Rotation], attend: Attend) -> Tensor:
        """x [T, D]; rotations: of each of the model's rotary embeddings, in x's dtype -> [T, D]."""
        rotation = None if self.rope_index is None else rotations[self.rope_index]
        values = () if self.v_proj is None else (self.v_proj,)
        of_queries, k, *v = forward_shared(x, self.q_a_proj, self.k_proj, *values)  # [T, Q], [T, C] and [T, C]
        q = self.q_b_proj(of_queries if self.q_a_norm is None else self.q_a_norm(of_queries))  # [T, H*C]
        out: Tensor = self.o_proj(self.attend_heads(q, k, rotation, attend, *v))
        return out

    def attend_heads(
        self, q: Tensor, k: Tensor, rotation: Rotation | None, attend: Attend, v: Tensor | None = None
    ) -> Tensor:
        """Rotation and attention. q [T, H*C]; k [T, C]; v [T, C], or None with key reuse -> [T, H*C]."""
        q, k = q.unflatten(-1, (-1, self.head_dim)), k.unsqueeze(1)  # [T, H, C], [T, 1, C]
        if v is None:
            q = q if rotation is None else ops.rotate(q, rotation.cos, rotation.sin)
            keys = Keys((k,), partial(self._of_keys, rotation))
        else:
            if rotation is not None:
                q, k = ops.apply_rope(q, k, rotation.cos, rotation.sin)
            keys = Keys((k, v.unsqueeze(1)))
        if rotation is not None and rotation.query_scale is not None:
            q = q * rotation.query_scale[:, None, None]
        return self._mix(attend, q, keys).flatten(1)

    def _of_keys(
        self, rotation: Rotation | None, stored: Sequence[Tensor], positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [S, 1, C] of keys before rotation, [S, 1, C]; see `danlu.core.layer_types.Expand`.

        rotation: of the tokens of the forward pass.
        """
        (k,) = stored
        assert self.key_reuse is not None and self.key_reuse_gate is not None, "keys that are not stored are reused"
        v = k + self.key_reuse_gate.to(k.dtype) * self.key_reuse(k.squeeze(1)).unsqueeze(1)
        if self.rope is None:
            return k, v
        if positions is not None:
            rotation = rotary_tables(self.rope, positions).to(k.dtype)
        assert rotation is not None, "a rotary embedding rotates the tokens of the forward pass"
        return ops.rotate(k, rotation.cos, rotation.sin), v

    def _mix(self, attend: Attend, q: Tensor, keys: Keys) -> Tensor:  # [T, H, C]
        return attend(self.layer, q, keys, scale=self.scale, window=None, softcap=None)

    def extra_repr(self) -> str:
        return f"rope={self.rope_index}, key_reuse={self.v_proj is None}"
