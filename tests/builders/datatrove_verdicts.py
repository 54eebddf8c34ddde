"""Writes tests/curation/datatrove_verdicts.json, datatrove's decisions on `quality_texts`, where it is installed:

    PYTHONPATH=tests python -m builders.datatrove_verdicts      (datatrove 0.10.1)

Words are split at spaces and sentences are counted by their full stops there and in danlu's test, so that the rules are
compared and not the splitters.
"""

from __future__ import annotations

import hashlib
import json
from importlib import import_module
from pathlib import Path
from typing import Any

from builders.quality_texts import quality_texts

PAGE = Path(__file__).parents[1] / "curation" / "datatrove_verdicts.json"
FILTERS = {
    "c4": ("c4_filters", "C4QualityFilter"),
    "gopher": ("gopher_quality_filter", "GopherQualityFilter"),
    "gopher-repetition": ("gopher_repetition_filter", "GopherRepetitionFilter"),
    "fineweb": ("fineweb_quality_filter", "FineWebQualityFilter"),
}


def count_stops(line: str) -> int:
    return max(1, line.count(". "))


def kept_text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def verdicts(name: str) -> list[str]:
    """For each text the reason for which it is dropped, or a digest of the text that is kept."""
    from datatrove.data import Document

    file, kind = FILTERS[name]
    module: Any = import_module(f"datatrove.pipeline.filters.{file}")
    module.split_into_words = lambda text, language: text.split()
    module.split_into_sentences = lambda line, language: [line] * count_stops(line)
    results = []
    for text in quality_texts(300, seed=1):
        document = Document(text=text, id="")
        result = getattr(module, kind)().filter(document)
        results.append(kept_text_digest(document.text) if result is True else result[1])
    return results


if __name__ == "__main__":
    PAGE.write_text(json.dumps({name: verdicts(name) for name in FILTERS}), encoding="utf-8")
