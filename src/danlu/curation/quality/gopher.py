"""Gopher's rules for documents (arXiv:2112.11446, section A.1.1), with the defaults of datatrove 0.10.1."""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from danlu.curation.quality.rules import Rule, judge, marks_of, share
from danlu.curation.rows import Row
from danlu.curation.steps import Marks, Needs, Summary, Verdict
from danlu.curation.words import SplitWords, function_name, is_unspaced, sentence_terminals, split_words

_CONTROLS = "".join(chr(code) for code in (*range(9), *range(11, 32), *range(127, 160)))
_PUNCTUATION = string.punctuation + "，。、„”“«»１」「《》´∶：？！（）；–—．～’…━〈〉【】％►" + _CONTROLS
"""Words of these and of the marks that end sentences alone are no words (CCNet's list, as datatrove has it)."""
_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_CHINESE_STOP_WORDS = frozenset("的是在了和有不这我也")
_MARKS = (
    "words", "mean_length", "hashes", "ellipses", "bullet_lines", "ellipsis_lines", "alphabetic", "stop_words"
)  # fmt: skip


@dataclass(frozen=True)
class GopherRules:
    """Drops documents by the number and length of their words, by symbols, bullets, ellipses, and missing stop words.

    A document written without spaces has characters as words: their length is no measure, and its stop words are
    Chinese ones, danlu's own choice.

    Attributes:
        words: fewest and most words that are not punctuation.
        mean_length: shortest and longest mean of their length, in characters.
        symbols: most hash signs, and most ellipses, for each word.
        bullet_lines: largest share of lines that begin with a bullet or dash.
        ellipsis_lines: largest share of lines that end with an ellipsis.
        alphabetic: smallest share of words with a letter.
        stop_words: fewest different stop words.
        split_words: gives the words of a text.
    """

    words: tuple[int, int] = (50, 100_000)
    mean_length: tuple[float, float] = (3, 10)
    symbols: float = 0.1
    bullet_lines: float = 0.9
    ellipsis_lines: float = 0.3
    alphabetic: float = 0.8
    stop_words: int = 2
    split_words: SplitWords = split_words
    name: ClassVar[str] = "quality.gopher"
    version: ClassVar[int] = 1
    needs: ClassVar[Needs] = "text"

    def measured_with(self) -> Mapping[str, object]:
        return {"split_words": function_name(self.split_words)}

    @property
    def rules(self) -> list[Rule]:
        """The rules in the order in which they are tried."""
        return [
            Rule("words", "gopher: too few words", least=self.words[0]),
            Rule("words", "gopher: too many words", most=self.words[1]),
            Rule("mean_length", "gopher: words too short", least=self.mean_length[0]),
            Rule("mean_length", "gopher: words too long", most=self.mean_length[1]),
            Rule("hashes", "gopher: hash signs", most=self.symbols),
            Rule("ellipses", "gopher: ellipses", most=self.symbols),
            Rule("bullet_lines", "gopher: lines with bullets", most=self.bullet_lines),
            Rule("ellipsis_lines", "gopher: lines with ellipses", most=self.ellipsis_lines),
            Rule("alphabetic", "gopher: words without letters", least=self.alphabetic),
            Rule("stop_words", "gopher: too few stop words", least=self.stop_words),
        ]

    def measure(self, rows: Sequence[Row]) -> Marks:
        return marks_of(_MARKS, rows, self._measured)

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        return judge(self.rules, marks, len(rows))

    def _measured(self, text: str) -> tuple[float, ...]:
        counts = Counter(self.split_words(text))
        total, real, characters, alphabetic = sum(counts.values()), 0, 0, 0
        punctuation = _punctuation()
        for word, count in counts.items():
            if word.strip(punctuation):
                real += count
                characters += count * len(word)
            if word.isalpha() or any(map(str.isalpha, word)):
                alphabetic += count
        unspaced = is_unspaced(text)
        lines = text.splitlines()
        stripped = [line.strip() for line in lines]
        return (
            real,
            math.nan if unspaced else share(characters, real),
            share(text.count("#"), total),
            share(text.count("...") + text.count("…"), total),
            share(sum(line.startswith(("•", "-")) for line in stripped), len(lines)),
            share(sum(line.endswith(("...", "…")) for line in stripped), len(lines)),
            share(alphabetic, total),
            len((_CHINESE_STOP_WORDS if unspaced else _STOP_WORDS) & counts.keys()),
        )


@cache
def _punctuation() -> str:
    return _PUNCTUATION + "".join(sentence_terminals())
