"""The demo's sums: worked and right, some held out, the same each time."""

from __future__ import annotations

import re

import pytest

from danlu.data.demo_data import answered_sums, held_out_sums, preferences, sums_to_answer
from danlu.rewards.protocol import JudgedAnswer
from danlu.rewards.text import Numeric


def test_worked_sums_are_right_in_every_step() -> None:
    for row in answered_sums(0, 500, 0):
        question, answer = (message["content"] for message in row["messages"])
        a, b = map(int, re.findall(r"\d+", question))
        *worked, result = answer.split(", ")
        assert int(result) == a + b
        for step in worked:
            left, _, right = step.partition("=")
            assert sum(map(int, left.split("+"))) == int(right), answer
        assert (
            int(worked[0].partition("=")[2]) % 10 == (a + b) % 10 and int(worked[1].partition("=")[2]) == (a + b) // 10
        )


def test_worked_and_bare_answers_are_mixed() -> None:
    answers = [row["messages"][1]["content"] for row in answered_sums(0, 200, 300)]
    assert [sum("=" in answer for answer in answers[start : start + 50]) for start in range(0, 500, 50)] == [20] * 10
    for row in answered_sums(3, 0, 100):
        question, answer = (message["content"] for message in row["messages"])
        assert int(answer) == sum(map(int, re.findall(r"\d+", question)))


def test_a_reward_knows_a_worked_sum_by_its_row() -> None:
    answers = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in answered_sums(0, 7000, 0)}
    rows = [row for row in sums_to_answer(0, 200) if row["question"] in answers]
    assert len(rows) > 100
    texts = [answers[row["question"]] for row in rows]
    judge = Numeric("answer")
    assert judge([JudgedAnswer(text, row) for text, row in zip(texts, rows, strict=True)]) == [1.0] * len(rows)
    wrong = judge([JudgedAnswer(text, row) for text, row in zip(texts[1:], rows, strict=False)])
    assert sum(map(float, wrong)) < 0.1 * len(wrong)  # type: ignore[arg-type]  # control: another sum's


def test_sums_are_held_out_of_both() -> None:
    held_out = {row["question"] for row in held_out_sums(700)}
    worked = [row["messages"][0]["content"] for row in answered_sums(0, 7000, 0)]
    asked = [row["question"] for row in sums_to_answer(0, 7000)]
    assert len(held_out) == 700 and len(set(worked)) == len(set(asked)) == 7000
    assert held_out.isdisjoint(worked) and held_out.isdisjoint(asked)
    assert set(worked) & set(asked)  # control: these two are drawn from the same sums


def test_sums_are_a_function_of_the_seed() -> None:
    assert list(answered_sums(1, 50, 9)) == list(answered_sums(1, 50, 9)) != list(answered_sums(2, 50, 9))
    assert list(sums_to_answer(1, 50)) == list(sums_to_answer(1, 50)) != list(sums_to_answer(2, 50))
    assert held_out_sums(50) == held_out_sums(50)
    with pytest.raises(ValueError, match="larger than population"):
        held_out_sums(100_000)


def test_preferred_answers_are_right_or_happy() -> None:
    rows = list(preferences(0, 300))
    stories = 0
    for row in rows:
        (prompt,), (chosen,), (rejected,) = row["prompt"], row["chosen"], row["rejected"]
        assert chosen["content"] != rejected["content"]
        if "story" in prompt["content"]:
            stories += 1
            assert "was happy" in chosen["content"] and "was happy" not in rejected["content"]
            assert prompt["content"].removeprefix("Tell me a story about the ").removesuffix(".") in rejected["content"]
    assert 100 < stories < 200
    assert rows == list(preferences(0, 300)) != list(preferences(1, 300))
