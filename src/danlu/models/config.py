"""What a decoder looks like, as plain data: every size and switch of all supported families, without torch.

`parameter_shapes` lists the parameters that `decoder.Decoder` will have; the plan counts them without building one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from danlu.errors import ModelError

if TYPE_CHECKING:  # it imports numpy, and a wrong recipe is told without
    from danlu.types import Task

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class LinearScaling:
    """All rotary frequencies divided by `factor` (position interpolation, arXiv:2306.15595)."""

    kind: ClassVar[str] = "linear"

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK: the base grows with the document, once it is longer than max_position_embeddings."""

    kind: ClassVar[str] = "dynamic"

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between (arXiv:2407.21783)."""

    kind: ClassVar[str] = "llama3"

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: interpolation by wavelength with a ramp between beta_fast and beta_slow turns (arXiv:2309.00071)."""

    kind: ClassVar[str] = "yarn"

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def attention_scaling(self) -> float:
        """What cos and sin are multiplied by: given, or 0.1 ln(factor) + 1 (DeepSeek's ratio of two where set)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


MAXIMUMS = {
    "layers": 10_000,
    "vocab_size": 2**31 - 1,
    "hidden_size": 2**31 - 1,
    "intermediate_size": 2**31 - 1,
    "heads": 2**20,
    "kv_heads": 2**20,
    "head_dim": 2**20,
    "max_position_embeddings": 2**31 - 1,
}
"""Bounds far above every published model, below which sizes can be multiplied and listed without harm."""

RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of one decoder. Raises ModelError when its sizes do not fit each other."""

    family: str
    """Key of `families.FAMILIES`; the `model_type` of config.json."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0
    """Share of each head that is rotated (its first features)."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before rotation (Qwen3)."""
    windows: tuple[int | None, ...] = ()
    """One per layer: how many tokens a query sees, itself included; None = all. Empty means None everywhere."""
    activation: Activation = "silu"
    embedding_multiplier: float = 1.0
    """Embeddings are multiplied by this, rounded to the type of activations (Gemma: sqrt(hidden_size))."""
    attention_softcap: float | None = None
    final_softcap: float | None = None
    query_pre_attn_scalar: float | None = None
    """Scores are divided by its square root; None = head_dim."""
    norm_offset: float = 0.0
    """Norm weights are stored as differences from this (Gemma: 1)."""
    sandwich_norms: bool = False
    """A norm after attention and after the MLP too, before each joins the residual stream (Gemma-2)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    task: Task = "causal-lm"

    def __post_init__(self) -> None:
        for name, maximum in MAXIMUMS.items():
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}: it must be at least 1")
            if getattr(self, name) > maximum:
                raise ModelError(f"{name} is {getattr(self, name):,}: at most {maximum:,} can be built")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.layers)
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly: "
                "the second must divide the first"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ModelError(
                f"rotary embedding turns pairs of features, but {self.rotary_dim} of head_dim {self.head_dim} "
                f"(partial_rotary_factor {self.partial_rotary_factor}) is not a positive even number"
            )
        if len(self.windows) != self.layers:
            raise ModelError(f"{len(self.windows)} attention windows are given for {self.layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError(f"a sliding window must be at least 1 token: {self.windows}")

    @property
    def has_own_head(self) -> bool:
        """Whether there is an output matrix beside the embedding: of a language model whose head is not tied."""
        return self.task == "causal-lm" and not self.tie_word_embeddings

    @property
    def rotary_dim(self) -> int:
        """Features of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def context_length(self) -> int:
        """Tokens the model can see at once: its positions, with what a rotary scaling adds to them.

        Linear scaling and dynamic NTK leave max_position_embeddings at the length before them, as vLLM takes it. Under
        YaRN it may be either, and `original_max_position_embeddings` says what is stretched. Llama 3's has both.
        """
        match self.rope_scaling:
            case LinearScaling(factor=factor) | DynamicScaling(factor=factor):
                return int(self.max_position_embeddings * max(factor, 1.0))
            case YarnScaling(factor=factor, original_max_position_embeddings=trained):
                return max(self.max_position_embeddings, int(trained * factor))
            case _:
                return self.max_position_embeddings

    @property
    def attention_scale(self) -> float:
        """What q·k is multiplied by."""
        return 1 / math.sqrt(self.head_dim if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar)

    def parameter_count(self) -> int:
        """Parameters of the decoder; a tied head counts once."""
        return sum(math.prod(shape) for shape in parameter_shapes(self).values())

    @property
    def largest_size(self) -> tuple[str, int]:
        """The name and value of its largest size, for messages about a model that is too large."""
        name = max(MAXIMUMS, key=lambda name: int(getattr(self, name)) / MAXIMUMS[name])
        return name, getattr(self, name)


Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Name -> shape of every parameter of the decoder, in the order of its forward pass."""
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {"embed_tokens.weight": vocabulary}
    for index in range(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["norm.weight"] = (config.hidden_size,)
    if config.has_own_head:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def _layer_shapes(config: ModelConfig) -> Shapes:
    width, mlp = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: Shapes = {"attention_norm.weight": (width,)}
    shapes |= _linear("attention.q_proj", q_width, width, config.qkv_bias)
    shapes |= _linear("attention.k_proj", kv_width, width, config.qkv_bias)
    shapes |= _linear("attention.v_proj", kv_width, width, config.qkv_bias)
    if config.qk_norm:
        shapes |= {"attention.q_norm.weight": (config.head_dim,), "attention.k_norm.weight": (config.head_dim,)}
    shapes |= _linear("attention.o_proj", width, q_width, config.o_bias)
    if config.sandwich_norms:
        shapes["post_attention_norm.weight"] = (width,)
    shapes["mlp_norm.weight"] = (width,)
    shapes |= _linear("mlp.gate_proj", mlp, width, config.mlp_bias)
    shapes |= _linear("mlp.up_proj", mlp, width, config.mlp_bias)
    shapes |= _linear("mlp.down_proj", width, mlp, config.mlp_bias)
    if config.sandwich_norms:
        shapes["post_mlp_norm.weight"] = (width,)
    return shapes


def _linear(name: str, out_features: int, in_features: int, biased: bool) -> Shapes:
    weight: Shapes = {f"{name}.weight": (out_features, in_features)}
    return weight | {f"{name}.bias": (out_features,)} if biased else weight
