r"""Whether an answer is the same mathematics as a reference: texts and numbers at once, the rest by math-verify.

Read before math-verify: choices and words, numbers, quantities with units, lists, points, intervals and sets (part by
part), assignments, inequalities, plus and minus. The rest are formulas, which `symbolic` compares in a process of its
own: `decide` returns None for them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from danlu.rewards import symbolic
from danlu.rewards.math_inequalities import EVERYTHING, NOTHING, as_intervals, names_of, solved
from danlu.rewards.math_notation import (
    FUNCTIONS,
    GREEK,
    NO_SOLUTION,
    compact,
    nesting,
    plain,
    split_top,
)
from danlu.rewards.math_structure import (
    SEPARATOR,
    Group,
    Relation,
    distinct_names,
    is_plain,
    names_agree,
)
from danlu.rewards.math_units import Unit, compound, split_unit
from danlu.rewards.plain_numbers import Number, read_number

LONGEST_ANSWER = 2000
"""Characters; longer ones are compared as texts alone."""
DEEPEST_NESTING = 60
MOST_PARTS = 60
"""The most parts of a list, a set or a union."""
MOST_FORMULAS = 40
"""Pairs that math-verify compares for one answer."""

Symbolic = Callable[[str, str], bool]
"""A function that compares two formulas for equality; may raise `symbolic.NotRead`."""


@dataclass(frozen=True)
class Match:
    """Whether an answer is right, and by which reading."""

    is_equal: bool
    why: str


_DIGITS = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3}){1,9}|\d{1,30})(?:\.\d{1,30})?")
"""Plain numbers, most answers to problems in words, which need no notation."""


class NeedsMathVerify(Exception):
    """A formula has to be compared, which is not done here."""


def decide(answer: str, reference: str) -> Match | None:
    """The verdict where no formula has to be compared; else None. Linear in the lengths."""

    if _DIGITS.fullmatch(answer) and _DIGITS.fullmatch(reference):
        first, second = (Fraction(text.replace(",", "").replace("$", "")) for text in (answer, reference))
        return Match(first == second, "equal numbers" if first == second else f"other numbers: {answer}, {reference}")

    def not_here(_: str, __: str) -> bool:
        raise NeedsMathVerify

    try:
        return _match(answer, reference, not_here)
    except NeedsMathVerify:
        return None


def match_answer(answer: str, reference: str) -> Match:
    """The verdict, with math-verify in this process. Raises `symbolic.TooLate`."""
    with symbolic.time_limit():
        return _match(answer, reference, symbolic.equal)


@functools.lru_cache(maxsize=4096)
def is_number(reference: str) -> bool:
    """Whether a reference is a number, perhaps with a unit: other answers are looked for among numbers then."""
    if len(reference) > LONGEST_ANSWER:
        return False
    if _DIGITS.fullmatch(reference):
        return True
    head, _, _ = split_unit(plain(reference))
    return read_number(head) is not None


@functools.lru_cache(maxsize=4096)
def is_list(reference: str) -> bool:
    """Whether a reference has several parts in any order, which may stand in boxes of their own."""
    if len(reference) > LONGEST_ANSWER or not re.search(SEPARATOR.pattern + r"|\\pm", reference):
        return False
    return Group.of(plain(reference)).is_list


def _match(answer: str, reference: str, compare: Symbolic) -> Match:
    if max(len(answer), len(reference)) > LONGEST_ANSWER:
        return Match(answer.strip() == reference.strip(), f"compared as texts: more than {LONGEST_ANSWER} characters")
    if max(nesting(answer), nesting(reference)) > DEEPEST_NESTING:
        return Match(answer.strip() == reference.strip(), f"compared as texts: more than {DEEPEST_NESTING} brackets")
    try:
        return _Comparison(compare).match(plain(answer), plain(reference))
    except RecursionError:
        return Match(False, "parts within parts without end")


_COMMUTATIVE = tuple(re.compile(rf"\\{name}(?![A-Za-z])") for name in ("cup", "cap", "lor", "land", "iff", "triangle"))
_CHOICE = re.compile(r"(?:option|choice|answer)?\s*+\(?\s*+([A-Za-z])\s*+\)?\s*+[.:)]?", re.IGNORECASE)
_CHOICE_WITH_CONTENT = re.compile(r"(?:\(\s*+([A-Ja-j])\s*+\)|([A-J])\s*+[.:)])\s*+[.:]?\s*+(\S.*+)")
_ANOTHER_CHOICE = re.compile(
    r"(?:and|or|nor|but|not|&|,)(?![A-Za-z])|(?:[^(]|\((?!\s*+[A-J]\s*+\)))*+\(\s*+[A-J]\s*+\)", re.IGNORECASE
)
_NAMES_OF_POINTS = re.compile(r"(?<![\\A-Za-z])[A-Z]{2,}")
_LATER_DIGITS = re.compile(r"\d,0\d\d(?!\d)")
"""The later digits of a number with commas: no list has an item such as 000."""
_KNOWN_WORDS = {"yes", "no", "odd", "even", "true", "false", "none", "all", "any", "dne"}
_NOT_WORDS = {*FUNCTIONS, *GREEK, "infty", "sqrt", "frac"}


class _Comparison:
    """One comparison of two answers; counts the formulas that it has to have compared."""

    def __init__(self, compare: Symbolic) -> None:
        self._compare, self._compared = compare, 0

    def match(self, answer: str, reference: str) -> Match:
        """Both in the notation of `plain`."""
        answer, reference = as_intervals(answer), as_intervals(reference)
        if not answer or not reference:
            return Match(False, "an empty answer" if not answer else "an empty reference")
        if compact(answer) == compact(reference):
            return Match(True, "equal texts")
        for reading in (_choices, _texts, _quantities, _compounds):
            if (match := reading(answer, reference)) is not None:
                return match
        for part in (self._relations, self._operations, self._lists, self._units):
            if (match := part(answer, reference)) is not None:
                return match
        return self._formulas(answer, reference)

    def equal(self, answer: str, reference: str) -> bool:
        return self.match(answer.strip(), reference.strip()).is_equal

    def _relations(self, answer: str, reference: str) -> Match | None:
        """Assignments (x = 5 is 5), chains (3 * 6 = 18), inequalities, which are intervals, and memberships."""
        left, right = Relation.of(answer), Relation.of(reference)
        if left is None and right is None:
            return None
        if (left or right) is not None and any(each is not None and each.is_value for each in (left, right)):
            return self._values(answer, left, reference, right)
        if left is not None and right is not None:
            return self._same_solutions(left, right) or self._same_relation(left, right)
        relation, other = (left, reference) if left is not None else (right, answer)
        assert relation is not None, "one of both is a relation"
        if (interval := solved(relation)) is not None and not Group.of(other).is_bare_list:
            return Match(self.equal(*((interval, other) if relation is left else (other, interval))), "as an interval")
        return Match(False, "a relation, and a value")

    def _values(self, answer: str, left: Relation | None, reference: str, right: Relation | None) -> Match:
        """Compares two relations of which one at least is a name and its value."""
        named = [each for each in (left, right) if each is not None and each.is_value]
        if len(named) == 2 and not names_agree(named[0].operands[0], named[1].operands[0]):
            return Match(False, f"other names: {named[0].operands[0]}, {named[1].operands[0]}")
        values = [
            each.operands[-1] if each is not None and each.is_value else text
            for each, text in ((left, answer), (right, reference))
        ]
        if any(each is not None and not each.is_value and "=" in each.signs for each in (left, right)):
            return self._formulas(answer, reference)  # an equation of another form
        return self.match(values[0].strip(), values[1].strip())

    def _same_solutions(self, left: Relation, right: Relation) -> Match | None:
        """Compares the solutions of two inequalities of which one at least is no interval as written: |x| < 3 and -3 <
        x < 3.
        """
        if left.as_interval() is not None and right.as_interval() is not None:
            return None
        first, second = solved(left), solved(right)
        if first is None or second is None or {first, second} & {EVERYTHING, NOTHING}:
            return None
        if names_of(left) != names_of(right):
            return Match(False, "other variables")
        return Match(self.equal(first, second), "as intervals")

    def _same_relation(self, left: Relation, right: Relation) -> Match | None:
        first, second = left.ascending(), right.ascending()
        if first.signs == second.signs and all(map(self.equal, first.operands, second.operands)):
            return Match(True, "equal relations")
        is_symmetric = first.signs in (("=",), (r"\ne",)) and first.signs == second.signs
        if is_symmetric and all(map(self.equal, first.operands, reversed(second.operands))):
            return Match(True, "equal relations")
        if first.signs == second.signs and all(map(is_plain, (*first.operands, *second.operands))):
            return Match(False, "other relations")
        if any(sign in (r"\ne", r"\in") for sign in (*first.signs, *second.signs)) or len(first.signs) > 1:
            return Match(False, "other relations")
        return self._formulas(first.text(), second.text())

    def _operations(self, answer: str, reference: str) -> Match | None:
        """Unions, intersections and the like, in any order."""
        for operation in _COMMUTATIVE:
            sides = [split_top(text, operation) for text in (answer, reference)]
            if max(map(len, sides)) > 1:
                if len(sides[0]) == len(sides[1]) and self._in_any_order(*sides):
                    return Match(True, "equal parts")
                if not all(Group.of(part).is_interval for part in (*sides[0], *sides[1])):
                    return Match(False, "other parts")
                return self._formulas(answer, reference)
        return None

    def _lists(self, answer: str, reference: str) -> Match | None:
        """Lists, points, intervals and sets, part by part; a comma between digits may group thousands."""
        groups = [[Group.of(text, thousands=True)] for text in (answer, reference)]
        for text, readings in ((answer, groups[0]), (reference, groups[1])):
            if not _LATER_DIGITS.search(text) and not (text is reference and _has_thousands(text)):
                readings.append(Group.of(text, thousands=False))
        if all(len(each.parts) == 1 and not each.is_opened for of_side in groups for each in of_side):
            return None
        if max(len(each.parts) for of_side in groups for each in of_side) > MOST_PARTS:
            return Match(False, f"more than {MOST_PARTS} parts")
        pairs = dict.fromkeys((left, right) for left in groups[0] for right in groups[1])
        in_parts = [pair for pair in pairs if any(len(each.parts) != 1 or each.is_opened for each in pair)]
        if any(self._same_group(left, right) for left, right in in_parts):
            return Match(True, "equal parts")
        return Match(False, "other parts") if len(in_parts) == len(pairs) else None

    def _same_group(self, left: Group, right: Group) -> bool:
        if len(left.parts) != len(right.parts):
            return False
        if len(left.parts) == 1:
            return self.equal(left.parts[0], right.parts[0])
        brackets = {left.brackets, right.brackets}
        names = [distinct_names(each.parts) for each in (left, right)]
        if brackets <= {"", "{}"} and (names[0] is None) == (names[1] is None):
            return self._in_any_order(left.parts, right.parts)
        agree = len(brackets) == 1 or brackets == {"", "()"} or (brackets == {"()", "[]"} and len(left.parts) > 2)
        if brackets == {"", "{}"}:
            agree = True
        return agree and all(map(self.equal, left.parts, right.parts))

    def _in_any_order(self, parts: Sequence[str], others: Sequence[str]) -> bool:
        remaining = list(others)
        for part in parts:
            index = next((index for index, other in enumerate(remaining) if self.equal(part, other)), None)
            if index is None:
                return False
            remaining.pop(index)
        return True

    def _units(self, answer: str, reference: str) -> Match | None:
        """Formulas with units, which may be left out and must not differ."""
        (left, unit, power), (right, other, other_power) = split_unit(answer), split_unit(reference)
        if unit is None and other is None:
            return None
        if unit is not None and not unit.agrees_with(other):
            return Match(False, "another unit")
        if power != other_power:
            return Match(False, "another number")
        return self.match(left, right)

    def _formulas(self, answer: str, reference: str) -> Match:
        letters = [set(re.findall(r"(?<![\\A-Za-z])[A-Za-z]", text)) for text in (answer, reference)]
        folded = [sorted(letter.casefold() for letter in each) for each in letters]
        if letters[0] != letters[1] and folded[0] == folded[1]:
            return Match(False, "other variables")
        names = [sorted(_NAMES_OF_POINTS.findall(text)) for text in (answer, reference)]
        if names[0] != names[1]:
            return Match(False, "other names")
        self._compared += 1
        if self._compared > MOST_FORMULAS:
            return Match(False, f"more than {MOST_FORMULAS} formulas to compare")
        try:
            equal = self._compare(answer, reference)
        except symbolic.NotRead as error:
            return Match(False, str(error))
        except (RecursionError, MemoryError) as error:
            return Match(False, type(error).__name__)
        return Match(equal, "math-verify: equal" if equal else "math-verify: different")


def _has_thousands(reference: str) -> bool:
    """Whether a comma in a reference groups thousands, and separates no parts: 1,234 eggs."""
    return "," in reference and read_number(split_unit(reference)[0]) is not None


def _choices(answer: str, reference: str) -> Match | None:
    """Compares choices by their letters, or by a letter's text with a text."""
    pairs = [_choice(text) for text in (answer, reference)]
    if pairs[0] is None and pairs[1] is None:
        return None
    (letter, content), (other, wanted) = pairs[0] or (None, answer), pairs[1] or (None, reference)
    if letter is not None and other is not None:
        return Match(letter == other, "the same choice" if letter == other else f"another choice: {letter}, {other}")
    if content is None or wanted is None:  # a letter alone, which may be a variable or a constant, and something else
        return None
    return Match(True, "the text of the choice") if compact(content) == compact(wanted) else None


