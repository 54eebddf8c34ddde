"""Answers that are the same mathematics are equal however they are written, and those that are not are not."""

from __future__ import annotations

import pytest

from danlu.rewards.math_answer import final_answer, final_number, same_answer, to_number
from danlu.rewards.math_expression import NotMathematics, parse

SAME = [
    ("1/2", r"\frac{1}{2}"),
    ("0.5", r"\frac12"),
    (r"\dfrac{3}{4}", "0.75"),
    ("1,234", "1234"),
    ("$1,000,000", "1000000"),
    ("50%", "0.5"),
    (r"50\%", "1/2"),
    ("2(x+1)", "2x+2"),
    ("(x+1)^2", "x^2 + 2x + 1"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\sqrt[3]{27}", "3"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"\sin^2 x + \cos^2 x", "1"),
    ("3!", "6"),
    ("x = 5", "5"),
    (r"x \in (0, 1]", "(0,1]"),
    ("(1, 2)", r"\left( 1, 2 \right)"),
    ("{1, 2, 3}", r"\{3, 2, 1\}"),
    ("1, -2", "-2, 1"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)"),
    (r"5\text{ cm}", "5"),
    ("12 hours", "12"),
    (r"90^\circ", "90"),
    ("5.0", "5"),
    (r"\text{(A)}", "(A)"),
    ("Paris", "paris"),
    ("e^{i \\pi}", "-1"),
    (r"-\frac{1}{2}", "-0.5"),
    (r"2\pi r", r"2 r \pi"),
    ("|-3|", "3"),
    ("x_1 + x_2", "x_2+x_1"),
    ("10^{3}", "1000"),
    ("\\log 100", "2"),
]
DIFFERENT = [
    ("1/2", "1/3"),
    ("0.333", "1/3"),
    ("x^2", "2x"),
    ("(1, 2)", "(2, 1)"),
    ("(1, 2)", "[1, 2]"),
    ("{1, 2}", "{1, 2, 2}"),
    ("1, 2", "1, 3"),
    ("1,234", "1, 235"),
    (r"\sqrt{x^2}", "x + 1"),
    ("-5", "5"),
    ("x + y", "x - y"),
    ("Paris", "London"),
    ("", "5"),
    ("12 or 13", "12"),
    (r"\infty", r"-\infty"),
]


@pytest.mark.parametrize(("answer", "reference"), SAME)
def test_the_same(answer, reference):
    assert same_answer(answer, reference)
    assert same_answer(reference, answer)


@pytest.mark.parametrize(("answer", "reference"), DIFFERENT)
def test_not_the_same(answer, reference):
    assert not same_answer(answer, reference)
    assert not same_answer(reference, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{1}, so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("48/2 = <<48/2=24>>24 clips.\n#### 72", "72"),
        ("The answer is: 3x + 1.", "3x + 1"),
        ("He has 3 apples and 4 pears, 7 in all.", "7"),
        (r"\boxed{unclosed and 5", "5"),
        ("nothing here", None),
        ("It costs $1,250.50 now", "$1,250.50"),
    ],
)
def test_what_a_text_ends_with(text, answer):
    assert final_answer(text) == answer


def test_numbers():
    assert final_number("3 then -4.5") == "-4.5"
    assert final_number("no digits") is None
    assert [to_number(text) for text in ("1,234.5", "$3", "1/2", "50%", "-2", "x", "1/0", "two")] == [
        1234.5,
        3,
        0.5,
        0.5,
        -2,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2 +", "ends where a value"),
        ("(1", r"'\)' is expected, and the end"),
        ("3 ] 4", "character 3"),
        ("§", "character 1"),
        ("(" * 100 + "1" + ")" * 100, "nested"),
        ("1" * 3000, "3000 characters"),
        ("2 3", "right behind"),
    ],
)
def test_what_is_no_formula(text, message):
    with pytest.raises(NotMathematics, match=message):
        parse(text)


@pytest.mark.parametrize("text", ["9^9^9^9", "(10^300)^10", "171!", "1/0", "0^{-1}", "()", "\\frac{}{}", "x" * 500])
def test_nothing_hangs_or_raises(text):
    assert same_answer(text, "7") is False
