r"""What a text ends with as its answer: between <answer> tags, in the last \boxed{...}, behind ####, behind "the answer
is", or else its last formula or number.

The time is linear in the length of a text, whatever a model writes: no pattern here tries a stretch twice.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

from danlu.rewards.math_notation import plain, unwrapped
from danlu.rewards.plain_numbers import numbers_in

LONGEST_MARKED = 500
"""Characters behind "the answer is"."""
LONGEST_BARE = 200
"""Characters of a text that is its own answer as a whole, if nothing in it says where the answer is."""

BOXED = re.compile(r"\\(?:boxed|fbox)\s*+(?:\{|(?P<bare>[A-Za-z0-9]))")
TAGGED = re.compile(r"<answer>((?:[^<]|<(?!/?answer>))*+)</answer>", re.IGNORECASE)
MARKED = re.compile(r"####[ \t]*+(.++)")
HEADING = re.compile(
    r"^[ \t]*+(?:#{1,6}[ \t]*+|\*\*)(?:the[ \t]++)?(?:final[ \t]++)?(?:answer|result|solution)[ \t]*+:?(?:\*\*)?:?"
    r"[ \t]*+\n\s*+(\S.*+)",
    re.IGNORECASE | re.MULTILINE,
)
PHRASED = re.compile(
    r"(?<![A-Za-z])(?:answers?|result|ans|option|choice)[ \t]*+(?:\*\*|__)?[ \t]*+"
    r"(?::|=|(?:is|are|was|(?:would|will|should|must)[ \t]++be|equals|comes[ \t]++to)(?![A-Za-z]))"
    r"[ \t]*+:?[ \t]*+(?:\*\*|__)?\s*+(\S.*+)|答案(?:是|为|：|:)\s*+(\S.*+)",
    re.IGNORECASE,
)
NAMED = re.compile(
    r"(?<![\w.])([-+]?\$?\d[\d,./%]*+)\s++(?:\w++\s++)?(?:is|are)\s++(?:the|our|my)\s++(?:final\s++|correct\s++)?answer",
    re.IGNORECASE,
)
FORMULA = re.compile(
    r"\$\$([^$]++)\$\$|(?<!\\)\$((?:\\\$|[^$\n])++)\$|\\\(((?:[^\\\n]|\\(?!\)))++)\\\)|\\\[((?:[^\\]|\\(?!\]))++)\\\]"
)
_LEADING_FORMULA = re.compile(rf"(?:\*\*|[ \t])*+(?:{FORMULA.pattern})")
_CLAUSE_END = re.compile(
    r"[.!?](?=\s++[A-Z\"'(]|\s*+$)|[,;]\s++(?:because|since|as|so|which|where|and so|for|given|not)\b|"
    r"\s(?:because|since)\b|\n|<|[;,]?\s*+\\(?:boxed|fbox)"
)
_LEADING_VALUE = re.compile(r"[-+\s]*+[\d.$€£(\[{\\]")
_DIGITS = re.compile(r"[-+]?\$?\d[\d,]*+(?:\.\d++)?%?")
_CONJUNCTION = re.compile(r"\s*+(?:,|(?:,\s*+)?(?:and|or))\s*+")
_AND_A_FORMULA = re.compile(r"(?:,|(?:,\s*+)?(?:and|or)\s)\s*+(?:\$|\\\()")
_HEDGES = re.compile(
    r"\(?(?<![A-Za-z])(?:approximately|about|around|roughly|simply|just|therefore|thus|then|exactly|equal to)\)?\s++",
    re.I,
)
_WORDY = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?=\s|$)")


def final_answer(text: str, *, numeric: bool = False) -> str | None:
    """What a text ends with as its answer; None where nothing in it looks like one.

    numeric: a number is looked for, so that words behind "the answer is" that have none are no answer.
    """
    text = _behind_thoughts(text)
    for inner in reversed(TAGGED.findall(text)):
        if inner.strip():
            return final_answer(inner, numeric=numeric) or inner.strip()
    if (boxed := last_boxed(text)) is not None:
        return boxed
    for marked in _marked(text):
        if answer := _clause(marked, numeric=numeric):
            return answer
    bare = unwrapped(text)
    is_bare = len(bare) <= LONGEST_BARE and "\n" not in bare and FORMULA.search(bare) is None and not _is_prose(bare)
    if is_bare and (not numeric or _LEADING_VALUE.match(bare)):
        return bare or None
    formula = _last_formula(text)
    number = _last_number(text)
    if formula is not None and (not numeric or (number is not None and number in _behind(text, formula))):
        return formula
    return number


def final_number(text: str) -> str | None:
    """The last number of what is marked as the answer, or else of the text; None where there is none."""
    marked = last_boxed(text) or _last(MARKED, text)
    return (None if marked is None else _last_number(marked)) or _last_number(text)


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} that is closed and not empty; without one, of the last that is not closed
    up to the end of its line, if nothing else marks an answer."""
    boxes = {match.end(): match["bare"] for match in BOXED.finditer(text)}
    last, open_groups = (0, 0), list[int]()
    for brace in re.finditer(r"[{}]", text) if boxes else ():
        if brace.group() == "{":
            open_groups.append(brace.end())
        elif open_groups and boxes.get(start := open_groups.pop(), "") is None and text[start : brace.start()].strip():
            last = max(last, (start, brace.start()))
    bare = max((end for end, letter in boxes.items() if letter), default=0)
    if bare > last[0]:
        return boxes[bare]
    return text[slice(*last)].strip() if last != (0, 0) else None


