"""Multi-head latent attention as plain data. Imports no torch.

D model width · H query heads · R width of the latent · C width of a query and a key, of which Cr are rotated · W width
of a value
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from danlu.models.rope_config import Rope, YarnScaling
from danlu.models.spec_shapes import Kept, Shapes, check_sizes, linear_shapes


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values of all heads are made of one latent of `kv_lora_rank` features a token, and of one rotated key that
    all heads share; queries may be made of a latent of their own. A cache holds latent and rotated key alone.
    """

    heads: int
    kv_lora_rank: int
    """Features of the latent that keys and values are made of, R."""
    qk_nope_head_dim: int
    """Features of a query, and of a key, that are not rotated."""
    v_head_dim: int
    rope: Rope
    """The rotary embedding of the other features of a query, Cr, and of the key that all heads share."""
    q_lora_rank: int | None = None
    """Features of the latent that queries are made of; None: they are made of the layer's input."""
    bias: bool = False
    """Whether the matrices that make the latents, and the output's, have biases."""
    interleaved: bool = True
    """Whether neighbouring features of a head make a rotated pair, as DeepSeek stores them; else halves of it do."""
    norm_eps: float = 1e-6
    """The epsilon of the latents' norms; transformers gives them one of their own, whatever the model's is."""

    window: ClassVar[None] = None
    softcap: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_sizes(vars(self))

    @property
    def kv_heads(self) -> int:
        """Each query head has a key and a value of its own."""
        return self.heads

    @property
    def qk_rope_head_dim(self) -> int:
        """Rotated features of a query, and of the shared key, Cr."""
        return self.rope.dim

    @property
    def head_dim(self) -> int:
        """Features of a query and of a key, C."""
        return self.qk_nope_head_dim + self.rope.dim

    @property
    def cached_width(self) -> int:
        """Numbers a token that a cache keeps: the latent and the rotated key."""
        return self.kv_lora_rank + self.rope.dim

    @property
    def attention_scale(self) -> float:
        """The factor of q·k: one over the root of C, and YaRN's temperature (see `YarnScaling.score_scale`)."""
        scaling = self.rope.scaling
        return (scaling.score_scale if isinstance(scaling, YarnScaling) else 1.0) / math.sqrt(self.head_dim)

    @property
    def query_width(self) -> int:
        """Features of all queries, H C."""
        return self.heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Features of all values, H W."""
        return self.heads * self.v_head_dim

    @property
    def expanded_width(self) -> int:
        """Features that are made of a latent: of all heads, the key's that are not rotated, and the value."""
        return self.heads * (self.qk_nope_head_dim + self.v_head_dim)

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of the forward pass."""
        if self.q_lora_rank is None:
            shapes = linear_shapes("q_proj", self.query_width, width, False)
        else:
            shapes = linear_shapes("q_a_proj", self.q_lora_rank, width, self.bias)
            shapes |= {"q_a_norm.weight": (self.q_lora_rank,)}
            shapes |= linear_shapes("q_b_proj", self.query_width, self.q_lora_rank, False)
        shapes |= linear_shapes("kv_a_proj", self.cached_width, width, self.bias)
        shapes |= {"kv_a_norm.weight": (self.kv_lora_rank,)}
        shapes |= linear_shapes("kv_b_proj", self.expanded_width, self.kv_lora_rank, False)
        return shapes | linear_shapes("o_proj", width, self.value_width, self.bias)

    def pair_flops(self) -> int:
        """Operations of one query on one key it sees: scores, and the sum of values."""
        return 2 * (self.query_width + self.value_width)

    def kept(self, tensor: int) -> Kept:
        """The values that the backward pass keeps of each token, on one of `tensor` tensor ranks, besides scores."""
        queries, values = self.query_width / tensor, self.value_width / tensor
        expanded = self.expanded_width / tensor
        q_latent = self.q_lora_rank or 0
        kv_latent = self.kv_lora_rank
        # The normed latents are what products save, latents as they are what norms save; keys are put together of what
        # is made of a latent and of the shared key, so they are there twice but for the values.
        return {
            "none": 2 * q_latent + 2 * kv_latent + 2 * queries + expanded + values,
            "elementwise": q_latent + kv_latent + 2 * queries + expanded + values,
            "selective": q_latent + self.cached_width + queries,
        }

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.heads % degree:
            return f"{degree} does not divide the model's {self.heads} attention heads"
        return None

    def __str__(self) -> str:
        return f"{self.heads} heads (of a latent of {self.kv_lora_rank})"
