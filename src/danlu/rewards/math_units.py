"""Quantities: a value and its unit. 5 m is 5, for a unit may be left out; 5 km is not 5 miles, and 5 m is not 5 g."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from danlu.rewards.plain_numbers import read_number

_NAMES: dict[str, dict[str, tuple[int | Fraction, str]]] = {
    "length": {
        "mm": (1, "millimeter millimetre"),
        "cm": (10, "centimeter centimetre"),
        "in": (Fraction(254, 10), "inch inches"),
        "ft": (Fraction(3048, 10), "foot feet"),
        "yd": (Fraction(9144, 10), "yard"),
        "m": (1000, "meter metre"),
        "km": (1_000_000, "kilometer kilometre"),
        "mi": (1_609_344, "mile"),
    },
    "volume": {"mL": (1, "ml milliliter millilitre"), "L": (1000, "l liter litre"), "gal": (3785, "gallon")},
    "mass": {
        "mg": (Fraction(1, 1000), "milligram"),
        "g": (1, "gram gm"),
        "kg": (1000, "kilogram kilo"),
        "oz": (Fraction(45359237, 1600000), "ounce"),
        "lb": (Fraction(45359237, 100000), "pound"),
        "ton": (1_000_000, "tonne"),
    },
    "time": {
        "s": (1, "sec second"),
        "min": (60, "minute"),
        "h": (3600, "hr hour"),
        "day": (86_400, ""),
        "week": (604_800, ""),
        "month": (2_592_000, ""),
        "year": (31_536_000, "yr"),
    },
    "money": {"cent": (1, "¢ penny pennies"), "dollar": (100, "$ usd buck")},
    "other money": {"euro": (1, "€ eur"), "rupee": (1, "rs ₹"), "yen": (1, "¥"), "yuan": (1, "rmb")},
    "british money": {"£": (1, "gbp")},
    "angle": {"degree": (1, "deg ^\\circ"), "radian": (1, "rad")},
    "temperature": {"celsius": (1, ""), "fahrenheit": (1, "")},
    "speed": {"mi/h": (1, "mph"), "km/h": (1, "kmh kph kmph")},
    "half of a day": {"am": (1, ""), "pm": (1, "")},
}
_UNITS: dict[str, tuple[str, str, Fraction]] = {
    spelling: (name, quantity, Fraction(scale))
    for quantity, units in _NAMES.items()
    for name, (scale, others) in units.items()
    for other in (name, *others.split())
    for spelling in ({other, f"{other}s"} if other.isalpha() and len(other) > 1 else {other})
}
_ADDED = {"length", "volume", "mass", "time", "money"}
"""Quantities with units that add up, as 5 feet 6 inches do; scales of the others compare a unit with itself alone."""
_LETTERS = {"m", "g", "s", "h", "L", "l"}
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_ANY_UNIT = {"unit", "units"}
_POWERED = {"square": 2, "sq": 2, "cubic": 3}
_CONDITIONS = {"or", "and", "if", "unless", "except", "but", "not"}
"""Words behind a number with which it is another answer: 5 or less, 2 if n is even."""
_BEHIND = {"squared": 2, "cubed": 3}
_SIGNS = "$€£¥₹"

_TOKEN = re.compile(r"\s*+(\^\\circ|\^\{?[23]\}?|\\?/|¢|[$€£¥₹]|(?<![\\A-Za-z])[A-Za-z]++\.?|-(?=[A-Za-z]{3}))")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_VALUE = r"\d[\d,]*+(?:\.\d++)?(?:\s*+/\s*+\d++|\s*+\\frac\{\d++\}\{\d++\}|\s\d++/\d++)?+"
_TERM = re.compile(rf"\s*+(?:,\s*+)?(?:and\s++)?(?P<value>[$€£¥₹]?\s*+{_VALUE})\s*+-?(?P<unit>[A-Za-z¢]++\.?|)")


@dataclass(frozen=True)
class Unit:
    """A known unit such as `m^2` or `km/h`, and the words behind it; or those for whatever was counted: 18 eggs."""

    name: str = ""
    counted: frozenset[str] = frozenset()
    scale: Fraction = Fraction(1)
    quantity: str = ""

    def agrees_with(self, other: Unit | None) -> bool:
        """Whether both may stand behind one number: one is left out, or they are the same."""
        if other is None or self == NO_UNIT or other == NO_UNIT:
            return True
        if self.name or other.name:
            says_other = self.counted and other.counted and not self.counted & other.counted  # north, south
            return self.name == other.name and not says_other
        return bool(self.counted & other.counted)


NO_UNIT = Unit()


def split_unit(text: str) -> tuple[str, Unit | None, int]:
    """Returns (the text before a unit, the unit, the power of ten of a word such as million).

    It is the text itself and None where it ends with no unit. Algebra stays whole: 2m + 1, 4g^2, 2xy.
    """
    sign, rest = _currency(text)
    match = _tail(rest)
    if match is None:
        return (rest, sign, 0) if sign else (text, None, 0)
    head, tail = rest[:match].rstrip(" -"), rest[match:]
    tokens = [token.rstrip(".") for token in _TOKEN.findall(tail)]
    power = _SCALES.get(tokens[0].casefold(), 0) if tokens else 0
    if power:
        tokens = tokens[1:]
    is_apart = match == 0 or tail[:1].isspace() or tail.startswith("-") or power > 0
    unit = _unit(tokens, is_apart=is_apart) if tokens else NO_UNIT
    if unit is None or not head or (unit.name == "degree" and _ANGLE.search(head)):
        return (rest, sign, 0) if sign else (text, None, 0)
    has_letters = re.search(r"(?<![\\A-Za-z])[A-Za-z]", re.sub(r"\\[A-Za-z]++", "", head)) is not None
    if has_letters and not (is_apart and len(tokens[0]) > 1):
        return text, None, 0
    if sign is not None and unit.name and unit.name != sign.name:
        return text, None, 0
    return head, sign or unit, power


def compound(text: str) -> tuple[Fraction, Fraction, str] | None:
    """Returns (sum in the smallest unit, in the first one, the quantity) of 5 feet 6 inches; None for a text that is no
    such sum.
    """
    terms, place = list[tuple[Fraction, Unit]](), 0
    while place < len(text):
        match = _TERM.match(text, place)
        if match is None:
            return None
        sign, value_text = _currency(match["value"])
        value = read_number(value_text.strip())
        known = _UNITS.get(_spelled(match["unit"].rstrip("."))) if match["unit"] else None
        if value is None or (known is None and sign is None) or (known is not None and sign is not None):
            return None
        unit = sign if sign is not None else Unit(known[0], frozenset(), known[2], known[1])  # type: ignore[index]
        terms.append((value.value, unit))
        place = match.end()
        if text[place:].strip() == "":
            break
    quantities = {unit.quantity for _, unit in terms}
    if len(quantities) > 1 or not quantities <= _ADDED or len({unit.name for _, unit in terms}) < 2:
        return None
    total = sum((value * unit.scale for value, unit in terms), Fraction(0))
    return total, total / terms[0][1].scale, terms[0][1].quantity


def _currency(text: str) -> tuple[Unit | None, str]:
    """The unit of a sign before a number, and the text without it."""
    match = re.match(rf"\s*+([-+]?)\s*+(?:US|U\.S\.)?\s?([{_SIGNS}])\s*+(?=[-+\d.\\(])", text)
    if match is None:
        return None, text
    name, quantity, scale = _UNITS[match[2]]
    return Unit(name, frozenset(), scale, quantity), match[1] + text[match.end() :]


def _tail(text: str) -> int | None:
    """Returns the start of the words and signs that a text ends with, behind a digit, a bracket or a command."""
    start = len(text)
    for match in reversed(list(_TOKEN.finditer(text))):
        if match.end() != start and text[match.end() : start].strip():
            break
        start = match.start()
    while start < len(text) and not re.search(r"[\d})\]]\s*+-?$|\\[A-Za-z]++\s*+$|[A-Za-z]\s++$", text[:start]):
        following = _TOKEN.match(text, start)
        if following is None:
            return None
        start = following.end()
    return start if start < len(text) else None


def _spelled(word: str) -> str:
    """Returns a unit as the table spells it: abbreviations of one or two letters keep their capitals."""
    if word in _UNITS or len(word) < 3:
        return word
    return word.casefold()


def _unit(tokens: list[str], *, is_apart: bool) -> Unit | None:
    """Returns words and signs as a unit; None where they are none.

    is_apart: a space stands before them, so that they are no factors of an algebraic term.
    """
    if any(token.casefold() in _CONDITIONS for token in tokens):
        return None
    if all(
        token.casefold() in {*_ANY_UNIT, *_POWERED} or (token.startswith("^") and "circ" not in token)
        for token in tokens
    ):
        return NO_UNIT if any(token.casefold() in _ANY_UNIT for token in tokens) else None
    factor, rest = _factor(tokens)
    if factor is not None:
        name, quantity, scale = factor
        if name == "in" and rest and rest[0].casefold() not in ("per", "/", "\\/"):
            return Unit(counted=_stems(tokens)) if is_apart else None  # 7 in the morning
        if rest and rest[0].casefold() in ("per", "/", "\\/", "an", "a", "each"):
            divisor, rest = _factor(rest[1:])
            if divisor is not None:
                return Unit(f"{name}/{divisor[0]}")
        if not is_apart and rest:
            return None
        if rest and rest[0] != "in" and (other := _factor(rest)[0]) is not None:
            return Unit(f"{name} {other[0]}")
        return Unit(name, _stems(rest), scale, quantity)
    if not is_apart or not all(re.fullmatch(r"[A-Za-z]++", token) or token in "-/" for token in tokens):
        return None
    if any(re.fullmatch(r"(?:square|sq|cubic)", token.casefold()) for token in tokens):
        return None
    counted = _stems(tokens)
    for token in tokens:  # 18 more dollars
        if len(token) > 2 and (known := _UNITS.get(_spelled(token))) is not None:
            return Unit(known[0], frozenset(), known[2], known[1])
    return Unit(counted=counted) if any(len(word) > 2 for word in counted) else None


def _factor(tokens: list[str]) -> tuple[tuple[str, str, Fraction] | None, list[str]]:
    """Returns a unit with its power at the start of tokens, and the tokens behind it."""
    tokens, power = list(tokens), 1
    if tokens and tokens[0] == "-":
        tokens = tokens[1:]
    if tokens and tokens[0].casefold() in _POWERED:
        power, tokens = _POWERED[tokens[0].casefold()], tokens[1:]
    if not tokens:
        return None, []
    known = _UNITS.get(_spelled(tokens[0]))
    if known is None or (len(tokens[0]) == 1 and tokens[0].isalpha() and tokens[0] not in _LETTERS):
        return None, tokens
    rest = tokens[1:]
    if (
        tokens[0] in ("^\\circ", "degrees", "degree")
        and rest
        and rest[0].casefold() in ("c", "f", "celsius", "fahrenheit")
    ):
        name = "celsius" if rest[0].casefold().startswith("c") else "fahrenheit"
        return _UNITS[name], rest[1:]
    if rest and (rest[0].startswith("^") or rest[0].casefold() in _BEHIND):
        if known[1] != "length":
            return None, tokens
        power, rest = int(rest[0].strip("^{}")) if rest[0].startswith("^") else _BEHIND[rest[0].casefold()], rest[1:]
    if power == 1:
        return known, rest
    return (f"{known[0]}^{power}", f"{known[1]}^{power}", known[2] ** power), rest


def _stems(tokens: list[str]) -> frozenset[str]:
    return frozenset(token.casefold().removesuffix("s") for token in tokens if token not in "-/")
