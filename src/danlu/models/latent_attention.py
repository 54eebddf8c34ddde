"""Multi-head latent attention: keys and values of all heads made of one latent a token (arXiv:2405.04434).

T packed tokens · S cached tokens · D model width · H query heads · R width of the latent · C width of a query and a
key, of which the last Cr are rotated · L = R + Cr · W width of a value
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from danlu.core.layer_types import Attend, Keys, LayerCache
from danlu.models import ops
from danlu.models.blockwise import by_head_in_tiles
from danlu.models.config import ModelConfig
from danlu.models.mixer_spec import Latent
from danlu.models.modules import Linear, RecomputePoints, RMSNorm, forward_shared
from danlu.models.rope import Rotation


class LatentAttention(nn.Module):
    """Multi-head latent attention, in either of two forms that are the same function.

    Expanded, each head has keys and values of its own, made of the latents: training takes it, and prompts. Absorbed,
    the matrix that makes keys is multiplied into the queries, the one that makes values is multiplied into the outputs,
    and all heads attend to the latents themselves: decoding uses it, and its cache holds nothing else. Cut over
    processes, each has some of the heads and the latents of all.
    """

    recompute_points: ClassVar[RecomputePoints] = {
        "elementwise": ("q_a_norm.forward", "kv_a_norm.forward"),
        "selective": ("q_a_norm.forward", "attend_heads"),
    }

    def __init__(self, config: ModelConfig, spec: Latent, layer: int) -> None:
        super().__init__()
        width, rank = config.hidden_size, spec.q_lora_rank
        self.q_a_norm = None
        if rank is None:
            self.q_proj = Linear(width, spec.query_width, bias=False)
        else:
            self.q_a_proj = Linear(width, rank, bias=spec.bias)
            self.q_a_norm = RMSNorm(rank, config, eps=spec.norm_eps)
            self.q_b_proj = Linear(rank, spec.query_width, bias=False)
        self.kv_a_proj = Linear(width, spec.cached_width, bias=spec.bias)
        self.kv_a_norm = RMSNorm(spec.kv_lora_rank, config, eps=spec.norm_eps)
        self.kv_b_proj = Linear(spec.kv_lora_rank, spec.expanded_width, bias=False)
        self.o_proj = Linear(spec.value_width, width, bias=spec.bias)
        self.layer = layer
        self.rope = config.ropes.index(spec.rope)
        """The index of the rotary embedding in `config.ropes` that turns queries and keys."""
        self.spec = spec
        self.tensor_cut = spec.tensor_cut
        self.scale = spec.attention_scale

    @property
    def cache(self) -> LayerCache:
        """The values cached for each token: its latent, and its rotated key, as the one head of one tensor."""
        return self.spec.cache()

    def forward(self, x: Tensor, rotations: Sequence[Rotation], attend: Attend) -> Tensor:
        """x [T, D]; rotations: of each of the model's rotary embeddings, in x's dtype -> [T, D]."""
        if self.q_a_norm is None:
            q, latent = forward_shared(x, self.q_proj, self.kv_a_proj)  # [T, H*C], [T, L]
        else:
            of_queries, latent = forward_shared(x, self.q_a_proj, self.kv_a_proj)
            q = self.q_b_proj(self.q_a_norm(of_queries))
        out: Tensor = self.o_proj(self.attend_heads(q, latent, rotations[self.rope], attend))
        return out

    def attend_heads(self, q: Tensor, latent: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Applies the norm of the latent, rotation and attention.

        q [T, H*C]; latent [T, L], with the features to be rotated behind it -> [T, H*W].
        """
        spec = self.spec
        rotated = spec.qk_rope_head_dim
        latent, shared_key = latent.split((spec.kv_lora_rank, rotated), dim=-1)
        q = q.unflatten(-1, (-1, spec.head_dim))  # [T, H, C]
        of_latent, turned = q.split((spec.qk_nope_head_dim, rotated), dim=-1)
        turned, shared_key = self._rotate(turned, shared_key.unsqueeze(1), rotation)  # [T, H, Cr], [T, 1, Cr]
        q = torch.cat((of_latent, turned), dim=-1)
        if rotation.query_scale is not None:
            q = q * rotation.query_scale[:, None, None]
        stored = torch.cat((self.kv_a_norm(latent).unsqueeze(1), shared_key), dim=-1)  # [T, 1, L]
        return self._mix(attend, q, Keys((stored,), self.expand, Absorbed(self))).flatten(1)

    def expand(self, stored: Sequence[Tensor], positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Computes keys [S, H, C] and values [S, H, W] from stored values [S, 1, L]; see
        `danlu.core.layer_types.Expand`.
        """
        (rows,) = stored
        spec = self.spec
        latent, shared_key = rows.split((spec.kv_lora_rank, spec.qk_rope_head_dim), dim=-1)
        of_heads = self.kv_b_proj(latent.squeeze(1)).unflatten(-1, (-1, spec.qk_nope_head_dim + spec.v_head_dim))
        of_latent, values = of_heads.split((spec.qk_nope_head_dim, spec.v_head_dim), dim=-1)
        return torch.cat((of_latent, shared_key.expand(-1, of_latent.shape[1], -1)), dim=-1), values

    def _rotate(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Queries [T, H, Cr] and keys [T, 1, Cr], rotated; in another order of features where they lie interleaved,
        the same of both, which no score depends on."""
        if self.spec.interleaved:
            q, k = (ops.halves_of_pairs(x, x.shape[-1]) for x in (q, k))
        return ops.apply_rope(q, k, rotation.cos, rotation.sin)

    def _mix(self, attend: Attend, q: Tensor, keys: Keys) -> Tensor:  # [T, H, W]
        return attend(self.layer, q, keys, scale=self.scale, window=None, softcap=None)

    def extra_repr(self) -> str:
        return f"rope={self.rope}, interleaved={self.spec.interleaved}"


class Absorbed:
    """The absorbed form; satisfies `danlu.core.layer_types.Absorb`."""

    def __init__(self, attention: LatentAttention) -> None:
        self._attention, self._spec = attention, attention.spec

    @property
    def value_width(self) -> int:
        """The stored features from which values are made: the latent's, R."""
        return self._spec.kv_lora_rank

    @property
    def fewest_expanded(self) -> int:
        """Queries a sequence from which on it takes fewer operations to expand its keys.

        A query and a key are multiplied in C + W features of a head expanded and in L + R absorbed; a key and a value
        of a head are made by R (C - Cr + W) multiplications.
        """
        spec = self._spec
        more = spec.cached_width + spec.kv_lora_rank - spec.head_dim - spec.v_head_dim
        return spec.kv_lora_rank * (spec.qk_nope_head_dim + spec.v_head_dim) // more + 1 if more > 0 else 2**62

    @property
    def merges_adapter(self) -> bool:
        """Whether the matrices have an adapter merged into them."""
        return self._attention.kv_b_proj.adapter is not None

    def queries(self, q: Tensor, *, exact: bool = False) -> Tensor:
        """q [T, H, C] -> [T, H, L]: multiplied with the matrix that makes the keys that are not rotated."""
        spec = self._spec
        of_latent, turned = q.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), dim=-1)
        makes_keys = self._matrices(q.dtype)[:, : spec.qk_nope_head_dim]  # [H, C - Cr, R]
        return torch.cat((_by_head(of_latent, makes_keys, exact), turned), dim=-1)

    def outputs(self, out: Tensor, *, exact: bool = False) -> Tensor:
        """out [T, H, R] -> [T, H, W]: multiplied with the matrix that makes the values."""
        makes_values = self._matrices(out.dtype)[:, self._spec.qk_nope_head_dim :]  # [H, W, R]
        return _by_head(out, makes_values.transpose(1, 2), exact)

    def _matrices(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrices that make keys and values of the heads that are here, [H, C - Cr + W, R]."""
        linear, spec = self._attention.kv_b_proj, self._spec
        whole = linear.rounded_weight(dtype) if linear.adapter is None else linear.adapter.effective(linear).to(dtype)
        return whole.unflatten(0, (-1, spec.qk_nope_head_dim + spec.v_head_dim))


def _by_head(x: Tensor, matrices: Tensor, exact: bool) -> Tensor:
    """x [T, H, I] times matrices [H, I, O] -> [T, H, O]."""
    if exact:
        return by_head_in_tiles(x, matrices)
    return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)
