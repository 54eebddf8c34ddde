"""Rotary position embedding as plain data: the base, what is rotated, and how frequencies are scaled. No torch.

`rope.py` makes frequencies and tables of it, `hf_rope.py` reads and writes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from danlu.errors import ModelError


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


@dataclass(frozen=True)
class QueryTemperature:
    """Queries far into a document are made longer: times 1 + beta ln(1 + floor(position / length)) (Llama 4)."""

    beta: float
    length: int


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling


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

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ModelError(
                f"rotary embedding turns pairs of features: {self.dim} features of a head is not a positive even number"
            )

    @property
    def follows_length(self) -> bool:
        """Whether a document's frequencies depend on how long it is."""
        return isinstance(self.scaling, DynamicScaling)

    @property
    def context_length(self) -> int:
        """Positions with what the scaling adds to them.

        Linear scaling and dynamic NTK leave max_position_embeddings at the length before them, as vLLM takes it. Under
        YaRN it may be either, and `original_max_position_embeddings` says what is stretched. Llama 3's has both.
        """
        match self.scaling:
            case LinearScaling(factor=factor) | DynamicScaling(factor=factor):
                return int(self.max_position_embeddings * max(factor, 1.0))
            case YarnScaling(factor=factor, original_max_position_embeddings=trained):
                return max(self.max_position_embeddings, int(trained * factor))
            case _:
                return self.max_position_embeddings
