"""Repair mends what was broken, and nothing that was right."""

from __future__ import annotations

import ftfy
import pytest
from builders.curated_rows import conversation, documents, outcomes

from danlu.curation.repair import Repair, decode_again, is_boilerplate
from danlu.curation.run_steps import run_steps


def repaired(text: str) -> tuple[str, str]:
    (account,) = (result := run_steps([documents(text)], [Repair()])).accounts
    return result.rows[0].text, account.decisions[0][1].reason if account.decisions else ""


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("schÃ¶n cafÃ©, donâ€™t", "schön café, don’t", "repair: encoding"),
        ("a\r\nb\rc", "a\nb\nc", "repair: encoding"),
        ("Tom &amp; Jerry", "Tom & Jerry", "repair: encoding"),
        ("zero\u200bwidth\ufeff, bell\x07, so\u00adft", "zerowidth, bell, soft", "repair: control characters"),
        (
            "Text.\nShare this on Facebook\n© 2020 Acme, all rights reserved.\nMore.",
            "Text.\nMore.",
            "repair: boilerplate lines",
        ),
        ("正文。\n责任编辑：王小明\n上一篇：旧闻\n完。", "正文。\n完。", "repair: boilerplate lines"),
        ("A\x00 &lt;\nRead more…", "A <", "repair: encoding, control characters, boilerplate lines"),
    ],
)
def test_what_is_broken_is_mended(text: str, expected: str, reason: str) -> None:
    assert repaired(text) == (expected, reason)


@pytest.mark.parametrize(
    "text",
    [
        "“Curly” quotes, naïve café, ﬁn.. ¿qué?".replace("ﬁ", "fi"),
        "全角，标点！ＡＢＣ「引用」",
        "می‌خواهم नमस्ते 👩‍👩‍👧 e\u0301".replace("e\u0301", "é"),
        "if (a && b) { return x &lt y }\n\tindented",
        "AT&T, R&D",
        "Click on the cell and read more about it in chapter 3.\nHome was far away.",
        "We share this view, and all rights reserved to them were lost in 1990.",
    ],
)
def test_what_is_right_stays(text: str) -> None:
    assert repaired(text) == (text, "")


@pytest.mark.parametrize(
    "text", ["“It’s” – well… fine—", "全角，标点！ＡＢＣ「引用」か\u3099", "ä½\xa0å¥½", "Ð¿ÑÐ¸Ð²ÐµÑ", "caf√© ‚Äú"]
)
def test_texts_that_are_not_looked_at_are_those_that_ftfy_leaves(text: str) -> None:
    assert decode_again(text) == ftfy.fix_text(
        text, uncurl_quotes=False, fix_character_width=False, remove_control_chars=False, fix_line_breaks=False
    )


def test_conversations_keep_their_lines_and_are_mended_in_all_parts() -> None:
    rows = [conversation(0, "Say it\x07", "Read more\nschÃ¶n", system="be\u200b kind")]
    (row,) = run_steps([rows], [Repair()]).rows
    assert [part.text for part in row.parts] == ["be kind", "Say it", "Read more\nschön"]


def test_a_document_of_boilerplate_is_dropped() -> None:
    assert outcomes(documents("Home | News | About\nLog in"), Repair()) == [
        ("dropped", "repair: nothing but boilerplate lines")
    ]
    assert outcomes(documents("Home | News | About\nLog in", ""), Repair(boilerplate=False)) == [("kept", "")] * 2


def test_boilerplate_is_a_whole_line() -> None:
    lines = [
        "Skip to content",
        "  READ MORE » ",
        "12 comments",
        "Page 1 of 3",
        "Home > News > Local",
        "Sign up!",
        "版权所有 2020",
    ]
    assert [is_boilerplate(line) for line in lines] == [True] * len(lines)
    others = [
        "",
        "Reading more helps.",
        "12 comments were made by the board.",
        "Home is where it is",
        "Sign up with friends to win",
    ]
    assert [is_boilerplate(line) for line in others] == [False] * len(others)
