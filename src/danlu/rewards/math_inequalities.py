r"""Inequalities of one variable as the intervals in which they hold: x < 1 or x > 3, |x| < 3, x^2 - 5x + 6 \le 0.

Exact, and of known size: polynomials up to the second degree with rational coefficients, absolute values of linear
terms, unions and intersections of intervals. Any other text stays as it is.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from danlu.rewards.math_notation import GREEK, split_top
from danlu.rewards.math_structure import SEPARATOR, Group, Relation, groups_thousands
from danlu.rewards.plain_numbers import read_number

EVERYTHING, NOTHING = r"(-\infty,\infty)", r"\emptyset"
LONGEST_INEQUALITY = 200
"""Characters; longer ones are not solved."""

_BUILT = re.compile(
    rf"\\\{{\s*+(?P<name>[A-Za-z]|\\(?:{'|'.join(GREEK)}))\s*+(?:\\in\s*+\(-\\infty\s?,\s?\\infty\s?\)\s*+)?(?:\\mid(?![A-Za-z])|\||:)"
    r"(?P<condition>.++)(?<=\\\})"
)
_JOINT = re.compile(rf"{SEPARATOR.pattern}|\\(?:land|wedge)(?![A-Za-z])")
_AND = re.compile(r"(?<![\\A-Za-z])and(?![A-Za-z])|\\(?:land|wedge)(?![A-Za-z])")
_OR = re.compile(r"(?<![\\A-Za-z])or(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])")
_CUP, _CAP = (re.compile(rf"\\{name}(?![A-Za-z])") for name in ("cup", "cap"))
_COMPLEX = {"z", "w", "i", "e"}
_COEFFICIENT = r"\d++(?:\.\d++)?(?:/\d++)?|\\frac\s*+\{\s*+\d++\s*+\}\s*+\{\s*+\d++\s*+\}"
_TERM = re.compile(
    rf"\s*+(?P<sign>[-+]?)\s*+(?P<number>{_COEFFICIENT})?\s*+(?:(?:\*|\\cdot(?![A-Za-z]))?\s*+(?P<name>[A-Za-z])\s*+"
    r"(?:\^\s*+\{?(?P<power>[12])\}?)?)?\s*+"
)
_ABSOLUTE = re.compile(r"\|([^|]++)\|")


@dataclass(frozen=True, order=True)
class Interval:
    """An interval with rational ends, or with infinite ends, which it does not contain."""

    low: Fraction | float
    is_open: bool
    high: Fraction | float
    is_closed: bool

    @property
    def is_empty(self) -> bool:
        return self.low > self.high or (self.low == self.high and (self.is_open or not self.is_closed))

    def __str__(self) -> str:
        if self.low == self.high:
            return rf"\{{{self.low}\}}"
        ends = [_shown(end) for end in (self.low, self.high)]
        return f"{'[('[self.is_open]}{ends[0]},{ends[1]}{')]'[self.is_closed]}"


def as_intervals(text: str) -> str:
    r"""A set that is built by a condition, and conditions with "and" or "or" between them, as intervals: \{x : x > 2\}.

    Returns the text itself where it is none of these.
    """
    if (built := _BUILT.fullmatch(text)) is not None:
        condition = built["condition"][:-2].strip()
        text = condition if _names(condition) == {built["name"]} and re.search(r"[<>]|\\[gl]e", condition) else text
    parts = split_top(text, _JOINT, groups_thousands)
    if len(parts) > 1 and all(re.search(r"[<>]|\\[gln]e", part) for part in parts):
        relations = [Relation.of(part) for part in parts]
        sets = [each and solved(each) for each in relations]
        names = {name for part in parts for name in _names(part)}
        if len(names) > 1 or not all(sets) or (_AND.search(text) and _OR.search(text)):
            return text
        text = (r" \cap " if _AND.search(text) else r" \cup ").join(each for each in sets if each)
        if _AND.search(text) is None and not re.search(r"\\c[au]p", text):
            return text
    return _merged(text) or text


def solved(relation: Relation) -> str | None:
    """Returns the set where a relation of one variable holds; None for one that is not solved here."""
    if (interval := relation.as_interval()) is not None:
        return interval
    text = relation.text()
    names = _names(text)
    if len(text) > LONGEST_INEQUALITY or len(names) != 1 or names & _COMPLEX:
        return None
    pairs = zip(relation.operands, relation.signs, relation.operands[1:], strict=False)
    sets = [_where(left, sign, right) for left, sign, right in pairs]
    if not all(sets) or len(sets) > 2:
        return None
    joined = r" \cap ".join(each for each in sets if each)
    return joined if len(sets) == 1 else _merged(joined)


def names_of(relation: Relation) -> set[str]:
    """The letters of a relation."""
    return _names(relation.text())


def _names(text: str) -> set[str]:
    bare = re.sub(r"\\([A-Za-z]++)", lambda match: f" {match[1]} " if match[1] in GREEK else " ", text)
    return set(re.findall(r"[A-Za-z]++(?:_\{?\w\}?)?", re.sub(r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])", " ", bare)))


def _where(left: str, sign: str, right: str) -> str | None:
    """Returns the set where left sign right holds, for polynomials in one variable."""
    if sign not in ("<", ">", r"\le", r"\ge"):
        return None
    if sign in ("<", r"\le"):
        left, right, sign = right, left, {"<": ">", r"\le": r"\ge"}[sign]
    absolute = [_ABSOLUTE.fullmatch(side.strip()) for side in (left, right)]
    first, second = (
        _polynomial(match[1] if match else side) for match, side in zip(absolute, (left, right), strict=True)
    )
    if first is None or second is None or all(absolute):
        return None
    if any(absolute):
        term, bound = (first, second) if absolute[0] else (second, first)
        if term[2] or bound[1] or bound[2]:
            return None
        if bound[0] < 0:
            return EVERYTHING if absolute[0] else NOTHING
        square = (term[0] ** 2 - bound[0] ** 2, 2 * term[0] * term[1], term[1] ** 2)
        difference = square if absolute[0] else tuple(-each for each in square)
    else:
        difference = tuple(left_part - right_part for left_part, right_part in zip(first, second, strict=True))
    return _where_positive(difference, or_zero=sign == r"\ge")


def _polynomial(text: str) -> tuple[Fraction, ...] | None:
    """The coefficients of 1, x and x^2."""
    coefficients, place = [Fraction(0)] * 3, 0
    while place < len(text):
        match = _TERM.match(text, place)
        if match is None or match.end() == place or not (match["number"] or match["name"]):
            return None
        if place and not match["sign"]:
            return None
        number = read_number(match["number"]) if match["number"] else None
        if match["number"] and number is None:
            return None
        value = Fraction(1) if number is None else number.value
        power = 0 if match["name"] is None else int(match["power"] or 1)
        coefficients[power] += -value if match["sign"] == "-" else value
        place = match.end()
    return tuple(coefficients) if text.strip() else None


def _where_positive(coefficients: tuple[Fraction, ...], *, or_zero: bool) -> str | None:
    """Returns the set where c + b x + a x^2 is more than 0, or 0 too."""
    c, b, a = coefficients
    if a == b == 0:
        return None
    if a == 0:
        end = -c / b
        inside = Interval(end, not or_zero, math.inf, False) if b > 0 else Interval(-math.inf, True, end, or_zero)
        return str(inside)
    discriminant = b * b - 4 * a * c
    if discriminant < 0:
        return EVERYTHING if a > 0 else NOTHING
    if discriminant == 0 and (a > 0) == or_zero:
        return EVERYTHING if or_zero else NOTHING
    ends = _roots(a, b, discriminant)
    if discriminant == 0 and or_zero:
        return rf"\{{{ends[0]}\}}"
    opening, closing = "[("[not or_zero], ")]"[or_zero]
    if a < 0:
        return f"{opening}{ends[0]},{ends[1]}{closing}"
    return rf"(-\infty,{ends[0]}{closing} \cup {opening}{ends[1]},\infty)"


def _roots(a: Fraction, b: Fraction, discriminant: Fraction) -> list[str]:
    """Returns the roots of a x^2 + b x + c, the smaller one first, as numbers or with a root in them."""
    parts = (discriminant.numerator, discriminant.denominator)
    roots = [math.isqrt(part) for part in parts]
    if [root * root for root in roots] == list(parts):
        root = Fraction(roots[0], roots[1])
        return [str(end) for end in sorted(((-b - root) / (2 * a), (-b + root) / (2 * a)))]
    middle, square = -b / (2 * a), discriminant / (4 * a * a)
    radical = rf"\frac{{\sqrt{{{square.numerator * square.denominator}}}}}{{{square.denominator}}}"
    if square.denominator == 1:
        radical = rf"\sqrt{{{square.numerator}}}"
    before = "" if middle == 0 else _fraction(middle)
    return [f"{before}-{radical}", f"{before}+{radical}" if before else radical]


def _merged(text: str) -> str | None:
    """Unions or intersections of intervals with rational ends as disjoint ones in ascending order."""
    unites, cuts = _CUP.search(text) is not None, _CAP.search(text) is not None
    if unites and cuts:
        joined = [_merged(part.strip()) or part.strip() for part in split_top(text, _CAP)]
        sets = [_read(part) for part in joined]
    elif unites or cuts:
        sets = [_read(part) for part in split_top(text, _CUP if unites else _CAP)]
    else:
        return None
    if any(each is None for each in sets):
        return None
    if cuts:
        common = [Interval(-math.inf, True, math.inf, False)]
        for each in sets:
            common = [
                both for first in common for second in each or () if not (both := _common(first, second)).is_empty
            ]
    else:
        common = [interval for each in sets for interval in each or ()]
    return r" \cup ".join(map(str, _disjoint(common))) or NOTHING


def _read(text: str) -> list[Interval] | None:
    """The intervals of a union in which no other operation stands."""
    intervals = list[Interval]()
    for part in split_top(text.strip(), _CUP):
        part = part.strip()
        if part == NOTHING:
            continue
        group = Group.of(part)
        numbers = [_end(end) for end in group.parts]
        if group.brackets == "{}" and all(isinstance(number, Fraction) for number in numbers):
            intervals += [Interval(number, False, number, True) for number in numbers if number is not None]
            continue
        if not group.is_interval or numbers[0] is None or numbers[1] is None:
            return None
        interval = Interval(numbers[0], group.brackets[0] == "(", numbers[1], group.brackets[1] == "]")
        if interval.low >= interval.high:
            return None
        intervals.append(interval)
    return intervals


def _end(text: str) -> Fraction | float | None:
    infinity = re.fullmatch(r"([-+]?)\s*+\\infty", text.strip())
    if infinity:
        return -math.inf if infinity[1] == "-" else math.inf
    number = read_number(text)
    return None if number is None or number.is_percent else number.value


def _common(first: Interval, second: Interval) -> Interval:
    low, is_open = max((first.low, first.is_open), (second.low, second.is_open))
    high, is_closed = min((first.high, first.is_closed), (second.high, second.is_closed))
    return Interval(low, is_open, high, is_closed)


def _disjoint(intervals: list[Interval]) -> list[Interval]:
    disjoint = list[Interval]()
    for interval in sorted(intervals):
        last = disjoint[-1] if disjoint else None
        if last is not None and (
            interval.low < last.high or (interval.low == last.high and (last.is_closed or not interval.is_open))
        ):
            high, is_closed = max((last.high, last.is_closed), (interval.high, interval.is_closed))
            disjoint[-1] = Interval(last.low, last.is_open, high, is_closed)
        else:
            disjoint.append(interval)
    return disjoint


def _shown(end: Fraction | float) -> str:
    return str(end) if isinstance(end, Fraction) else (r"-\infty" if end < 0 else r"\infty")


def _fraction(number: Fraction) -> str:
    sign = "-" if number < 0 else ""
    above, below = abs(number.numerator), number.denominator
    return f"{sign}{above}" if below == 1 else rf"{sign}\frac{{{above}}}{{{below}}}"
