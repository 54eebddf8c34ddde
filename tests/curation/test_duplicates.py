"""Exact duplicates and repeated lines: the copy that stays is the first by place, whatever comes first."""

from __future__ import annotations

from builders.curated_rows import check_gathering, conversation, documents, outcomes

from danlu.curation.duplicates import ExactDuplicates, RepeatedParagraphs
from danlu.curation.rows import document, place_of

LONG = "All rights are reserved by the owner of this page"
OTHER = "This line has eight words and stands once only"


def test_the_first_by_source_and_row_stays() -> None:
    rows = [document(text, source, row) for source, row, text in [
        (1, 0, "same"), (0, 5, "same"), (0, 9, "other"), (0, 7, "same"), (2, 0, "Same"), (2, 1, "")
    ]]  # fmt: skip
    result = check_gathering(ExactDuplicates(), rows)
    assert [row.place for row in sorted(result.rows, key=lambda row: row.place)] == [
        place_of(0, 5), place_of(0, 9), place_of(2, 0), place_of(2, 1)
    ]  # fmt: skip
    dropped = [account for account in result.accounts if account.outcome == "dropped"]
    assert [(account.place, account.decisions[0][1].kept) for account in dropped] == [
        (place_of(0, 7), place_of(0, 5)), (place_of(1, 0), place_of(0, 5))
    ]  # fmt: skip


def test_roles_and_frames_tell_rows_apart() -> None:
    rows = [
        conversation(0, "a", "b"),
        conversation(1, "a", "b", system="s"),
        conversation(2, "ab", ""),
        conversation(3, "a", "b"),
    ]
    assert [outcome for outcome, _ in outcomes(rows, ExactDuplicates())] == ["kept", "kept", "kept", "dropped"]


def test_repeated_lines_go_from_all_but_the_first() -> None:
    rows = [
        *documents(
            f"{LONG}\n{OTHER}",
            f"Title\n{LONG.upper()}!\nTitle\nA second line of eight words that stands alone",
            LONG,
            "Mine has eight words and is written twice\nshort\nmine has eight words, and is written twice",
            "Title",
        ),
        conversation(5, LONG, OTHER),
    ]
    result = check_gathering(RepeatedParagraphs(), rows)
    assert [row.text for row in result.rows] == [
        f"{LONG}\n{OTHER}",
        "Title\nTitle\nA second line of eight words that stands alone",
        "Mine has eight words and is written twice\nshort",
        "Title",
        f"{LONG}\n{OTHER}",
    ]
    by_place = {account.place: account for account in result.accounts}
    assert [by_place[place].outcome for place in range(6)] == ["kept", "changed", "dropped", "changed", "kept", "kept"]
    ((_, verdict),) = by_place[1].decisions
    assert verdict.value == (len(LONG) + 1) / (len(LONG) + 1 + 10 + 46) and verdict.threshold == 0.0


def test_a_document_that_is_mostly_repeated_is_dropped() -> None:
    rows = documents(LONG, f"{LONG}\nwhat is left")
    assert outcomes(rows, RepeatedParagraphs(drop_at=0.8))[1] == ("dropped", "repeated paragraphs")
    assert outcomes(rows, RepeatedParagraphs(drop_at=0.9))[1] == ("changed", "repeated paragraphs")


def test_chinese_lines_are_long_by_characters() -> None:
    rows = documents("本网站所有内容版权所有请勿转载", "本网站所有内容，版权所有，请勿转载！\n新内容", "新内容")
    assert [outcome for outcome, _ in outcomes(rows, RepeatedParagraphs())] == ["kept", "changed", "kept"]