def _choice(text: str) -> tuple[str, str | None] | None:
    if match := _CHOICE.fullmatch(text):
        return match[1], None
    match = _CHOICE_WITH_CONTENT.fullmatch(text)
    if match and not _ANOTHER_CHOICE.match(match[3]):
        return match[1] or match[2], match[3]
    return None


def _texts(answer: str, reference: str) -> Match | None:
    """Answers in words: equal up to capitals and punctuation."""
    for text, other in ((answer, reference), (reference, answer)):
        if other.casefold() in ("yes", "no", "true", "false") and (said := re.match(r"([A-Za-z]++)\s*+[,;.:]", text)):
            return Match(said[1].casefold() == other.casefold(), "the first word")
    sides = [_in_words(text) for text in (answer, reference)]
    if sides[0] is None and sides[1] is None:
        return None
    if sides[0] is None or sides[1] is None:
        other = answer if sides[0] is None else reference
        if other.casefold() == (sides[0] or sides[1]):
            return Match(True, "equal words")
        return None if re.search(r"\d|\\", other) is not None and re.search(SEPARATOR, other) else Match(False, "words")
    return Match(sides[0] == sides[1], "equal words" if sides[0] == sides[1] else "other words")


def _in_words(text: str) -> str | None:
    """The words of a text that has nothing else, in small letters; None of one that is no words."""
    if text == r"\emptyset":
        return NO_SOLUTION[0]
    if re.search(r"[\d\\=<>^_+*/|{}\[\]]", text):
        return None
    spelled = re.findall(r"[A-Za-z\u00c0-\uffff]++", text)
    if not spelled or all(word in _NOT_WORDS for word in spelled):
        return None
    lowered = [word.casefold() for word in spelled]
    is_words = (
        len(lowered) > 1
        or len(lowered[0]) > 3
        or lowered[0] in _KNOWN_WORDS
        or re.fullmatch("[A-Z][a-z]{2,}", spelled[0])
    )
    if not is_words or all(len(word) == 1 for word in lowered):
        return None
    if all(_CHOICE.fullmatch(part.strip()) for part in split_top(text, SEPARATOR)):
        return None  # A, C and D
    if len(split_top(text, SEPARATOR)) > 1:
        return None  # red and blue: a list
    said = " ".join(word for word in lowered if word not in ("the", "a", "an"))
    return NO_SOLUTION[0] if re.sub("^there (?:is|are) ", "", said) in NO_SOLUTION else said


