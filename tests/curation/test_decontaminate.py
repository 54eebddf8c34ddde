"""Decontamination: planted benchmark rows are dropped, whatever their case and numbers, and nothing else is."""

from __future__ import annotations

import random

import pytest
from builders.curated_rows import conversation, documents, outcomes

from danlu.curation.decontaminate import Benchmark, Decontaminate

QUESTION = (
    "Natalia sold 1,000 clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether?"
)
WORDS = [f"w{number}" for number in range(3000)]


def step(*texts: str, name: str = "gsm8k") -> Decontaminate:
    return Decontaminate((Benchmark("other", (" ".join(WORDS[:20]),)), Benchmark(name, texts)))


@pytest.mark.parametrize(
    "text",
    [
        QUESTION,
        f"A page about it. {QUESTION.upper().replace(',', '')} And so on.",
        "she said: natalia sold 1000 clips — to 48 of her friends, in April and then?",
        " ".join(QUESTION.split()[8:21]),
    ],
)
def test_what_a_benchmark_has_is_dropped(text: str) -> None:
    assert outcomes(documents(text), step(QUESTION)) == [("dropped", "contaminated: gsm8k")]


@pytest.mark.parametrize(
    "text",
    [
        " ".join(QUESTION.split()[8:20]),  # twelve words
        QUESTION.replace("48", "49").replace("half", "twice").replace("did", "has"),
        "Natalia sold clips.",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert outcomes(documents(text), step(QUESTION)) == [("kept", "")]


def test_conversations_are_read_across_turns() -> None:
    words = QUESTION.split()
    rows = [conversation(0, " ".join(words[:10]), " ".join(words[10:])), conversation(1, "hi", "ho", system=QUESTION)]
    assert [outcome for outcome, _ in outcomes(rows, step(QUESTION))] == ["dropped", "kept"]


def test_benchmark_rows_of_few_words_are_compared_whole() -> None:
    nine, four = "What is the capital city of the French Republic?", "Is water wet? Yes"
    rows = documents(
        "Quiz: what is the capital city of the french republic",
        "What is the capital city of the French people?",
        "He asked: is water wet? Yes, I said.",
        "Facts\nIs water wet? Yes!\nmore",
        "...",
    )  # fmt: skip
    assert [outcome for outcome, _ in outcomes(rows, step(nine, four, "!!"))] == [
        "dropped", "kept", "kept", "dropped", "kept"
    ]  # fmt: skip
    talk = [conversation(0, "Is water wet?\nYes", "Why"), conversation(1, "Is water wet?", "Yes")]
    assert [outcome for outcome, _ in outcomes(talk, step(nine, four))] == ["dropped", "kept"]


def test_a_header_that_rows_share_is_no_overlap() -> None:
    draw = random.Random(0)
    header = "The following are multiple choice questions with answers about the history of science and its people."
    questions = [" ".join(draw.choices(WORDS[100:], k=25)) for _ in range(5)]
    marked = step(*(f"{header} {question}" for question in questions))
    rows = documents(f"{header} {' '.join(draw.choices(WORDS[100:], k=30))}", f"text {questions[3]} text")
    assert [outcome for outcome, _ in outcomes(rows, marked)] == ["kept", "dropped"]
    two_rows = step(*(f"{header} {question}" for question in questions[:2]))
    assert outcomes(rows, two_rows)[0][0] == "dropped"  # control: of two rows it might be the question


def test_planted_rows_are_found_with_their_counts() -> None:
    draw = random.Random(1)
    benchmark = [" ".join(draw.choices(WORDS, k=draw.randrange(3, 40))) for _ in range(50)]
    planted = draw.sample(range(200), 40)
    texts = []
    for row in range(200):
        words = draw.choices(WORDS, k=60)
        at = draw.randrange(60)
        lines = (
            [" ".join(words[:at]), draw.choice(benchmark).capitalize() + "."]
            if row in planted
            else [" ".join(words[:at])]
        )
        texts.append("\n".join([*lines, " ".join(words[at:])]))
    found = outcomes(documents(*texts), step(*benchmark))
    assert [row for row, (outcome, _) in enumerate(found) if outcome == "dropped"] == sorted(planted)


def test_marks_hang_on_what_the_benchmarks_say() -> None:
    assert step(QUESTION).measured_with() == step(QUESTION, name="x").measured_with()
    assert step(QUESTION).measured_with() != step(QUESTION + " now").measured_with()
    assert Decontaminate(()).measure(documents("a"))["overlap"].tolist() == [0]
