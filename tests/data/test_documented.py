"""What docs/data.md says of row formats, keys and reasons is so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import cast, get_args

import pytest

from danlu.data.message_spans import Reason
from danlu.data.preference_rows import parse_answers
from danlu.data.rows import detect_format, parse_row
from danlu.recipe.sections import Data, Packing, Source
from danlu.recipe.sections.base import RowType

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^\| `([\w-]+)` \| `(\{.*\})` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("format", "row"), EXAMPLES)
def test_example_rows_are_what_they_are_said_to_be(format: str, row: str) -> None:
    value = json.loads(row)
    assert detect_format(value) == format
    if format in get_args(RowType):
        parse_answers(value, "auto", cast(RowType, format), "docs")
    else:
        parse_row(value, "auto", "docs")


def test_there_is_an_example_of_every_format() -> None:
    formats = set(Source.model_fields["format"].annotation.__args__) - {"auto"}  # type: ignore[union-attr]
    assert {format for format, _ in EXAMPLES} == formats


def test_every_reason_is_explained_and_no_other() -> None:
    table = PAGE.split("| reason |")[1].split("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])}
    assert named == {reason.label for reason in Reason}


def test_every_key_of_the_section_is_mentioned() -> None:
    written = set(re.findall(r"[a-z_]+", PAGE))
    keys = {*Data.model_fields, *Source.model_fields, *Packing.model_fields} - {"kind"}
    assert keys <= written
    assert not {*keys, "no_such_key"} <= written
