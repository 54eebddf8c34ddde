r"""The final answer of a text: between <answer> tags, in the last \boxed{...}, behind ####, behind "the answer is", or
else its last formula or number.

The time is linear in the length of a text, whatever a model writes: no pattern here tries a stretch twice.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from danlu.rewards.math_notation import plain, unwrapped
from danlu.rewards.math_structure import Group
from danlu.rewards.plain_numbers import numbers_in

LONGEST_MARKED = 500
"""Characters behind "the answer is"."""
MOST_STATEMENTS = 100
"""The most statements that are looked at, the last ones of a text."""
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
    r"(?<![A-Za-z])(?:answers?|ans|(?P<minor>result|option|choice))"
    r"(?:[ \t]++(?:to|for)(?:[ \t]++[\w'-]++){1,6}?)?[ \t]*+(?:\*\*|__)?[ \t]*+"
    r"(?::|=|(?:is|are|was|(?:would|will|should|must)[ \t]++be|equals|comes[ \t]++to)(?![A-Za-z]))"
    r"[ \t]*+:?[ \t]*+(?:\*\*|__)?\s*+(?=\S)|答案(?:是|为|：|:)\s*+(?=\S)"
    r"|(?<![A-Za-z])(?:no|wait|actually|oops|sorry|correction)[,.:]?\s++(?:wait,?\s++)?"
    r"(?:it|this|that)(?:'s|\s(?:is|should\sbe|must\sbe))\s++(?=[-$\\\d])",
    re.IGNORECASE,
)
"""Ends where the answer begins: a line may have several."""
NAMED = re.compile(
    r"(?<![\w.])([-+]?\$?\d[\d,./%]*+)\s++(?:\w++\s++)?(?:is|are)\s++(?:the|our|my)\s++(?:final\s++|correct\s++)?answer",
    re.IGNORECASE,
)
FORMULA = re.compile(
    r"\$\$([^$]++)\$\$|(?<!\\)\$((?:\\\$|[^$\n])++)\$|\\\(((?:[^\\\n]|\\(?![()]))++)\\\)|\\\[((?:[^\\]|\\\\|\\(?![\[\]]))++)\\\]"
)
_LEADING_FORMULA = re.compile(rf"(?:\*\*|[ \t])*+(?:{FORMULA.pattern})")
_TOGETHER = re.compile(
    r"(?=.*(?:[,;]|(?:and|or)))(?:[\s$\\(),;*]|(?:and|or)(?![A-Za-z])|[A-Za-z](?:_\{?\w\}?)?\s?=)*+",
    re.DOTALL | re.IGNORECASE,
)
"""The text between two boxes that are one answer: `$x=\boxed{2}$ and $x=\boxed{3}$`."""
_CLAUSE_END = re.compile(
    r"[.!?](?=\s++[A-Z\"'(]|\s*+$)|[,;]\s++(?:because|since|as|so|which|where|and so|for|given|not|"
    r"check|namely|that is|i\.e)\b|[✓✔✅]|"
    r"\s++\((?:i\.e\.|that\sis|=|about|approximately|\d[\d.]*+\s?\\?%\))|"
    r"\s(?:because|since)\b|\n|<|[;,]?\s*+\\(?:boxed|fbox)"
)
_LEADING_VALUE = re.compile(r"[-+\s]*+[\d.$€£(\[{\\]")
_DIGITS = re.compile(r"[-+]?\$?\d[\d,]*+(?:\.\d++)?%?")
_CONJUNCTION = re.compile(r"\s*+(?:,|(?:,\s*+)?(?:and|or))\s*+")
_AND_A_FORMULA = re.compile(r"(?:,|(?:,\s*+)?(?:and|or)\s)\s*+(?:\$|\\\()")
_VALUE = r"(?:\$[^$\n]++\$|\\\([^\n\\]++\\\)|\\?\$?[-+]?\d(?:[\d/]|[,.]\d)*+(?:\s?\\?%)?)"
_DENIED = re.compile(
    rf"(?:\(|,\s*+)?(?:(?<![A-Za-z])(?:not|never|cannot|rather\s++than|instead\s++of|anything\s++but)|n't)\s++"
    rf"(?:be\s++|equal\s++to\s++){{0,2}}{_VALUE}(?!\s*+[-+*/^=\d])(?:(?<=[\d$%)])\)|,?\s++but(?:\s++rather)?(?![A-Za-z]))?|"
    rf"(?<![\w.]){_VALUE}\s(?:is|was)(?:n't|\s(?:not|wrong|incorrect))(?![A-Za-z])(?:\s(?:the|our|my|a|an|right|correct)(?![A-Za-z]))*+|"
    rf"(?<![A-Za-z])(?:is|are|be|lies?|somewhere)\s++between\s++{_VALUE}\s++and\s++{_VALUE}",
    re.IGNORECASE,
)
"""Statements that deny an answer: not 5, 5 is not the answer; and bounds: it is between 5 and 6."""
_DENIAL = re.compile(r"(?:not|never)(?![A-Za-z])[^\n\d\\$]*+[\d\\$]", re.IGNORECASE)
_RANGE = re.compile(
    r"(?:between|from|(?:more|less|greater|fewer|larger|smaller)\s++than|over|under|above|below)\s", re.I
)
_REMARK = re.compile(
    r"(?:in)?(?:correct|right|wrong|valid|exact|reasonable|verified|confirmed|clear|unique|given|found|as\s++follows)"
    r"(?![A-Za-z])",
    re.I,
)
"""A remark about the answer that is no answer itself."""
_YES_OR_NO = re.compile(r"\s*+(yes|no)[,.:;!]", re.IGNORECASE)
_QUOTED = re.compile(r"[\"\u201c]([^\"\u201c\u201d\n]++)[\"\u201d]")
_EMPHASIZED = re.compile(r"(?<![\w*\\)}\]])([*_]{1,3})(\\?\$?[-+]?\d[\d,./]*+%?)\1(?![\w*])")
_HEDGES = re.compile(
    r"\(?(?<![A-Za-z])"
    r"(?:either|approximately|about|around|roughly|simply|just|therefore|thus|then|exactly|equal to)\)?\s++",
    re.I,
)
_WORDY = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?=\s|$)")


def final_answer(text: str, *, numeric: bool = False, several: bool = False) -> str | None:
    """Returns the final answer of a text; None where nothing in it looks like one.

    numeric: a number is looked for, so that words without one behind "the answer is" are no answer.
    several: a list is looked for, so that boxes with "and" between them are its parts; else the last one is the answer.
    """
    text = _EMPHASIZED.sub(r"\2", _behind_thoughts(text))
    for inner in reversed(TAGGED.findall(text)):
        if inner.strip():
            return final_answer(inner, numeric=numeric, several=several) or inner.strip()
    if boxed := boxed_together(text) if several else last_boxed(text):
        return boxed if isinstance(boxed, str) else ", ".join(boxed)
    for marked in _marked(text):
        if answer := _clause(_DENIED.sub(" ", marked), numeric=numeric):
            return answer
    text = _DENIED.sub(" ", text)
    bare = unwrapped(text)
    is_bare = len(bare) <= LONGEST_BARE and "\n" not in bare and FORMULA.search(bare) is None and not _is_prose(bare)
    if is_bare and (not numeric or _LEADING_VALUE.match(bare)):
        return bare or None
    formula = _last_formula(text)
    number = _last_number(text)
    if not numeric and formula is None and (said := _YES_OR_NO.match(text)):
        return said[1]
    if formula is not None and (not numeric or (number is not None and number in _behind(text, formula))):
        return formula
    return number


def final_number(text: str) -> str | None:
    """Returns the last number of the part that is marked as the answer, or else of the text; None where there
    is none.
    """
    marked = last_boxed(text) or _last(MARKED, text)
    return (None if marked is None else _last_number(marked)) or _last_number(text)


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} that is closed and not empty; None where there is none."""
    box = max(_boxes(text), key=lambda box: box.start, default=None)
    return None if box is None else box.content


