"""Rotary position embedding as plain data: the base, the rotated features, and the scaling of frequencies. No torch.

`rope.py` makes frequencies and tables of it, `hf_rope.py` reads and writes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from danlu.core.errors import ModelError


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
        """The factor of cos and sin: given, or 0.1 ln(factor) + 1 (DeepSeek's ratio of two where set)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def score_scale(self) -> float:
        """The factor of the score scale in DeepSeek's latent attention: the square of mscale_all_dim's temperature.

        Its cos and sin keep `attention_scaling` alone, which turns only the rotated features of a head; the other
        features get their temperature from here (arXiv:2405.04434, transformers' `DeepseekV3Attention`).
        """
        return self._temperature(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _temperature(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: the frequency of each pair divided by a factor of its own, found by search (arXiv:2402.13753).

    Documents of up to `original_max_position_embeddings` tokens are rotated by the short factors, longer ones by the
    long factors. Raises ModelError for factors that cannot be.
    """

    kind: ClassVar[str] = "longrope"

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    """The ratio of the longest document to the original length."""
    attention_factor: float | None = None
    short_mscale: float | None = None
    """The factor of cos and sin of documents that have the short factors, in place of `attention_factor`
    (Phi-3.5-MoE)."""
    long_mscale: float | None = None
    """The same for documents that have the long factors: both are given, or neither."""

    def __post_init__(self) -> None:
        assert (self.short_mscale is None) == (self.long_mscale is None), "both lengths have a factor, or neither"
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            wrong = next((factor for factor in factors if not (math.isfinite(factor) and factor > 0)), None)
            if wrong is not None:
                raise ModelError(f"{name} has {wrong}: frequencies are divided by its factors, numbers above 0")
        if self.original_max_position_embeddings < 2:
            raise ModelError(
                f"longrope: original_max_position_embeddings is {self.original_max_position_embeddings}: at least 2, "
                "because the attention factor is made of its logarithm"
            )

    @property
    def attention_scaling(self) -> float:
        """The factor of cos and sin, also for short documents: given, or sqrt(1 + ln factor / ln original)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the first pairs of a head turn, at the frequencies that they have where all of them do (Gemma 4)."""

    kind: ClassVar[str] = "proportional"

    partial_rotary_factor: float = 1.0
    """The share of pairs that turn; the others keep the features they have."""
    factor: float = 1.0
    """All frequencies are divided by this."""

    def __post_init__(self) -> None:
        if not 0 <= self.partial_rotary_factor <= 1:
            raise ModelError(f"proportional: partial_rotary_factor {self.partial_rotary_factor:g} must be in [0, 1]")


@dataclass(frozen=True)
class QueryTemperature:
    """Queries far into a document are made longer: times 1 + beta ln(1 + floor(position / length)) (Llama 4)."""

    beta: float
    length: int


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling


def ntk_theta(theta: float, dim: int, factor: float) -> float:
    """The base under which the slowest of `dim` / 2 pairs turns `factor` times slower, and the fastest as before.

    "NTK-aware" scaling (arXiv:2309.00071, sec. 3.1): theta x factor^(dim / (dim - 2)). Raises ModelError for a single
    pair, which is the slowest and the fastest.
    """
    if dim <= 2:
        raise ModelError(f"NTK-aware scaling needs more than one rotated pair of features: there are {dim} features")
    return float(theta * factor ** (dim / (dim - 2)))


@dataclass(frozen=True)
class Rope:
    """The rotary embedding (arXiv:2104.09864) of a layer's queries and keys. Raises ModelError for an odd `dim`."""

    theta: float
    """Base of the frequencies: pair i of `dim` / 2 turns by theta^(-2i / dim) radians a position."""
    dim: int
    """Features of a head that are rotated, its first ones."""
    max_position_embeddings: int
    """Positions the model was made for, from which dynamic scaling measures how long a document is."""
    scaling: RopeScaling | None = None
    temperature: QueryTemperature | None = None
    sections: tuple[int, ...] = ()
    """Pairs that turn by time, height and width of an image's parts, where the model sees some. Tokens of a text have
    the same position along all three, so that nothing but the config.json of the result depends on it."""

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ModelError(
                f"rotary embedding turns pairs of features: {self.dim} features of a head is not a positive even number"
            )
        if isinstance(self.scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                if (count := len(getattr(self.scaling, name))) != self.dim // 2:
                    raise ModelError(
                        f"longrope: {name} has {count} factors, and {self.dim} rotated features of a head are "
                        f"{self.dim // 2} pairs: give a factor for each"
                    )

    @property
    def follows_length(self) -> bool:
        """Whether a document's frequencies depend on how long it is."""
        return isinstance(self.scaling, DynamicScaling | LongRopeScaling)

    @property
    def has_one_switch(self) -> bool:
        """Whether there are two sets of frequencies, of short and of long documents, and none between (LongRoPE).

        A text that is being generated is then rotated by the length that it may reach, and its keys stay valid.
        """
        return isinstance(self.scaling, LongRopeScaling)

    @property
    def short_length(self) -> int:
        """The length of the longest document that has the frequencies of short ones, where frequencies follow the
        length.
        """
        if isinstance(self.scaling, LongRopeScaling):
            return self.scaling.original_max_position_embeddings
        return self.max_position_embeddings

    @property
    def attention_scaling(self) -> float:
        """The factor of cos and sin."""
        return self.scaling.attention_scaling if isinstance(self.scaling, YarnScaling | LongRopeScaling) else 1.0

    @property
    def context_length(self) -> int:
        """The number of positions, extended by the scaling.

        Linear scaling and dynamic NTK leave max_position_embeddings at the length before them, as vLLM takes it. Under
        YaRN and LongRoPE it may be either, and `original_max_position_embeddings` is the length that is stretched.
        Llama 3's has both.
        """
        match self.scaling:
            case LinearScaling(factor=factor) | DynamicScaling(factor=factor):
                return int(self.max_position_embeddings * max(factor, 1.0))
            case (
                YarnScaling(factor=factor, original_max_position_embeddings=trained)
                | LongRopeScaling(factor=factor, original_max_position_embeddings=trained)
            ):
                return max(self.max_position_embeddings, int(trained * factor))
            case _:
                return self.max_position_embeddings
