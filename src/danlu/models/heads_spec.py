"""Attention by heads with keys and values of their own, as plain data. Imports no torch.

D model width · H query heads · K key/value heads · C head width
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from danlu.core.errors import ModelError
from danlu.models.rope_config import Rope
from danlu.models.spec_shapes import Kept, Shapes, check_sizes, linear_shapes


@dataclass(frozen=True)
class Heads:
    """Attention by heads with keys and values of their own: multi-head (K = H), grouped-query, multi-query (K = 1)."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    """None: its queries and keys are not rotated (NoPE, arXiv:2305.19466)."""
    scale: float | None = None
    """The factor of q·k; None: one over the root of head_dim."""
    window: int | None = None
    """The number of tokens that a query sees, itself included; None: all."""
    softcap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    """RMSNorm of q and k before rotation, over each head (Qwen3) or over all of them together (OLMo 2)."""
    sinks: bool = False
    """Whether each query head has one more key, with a learned score and a value of zero (gpt-oss)."""
    output_gate: bool = False
    """Whether the heads' outputs are multiplied by a sigmoid of as many features of the layer's input (Qwen3-Next)."""

    def __post_init__(self) -> None:
        check_sizes(vars(self))
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly: "
                "the second must divide the first"
            )
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise ModelError(f"rotary embedding of {self.rope.dim} features does not fit a head of {self.head_dim}")
        if self.window is not None and self.window < 1:
            raise ModelError(f"a sliding window must be at least 1 token: {self.window}")

    @property
    def attention_scale(self) -> float:
        """The factor of q·k."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def query_width(self) -> int:
        """Features of all queries, H C."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all keys, and of all values, K C."""
        return self.kv_heads * self.head_dim

    @property
    def cached_width(self) -> int:
        """Numbers a token that a cache keeps: a key and a value of each key/value head."""
        return 2 * self.kv_width

    @property
    def normed_widths(self) -> tuple[int, int]:
        """Features of q and of k that are normed together."""
        return (self.query_width, self.kv_width) if self.qk_norm == "full" else (self.head_dim, self.head_dim)

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of the forward pass."""
        shapes: Shapes = {"sinks": (self.heads,)} if self.sinks else {}  # first, for it is in no module
        shapes |= linear_shapes("q_proj", self.query_width, width, self.qkv_bias)
        shapes |= linear_shapes("k_proj", self.kv_width, width, self.qkv_bias)
        shapes |= linear_shapes("v_proj", self.kv_width, width, self.qkv_bias)
        shapes |= linear_shapes("gate_proj", self.query_width, width, False) if self.output_gate else {}
        if self.qk_norm is not None:
            queries, keys = self.normed_widths
            shapes |= {"q_norm.weight": (queries,), "k_norm.weight": (keys,)}
        return shapes | linear_shapes("o_proj", width, self.query_width, self.o_bias)

    def pair_flops(self) -> int:
        """Operations of one query on one key it sees: scores, and the sum of values."""
        return 4 * self.query_width

    def kept(self, tensor: int) -> Kept:
        """The values that the backward pass keeps of each token, on one of `tensor` tensor ranks, besides scores."""
        queries, keys = self.query_width / tensor, self.kv_width / min(tensor, self.kv_heads)
        # The gate and its product with what heads say, which is recomputed.
        gate = queries if self.output_gate else 0
        return {
            "none": 2 * queries + 2 * keys + 3 * gate,
            "elementwise": 2 * queries + 2 * keys + gate,
            "selective": queries + 2 * keys + gate,
        }

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.heads % degree:
            return f"{degree} does not divide the model's {self.heads} attention heads"
        if self.kv_heads % degree and degree % self.kv_heads:
            return f"{degree} neither divides the model's {self.kv_heads} key/value heads nor is a multiple of them"
        return None

    def __str__(self) -> str:
        return f"{self.heads} heads ({self.kv_heads} of keys)"
