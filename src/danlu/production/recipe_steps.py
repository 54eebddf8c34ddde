"""The steps of curation that a recipe names, from their sections; benchmarks are read from their files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from danlu.core.errors import DataError
from danlu.curation.decontaminate import Benchmark, Decontaminate
from danlu.curation.duplicates import ExactDuplicates, RepeatedParagraphs
from danlu.curation.language import Language
from danlu.curation.near_duplicates import NearDuplicates
from danlu.curation.personal.step import Personal
from danlu.curation.quality.c4 import C4Rules
from danlu.curation.quality.fineweb import FineWebRules
from danlu.curation.quality.gopher import GopherRules
from danlu.curation.quality.repetition import RepetitionRules
from danlu.curation.repair import Repair
from danlu.curation.rows import WRITTEN
from danlu.curation.selection import Selection
from danlu.curation.steps import Step
from danlu.data.raw_rows import BadRow
from danlu.data.row_texts import placed_texts
from danlu.data.rows import detect_format
from danlu.data.sources import read_rows, source_names
from danlu.recipe.sections import Section, Source
from danlu.recipe.sections.curating import (
    CurationStep,
    DecontaminateStep,
    DeduplicationStep,
    LanguageStep,
    PersonalStep,
    QualityStep,
    RepairStep,
    SelectStep,
)

_RULES = {"c4": C4Rules, "gopher": GopherRules, "gopher-repetition": RepetitionRules, "fineweb": FineWebRules}


def steps_of(sections: Sequence[CurationStep]) -> list[Step]:
    """The steps of all sections, in order.

    Raises:
        DataError: a benchmark cannot be read, or has no texts.
    """
    return [step for section in sections for step in _steps(section)]


def _steps(section: CurationStep) -> Iterator[Step]:
    if isinstance(section, RepairStep):
        yield Repair(**_settings(section))
    elif isinstance(section, LanguageStep):
        yield Language(**_settings(section))
    elif isinstance(section, QualityStep):
        yield from (_RULES[rules.kind](**_settings(rules)) for rules in section.rules)
    elif isinstance(section, DeduplicationStep):
        yield from (_deduplicating(section, by) for by in section.by)
    elif isinstance(section, PersonalStep):
        yield Personal(**_settings(section))
    elif isinstance(section, SelectStep):
        yield Selection(**_settings(section))
    else:
        assert isinstance(section, DecontaminateStep), "the recipe has no other steps"
        yield Decontaminate(tuple(_benchmarks(section.against)), **_settings(section, but=("against",)))


def _deduplicating(section: DeduplicationStep, by: str) -> Step:
    if by == "exact":
        return ExactDuplicates()
    if by == "paragraph":
        return RepeatedParagraphs(**_settings(section.paragraph))
    return NearDuplicates(**_settings(section, but=("by", "paragraph")))


def _settings(section: Section, but: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of a step: the fields of its section but some, with tuples for lists."""
    names = (name for name in type(section).model_fields if name != "kind" and name not in but)
    return {name: _tuples(getattr(section, name)) for name in names}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _benchmarks(sources: Sequence[Source]) -> Iterator[Benchmark]:
    for source, name in zip(sources, source_names(sources), strict=True):
        texts = tuple(_texts(source))
        if not any(text.strip() for text in texts):
            raise DataError(f"{source.path}: a benchmark without any text")
        yield Benchmark(name, texts)


def _texts(source: Source) -> Iterator[str]:
    """The text of each row of a benchmark: a document, or what user and assistant write."""
    for row in read_rows(source):
        if isinstance(row.value, BadRow):
            raise DataError(row.value.message)
        format = detect_format(row.value, row.where) if source.format == "auto" else source.format
        if format == "tokenized":
            raise DataError(f"{row.where}: rows of tokens (input_ids) have no texts. Name the rows they were made of")
        yield "\n".join(each.text for each in placed_texts(row.value, format) if each.role in WRITTEN)
