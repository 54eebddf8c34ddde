"""The mixers of a layer's tokens as plain data: attention by heads, latent, factorized, and linear. Imports no torch.

D model width · H query heads · K key/value heads · C head width, of which Cr features are rotated · R width of a latent
· Q rank of factorized queries · W width of a value; of linear attention H heads of values, J heads of keys, K width of
a key, V width of a value
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from danlu.core.errors import ModelError
from danlu.core.layer_types import LayerCache
from danlu.models.rope_config import Rope, YarnScaling
from danlu.models.tensor_cut import Role, TensorCut

Shapes = dict[str, tuple[int, ...]]
"""Name of a parameter, without its layer -> shape."""

_OF_HEADS = (
    *("heads", "kv_heads", "head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"),
    *("query_rank", "key_heads", "key_dim", "value_dim"),
)
MAXIMUMS = dict.fromkeys(_OF_HEADS, 2**20) | {
    "conv_width": 2**10,
    "intermediate_size": 2**31 - 1,
    "num_experts": 2**16,
    "top_k": 2**16,
}
"""Bounds far above every published model, below which sizes can be multiplied and listed without harm."""


def check_sizes(sizes: Mapping[str, Any], maximums: Mapping[str, int] = MAXIMUMS) -> None:
    """Raises ModelError for a size below 1 or above its maximum; a name that is None, or not in `maximums`, is not
    checked.
    """
    for name, maximum in maximums.items():
        size = sizes.get(name)
        if size is None:
            continue
        if size < 1:
            raise ModelError(f"{name} is {size}: it must be at least 1")
        if size > maximum:
            raise ModelError(f"{name} is {size:,}: at most {maximum:,} can be built")


def linear_shapes(name: str, out_features: int, in_features: int, biased: bool, *stacked: int) -> Shapes:
    """Weight and, if it has one, bias of a linear layer; stacked: the number of layers that share one tensor of
    each."""
    weight: Shapes = {f"{name}.weight": (*stacked, out_features, in_features)}
    return weight | {f"{name}.bias": (*stacked, out_features)} if biased else weight


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
    norm_behind_rope: bool = False
    """Whether these norms stand behind the rotation (Hunyuan)."""
    sinks: bool = False
    """Whether each query head has one more key, with a learned score and a value of zero (gpt-oss)."""
    output_gate: bool = False
    """Whether the heads' outputs are multiplied by a sigmoid of as many features of the layer's input (Qwen3-Next)."""
    interleaved: bool = False
    """Whether neighbouring features of a head make a rotated pair, as GLM and Cohere store them; else halves of what is
    rotated do.
    """
    value_norm: bool = False
    """Whether the value of each head is normed, by an RMSNorm without a weight (Gemma 4)."""
    values_are_keys: bool = False
    """Whether the value of a head is its key before norm and rotation: there is no v_proj (Gemma 4)."""
    sharing: Literal["gives", "reads"] | None = None
    """Whether later layers read this layer's keys and values (`gives`), or this layer has none and reads those of the
    last layer before it that gives some and has the same window (`reads`, Gemma 4; arXiv:2405.12981).
    """

    def __post_init__(self) -> None:
        check_sizes(vars(self))
        if self.sharing is not None:
            has_more = self.sinks or self.output_gate or self.interleaved or self.norm_behind_rope
            assert not has_more and self.qk_norm != "full", "no family with shared keys has these"
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly: "
                "the second must divide the first"
            )
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise ModelError(f"rotary embedding of {self.rope.dim} features does not fit a head of {self.head_dim}")
        if self.norm_behind_rope and self.qk_norm != "head":
            raise ModelError("only norms of single heads may stand behind the rotation")
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
    def reads_keys(self) -> bool:
        """Whether it has no keys and values of its own."""
        return self.sharing == "reads"

    @property
    def cached_width(self) -> int:
        """Numbers a token that a cache keeps: a key and a value of each key/value head, where they are its own."""
        return 0 if self.reads_keys else 2 * self.kv_width

    @property
    def key_products(self) -> tuple[str, ...]:
        """The linear layers that keys and values are made with."""
        if self.reads_keys:
            return ()
        return ("k_proj",) if self.values_are_keys else ("k_proj", "v_proj")

    def cache(self, ranks: int = 1) -> LayerCache:
        """The values that each of `ranks` tensor ranks caches of a token: its key and its value; nothing where it reads
        those of another layer.
        """
        if self.reads_keys:
            return LayerCache((), None)
        return LayerCache(((self.kv_heads // ranks, self.head_dim),) * 2, self.window)

    @property
    def normed_widths(self) -> tuple[int, int]:
        """Features of q and of k that are normed together."""
        return (self.query_width, self.kv_width) if self.qk_norm == "full" else (self.head_dim, self.head_dim)

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of the forward pass."""
        shapes: Shapes = {"sinks": (self.heads,)} if self.sinks else {}  # first, for it is in no module
        shapes |= linear_shapes("q_proj", self.query_width, width, self.qkv_bias)
        for name in self.key_products:
            shapes |= linear_shapes(name, self.kv_width, width, self.qkv_bias)
        shapes |= linear_shapes("gate_proj", self.query_width, width, False) if self.output_gate else {}
        if self.qk_norm is not None:
            queries, keys = self.normed_widths
            shapes |= {"q_norm.weight": (queries,)} | ({} if self.reads_keys else {"k_norm.weight": (keys,)})
        return shapes | linear_shapes("o_proj", width, self.query_width, self.o_bias)

    @property
    def tensor_cut(self) -> TensorCut:
        """The cut over processes, by heads; norms of single heads are whole."""
        roles: dict[str, Role] = {"q_proj": "column", **dict.fromkeys(self.key_products, "grouped")}
        roles |= {"gate_proj": "column"} if self.output_gate else {}
        roles["o_proj"] = "row"
        norms = {"q_norm": "q_proj", "k_norm": "k_proj"} if self.qk_norm == "full" else {}
        units = dict.fromkeys(roles, self.head_dim)
        slots = {} if self.reads_keys else {"prefix": "k_proj", "sinks": "q_proj"}
        return TensorCut(roles, units, slots=slots, norms=norms)

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.heads % degree:
            return f"{degree} does not divide the model's {self.heads} attention heads"
        if self.kv_heads % degree and degree % self.kv_heads:
            return f"{degree} neither divides the model's {self.kv_heads} key/value heads nor is a multiple of them"
        return None

    def __str__(self) -> str:
        return f"{self.heads} heads ({self.kv_heads} of keys)"


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
    sharing: ClassVar[None] = None

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

    def cache(self, ranks: int = 1) -> LayerCache:
        """The values that each of `ranks` tensor ranks caches of a token: its latent, and its rotated key, as the one
        head of one tensor.
        """
        return LayerCache(((1, self.cached_width),), None)

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

    @property
    def tensor_cut(self) -> TensorCut:
        """The cut over processes: matrices that make queries, keys or values of heads, by heads; latents are whole."""
        roles: dict[str, Role] = {"q_proj": "column"}
        if self.q_lora_rank is not None:
            roles = {"q_a_proj": "whole", "q_b_proj": "column"}
        roles |= {"kv_a_proj": "whole", "kv_b_proj": "column", "o_proj": "row"}
        queries = "q_proj" if self.q_lora_rank is None else "q_b_proj"
        expanded = self.qk_nope_head_dim + self.v_head_dim
        return TensorCut(roles, {queries: self.head_dim, "kv_b_proj": expanded, "o_proj": self.v_head_dim})

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.heads % degree:
            return f"{degree} does not divide the model's {self.heads} attention heads"
        return None

    def __str__(self) -> str:
        return f"{self.heads} heads (of a latent of {self.kv_lora_rank})"


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
    sharing: ClassVar[None] = None

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

    def cache(self, ranks: int = 1) -> LayerCache:
        """The values that each of `ranks` tensor ranks caches of a token: its key and its value, or its key before
        rotation, from which both are computed.
        """
        return LayerCache(((1, self.head_dim),) * (1 if self.key_reuse else 2), None)

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

    @property
    def tensor_cut(self) -> TensorCut:
        """The cut over processes: matrices of query heads, by heads; the key and the value are whole."""
        values = "key_reuse" if self.key_reuse else "v_proj"
        roles: dict[str, Role] = {"q_a_proj": "whole", "q_b_proj": "column", "k_proj": "whole", values: "whole"}
        roles["o_proj"] = "row"
        return TensorCut(roles, {"q_b_proj": self.head_dim, "o_proj": self.head_dim})

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.heads % degree:
            return f"{degree} does not divide the model's {self.heads} attention heads"
        return None

    def __str__(self) -> str:
        return f"{self.heads} factorized heads (one key)"


