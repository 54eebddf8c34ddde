r"""The final answer in a text, and whether it is the same as another: numbers, formulas, intervals, sets, tuples.

What is compared is what a text ends with: the last \boxed{...}, what stands behind the last ####, or behind the last
"answer is"; else the last number. The time is linear in the length of a text, whatever a model writes: no pattern here
tries a stretch twice, and what is compared as mathematics is short.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from danlu.rewards.math_expression import LONGEST_TEXT, NotMathematics, equal, near, parse

BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
MARKED = re.compile(r"####\s*+(.+)")
PHRASED = re.compile(r"(?:answer|result)\s*+(?:is|:|=)\s*+:?\s*+(.+)", re.IGNORECASE)
NUMBER = re.compile(r"[-−+]?(?:\$\s?)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s?/\s?\d+)?%?|[-−+]?\.\d+")
TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
UNIT = re.compile(
    r"(?<=[\d}\)])\s*\\?(?:cm|mm|km|m|kg|g|mph|ft|feet|inches|inch|in|units?|square|cubic|degrees?|dollars?|cents?|"
    r"hours?|minutes?|seconds?|days?|years?|people|apples|points?|miles?|meters?|%)\b.*$",
    re.IGNORECASE,
)


def final_answer(text: str) -> str | None:
    """What a text ends with as its answer; None where nothing in it looks like one."""
    for answer in (_last_boxed(text), _last(MARKED, text), _last(PHRASED, text)):
        if answer is not None:
            return answer.strip().rstrip(".")
    return final_number(text)


def final_number(text: str) -> str | None:
    """The number that `final_answer` has, or the last in a text; None where there is none."""
    marked = _last_boxed(text) or _last(MARKED, text)
    numbers = NUMBER.findall(marked) if marked is not None else []
    numbers = numbers or NUMBER.findall(text)
    return numbers[-1] if numbers else None


def to_number(text: str) -> float | None:
    """The value of a text that is one number: 1,234.5, $3, 1/2, 50% (0.5); None where it is none."""
    try:
        expression = parse(text.replace("$", "").strip().rstrip("."))
        value = expression.value({}) if not expression.variables else None
    except (NotMathematics, ArithmeticError, ValueError):
        return None
    return value.real if value is not None and value.imag == 0 else None


def same_answer(answer: str, reference: str) -> bool:
    """Whether two answers are the same mathematics, or else the same text up to spaces, case and LaTeX's looks."""
    if _normalised(answer) == _normalised(reference):
        return True
    if len(answer) > LONGEST_TEXT or len(reference) > LONGEST_TEXT:
        return False
    return any(_same(*pair) for pair in _readings(answer, reference))


def _readings(answer: str, reference: str) -> Iterator[tuple[str, str]]:
    """Both as they are, then without units and words, then what stands behind an equals sign."""
    yield answer, reference
    plain = _without_words(answer), _without_words(reference)
    yield plain
    yield _right_side(plain[0]), _right_side(plain[1])


def _same(answer: str, reference: str) -> bool:
    left, right = _Parts.of(answer), _Parts.of(reference)
    if len(left.parts) != len(right.parts) or (left.brackets != right.brackets and len(left.parts) > 1):
        return False
    if not left.ordered and len(left.parts) > 1:
        return _same_in_any_order(left.parts, list(right.parts))
    return all(map(_equal, left.parts, right.parts))


def _same_in_any_order(parts: tuple[str, ...], others: list[str]) -> bool:
    for part in parts:
        match = next((index for index, other in enumerate(others) if _equal(part, other)), None)
        if match is None:
            return False
        others.pop(match)
    return True


class _Parts:
    """An answer of several: (1, 2) and [1, 2) in order, {1, 2} and a bare 1, 2 in any order."""

    def __init__(self, brackets: str, parts: tuple[str, ...]) -> None:
        self.brackets, self.parts = brackets, parts

    @classmethod
    def of(cls, text: str) -> _Parts:
        text = re.sub(r"\\(?:left|right|big|Big|bigl|bigr)\s*(?=[\\({\[\])}|.])", "", text.strip()).strip("$ ")
        text = text.replace("\\{", "{").replace("\\}", "}").replace("\\cup", "∪")
        unions = text.split("∪")
        if len(unions) > 1:
            return cls("∪", tuple(part.strip() for part in unions))
        brackets, inner = "", text
        if len(text) > 1 and text[0] in "([{" and text[-1] in ")]}" and _closes_at_end(text):
            inner, brackets = text[1:-1], text[0] + text[-1]
        parts = tuple(part.strip() for part in _split(inner))
        if len(parts) == 1 and brackets in ("()", "{}", ""):
            return cls("", parts)
        return cls(brackets, parts)

    @property
    def ordered(self) -> bool:
        """Whether (1, 2) is another answer than (2, 1)."""
        return self.brackets not in ("", "{}", "∪")


def _closes_at_end(text: str) -> bool:
    """Whether the bracket that opens a text is closed by its last character."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    """The parts between commas outside of brackets; the commas of 1,234,567 are its own."""
    parts, start, depth = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0 and not _groups_thousands(text, place):
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _groups_thousands(text: str, place: int) -> bool:
    """Whether a comma stands between one to three digits and three."""
    before, behind = text[max(0, place - 4) : place], text[place + 1 : place + 5]
    return re.search(r"(?:^|\D)\d{1,3}$", before) is not None and re.match(r"\d{3}(?!\d)", behind) is not None


def _equal(answer: str, reference: str) -> bool:
    if _normalised(answer) == _normalised(reference):
        return True
    left, right = _Parts.of(answer), _Parts.of(reference)
    if len(left.parts) > 1 or len(right.parts) > 1:  # of a union of intervals, or a set of pairs
        return _same(answer, reference)
    try:
        first, second = parse(answer), parse(reference)
    except (NotMathematics, RecursionError):
        return False
    if not first.variables and not second.variables:
        try:
            return near(first.value({}), second.value({}))
        except (ArithmeticError, ValueError):
            return False
    return equal(first, second)


def _right_side(text: str) -> str:
    """What stands behind the equals sign of x = 5, or the member sign of x in (0, 1); else the text itself."""
    match = re.fullmatch(r"\s*\\?[A-Za-z]\w{0,5}(?:\([A-Za-z]\))?\s*(?:=|\\in|∈)\s*([^=]+)", text)
    return text if match is None else match.group(1)


def _without_words(text: str) -> str:
    text = TEXT_COMMAND.sub(" ", text).replace("\\%", "%").replace("\\$", "").replace("^\\circ", "").replace("°", "")
    return UNIT.sub("", text.strip()).strip()


def _normalised(text: str) -> str:
    text = TEXT_COMMAND.sub(r"\1", text)
    text = re.sub(r"\\(?:left|right|!|,|;|:|displaystyle)", "", text).replace("\\dfrac", "\\frac")
    return re.sub(r"[\s$]+", "", text.replace("\\tfrac", "\\frac")).rstrip(".").casefold()


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return matches[-1] if matches else None


def _last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} whose braces are closed."""
    boxes = {match.end() for match in BOXED.finditer(text)}
    last, open_groups = (0, 0), list[int]()
    for brace in re.finditer(r"[{}]", text) if boxes else ():
        if brace.group() == "{":
            open_groups.append(brace.end())
        elif open_groups and (start := open_groups.pop()) in boxes:
            last = max(last, (start, brace.start()))
    return text[slice(*last)] if last != (0, 0) else None
