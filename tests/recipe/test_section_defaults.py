"""Defaults that are sections are not validated when they are made: they are here. And what makes their import fast."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

import danlu.recipe.sections as sections
from danlu.recipe.sections.base import Section, VariantSection, default_section
from danlu.recipe.sections.training import BatchSize

FILES = sorted(Path(sections.__file__).parent.glob("*.py"))
BUILT = """
import danlu.recipe
from danlu.recipe.sections.base import Section

def below(section):
    for each in section.__subclasses__():
        yield each
        yield from below(each)

print(*(each.__name__ for each in below(Section) if each.__pydantic_complete__))
danlu.recipe.sections.Packing()
print(*(each.__name__ for each in below(Section) if each.__pydantic_complete__))
"""
"""Prints the sections whose validators are built: by the import, and after one was used (the control)."""


def section_types(below: type[Section] = Section) -> Iterator[type[Section]]:
    for section in below.__subclasses__():
        yield section
        yield from section_types(section)


def revalidated(section: Section) -> Section:
    """A section of the same values, by its own validator; raises ValidationError for values that it refuses."""
    return type(section).model_validate(section.model_dump(by_alias=True))


def test_each_default_that_is_a_section_is_valid() -> None:
    defaults = [
        (section.__name__, name, field.default)
        for section in section_types()
        if section is not VariantSection
        for name, field in section.model_fields.items()
        if isinstance(field.default, Section)
    ]
    assert len(defaults) >= 18
    for section, name, default in defaults:
        assert revalidated(default) == default, (section, name)
    with pytest.raises(ValidationError):  # control
        revalidated(default_section(BatchSize, sequences=0))


def test_the_import_of_the_sections_builds_one_validator_alone() -> None:
    printed = subprocess.run([sys.executable, "-c", BUILT], check=True, capture_output=True, text=True, timeout=120)
    assert printed.stdout.splitlines() == ["Kl", "Packing Kl"]  # Kl has a validator of its own


def test_annotations_of_sections_are_no_texts() -> None:
    def futures(source: str) -> list[str]:
        return [node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]

    assert len(FILES) >= 16 and not [file.name for file in FILES if "__future__" in futures(file.read_text("utf-8"))]
    assert "__future__" in futures(Path(__file__).read_text("utf-8"))  # control
