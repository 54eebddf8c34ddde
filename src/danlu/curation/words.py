"""Words and sentences of a text as strings, by rules without a model, and whether it is written without spaces."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from danlu.curation.word_hashes import UNSPACED

SplitWords = Callable[[str], list[str]]
"""The words of a text in order; punctuation marks are words too."""
CountSentences = Callable[[str], int]
"""The number of sentences in a line, at least 1."""

_UNSPACED = re.compile(f"[{UNSPACED}]")
_LETTER = re.compile(r"[^\W\d_]")
_ABBREVIATIONS = ("Mr", "Mrs", "Ms", "Dr", "St", "Prof", "Sr", "Jr", "vs", "Gen", "Lt", "Col", "Inc", "Co", "Ltd")
_ABBREVIATED = rf"(?:[A-Za-z]\.){{2,}}|[A-Z]\.(?=\s[A-Z])|(?:{'|'.join(_ABBREVIATIONS)})\."
# Abbreviations, words and numbers with their separators, ends of words behind apostrophes, runs of dots or dashes, and
# every other mark by itself.
_ASCII_WORDS = re.compile(
    rf"{_ABBREVIATED}|[A-Za-z0-9]+(?:(?<=[0-9])[.,:][0-9]+)*|(?<=[A-Za-z])'[A-Za-z]+|\.{{2,}}|-{{2,}}|[^\sA-Za-z0-9]"
)
_ANY_WORDS = re.compile(
    rf"{_ABBREVIATED}|[^\W_{UNSPACED}]+(?:(?<=\d)[.,:]\d+)*|(?<=[^\W\d_])['’][^\W\d_{UNSPACED}]+|[{UNSPACED}]"
    r"|\.{2,}|-{2,}|[^\w\s]|_"
)
# Not behind an abbreviation, an initial, or the last letter of "U.S." and "p.m.": looked for from the first mark on, so
# that the engine skips to marks.
_SENTENCE_ENDS = re.compile(
    "[.!?…]"
    + "".join(rf"(?<!\b{word}\.)" for word in (*_ABBREVIATIONS, "[A-Z]", r"[A-Za-z]\.[A-Za-z]"))
    + r"""[.!?…]*["'”’»)\]]*(?=\s+\S)|[。！？]+["'”’」』）]*(?=\s*\S)"""
)


def split_words(text: str) -> list[str]:
    """Words, numbers and punctuation marks. Each character of a script without spaces is a word."""
    return (_ASCII_WORDS if text.isascii() else _ANY_WORDS).findall(text)


def count_sentences(line: str) -> int:
    """Sentences of a line: one more than the ends of sentences that something follows."""
    return 1 + sum(1 for _ in _SENTENCE_ENDS.finditer(line))


def function_name(function: Callable[..., object]) -> str:
    """The name by which marks remember a function that they were measured with: two lambdas of a module share it."""
    return f"{getattr(function, '__module__', None) or 'builtins'}.{function.__qualname__}"


def is_unspaced(text: str) -> bool:
    """Whether most letters of a text are of scripts that are written without spaces, such as Chinese."""
    if text.isascii():
        return False
    return 2 * len(_UNSPACED.findall(text)) > len(_LETTER.findall(text))


@cache
def sentence_terminals() -> frozenset[str]:
    """The characters that end sentences, in all scripts: Unicode's property Sentence_Terminal."""
    import regex  # 40 ms that only these rules need

    planes = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x20000))))
    return frozenset(regex.findall(r"\p{Sentence_Terminal}", planes))
