"""Answers that are the same mathematics are equal however they are written, and those that are not are not."""

from __future__ import annotations

from random import Random

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


HOSTILE = {
    "newlines": "answer is" + "\n" * 200_000,
    "boxes": r"\boxed{" * 30_000,
    "groups": "{" * 50_000 + "}" * 50_000,
    "thousands": "1" + ",111" * 100_000,
    "thousands-of-a-formula": "1" + ",111" * 480 + "x",
    "sums": "1" + "+1" * 990,
    "factorials": "3" + "!" * 1900,
    "signs": "-" * 1900 + "1",
    "roots": r"\sqrt" * 390 + "2",
    "fractions": r"\frac" * 390 + "2",
    "powers": "2^" * 990 + "2",
    "subscripts": "x_{" * 600 + "1",
    "unions": r"1\cup" * 390 + "1",
    "units": "1m " * 600 + "\nx",
    "huge": "1" + "0" * 300 + "(1+i)(179+i)",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_answers_are_judged_wrong_and_soon(text):
    for answer in (text, rf"\boxed{{{text}}}", f"#### {text}"):
        given = final_answer(answer)
        assert given is None or not same_answer(given, "7")
        assert final_number(answer) != "7"
        if given is not None:
            to_number(given)


def test_any_soup_of_signs_is_judged():
    """What comes out of a model early in training: never an exception, which would leave it unjudged."""
    random = Random(0)
    signs = [
        *"0123456789xye+-*/^!%|(){}[],.=_ ",
        "\\frac",
        "\\sqrt",
        "\\sin",
        "\\pi",
        "\\infty",
        "\\left",
        "\\cup",
        "10^300",
    ]
    right = 0
    for _ in range(1000):
        text = "".join(random.choices(signs, k=random.randrange(1, 14)))
        right += same_answer(text, "7") + same_answer(text, "(1, x)") + same_answer(text, "x^{99}e^{700}")
        to_number(text)
    assert 0 < right < 50, "the soup never is an answer, or always"