def boxed_together(text: str) -> list[str]:
    r"""The contents of the boxes that end with the last one and have "and", "or" or a comma between them."""
    boxes = sorted(_boxes(text), key=lambda box: box.start)
    together = boxes[-1:]
    if together and Group.of(plain(together[0].content[:LONGEST_MARKED])).is_list:
        return [together[0].content]
    for box in reversed(boxes[:-1]):
        if box.end <= together[0].command and _TOGETHER.fullmatch(text[box.end : together[0].command][:80]) is None:
            break
        if box.end <= together[0].command:
            together.insert(0, box)
    return [box.content for box in together]


@dataclass(frozen=True)
class _Box:
    content: str
    command: int
    """Place of the command."""
    start: int
    end: int


def _boxes(text: str) -> list[_Box]:
    """The boxes that are closed and not empty, one within another too."""
    opened = {match.end(): match for match in BOXED.finditer(text)}
    boxes, open_groups = list[_Box](), list[int]()
    for brace in re.finditer(r"[{}]", text) if opened else ():
        if brace.group() == "{":
            open_groups.append(brace.end())
        elif open_groups:
            match = opened.get(start := open_groups.pop())
            if match is not None and match["bare"] is None and (content := text[start : brace.start()].strip()):
                boxes.append(_Box(content, match.start(), start, brace.end()))
    boxes += [_Box(bare, match.start(), end, end) for end, match in opened.items() if (bare := match["bare"])]
    return boxes


