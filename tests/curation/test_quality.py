"""Quality rules decide as datatrove 0.10.1 does on the same words, and each verdict has its value and threshold."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from builders.curated_rows import conversation, documents, outcomes
from builders.datatrove_verdicts import FILTERS, count_stops, kept_text_digest
from builders.quality_texts import quality_texts

from danlu.curation.quality.c4 import C4Rules
from danlu.curation.quality.fineweb import FineWebRules
from danlu.curation.quality.gopher import GopherRules
from danlu.curation.quality.repetition import RepetitionRules, repeated
from danlu.curation.run_steps import run_steps
from danlu.curation.words import count_sentences, is_unspaced, sentence_terminals, split_words

STEPS = {
    "c4": C4Rules(count_sentences=count_stops),
    "gopher": GopherRules(split_words=str.split),
    "gopher-repetition": RepetitionRules(split_words=str.split),
    "fineweb": FineWebRules(split_words=str.split),
}
# Datatrove's names of reasons.
REASONS = {
    "c4: lorem ipsum": "lorem_ipsum",
    "c4: curly brackets": "curly_bracket",
    "c4: too few sentences": "too_few_sentences",
    "gopher: too few words": "gopher_short_doc",
    "gopher: words too short": "gopher_below_avg_threshold",
    "gopher: hash signs": "gopher_too_many_hashes",
    "gopher: ellipses": "gopher_too_many_ellipsis",
    "gopher: lines with bullets": "gopher_too_many_bullets",
    "gopher: lines with ellipses": "gopher_too_many_end_ellipsis",
    "gopher: words without letters": "gopher_below_alpha_threshold",
    "gopher: too few stop words": "gopher_enough_stop_words",
    "repetition: no text": "empty",
    "repetition: paragraphs": "dup_para_frac",
    "repetition: characters in paragraphs": "dup_para_char_frac",
    "repetition: lines": "dup_line_frac",
    "repetition: characters in lines": "dup_line_char_frac",
    **{f"repetition: most frequent {n}-gram": f"top_{n}_gram" for n in range(2, 5)},
    **{f"repetition: repeated {n}-grams": f"duplicated_{n}_n_grams" for n in range(5, 11)},
    "fineweb: lines without punctuation": "line_punct_ratio",
    "fineweb: short lines": "short_line_ratio",
    "fineweb: repeated lines": "char_dup_ratio",
    "fineweb: a list of words": "list_ratio",
}
RECORDED: dict[str, list[str]] = json.loads(Path(__file__).with_name("datatrove_verdicts.json").read_text())
ENGLISH = (
    "The house by the river was old, and it had been empty for a long time. We went there with a light to see what "
    'was left of it in the morning. Nobody had told us that the door would be open. "Come in," said a voice. '
    "Nothing else was to be heard but the water, and after a while we turned back to the road that we had come by."
)


@pytest.mark.parametrize("name", FILTERS)
def test_decisions_are_those_of_datatrove(name: str) -> None:
    texts = quality_texts(300, seed=1)
    result = run_steps([documents(*texts)], [STEPS[name]])
    kept = {row.place: kept_text_digest(row.text) for row in result.rows}
    decided = [kept.get(each.place) or REASONS[each.decisions[-1][1].reason] for each in result.accounts]
    # An empty text has no lines that end a sentence.
    expected = ["line_punct_ratio" if name == "fineweb" and each == "empty" else each for each in RECORDED[name]]
    assert decided == expected
    assert len(Counter(decided)) > 3  # the texts are near several bounds
    for account in result.accounts:
        for _, verdict in account.decisions:
            assert verdict.value is not None and verdict.threshold is not None
            if verdict.outcome == "drop":
                assert verdict.value != verdict.threshold


def test_another_threshold_decides_on_the_same_marks() -> None:
    rows = documents(*quality_texts(60, seed=3))
    strict, lenient = RepetitionRules(split_words=str.split), RepetitionRules(lines=1, split_words=str.split)
    assert strict.measured_with() == lenient.measured_with()
    marks = strict.measure(rows)
    assert lenient.decide(rows, marks, {}) == lenient.decide(rows, lenient.measure(rows), {})
    assert lenient.decide(rows, marks, {}) != strict.decide(rows, marks, {})


@pytest.mark.parametrize("step", [C4Rules(sentences=3), GopherRules(), RepetitionRules(), FineWebRules()], ids=FILTERS)
def test_good_text_stays_in_english_and_chinese(step: C4Rules) -> None:
    chinese = (
        "河边的老房子已经空了很久。我们在早上带着灯去那里，想看看还剩下什么。没有人告诉我们门会开着。"
        "“请进，”一个声音说。除了水声，什么也听不见，过了一会儿，我们就沿着来时的路回去了。"
    )
    rows = [
        *documents(ENGLISH, chinese),
        conversation(2, "What was the house like?", ENGLISH),
        conversation(3, "那所房子是什么样的？", chinese),
    ]
    assert outcomes(rows, step) == [("kept", "")] * 4


def test_chinese_lists_are_dropped() -> None:
    menu = documents("首页\n新闻\n联系我们\n产品\n关于\n登录\n注册")
    assert outcomes(menu, FineWebRules())[0] == ("dropped", "fineweb: lines without punctuation")
    assert outcomes(menu, GopherRules())[0] == ("dropped", "gopher: too few words")
    assert outcomes(menu, C4Rules())[0] == ("dropped", "c4: too few sentences")


def test_c4_takes_lines_from_documents_only() -> None:
    text = f"Home\n{ENGLISH} It was so [3].\nclick"
    changed, talk = run_steps([[*documents(text), conversation(1, text, ENGLISH)]], [C4Rules()]).rows
    assert changed.text == f"{ENGLISH} It was so ."
    assert talk.parts[0].text == text


def test_n_grams_are_counted_document_by_document() -> None:
    texts = quality_texts(40, seed=9)[1:]  # without the empty one
    step = replace(STEPS["gopher-repetition"])
    together = step.measure(documents(*texts))
    for number, text in enumerate(texts):
        alone = step.measure(documents(text))
        assert {name: values[0] for name, values in alone.items()} == {
            n: values[number] for n, values in together.items()
        }
    assert step.measure([])["top_2"].shape == (0,)


def test_repeated_elements_are_all_but_the_first() -> None:
    assert repeated(["a", "bb", "a", "bb", "bb"]) == (3, 5)


def test_words_and_sentences() -> None:
    assert split_words("It's 1,000.50 km... (well-known) 3.") == [
        "It", "'s", "1,000.50", "km", "...", "(", "well", "-", "known", ")", "3", "."
    ]  # fmt: skip
    assert split_words("Mr. J. Doe -- of the U.S. -- left.") == [
        "Mr.", "J.", "Doe", "--", "of", "the", "U.S.", "--", "left", "."
    ]  # fmt: skip
    assert split_words("今天3.5度，it’s ok") == ["今", "天", "3.5", "度", "，", "it", "’s", "ok"]
    sentences = (
        'One. Two! "Three?" four',
        "3.5 km",
        "一。二！三",
        "end.",
        "Mr. J. Doe came at 5 p.m. to the U.S. embassy. So?",
    )
    assert [count_sentences(line) for line in sentences] == [4, 1, 3, 1, 2]
    assert [is_unspaced(text) for text in ("abc", "中文 a", "a中 bc", "...", "ไทย")] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert {".", "!", "?", "。", "؟"} <= sentence_terminals() and not {",", "'", '"', "a"} & sentence_terminals()
