"""Languages of rows are those that they are written in."""

from __future__ import annotations

import pytest
from builders.curated_rows import conversation, documents, outcomes

from danlu.curation.language import Language, _detect, _sample
from danlu.curation.run_steps import run_steps

TEXTS = {
    "en": "The house by the river was old, and it had been empty for a long time.",
    "zh": "河边的老房子已经空了很久，没有人告诉我们门会开着。",
    "de": "Das Haus am Fluss war alt, und es hatte lange Zeit leer gestanden.",
    "fr": "La maison au bord de la rivière était vieille et vide depuis longtemps.",
    "ja": "川のそばの家は古くて、長い間だれも住んでいませんでした。",
    "ru": "Дом у реки был старый и долго стоял пустым.",
}


def test_rows_in_other_languages_are_dropped_by_name() -> None:
    results = outcomes(documents(*TEXTS.values()), Language(keep=("en", "zh")))
    assert results == [(("kept" if code in ("en", "zh") else "dropped"), f"language: {code}") for code in TEXTS]


def test_verdicts_have_the_probability() -> None:
    (account,) = run_steps([documents(TEXTS["en"])], [Language(keep=("en",), at_least=0.5)]).accounts
    ((_, verdict),) = account.decisions
    assert verdict.value is not None and 0.9 < verdict.value <= 1 and verdict.threshold == 0.5
    unlikely = outcomes(documents("Maria Santos, Lima"), Language(keep=("en", "es", "it", "pt"), at_least=0.99))
    assert unlikely[0][0] == "dropped" and unlikely[0][1].endswith("not likely enough")


@pytest.mark.parametrize("text", ["", "12:30 -- 15 %", "\n"])
def test_a_row_without_letters_has_no_language(text: str) -> None:
    assert outcomes(documents(text), Language(keep=("en",))) == [("dropped", "language: none")]


def test_long_and_loud_texts() -> None:
    english, german = TEXTS["en"], TEXTS["de"]
    rows = documents(english.upper(), f"{english}\n" * 200, f"{german}\n" * 50 + english, english.replace(" ", "\n"))
    assert [reason for _, reason in outcomes(rows, Language(keep=("en",)))] == [
        "language: en", "language: en", "language: de", "language: en"
    ]  # fmt: skip


def test_names_at_the_borders_of_a_text_do_not_decide() -> None:
    names = "Krämer, Moreau, Santos, Pereira."
    text = f"{names} The old mill had been empty since the flood, and nobody wanted to live there. " * 6 + names
    assert _detect(_sample(text, 32))[1] < 0.65  # control: by short samples it is not likely to be English
    assert outcomes(documents(text), Language(keep=("en",))) == [("kept", "language: en")]


def test_a_system_prompt_says_nothing_of_the_language() -> None:
    assert outcomes([conversation(0, TEXTS["zh"], TEXTS["zh"], system=TEXTS["en"] * 9)], Language(keep=("zh",))) == [
        ("kept", "language: zh")
    ]