def _quantities(answer: str, reference: str) -> Match | None:
    """Numbers, with their units."""
    (left, unit, power), (right, other, other_power) = split_unit(answer), split_unit(reference)
    first, second = _scaled(left, power), _scaled(right, other_power)
    if first is None or second is None:
        return None
    if unit is not None and not unit.agrees_with(other):
        return Match(False, f"another unit: {left} {_shown(unit)}, {right} {_shown(other)}")
    if any(
        number.is_percent and known is not None and known.name for number, known in ((first, other), (second, unit))
    ):
        return Match(False, "percent, and a unit")
    equal = first.equals(second) or first.value * _dozen(unit) == second.value * _dozen(other)
    return Match(equal, "equal numbers" if equal else f"other numbers: {answer}, {reference}")


def _dozen(unit: Unit | None) -> int:
    return 12 if unit is not None and "dozen" in unit.counted else 1


def _shown(unit: Unit | None) -> str:
    return "" if unit is None else unit.name or " ".join(sorted(unit.counted))


def _scaled(text: str, power: int) -> Number | None:
    number = read_number(text)
    return number if number is None or power == 0 else Number(number.value * 10**power, number.is_percent)


def _compounds(answer: str, reference: str) -> Match | None:
    """Sums of quantities: 5 feet 6 inches."""
    sides = [compound(text) for text in (answer, reference)]
    if sides[0] is None and sides[1] is None:
        return None
    if sides[0] is not None and sides[1] is not None:
        return Match(sides[0][0] == sides[1][0] and sides[0][2] == sides[1][2], "sums of quantities")
    (total, in_first, quantity), other = (sides[0], reference) if sides[0] is not None else (sides[1], answer)  # type: ignore[misc]
    head, unit, power = split_unit(other)
    number = _scaled(head, power)
    if number is None:
        return Match(False, "a sum of quantities, and something else")
    if unit is not None and unit.name:
        return Match(unit.quantity == quantity and number.value * unit.scale == total, "a sum of quantities")
    return Match(number.value == in_first, "a sum of quantities")