def _behind_thoughts(text: str) -> str:
    """Returns the text behind the thoughts, if there is any; else the whole text."""
    _, tag, said = text.rpartition("</think>")
    return said if tag and said.strip() else text


def _marked(text: str) -> Iterator[str]:
    """Yields the texts behind marks of an answer, the surest mark first and the last of each kind first."""
    for answer in reversed(MARKED.findall(text)):
        if not re.fullmatch(r"[*\s]*+(?:the\s)?(?:final\s)?(?:answer|result|solution)[*:\s]*+", answer, re.IGNORECASE):
            yield answer
    yield from reversed(HEADING.findall(text))
    for match in _phrased(text):
        yield text[match.end() : match.end() + LONGEST_MARKED]  # a displayed formula is on other lines
    yield from reversed(NAMED.findall(text))
    unclosed = list(BOXED.finditer(text))
    if unclosed:
        yield text[unclosed[-1].end() :].split("\n", 1)[0]


def _phrased(text: str) -> list[re.Match[str]]:
    """Returns the statements of an answer, the last one first; within one line "the answer is" comes before its
    paraphrases.
    """
    ranked, line, place = list[tuple[int, bool, int, re.Match[str]]](), 0, 0
    for match in deque(PHRASED.finditer(text), maxlen=MOST_STATEMENTS):
        line, place = line + text.count("\n", place, match.start()), match.start()
        ranked.append((line, match["minor"] is None, match.start(), match))
    return [match for *_, match in sorted(ranked, reverse=True)]


def _clause(said: str, *, numeric: bool) -> str | None:
    """Returns the answer at the start of the text behind its mark; None where there is none, or no number and one is
    wanted.
    """
    said = said.lstrip()
    if _DENIAL.match(said) or _REMARK.match(said):
        return None
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
    clause = _QUOTED.sub(r"\1", said.replace("**", "")).strip()
    end = _CLAUSE_END.search(clause)
    clause = clause[: end.start()] if end else clause
    clause = _HEDGES.sub("", clause).strip()
    if not numeric:
        among_words = _last_formula(clause)  # that $x = 3$ holds
        return (clause if among_words is None else among_words) or None
    if _RANGE.match(clause):
        return clause
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
    """Returns the text between the dollar signs or brackets of a formula."""
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