@dataclass(frozen=True)
class Delta:
    """Heads with a state in the place of keys and values of all tokens: the gated delta rule (arXiv:2412.06464)."""

    heads: int
    """The number of heads of values, each with a state."""
    key_heads: int
    """The number of heads of queries and keys, each of which serves heads / key_heads heads of values."""
    key_dim: int
    value_dim: int
    conv_width: int = 4
    """Tokens that the convolutions before the rule see: a token and those before it."""

    rope: ClassVar[None] = None
    window: ClassVar[None] = None
    softcap: ClassVar[None] = None
    sharing: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_sizes(vars(self))
        if self.heads % self.key_heads:
            raise ModelError(
                f"{self.heads} value heads cannot share {self.key_heads} key heads evenly: the second must divide the "
                "first"
            )

    @property
    def key_width(self) -> int:
        """Features of all keys, J K."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Features of all values, H V."""
        return self.heads * self.value_dim

    @property
    def query_width(self) -> int:
        """Features of its widest tensor."""
        return max(self.key_width, self.value_width)

    def cache(self, ranks: int = 1) -> LayerCache:
        """The values that each of `ranks` tensor ranks caches of a sequence: the last inputs of the convolutions of
        queries, keys and values, and the state of its heads.
        """
        before = self.conv_width - 1
        keys, values = (before, self.key_width // ranks), (before, self.value_width // ranks)
        state = (self.heads // ranks, self.key_dim, self.value_dim)
        return LayerCache((), None, states=(keys, keys, values, state))

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of its modules."""
        keys, values = self.key_width, self.value_width
        shapes: Shapes = {"A_log": (self.heads,), "dt_bias": (self.heads,)}
        for name, outputs in (("q", keys), ("k", keys), ("v", values), ("gate", values), ("b", None), ("a", None)):
            shapes |= linear_shapes(f"{name}_proj", self.heads if outputs is None else outputs, width, False)
        for name, channels in (("q", keys), ("k", keys), ("v", values)):
            shapes[f"{name}_conv1d.weight"] = (channels, 1, self.conv_width)
        shapes["o_norm.weight"] = (self.value_dim,)
        return shapes | linear_shapes("o_proj", width, values, False)

    @property
    def tensor_cut(self) -> TensorCut:
        """The cut over processes, by heads; features of a key head stay together, and of the value heads that it
        serves.
        """
        columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "b_proj", "a_proj")
        roles: dict[str, Role] = {**dict.fromkeys(columns, "column"), "o_proj": "row"}
        served = self.value_dim * (self.heads // self.key_heads)
        units = {"q_proj": self.key_dim, "k_proj": self.key_dim}
        units |= dict.fromkeys(("v_proj", "gate_proj", "o_proj"), served)
        slots = {f"{name}_conv1d": f"{name}_proj" for name in "qkv"} | {"A_log": "a_proj", "dt_bias": "a_proj"}
        return TensorCut(roles, units, slots)

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.key_heads % degree:
            return f"{degree} does not divide the model's {self.key_heads} key heads of linear attention"
        return None

    def __str__(self) -> str:
        return f"{self.heads} heads of linear attention ({self.key_heads} of keys)"
