"""Every row has an account: kept, changed or dropped, by which step, with value and threshold."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from builders.curated_rows import conversation, documents

from danlu.core.errors import ResourceError
from danlu.curation.packages import require
from danlu.curation.rows import Part, Provenance, Row, document, place_of, row_of, source_and_row
from danlu.curation.run_steps import run_steps
from danlu.curation.steps import KEEP, GatheringStep, Marks, Needs, Step, Summary, Verdict


@dataclass(frozen=True)
class Longest:
    """Drops rows of fewer characters, and writes the longer ones in capitals."""

    characters: int
    name: ClassVar[str] = "longest"
    version: ClassVar[int] = 1
    needs: ClassVar[Needs] = "text"

    def measured_with(self) -> Mapping[str, object]:
        return {}

    def measure(self, rows: Sequence[Row]) -> Marks:
        return {"characters": np.array([len(row.text) for row in rows])}

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        verdicts = []
        for row, count in zip(rows, marks["characters"], strict=True):
            if count < self.characters:
                verdicts.append(Verdict("drop", "short", value=float(count), threshold=self.characters))
            elif row.text.isupper():
                verdicts.append(KEEP)
            else:
                texts = tuple(part.text.upper() for part in row.parts)
                verdicts.append(Verdict("change", "capitals", value=float(count), threshold=0, texts=texts))
        return verdicts


def test_rows_are_accounted_for() -> None:
    rows = [*documents("a", "ABCD", "abcdef"), conversation(3, "hello", "you", system="be kind")]
    result = run_steps([rows[2:], rows[:2]], [Longest(2), Longest(5)])
    assert [account.place for account in result.accounts] == [0, 1, 2, 3]
    assert [account.outcome for account in result.accounts] == ["dropped", "dropped", "changed", "changed"]
    assert result.accounts[1].decisions == [("longest", Verdict("drop", "short", 4.0, 5))]
    assert [verdict.reason for _, verdict in result.accounts[2].decisions] == ["capitals"]
    assert [row.text for row in result.rows] == ["ABCDEF", "HELLO\nYOU"]
    changed = result.rows[1]
    assert [part.role for part in changed.parts] == ["system", "user", "assistant"]
    assert changed.id == rows[3].id and changed.provenance == Provenance(steps=("longest",))
    assert rows[3].parts[1].text == "hello"  # the row that came is as it was


def test_a_step_sees_what_the_steps_before_left() -> None:
    measured = []

    @dataclass(frozen=True)
    class Recorded(Longest):
        def measure(self, rows: Sequence[Row]) -> Marks:
            measured.append([row.text for row in rows])
            return super().measure(rows)

    run_steps([documents("a", "bcd")], [Recorded(2), Recorded(2)])
    assert measured == [["a", "bcd"], ["BCD"]]


def test_steps_are_those_of_the_protocols() -> None:
    assert isinstance(Longest(1), Step) and not isinstance(Longest(1), GatheringStep)


def test_ids_are_of_content_and_place() -> None:
    row = document("text", 1, 2)
    assert row.id == document("text", 1, 2).id and len(row.id) == 32
    others = [
        document("text", 1, 3),
        document("text", 2, 2),
        document("texts", 1, 2),
        row_of([Part("user", "text")], 1, 2),
        row_of([Part("text", "te"), Part("text", "xt")], 1, 2),
        row_of([Part("text", "text"), Part("text", "")], 1, 2),
    ]
    assert len({row.id, *(other.id for other in others)}) == 7
    divided = row_of([Part("user", "a"), Part("assistant", "b")], 0, 0)
    assert divided.id != row_of([Part("user", "aassistant:b")], 0, 0).id  # where parts end is hashed too


def test_places_are_ordered_by_source_then_by_row() -> None:
    numbers = [(0, 0), (0, 7), (0, 2**40 - 1), (1, 0), (3, 5)]
    places = [place_of(*each) for each in numbers]
    assert places == sorted(places) and [source_and_row(place) for place in places] == numbers
    with pytest.raises(AssertionError, match="no such place"):
        place_of(0, 2**40)


def test_rules_read_what_user_and_assistant_wrote() -> None:
    row = row_of([Part("system", "s"), Part("user", "u"), Part("tool", "t"), Part("assistant", "a")], 0, 0)
    assert row.text == "u\na" and not row.is_document
    assert row_of([Part("tool", "t")], 0, 0).text == ""


def test_two_rows_of_one_place_are_refused() -> None:
    with pytest.raises(AssertionError, match="one place"):
        run_steps([documents("a"), documents("b")], [])


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require.cache_clear()
    monkeypatch.setitem(sys.modules, "stdnum", None)
    monkeypatch.setitem(sys.modules, "stdnum.luhn", None)
    with pytest.raises(ResourceError, match=r"needs the package python-stdnum.*pip install 'danlu\[data\]'"):
        require("stdnum.luhn")
    require.cache_clear()
