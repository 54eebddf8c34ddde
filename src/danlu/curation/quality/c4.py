"""C4's rules (arXiv:1910.10683, section 2.2): lines that are no sentences go, and pages with too few that stay.

Beside the paper's rules there are those of its code: lines with a very long word, citation marks as Wikipedia has them,
and notices about cookies and terms of use. The list of bad words is none of them here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from danlu.curation.quality.rules import Rule, judge
from danlu.curation.ragged import Ragged
from danlu.curation.rows import Row
from danlu.curation.steps import KEEP, Marks, Needs, Summary, Verdict
from danlu.curation.tables import ragged_column
from danlu.curation.words import CountSentences, count_sentences, function_name, is_unspaced, split_words

_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_ENDS = (".", "?", "!", '"', "'")
_UNSPACED_ENDS = (*_ENDS, "。", "？", "！", "”", "’", "」", "』")
_NOTICE = re.compile("terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies")
_REMOVED, _KEPT, _LOREM_IPSUM, _BRACKET = 0, 1, 2, 3  # what becomes of a line; the last two drop the document


@dataclass(frozen=True)
class C4Rules:
    """Removes lines of documents, and drops a document in which too few sentences are left.

    A line stays if it ends like a sentence, has enough words, none of them huge, and neither names JavaScript nor is a
    notice about cookies or terms of use. A line that would stay but for "lorem ipsum" or a curly bracket drops its
    document. Conversations are dropped by the same rules, but never lose a line: an answer without one is another one.
    In a text that is written without spaces words are characters, and lines may end in its own punctuation: danlu's
    choice.

    Attributes:
        sentences: fewest sentences in the lines that stay.
        words: fewest words of a line, split at spaces.
        longest_word: most characters of a word.
        count_sentences: gives the number of sentences in a line.
    """

    sentences: int = 5
    words: int = 3
    longest_word: int = 1000
    count_sentences: CountSentences = count_sentences
    name: ClassVar[str] = "quality.c4"
    version: ClassVar[int] = 1
    needs: ClassVar[Needs] = "text"

    def measured_with(self) -> Mapping[str, object]:
        return {
            "words": self.words,
            "longest_word": self.longest_word,
            "count_sentences": function_name(self.count_sentences),
        }

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules in the order in which they are tried."""
        return (
            Rule("lorem_ipsum", "c4: lorem ipsum", most=0),
            Rule("brackets", "c4: curly brackets", most=0),
            Rule("sentences", "c4: too few sentences", least=self.sentences),
        )

    def measure(self, rows: Sequence[Row]) -> Marks:
        """Sentences in the lines that stay, whether a line drops the document, and which lines stay."""
        fates = [self._fates(row.text) for row in rows]
        last = [of_row[0][-1] if of_row[0] else _REMOVED for of_row in fates]
        return {
            "sentences": np.array([sentences for _, sentences in fates], np.float64),
            "lorem_ipsum": np.array([fate == _LOREM_IPSUM for fate in last], np.float64),
            "brackets": np.array([fate == _BRACKET for fate in last], np.float64),
            "lines": Ragged.of([of_row for of_row, _ in fates], np.uint8),
        }

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        verdicts = judge(self.rules, marks, len(rows))
        lines = ragged_column(marks, "lines")
        return [
            self._shortened(row, lines[number]) if verdict is KEEP and row.is_document else verdict
            for number, (row, verdict) in enumerate(zip(rows, verdicts, strict=True))
        ]

    def _fates(self, text: str) -> tuple[list[int], int]:
        """The fate of each line, up to one that drops the document, and the sentences of the lines that stay."""
        unspaced = is_unspaced(text)
        ends = _UNSPACED_ENDS if unspaced else _ENDS
        fates, sentences = list[int](), 0
        for line in text.splitlines():
            line = line.strip()
            words = split_words(line) if unspaced else line.split()
            cleaned = _CITATION.sub("", line)
            is_sentence = cleaned.endswith(ends) and not cleaned.endswith("...") and len(words) >= self.words
            if not is_sentence or (len(line) > self.longest_word and max(map(len, words)) > self.longest_word):
                fates.append(_REMOVED)
                continue
            lowered = cleaned.lower()
            if "lorem ipsum" in lowered:
                return [*fates, _LOREM_IPSUM], sentences
            if "javascript" in lowered:
                fates.append(_REMOVED)
            elif "{" in cleaned:
                return [*fates, _BRACKET], sentences
            elif _NOTICE.search(lowered):
                fates.append(_REMOVED)
            else:
                fates.append(_KEPT)
                sentences += self.count_sentences(cleaned)
        return fates, sentences

    @staticmethod
    def _shortened(row: Row, fates: np.ndarray) -> Verdict:
        """The verdict on a document that stays, with the fates of its lines."""
        lines = zip(row.text.splitlines(), fates.tolist(), strict=True)
        text = "\n".join(_CITATION.sub("", line.strip()) for line, fate in lines if fate == _KEPT).strip()
        if text == row.text:
            return KEEP
        removed = 1 - len(text) / len(row.text)
        return Verdict("change", "c4: lines that are no sentences", value=removed, threshold=0.0, texts=(text,))
