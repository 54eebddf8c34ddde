"""What a layer of a decoder is made of, as plain data: what mixes its tokens, its feed-forward network, its norms.

A `LayerSpec` says all that decides the layer's parameters, products, cache and cuts. `decoder.Layer` builds it; the
plan, tensor parallelism and the shrunken models of `danlu verify` read it. Imports no torch.

D model width · H query heads · K key/value heads · C head width · F inner width of the feed-forward network, or of
each expert · E experts
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from danlu.errors import ModelError
from danlu.models.factorized_spec import Factorized
from danlu.models.latent_spec import Latent
from danlu.models.rope_config import Rope
from danlu.models.spec_shapes import MAXIMUMS, Kept, Shapes, check_sizes, linear_shapes, stacked_shapes


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss' gated activation: (u + 1) g sigmoid(alpha g) of g = min(gate, limit) and up within limit, u."""

    alpha: float = 1.702
    limit: float = 7.0


Activation = Literal["silu", "gelu_tanh"] | ClampedSwiGLU
Norms = Literal["pre", "post", "sandwich"]


@dataclass(frozen=True)
class Heads:
    """Attention by heads with keys and values of their own: multi-head (K = H), grouped-query, multi-query (K = 1)."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    """None: its queries and keys are not rotated (NoPE, arXiv:2305.19466)."""
    scale: float | None = None
    """What q·k is multiplied by; None: one over the root of head_dim."""
    window: int | None = None
    """How many tokens a query sees, itself included; None: all."""
    softcap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    """RMSNorm of q and k before rotation, over each head (Qwen3) or over all of them together (OLMo 2)."""
    sinks: bool = False
    """Whether each query head has one more key, with a learned score and a value of zero (gpt-oss)."""
    output_gate: bool = False
    """Whether what heads say is multiplied by a sigmoid of as many features of the layer's input (Qwen3-Next)."""

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
        """What q·k is multiplied by."""
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
        """What the backward pass needs of each token, on one of so many tensor ranks, beside scores."""
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


@dataclass(frozen=True)
class Delta:
    """Heads with a state in the place of keys and values of all tokens: the gated delta rule (arXiv:2412.06464)."""

    heads: int
    """Of values, and states of so many."""
    key_heads: int
    """Of queries and keys, each of which serves heads / key_heads heads of values."""
    key_dim: int
    value_dim: int
    conv_width: int = 4
    """Tokens that the convolutions before the rule see: a token and those before it."""

    rope: ClassVar[None] = None
    window: ClassVar[None] = None
    softcap: ClassVar[None] = None

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

    def pair_flops(self) -> int:
        """0: a query is not multiplied with the keys of other tokens."""
        return 0

    def token_flops(self) -> int:
        """Operations of one token on the states: what they say of its key, the correction, what they say of its
        query."""
        return 6 * self.heads * self.key_dim * self.value_dim

    def kept(self, tensor: int) -> Kept:
        """What the backward pass needs of each token, on one of so many tensor ranks; of states one for 64 tokens."""
        keys, values = self.key_width / tensor, self.value_width / tensor
        states = self.heads * self.key_dim * self.value_dim / 64 / tensor
        projected = 2 * keys + 2 * values
        return {
            "none": projected + 2 * keys + values + 3 * values + states,
            "elementwise": projected + 2 * values + states,
            "selective": projected,
        }

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.key_heads % degree:
            return f"{degree} does not divide the model's {self.key_heads} key heads of linear attention"
        return None

    def __str__(self) -> str:
        return f"{self.heads} heads of linear attention ({self.key_heads} of keys)"


