"""Multi-matrix factorization attention as plain data. Imports no torch.

D model width · H query heads · C head width · Q rank of the queries
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from danlu.core.errors import ModelError
from danlu.models.rope_config import Rope
from danlu.models.spec_shapes import Kept, Shapes, check_sizes, linear_shapes


@dataclass(frozen=True)
class Factorized:
    """Multi-matrix factorization attention (MFA, arXiv:2412.19255), with key reuse or without.

    Many wide query heads share one key and one value, [C] each, of every token. Queries are made in two steps, of which
    the first is shared: q_h = Q_h S_q x, with S_q [Q, D] and Q_h [C, Q] of each head; the paper has Q = C. With key
    reuse (MFA-KR) the value is made of the key before its rotation, v = k + alpha * (N k), with N [C, C] and a gate
    alpha [C] that starts at zero, and a cache holds the key alone.
    """

    heads: int
    head_dim: int
    rope: Rope | None
    query_rank: int
    """Features of the queries' shared factor, Q."""
    key_reuse: bool = False
    query_norm: bool = False
    """RMSNorm between the two steps of the queries, as Step-3 has it (arXiv:2507.19427); the paper has none."""

    kv_heads: ClassVar[int] = 1
    window: ClassVar[None] = None
    softcap: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_sizes(vars(self))
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise ModelError(f"rotary embedding of {self.rope.dim} features does not fit a head of {self.head_dim}")
        if self.key_reuse and self.rope is not None and self.rope.follows_length:
            raise ModelError(
                "key reuse keeps keys as they are before rotation, which cannot be made again by frequencies that "
                "follow a document's length: use another rotary scaling, or key_reuse: false"
            )

    @property
    def attention_scale(self) -> float:
        """The factor of q·k."""
        return 1 / math.sqrt(self.head_dim)

    @property
    def query_width(self) -> int:
        """Features of all queries, H C."""
        return self.heads * self.head_dim

    @property
    def cached_width(self) -> int:
        """Numbers a token that a cache keeps."""
        return self.head_dim if self.key_reuse else 2 * self.head_dim

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of the forward pass."""
        shapes = linear_shapes("q_a_proj", self.query_rank, width, False)
        shapes |= {"q_a_norm.weight": (self.query_rank,)} if self.query_norm else {}
        shapes |= linear_shapes("q_b_proj", self.query_width, self.query_rank, False)
        shapes |= linear_shapes("k_proj", self.head_dim, width, False)
        if self.key_reuse:
            shapes |= linear_shapes("key_reuse", self.head_dim, self.head_dim, False)
            shapes |= {"key_reuse_gate": (self.head_dim,)}
        else:
            shapes |= linear_shapes("v_proj", self.head_dim, width, False)
        return shapes | linear_shapes("o_proj", width, self.query_width, False)

    def pair_flops(self) -> int:
        """Operations of one query on one key it sees: scores, and the sum of values."""
        return 4 * self.query_width

    def kept(self, tensor: int) -> Kept:
        """The values that the backward pass keeps of each token, on one of `tensor` tensor ranks, besides scores."""
        queries, keys = self.query_width / tensor, self.head_dim
        reuse = 2 * keys if self.key_reuse else 0  # the key before its rotation, and N times it
        normed = self.query_rank if self.query_norm else 0
        return {
            "none": self.query_rank + normed + 2 * queries + 2 * keys + reuse,
            "elementwise": self.query_rank + 2 * queries + 2 * keys + reuse,
            "selective": self.query_rank + queries + (keys if self.key_reuse else 2 * keys),
        }

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.heads % degree:
            return f"{degree} does not divide the model's {self.heads} attention heads"
        return None

    def __str__(self) -> str:
        return f"{self.heads} factorized heads (one key)"