def _behind_thoughts(text: str) -> str:
    """What is said behind the thoughts, if anything is."""
    _, tag, said = text.rpartition("</think>")
    return said if tag and said.strip() else text


def _marked(text: str) -> Iterator[str]:
    """What stands behind marks of an answer, the surest mark first and the last of each kind first."""
    for answer in reversed(MARKED.findall(text)):
        if not re.fullmatch(r"[*\s]*+(?:the\s)?(?:final\s)?(?:answer|result|solution)[*:\s]*+", answer, re.IGNORECASE):
            yield answer
    yield from reversed(HEADING.findall(text))
    for match in reversed(list(PHRASED.finditer(text))):
        start = match.start(1) if match[1] is not None else match.start(2)
        yield text[start : start + LONGEST_MARKED]  # a displayed formula is on other lines
    yield from reversed(NAMED.findall(text))
    unclosed = list(BOXED.finditer(text))
    if unclosed:
        yield text[unclosed[-1].end() :].split("\n", 1)[0]


def _clause(said: str, *, numeric: bool) -> str | None:
    """The answer at the start of what follows its mark; None where words alone do and a number is wanted."""
    first_line = said.split("\n", 1)[0]
    if _DIGITS.fullmatch(first_line):
        return first_line
    if match := _LEADING_FORMULA.match(said):
        formula = next(group for group in match.groups() if group is not None)
        behind = said[match.end() :].lstrip(" *")
        if _AND_A_FORMULA.match(behind):
            return _last_formula(first_line)
        if behind.startswith(("%", r"\%")):
            return formula.strip() + "%"
        if len(formula) == len(said.strip(" *.$\\()[]")) or behind[:1] != "$":
            return formula.strip()
    end = _CLAUSE_END.search(said.replace("**", "").strip())
    clause = said.replace("**", "").strip()
    clause = clause[: end.start()] if end else clause
    clause = _HEDGES.sub("", clause).strip()
    if not numeric:
        return _unworded(clause) or None
    if "=" in clause:
        clause = clause.rpartition("=")[2]
    whole = plain(clause) if len(clause) <= LONGEST_BARE else clause
    if not re.search(r"[\d\\]", whole):
        return None
    if not _is_prose(whole):
        return whole
    number = next(numbers_in(clause), None)
    if number is None:
        return None
    place = clause.index(number)
    return clause[place:] if place == 0 or clause[:place].strip() in ("$", "€", "£") else number


def _unworded(clause: str) -> str:
    """A clause as a formula where it has one among words: "that $x = 3$ holds"."""
    formula = _last_formula(clause)
    return formula if formula is not None else clause


def _is_prose(text: str) -> bool:
    r"""Whether words stand before anything else: a sentence, and not a value with its unit."""
    bare = re.sub(r"\\(?:text|mathrm|mbox)[a-z]*+\s*+\{[^{}]*+\}", " ", text)
    first = re.search(r"\d|\\", bare)
    texts = _WORDY.findall(bare if first is None else bare[: first.start()])
    return len(texts) > (3 if first is None else 0)


def _last_formula(text: str) -> str | None:
    """The last that is no text between two prices, as in $5 and $18."""
    matches = [match for match in FORMULA.finditer(text) if not _is_text(_content(match)) and _content(match)]
    if not matches:
        return None
    start = len(matches) - 1
    while start and _CONJUNCTION.fullmatch(text, matches[start - 1].end(), matches[start].start()):
        start -= 1
    return ", ".join(_content(match) for match in matches[start:])


def _content(match: re.Match[str]) -> str:
    """What stands between the dollar signs or brackets of a formula."""
    return next((group for group in match.groups() if group), "").strip()


def _behind(text: str, formula: str) -> str:
    """The text from the last place of a formula on, if no other number follows it; else nothing."""
    place = text.rfind(formula)
    return "" if place < 0 or _last_number(text[place + len(formula) :]) is not None else formula


def _is_text(formula: str) -> bool:
    return (
        re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]++\s*+(?:\{[A-Za-z ]*+\})?+", "", formula))
        is not None
    )


def _last_number(text: str) -> str | None:
    return next(iter(deque(numbers_in(text), maxlen=1)), None)


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return matches[-1] if matches else None