@dataclass(frozen=True)
class Dense:
    """A gated feed-forward network: down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False

    def __post_init__(self) -> None:
        check_sizes(vars(self))

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of the forward pass."""
        shapes = linear_shapes("gate_proj", self.intermediate_size, width, self.bias)
        shapes |= linear_shapes("up_proj", self.intermediate_size, width, self.bias)
        return shapes | linear_shapes("down_proj", width, self.intermediate_size, self.bias)

    def product_weights(self, width: int) -> int:
        """Weights that one token is multiplied with."""
        return 3 * self.intermediate_size * width

    def kept(self, width: int, tensor: int) -> Kept:
        """What the backward pass needs of each token, on one of so many tensor ranks, beside its input."""
        inner = self.intermediate_size / tensor
        return {"none": 3 * inner, "elementwise": 2 * inner, "selective": 2 * inner}

    @property
    def widest(self) -> int:
        """Features of its widest tensor between two products."""
        return self.intermediate_size

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.intermediate_size % degree:
            return f"{degree} does not divide the MLP's width of {self.intermediate_size}"
        return None


@dataclass(frozen=True)
class Router:
    """Which experts a token goes to, and how their outputs are weighted.

    Scores are softmax(x W + b) over all experts, or sigmoid(x W + b) of each. A token goes to the top_k experts with
    the highest scores; with `bias_correction` a bias is added to the scores for this choice alone (DeepSeek-V3,
    arXiv:2412.19437, eq. 16), and with several groups only experts of its `top_groups` best groups take part
    (arXiv:2405.04434, section 2.2.2). What the experts give is weighted with the scores.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """What the weights are multiplied by."""
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top-2"] = "max"
    """What a group is chosen by: its highest score (DeepSeek-V2), or the sum of its two highest (DeepSeek-V3)."""
    bias: bool = False
    """Whether scores are made with a bias b, which is trained."""
    bias_correction: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: gated feed-forward networks of which a router gives each token top_k, and one that all
    tokens go through, if it is there (`shared`)."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Of each expert."""
    activation: Activation = "silu"
    bias: bool = False
    router: Router = Router()
    shared: Dense | None = None
    shared_gate: bool = False
    """Whether what the shared network gives is multiplied by sigmoid(x w) (Qwen2-MoE)."""

    def __post_init__(self) -> None:
        check_sizes(vars(self))
        groups, top_groups = self.router.groups, self.router.top_groups
        if self.top_k > self.num_experts:
            raise ModelError(f"a token cannot go to {self.top_k} experts of {self.num_experts}")
        if groups < 1 or self.num_experts % groups:
            raise ModelError(f"{self.num_experts} experts do not make {groups} groups of one size")
        if not 1 <= top_groups <= groups:
            raise ModelError(f"a token's experts cannot be of {top_groups} groups: there are {groups}")
        of_groups = top_groups * (self.num_experts // groups)
        if self.top_k > of_groups:
            raise ModelError(
                f"a token cannot go to {self.top_k} experts: its {top_groups} of {groups} groups have {of_groups}"
            )
        if self.router.group_score == "top-2" and 1 < groups > self.num_experts // 2:
            raise ModelError(f"groups are chosen by their two best experts: {groups} of {self.num_experts} have one")
        if self.shared_gate and self.shared is None:
            raise ModelError("there is no shared expert for the gate of one")

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of the forward pass; of all experts in one tensor."""
        count, inner = self.num_experts, self.intermediate_size
        shapes = linear_shapes("router", count, width, self.router.bias)
        shapes |= {"router.correction": (count,)} if self.router.bias_correction else {}
        shapes |= stacked_shapes("experts.gate_proj", count, inner, width, self.bias)
        shapes |= stacked_shapes("experts.up_proj", count, inner, width, self.bias)
        shapes |= stacked_shapes("experts.down_proj", count, width, inner, self.bias)
        if self.shared is not None:
            shapes |= {f"shared.{name}": shape for name, shape in self.shared.parameter_shapes(width).items()}
        return shapes | ({"shared_gate.weight": (1, width)} if self.shared_gate else {})

    def product_weights(self, width: int) -> int:
        """Weights that one token is multiplied with: the router's, and those of its top_k experts and shared ones."""
        shared = 0 if self.shared is None else self.shared.product_weights(width)
        return width * (self.num_experts + 3 * self.top_k * self.intermediate_size + self.shared_gate) + shared

    def kept(self, width: int, tensor: int) -> Kept:
        """What the backward pass needs of each token, on one of so many tensor ranks, beside its input.

        Each of a token's experts keeps a row of what a dense network does, and what it gives, which the gradient of
        its weight is made with.
        """
        inner = self.intermediate_size / tensor
        nothing: Kept = {"none": 0.0, "elementwise": 0.0, "selective": 0.0}
        shared = nothing if self.shared is None else self.shared.kept(width, tensor)
        gated = width if self.shared_gate else 0
        return {
            "none": self.top_k * (3 * inner + 2 * width) + shared["none"] + gated,
            "elementwise": self.top_k * (2 * inner + 2 * width) + shared["elementwise"] + gated,
            "selective": self.top_k * (2 * inner + 2 * width) + shared["selective"] + gated,
        }

    @property
    def widest(self) -> int:
        """Features of its widest tensor between two products: a token has a row for each of its experts."""
        return max(self.top_k * self.intermediate_size, 0 if self.shared is None else self.shared.widest)

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.intermediate_size % degree:
            return f"{degree} does not divide the experts' width of {self.intermediate_size}"
        return None if self.shared is None else self.shared.uncuttable(degree)


Mixer = Heads | Latent | Factorized | Delta
Feed = Dense | Experts


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a decoder: attention, then a feed-forward network, each with norms around it."""

    mixer: Mixer
    feed: Feed
    norms: Norms = "pre"
    """Before each half (`pre`), behind it, before it joins the residual stream (`post`), or both (`sandwich`)."""

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of the forward pass."""
        before, behind = self.norms != "post", self.norms != "pre"
        shapes: Shapes = {}
        for name, half in (("attention", self.mixer), ("mlp", self.feed)):
            shapes |= {f"{name}_norm.weight": (width,)} if before else {}
            shapes |= {f"{name}.{part}": shape for part, shape in half.parameter_shapes(width).items()}
            shapes |= {f"post_{name}_norm.weight": (width,)} if behind else {}
        return shapes

    def product_weights(self, width: int) -> int:
        """Weights that one token is multiplied with."""
        mixer = sum(math.prod(shape) for shape in self.mixer.parameter_shapes(width).values() if len(shape) == 2)
        return mixer + self.feed.product_weights(width)

    @property
    def attention(self) -> Heads:
        """Its mixer, of a layer whose mixer is attention by heads."""
        assert isinstance(self.mixer, Heads), f"{self.mixer} is no attention by heads"
        return self.mixer

    def token_flops(self) -> int:
        """Operations of one token that are products with neither weights nor other tokens."""
        return self.mixer.token_flops() if isinstance(self.mixer, Delta) else 0

    @property
    def widest(self) -> int:
        """Features of its widest tensor between two products."""
        return max(self.mixer.query_width, self.feed.widest)

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share the layer; None: they can."""
        return self.mixer.uncuttable(degree) or self.feed.uncuttable(degree)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Names and values of its sizes, for messages about a model that is too large."""
        for half in (self.mixer, self.feed):
            yield from ((name, size) for name in MAXIMUMS if (size := getattr(half, name, None)) is not None)

    def differences(self, other: LayerSpec) -> list[str]:
        """Names of what another layer has not, or has otherwise: `mixer.qk_norm`."""
        names: list[str] = []
        for half in ("mixer", "feed"):
            own, others = getattr(self, half), getattr(other, half)
            if type(own) is not type(others):
                names.append(half)
                continue
            values: dict[str, Any] = vars(own)
            names += [f"{half}.{name}" for name, value in values.items() if getattr(others, name) != value]
        return names + (["norms"] if self.norms != other.norms else [])
