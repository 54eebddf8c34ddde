r"""Numbers that a text is or has, as exact fractions: 1,234.5, 3/4, 2 1/2, 1.6\times10^{-19}, 2^{40}, 50%.

Nothing is rounded: 0.333 is another number than 1/3, and 10000000001 than 10000000000.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

LONGEST_NUMBER = 400
"""Characters; longer ones are read as texts."""
LARGEST_EXPONENT = 1000
LARGEST_FACTORIAL = 200

NUMBER = re.compile(
    r"(?<![\^_])(?<![\^_]\{)(?<![\^_]-)(?<![\^_]\{-)(?<!\d)(?:(?<![\w.])[-−+]?(?:\$\s?)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d++)(?:\.\d++)?(?:[eE][-+]?\d++)?(?:\s?/\s?\d++)?+(?:\s?\\?%)?"
    r"|[-−+]?(?:\$\s?)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d++)(?:\.\d++)?(?:\s?/\s?\d++)?+(?:\s?\\?%)?"
    r"|[-−+]?\.\d++)"
)
"""A number within a text, and no exponent or index."""

_INTEGER = r"(?:\d{1,3}(?:,\d{3})++|\d{1,3}(?: \d{3})++|\d++)(?!\d)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*+)?|\.\d++)"
_POWER_OF_TEN = r"\s*+(?:\\times|\\cdot|\*)\s*+10\s*+\^\s*+\{\s*+(?P<ten>[-+]?\d++)\s*+\}"
_SHAPES = tuple(
    re.compile(shape)
    for shape in (
        rf"(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?\d++)|{_POWER_OF_TEN})?",
        rf"(?P<whole>{_INTEGER})?\s*+\\frac\s*+\{{\s*+(?P<above>[-+]?{_DECIMAL})\s*+\}}\s*+\{{\s*+(?P<below>{_DECIMAL})\s*+\}}",
        rf"(?:(?P<whole>{_INTEGER})(?:\s++|-|\s++and\s++))?+(?P<above>{_DECIMAL})\s*+/\s*+(?P<below>{_DECIMAL})",
        rf"(?P<above>{_DECIMAL})\s*+:\s*+(?P<below>{_DECIMAL})",
        r"(?P<base>\d++)\s*+\^\s*+\{\s*+(?P<power>[-+]?\d++)\s*+\}",
        r"(?P<factorial>\d++)\s*+!",
        r"(?P<before>\d*+\.\d*+)\\(?:overline|bar)\s*+\{?\s*+(?P<repeated>\d++)\s*+\}?",
    )
)
_SIGN = re.compile(r"(?:[-+]\s*+)*+")


@dataclass(frozen=True)
class Number:
    """A number, and whether it was given in percent: 50% is 50, and 0.5 too where nobody else says percent."""

    value: Fraction
    is_percent: bool = False

    def equals(self, other: Number) -> bool:
        """Whether both are one number; a sign of percent may be left out on one side."""
        if self.value == other.value:
            return True
        if self.is_percent == other.is_percent:
            return False
        percent, bare = (self, other) if self.is_percent else (other, self)
        return percent.value == 100 * bare.value


def numbers_in(text: str) -> Iterator[str]:
    """The numbers of a text as they are written there."""
    return (match.group() for match in NUMBER.finditer(text))


def read_number(text: str) -> Number | None:
    """The number that a text is, in the notation of `math_notation.plain`; None for one that is none, or too large."""
    if len(text) > LONGEST_NUMBER:
        return None
    text = text.replace("−", "-").strip()
    sign, text = _signed(text)
    percent = re.search(r"\s*+\\?(?:%|percent)$", text)
    if percent:
        text = text[: percent.start()]
    if len(text) > 2 and text[0] + text[-1] in ("()", "{}") and text[1:-1].count(text[0]) == 0:
        inner_sign, text = _signed(text[1:-1].strip())
        sign *= inner_sign
    for shape in _SHAPES:
        if match := shape.fullmatch(text):
            value = _value(match.groupdict())
            return None if value is None else Number(sign * value, percent is not None)
    return None


def to_number(value: Any) -> Number | None:
    """The number that a column holds: a number, or a text that is one, with a currency's sign or without."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return Number(Fraction(value))
    if isinstance(value, float):
        return Number(Fraction(repr(value))) if math.isfinite(value) else None
    text = str(value)
    if len(text) > LONGEST_NUMBER:
        return None
    return read_number(text.replace("\\$", "").replace("$", "").strip().rstrip("."))


def _signed(text: str) -> tuple[int, str]:
    match = _SIGN.match(text)
    assert match is not None, "it matches nothing at least"
    return (-1) ** match.group().count("-"), text[match.end() :]


def _value(groups: dict[str, str | None]) -> Fraction | None:
    """Returns the number in the groups of a shape; None for a division by 0, and for numbers too large to be
    computed.
    """
    if groups.get("decimal"):
        exponent = int(groups.get("exponent") or groups.get("ten") or 0)
        return None if abs(exponent) > LARGEST_EXPONENT else _fraction(groups["decimal"]) * Fraction(10) ** exponent
    if groups.get("below"):
        above, below = _fraction(groups["above"]), _fraction(groups["below"])
        if below == 0:
            return None
        if (whole := groups.get("whole")) is None:
            return above / below
        return _fraction(whole) + above / below if 0 <= above < below else None  # else nobody's mixed number
    if groups.get("base"):
        base, power = int(groups["base"] or ""), int(groups["power"] or "")
        if abs(power) * max(1, base.bit_length()) > 8 * LARGEST_EXPONENT or (base == 0 and power <= 0):
            return None
        return Fraction(base) ** power
    if groups.get("factorial"):
        number = int(groups["factorial"] or "")
        return None if number > LARGEST_FACTORIAL else Fraction(math.factorial(number))
    before, repeated = groups["before"] or "", groups["repeated"] or ""
    digits = len(before.partition(".")[2])
    return _fraction(before + "0") + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10**digits)


def _fraction(digits: str | None) -> Fraction:
    text = (digits or "").replace(",", "").replace(" ", "")
    return Fraction(text.removesuffix(".") or "0")
