r"""Answers of several parts: lists, points, intervals and sets; and relations: assignments, chains, inequalities.

All texts are in the notation of `math_notation.plain`. Nothing is compared here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from danlu.rewards.math_notation import GREEK, closes_at_end, compact, split_top
from danlu.rewards.plain_numbers import read_number

_RELATION = re.compile(
    r"=|<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|\\approx(?![A-Za-z])|\\in(?![A-Za-z])"
)
SEPARATOR = re.compile(r"[,;]|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z])(?:\s*+,)?|\\(?:lor|vee)(?![A-Za-z])")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
_SYMBOL = re.compile(rf"(?:[A-Za-z]|\\(?:{'|'.join(GREEK)}))(?:_(?:\w|\{{\w++\}}))?'?")
_NAME = re.compile(
    r"(?:[A-Za-z\\|(][A-Za-z0-9\\{}_'|(),\s]*+|)(?:\^\\circ\s?|\^\{-1\}\s*+\([A-Za-z]\))?", re.IGNORECASE
)
_INFINITY = r"\infty"


@dataclass(frozen=True)
class Group:
    """Parts between brackets, or none: (1, 2) and [1, 2) in order, {1, 2} and a bare 1, 2 in any order."""

    brackets: str
    parts: tuple[str, ...]
    is_opened: bool = False
    """Whether the group had brackets around a single part."""

    @classmethod
    def of(cls, text: str, *, thousands: bool = True) -> Group:
        text = text.strip()
        for opening, closing in ((r"\{", r"\}"), (r"\langle", r"\rangle")):
            if text.startswith(opening) and text.endswith(closing):
                text = (
                    ("{", "(")[opening == r"\langle"] + text[len(opening) : -len(closing)] + "})"[opening == r"\langle"]
                )
        brackets, inner = "", text
        if len(text) > 1 and text[0] in "([{" and text[-1] in ")]}" and closes_at_end(text, 0):
            inner, brackets = text[1:-1], text[0] + text[-1]
        chunks = split_top(inner, SEPARATOR, groups_thousands if thousands else None)
        if "[" in brackets and len(chunks) == 1:
            inner, brackets = text, ""
            chunks = [text]
        parts = [part.strip() for chunk in chunks for part in _plus_and_minus(chunk.strip()) if part.strip()]
        opened = len(parts) == 1 and (bool(brackets) or parts[0] != text)
        return cls(brackets, tuple(parts), opened)

    @property
    def is_bare_list(self) -> bool:
        return not self.brackets and len(self.parts) > 1

    @property
    def is_list(self) -> bool:
        """Whether the group has several parts in any order."""
        return self.brackets in ("", "{}") and len(self.parts) > 1

    @property
    def is_interval(self) -> bool:
        return self.brackets in ("()", "[]", "(]", "[)") and len(self.parts) == 2


def groups_thousands(text: str, place: int) -> bool:
    """Whether a comma stands between one to three digits and three."""
    before, behind = text[max(0, place - 4) : place], text[place + 1 : place + 5]
    return re.search(r"(?:^|\D)\d{1,3}$", before) is not None and re.match(r"\d{3}(?!\d)", behind) is not None


def _plus_and_minus(text: str) -> list[str]:
    r"""Both values of a part with one \pm."""
    if len(_PLUS_MINUS.findall(text)) != 1:
        return [text]
    before, _, behind = text.partition(r"\pm")
    plus = f"{before}+{behind}" if before.strip() and not before.rstrip().endswith(("=", "(", "{")) else before + behind
    return [plus, f"{before}-{behind}"]


@dataclass(frozen=True)
class Relation:
    """Operands with signs between them: x = 5, 1 < x \\le 3."""

    operands: tuple[str, ...]
    signs: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Relation | None:
        if len(split_top(text, SEPARATOR, groups_thousands)) > 1 and not text.startswith(("(", "[")):
            return None
        operands = [operand.strip() for operand in split_top(text, _RELATION)]
        if len(operands) < 2:
            return None
        signs, place = [], 0
        for operand in split_top(text, _RELATION)[:-1]:
            place += len(operand)
            match = _RELATION.match(text, place)
            assert match is not None, "what separates is a relation"
            signs.append(match.group())
            place = match.end()
        return cls(tuple(operands), tuple(signs))

    @property
    def is_value(self) -> bool:
        """Whether the relation only gives the value of a name or of a calculation."""
        if any(sign not in ("=", r"\approx", r"\in") for sign in self.signs) or not self.operands[-1]:
            return False
        if self.signs == (r"\in",):
            return _SYMBOL.fullmatch(self.operands[0]) is not None
        bare = re.sub(r"\\[A-Za-z]++", "", self.operands[0])
        return _NAME.fullmatch(self.operands[0]) is not None or not re.search(r"[A-Za-z]", bare)

    def ascending(self) -> Relation:
        """Returns the relation with signs of less instead of more, if all are such."""
        flipped = {">": "<", r"\ge": r"\le"}
        if all(sign in flipped for sign in self.signs):
            return Relation(self.operands[::-1], tuple(flipped[sign] for sign in reversed(self.signs)))
        return self

    def as_interval(self) -> str | None:
        """Returns the interval of one variable between numbers; both sides for one that is unequal to a number."""
        relation = self.ascending()
        operands, signs = relation.operands, relation.signs
        if signs == (r"\ne",) and is_variable(operands[0]):
            return rf"(-\infty,{operands[1]}) \cup ({operands[1]},\infty)"
        if not all(sign in ("<", r"\le") for sign in signs):
            return None
        if len(signs) == 1 and is_variable(operands[0]) and not is_variable(operands[1]):
            operands, signs = (f"-{_INFINITY}", *operands), ("<", *signs)
        elif len(signs) == 1 and is_variable(operands[1]) and not is_variable(operands[0]):
            operands, signs = (*operands, _INFINITY), (*signs, "<")
        if len(signs) != 2 or not is_variable(operands[1]):
            return None
        opening, closing = ("(" if signs[0] == "<" else "["), (")" if signs[1] == "<" else "]")
        return f"{opening}{operands[0]},{operands[2]}{closing}"

    def text(self) -> str:
        return " ".join(part for pair in zip(self.operands, (*self.signs, ""), strict=True) for part in pair if part)


def is_variable(text: str) -> bool:
    return _SYMBOL.fullmatch(text.strip()) is not None


def is_plain(text: str) -> bool:
    return is_variable(text) or read_number(text) is not None


def names_agree(name: str, other: str) -> bool:
    """Whether two values may be of the same thing: one name, or one in words."""
    if compact(name) == compact(other) or not name or not other:
        return True
    return any(re.search(r"(?<!\\)[A-Za-z]{3,}|\d", each) is not None for each in (name, other))


def distinct_names(parts: Sequence[str]) -> list[str] | None:
    """The names of assignments to several variables, x = 3 and y = 4, which are in an order; else None."""
    relations = [Relation.of(part) for part in parts]
    names = [
        compact(each.operands[0]) for each in relations if each is not None and each.is_value and "=" in each.signs
    ]
    return names if len(names) == len(parts) and len(set(names)) == len(names) else None
