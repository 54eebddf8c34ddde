"""Search in the keys of the recipe, the keys of other tools, the pages of the documentation and the
messages of danlu.

All of it is read when it is asked for, in some tenths of a second; there is no index to keep up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from danlu.recipe import other_tools
from danlu.recipe.messages import first_sentence
from danlu.recipe.type_hints import literal_values, variants_of, walk_fields

MOST = 6
"""Matches of a kind that are returned."""
PASTED = 4
"""Words from which on a query may be a message with values in it: three fifths of its words are then enough."""
_EMPTY = set(
    re.findall(r"\w+", "an and are as at be by for from how in is it of on or out set that the this to use what with")
)
"""Words that say nothing of what is looked for."""
_STRINGS = re.compile(r'(?:\b[fr]{0,2}"(?:[^"\\\n]|\\.)+"\s*)+')
_DOCSTRING = re.compile(r'"""[\s\S]*?"""')
_QUOTES = re.compile(r'"\s*[fr]{0,2}"|^[fr]{0,2}"|"\s*$')
_FIELD = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True)
class Match:
    """Something that a query is about."""

    name: str  # a key, `page, section` or `file:line`
    about: str
    score: float


def search_keys(query: str) -> list[Match]:
    """Keys of the recipe, the best first: by their own names, the values that they take, their documentation, and
    their names in other tools. Those with less than a fifth of the best score are left out.
    """
    terms = _terms(query)
    called_so = _scores_of_other_names(terms)
    about: dict[str, str] = {}
    scores: dict[str, float] = {}
    for field in walk_fields():
        values = " ".join(map(str, (*variants_of(field.hint), *literal_values(field.hint))))
        each = [_score_of_key(word, field.key, values, field.about) for word in terms]
        if each and (min(each) > 0 or field.key in called_so):
            score = sum(each) - 3 * field.key.count(".") + called_so.get(field.key, 0)
            scores[field.key] = max(score, scores.get(field.key, score))
            about.setdefault(
                field.key, first_sentence(field.about)
            )  # of the first kind of the section that has the key
    least = max(scores.values(), default=0) / 5
    return _best(Match(key, about[key], score) for key, score in scores.items() if score >= least)


def _scores_of_other_names(terms: Sequence[str]) -> dict[str, float]:
    """The keys that other tools call by these words, in any order: 100 for the words alone, less for longer names."""
    scores: dict[str, float] = {row.target: 100 for row in other_tools.find("_".join(terms)) if row.is_key}
    for row in (row for tool in other_tools.TITLES for row in other_tools.rows(tool) if row.is_key):
        parts = re.split(r"[._]", row.name.lower())
        if terms and all(any(_is_like(word, part) for part in parts) for word in terms):
            scores[row.target] = max(scores.get(row.target, 0), 100 * len(terms) / len(parts))
    return scores


def _is_like(word: str, part: str) -> bool:
    """Whether a word is a part of a name, or one is the beginning of the other (num, number; gradient, gradients)."""
    return word == part or (min(len(word), len(part)) >= 3 and (word.startswith(part) or part.startswith(word)))


def _score_of_key(word: str, key: str, values: str, about: str) -> float:
    """How much a key is about a word: 100 where it is called so, 1 where its documentation has a word like it."""
    *sections, name = key.split(".")
    if name == word:
        return 100
    if word in name.split("_"):
        return 50
    if word in _terms(values):
        return 40
    if word in sections:
        return 30
    if word in _terms(first_sentence(about)):
        return 30
    if word in _terms(about):
        return 10
    return 1 if word in f"{key} {about}".lower() and len(word) > 3 else 0


def search_tools(query: str) -> list[Match]:
    """Keys of other tools with all of the terms in their names, and what danlu has for them."""
    terms = set(_terms(query))
    matches: dict[str, Match] = {}
    for tool in other_tools.TITLES:
        for row in other_tools.rows(tool):
            parts = set(re.split(r"[._]", row.name.lower()))
            if terms and terms <= parts and row.name not in matches:
                said = other_tools.advice(row.name, stage=row.stage)
                matches[row.name] = Match(row.name, said or "", 1 / len(parts))
    return _best(matches.values())


def search_pages(query: str) -> list[Match]:
    """Sections of the documentation with all of the terms, those with them in the heading first."""
    terms = _terms(query)
    matches = []
    folder = pages_folder()
    for page in sorted(folder.glob("*.md")) if folder is not None else ():
        if page.name == "files.md":  # the list of source files
            continue
        for heading, text in _sections(page.read_text(encoding="utf-8")):
            lower, title = text.lower(), _terms(heading)
            counts = [20 * (word in title) + min(5, len(re.findall(rf"\b{re.escape(word)}", lower))) for word in terms]
            if counts and min(counts) > 0:
                score = sum(counts) + 10 * (" ".join(terms) in lower)
                matches.append(Match(f"docs/{page.name}, {heading}", _line_with(terms, text), score))
    return _best(matches)


def pages_folder() -> Path | None:
    """The folder with the documentation: in the package of an installed wheel, or at the top of a checkout."""
    file = Path(__file__).resolve()
    return next((each for each in (file.parent / "pages", file.parents[3] / "docs") if each.is_dir()), None)


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """(heading, text) of each section of a page."""
    parts = re.split(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    yield from zip(parts[1::2], parts[2::2], strict=True)


def _line_with(terms: Sequence[str], text: str) -> str:
    """The line of a section with the most of the terms, or its first."""
    lines = [line.strip("| ") for line in text.splitlines() if line.strip()]
    return max(lines, key=lambda line: sum(word in line.lower() for word in terms), default="")


def search_messages(query: str) -> list[Match]:
    """Errors, warnings and remarks with the terms, from the source of the package; braces stand for values."""
    terms = _terms(query)
    needed = len(terms) if len(terms) < PASTED else -(-3 * len(terms) // 5)
    source = Path(__file__).resolve().parents[1]
    matches = []
    for file in sorted(source.rglob("*.py")) if terms else ():
        text = file.read_text(encoding="utf-8")
        lower = text.lower()
        if sum(word in lower for word in terms) < needed:
            continue
        text = _DOCSTRING.sub(lambda docstring: "\n" * docstring[0].count("\n"), text)
        for strings in _STRINGS.finditer(text):
            message = _FIELD.sub("{}", _QUOTES.sub("", strings[0].strip()))
            said = set(_terms(message))
            count = sum(word in said for word in terms)
            if count >= needed and len(re.findall(r"[a-z]{2,}", message)) >= 4 and "|" not in message:
                line = text.count("\n", 0, strings.start()) + 1
                place = f"{file.relative_to(source)}:{line}"
                matches.append(Match(place, message, count + 1 / len(said)))
    return _best(matches)


@lru_cache(maxsize=10_000)
def _terms(text: str) -> tuple[str, ...]:
    """The words of a text in small letters, without numbers and without those that say nothing."""
    return tuple(word for word in re.findall(r"[^\W\d_]{2,}", text.lower()) if word not in _EMPTY)


def _best(matches: Iterable[Match]) -> list[Match]:
    """The best matches, in the order of the recipe, the pages or the source where they are as good."""
    return sorted(matches, key=lambda match: -match.score)[:MOST]
