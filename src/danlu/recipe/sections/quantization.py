"""A quantized frozen base."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import PositiveInt, Section


class _FourBit(Section):
    short = "kind"

    kind: str
    block: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = 64
    """Numbers that share a scale."""
    double: bool = True
    """Quantize the scales too: 4.13 bits a parameter instead of 4.5."""


class Nf4(_FourBit):
    """Four bits with levels at quantiles of the normal distribution, as in QLoRA (arXiv:2305.14314)."""

    kind: Literal["nf4"] = "nf4"


class Fp4(_FourBit):
    """Four-bit floating point: a sign, two bits of exponent, one of mantissa."""

    kind: Literal["fp4"] = "fp4"


class _Integers(Section):
    short = "kind"

    kind: str
    group: PositiveInt = 128
    """Inputs of a row that share a scale."""


class Int8(_Integers):
    """Eight-bit integers, rounded to nearest."""

    kind: Literal["int8"] = "int8"


class Int4(_Integers):
    """Four-bit integers, rounded to nearest."""

    kind: Literal["int4"] = "int4"


QuantizationSection = Nf4 | Fp4 | Int8 | Int4

Quantization = Annotated[QuantizationSection, Field(discriminator="kind")]
