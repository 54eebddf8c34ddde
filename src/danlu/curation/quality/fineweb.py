"""FineWeb's own rules for documents (arXiv:2406.17557, section 3.6), with the defaults of datatrove 0.10.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from danlu.curation.quality.repetition import repeated
from danlu.curation.quality.rules import Rule, judge, marks_of, share
from danlu.curation.rows import Row
from danlu.curation.steps import Marks, Needs, Summary, Verdict
from danlu.curation.words import SplitWords, function_name, is_unspaced, sentence_terminals, split_words

_SHORT, _SHORT_UNSPACED = 30, 10  # characters of a short line: some six words, Chinese too
_MARKS = ("punctuation", "short_lines", "repeated", "line_ends")


@dataclass(frozen=True)
class FineWebRules:
    """Drops documents that are lists of short lines: few lines end a sentence, many are short, some are repeated.

    Attributes:
        punctuation: smallest share of lines that end with a mark that ends sentences.
        short_lines: largest share of lines of at most 30 characters (10 in scripts without spaces, danlu's own choice).
        repeated: largest share of characters in lines that repeat an earlier one.
        line_ends: most line ends for each word.
        split_words: gives the words of a text.
    """

    punctuation: float = 0.12
    short_lines: float = 0.67
    repeated: float = 0.01
    line_ends: float = 0.3
    split_words: SplitWords = split_words
    name: ClassVar[str] = "quality.fineweb"
    version: ClassVar[int] = 1
    needs: ClassVar[Needs] = "text"

    def measured_with(self) -> Mapping[str, object]:
        return {"split_words": function_name(self.split_words)}

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules in the order in which they are tried."""
        return (
            Rule("punctuation", "fineweb: lines without punctuation", least=self.punctuation),
            Rule("short_lines", "fineweb: short lines", most=self.short_lines),
            Rule("repeated", "fineweb: repeated lines", most=self.repeated),
            Rule("line_ends", "fineweb: a list of words", most=self.line_ends),
        )

    def measure(self, rows: Sequence[Row]) -> Marks:
        return marks_of(_MARKS, rows, self._measured)

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        return judge(self.rules, marks, len(rows))

    def _measured(self, text: str) -> tuple[float, ...]:
        lines = [line for line in text.split("\n") if line.strip()]
        terminals, short = sentence_terminals(), _SHORT_UNSPACED if is_unspaced(text) else _SHORT
        return (
            sum(line[-1] in terminals for line in lines) / len(lines) if lines else 0.0,
            share(sum(len(line) <= short for line in lines), len(lines)),
            share(repeated(lines)[1], len(text) - text.count("\n")),
            share(text.count("\n"), len(self.split_words(text))),
        )
