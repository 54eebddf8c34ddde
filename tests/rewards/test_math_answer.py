"""Answers that are the same mathematics are equal however they are written, and those that are not are not."""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from builders.hostile_answers import HOSTILE, TIRING
from builders.math_pairs import DIFFERENT as OTHER_PAIRS
from builders.math_pairs import EQUAL as EQUAL_PAIRS
from builders.math_wordings import RIGHT, WRONG

from danlu.rewards import call_pool, symbolic, worker_pool
from danlu.rewards.call_pool import CallWorker, PoolCall
from danlu.rewards.final_answer import final_answer, final_number
from danlu.rewards.math_answer import decide, match_answer
from danlu.rewards.plain_numbers import to_number
from danlu.rewards.protocol import JudgedAnswer
from danlu.rewards.runner import RewardPart, RewardRunner, RewardTable
from danlu.rewards.text import Mathematical

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
    ("2x^2+2y^2=8", "x^2+y^2=4"),
    ("(2x-3y)^2=0", "2x=3y"),
    (r"\frac{x^2}{9}+\frac{y^2}{4}=1", "36-9y^2=4x^2"),
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
    ("x^2+y^2=4", "x^2-y^2=4"),
    ("(2x-3y)^2=0", "2x=3y+1"),
]


@pytest.fixture(scope="module")
def runner():
    with RewardRunner([RewardPart("math", Mathematical("answer"))], workers=2) as many:
        yield many


def judged(text, reference):
    return JudgedAnswer(text, {"answer": reference})


def equal_pairs(pairs: Sequence[tuple[str, str]], runner: RewardRunner) -> list[tuple[str, str]]:
    """Those that are the same; formulas are compared in the reward processes, all in one call."""
    at_once = [decide(*pair) for pair in pairs]
    formulas = [pair for pair, match in zip(pairs, at_once, strict=True) if match is None]
    table = runner.score([judged(rf"\boxed{{{answer}}}", reference) for answer, reference in formulas])
    assert not table.failures and not table.late.any()
    by_formula = iter(table.values[:, 0] == 1)
    return [
        pair
        for pair, match in zip(pairs, at_once, strict=True)
        if (next(by_formula) if match is None else match.is_equal)
    ]


def both_ways(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [*pairs, *((reference, answer) for answer, reference in pairs)]


def test_the_same(runner):
    pairs = both_ways([*SAME, *EQUAL_PAIRS])
    assert len(pairs) > 550
    assert sorted(set(pairs) - set(equal_pairs(pairs, runner))) == []


def test_not_the_same(runner):
    pairs = both_ways([*DIFFERENT, *OTHER_PAIRS])
    assert len(pairs) > 350
    assert equal_pairs(pairs, runner) == []


def test_what_models_write(runner):
    """Against the reference that it says, and against another one."""
    texts = [*RIGHT, *WRONG]
    values = runner.score([judged(*each) for each in texts]).values[:, 0]
    is_right = np.arange(len(texts)) < len(RIGHT)
    assert len(RIGHT) > 150 and len(WRONG) > 80
    assert [each for each, wrong in zip(texts, (values == 1) != is_right, strict=True) if wrong] == []


def test_the_reference_says_whether_a_comma_groups_thousands():
    """1, 234 is a list, and 1,234 one where the reference is."""
    for answer, reference, is_equal in (("1, 234", "1,234", False), ("1,234", "1, 234", True), ("1,234", "1234", True)):
        match = decide(answer, reference)
        assert match is not None and match.is_equal == is_equal, (answer, reference)


def test_shared_pairs(shared_data: Path, runner: RewardRunner) -> None:
    """math-verify alone, both sides in boxes, accepts 9 wrong answers of these and refuses 12 right ones."""
    lines = (shared_data / "cases" / "math_pairs.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    answers = [judged(rf"So it is \boxed{{{pair['answer']}}}.", pair["reference"]) for pair in pairs]
    given = runner.score(answers).values[:, 0] == 1
    wanted = np.array([pair["equal"] for pair in pairs])
    assert len(pairs) == 112 and wanted.sum() > 50
    assert (given & ~wanted).sum() <= 3 and (given != wanted).sum() <= 10
    assert [pair for pair, wrong in zip(pairs, given != wanted, strict=True) if wrong] == []


def test_every_wording_is_told_from_that_of_the_next_number(shared_data: Path) -> None:
    styles = [json.loads(line) for line in (shared_data / "cases" / "math_styles.jsonl").read_text().splitlines()]
    rows = (shared_data / "rl" / "gsm8k_train.jsonl").read_text().splitlines()[:300]
    reward, wrong = Mathematical("answer"), set()
    for row in map(json.loads, rows):
        number = int(row["answer"].rpartition("####")[2].replace(",", ""))
        for style in styles:
            for given in (number, number + 1):
                verdict = reward.decide(JudgedAnswer(style["template"].format(n=given), row))
                if verdict is None or verdict.value != (given == number):
                    wrong.add(style["style"])
    assert len(rows) == 300 and len(styles) == 26 and wrong == set()


@pytest.mark.parametrize(
    "template",
    [
        *("{n}", "\\({n}\\)", "${n}$. I hope it is correct.", "Answer: {n} eggs", "<answer>{n}</answer>", "{n}%"),
        *("<think>It is \\boxed{{5}}</think>\nThe answer is {n}.", "The answer is \\${n}.", "She pays ${n} in all."),
        *("**Final Answer:** ${n}$", "The answer is {n} dollars per day, which is 3 more.", "Hence x={n}."),
        *(
            "Final answer:\n\n**{n}**",
            "My final answer is {n}\n\nConfidence: 90%",
            "{n} is the answer to both 1 and 2.",
        ),
        *(
            "\\boxed{{\\text{{{n}}}}}",
            "\\boxed {{ {n} }}",
            "\\boxed{{{n}}} and \\boxed{{4",
            "The answer is {n}; \\boxed{{4",
        ),
        *("The question is whether the answer is even. It is. So we get {n}", "So the answer would be {n}."),
        *("It costs $5 and $7, so ${n}", "A: {n}", "= {n}", "- Answer: {n}", "Ans: {n}", "答案是{n}。"),
    ],
)
def test_wordings(template):
    for given in (1218, 1219):
        verdict = Mathematical("answer").decide(judged(template.format(n=given), "9 + 9\n#### 1,218"))
        assert verdict is not None and verdict.value == (given == 1218), verdict


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{1}, so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("48/2 = <<48/2=24>>24 clips.\n#### 72", "72"),
        ("The answer is: 3x + 1.", "3x + 1"),
        ("The answer is (A), for B is too large.", "(A)"),
        ("He has 3 apples and 4 pears, 7 in all.", "7"),
        (r"\boxed{unclosed and 5", "unclosed and 5"),
        (r"\boxed{3} or \boxed{unclosed", "3"),
        ("nothing here to be seen or read", None),
        ("It costs $1,250.50 now", "$1,250.50"),
        ("The solutions are $x=2$ and $x=3$.", "x=2, x=3"),
        ("Answer: $x=2$ or $x=3$.", "x=2, x=3"),
        ("The answer is\n\\[\n x = 1\n\\]\nas before.", "x = 1"),
        ("The correct option is (B).", "(B)"),
        (r"\( \( 5 \)", "5"),
        (r"The answer is $\$5$", r"\$5"),
        ("The area is 12 cm^2 in all, and no more than that", "12"),
        (r"So the probability is $\frac{3}{4}$, as before.", r"\frac{3}{4}"),
    ],
)
def test_what_a_text_ends_with(text, answer):
    assert final_answer(text) == answer


def test_numbers():
    assert final_number("3 then -4.5") == "-4.5"
    assert final_number("about 1e-05") == "1e-05"
    assert final_number("no digits") is None
    read = [
        to_number(text) for text in ("1,234.5", "$3", "1/2", "50%", "-2", "1e-05", 1e-05, 2e6, "x", "1/0", "two", None)
    ]
    assert [None if number is None else float(number.value) for number in read] == [
        *(1234.5, 3, 0.5, 50, -2, 1e-05, 1e-05, 2e6),
        *(None, None, None, None),
    ]


def test_what_is_decided_without_math_verify(runner):
    for answer, reference in (
        ("18", "17"),
        ("$18", "18"),
        (r"\frac{1}{2}", "0.5"),
        ("x + 1", "x+1"),
        ("(1,2)", "(2,1)"),
    ):
        assert decide(answer, reference) == match_answer(answer, reference)
    assert decide("2x", "x+x") is None
    assert runner.score([judged(r"\boxed{2x}", "x+x")]).verdicts[0, 0].why == "math-verify: equal"
    program = (
        "import sys; from danlu.rewards.build import build_rewards; from danlu.rewards.text import Mathematical; "
        "from danlu.rewards.protocol import JudgedAnswer as A; "
        "print(Mathematical('a')([A('It is 18', {'a': '18'})]), {'sympy', 'math_verify'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "[1.0] set()\n"


def test_hostile_answers_end_and_cost_no_other_answer_its_verdict(runner: RewardRunner) -> None:
    names = [name for name in HOSTILE if name not in TIRING]
    assert len(names) >= 60
    assert _score_hostile(runner, [*names, "logarithms"]).late.tolist() == [1]


@pytest.mark.slow
def test_hostile_answers_that_are_compared_until_their_time_is_up(runner: RewardRunner) -> None:
    assert _score_hostile(runner, TIRING).late[0] >= 4


def _score_hostile(runner: RewardRunner, names: Sequence[str]) -> RewardTable:
    """Hostile answers, each between two right ones, and all judged as they are."""
    right = [("The answer is 8.", "8"), (r"\boxed{x+x}", "2x"), (r"\boxed{(x+1)^2}", "x^2+2x+1")]
    answers = [judged(*right[0])]
    for number, name in enumerate(names):
        answers += [judged(rf"\boxed{{{HOSTILE[name]}}}", ("8", "x^2+1")[number % 2]), judged(*right[number % 3])]
    table = runner.score(answers)
    assert not table.failures
    assert (table.values[0::2, 0] == 1).all() and (table.values[1::2, 0] == 0).all()
    return table


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (r"\prod_{n=1}^{9} n", r"the command \prod is not read"),
        (r"\int x dx", r"the command \int is not read"),
        ("9^{9^{9}}", "a power of a power"),
        ("(x+1)^{9999}", "powers of more than 1000"),
        ("(x+1)!", "a factorial of what is no number"),
        ("201!+x", "a factorial of more than 200"),
        (r"\binom{9999}{2}x", "more than 999"),
        ("x+" + "7" * 61, "a number of more than 60 digits"),
        ("(" * 17 + "x" + ")" * 17, "brackets within more than 16 others"),
        ("x+" * 250 + "x", "a formula of 501 characters"),
        ("some words", "the word 'some' is no mathematics"),
        ("2 3x", "two numbers without an operation"),
    ],
)
def test_what_is_not_given_to_math_verify(text, why):
    with pytest.raises(symbolic.NotRead, match=re.escape(why)):
        symbolic.equal(text, "x")


STUCK = """
from danlu.rewards import symbolic, worker
symbolic.prepare = lambda: None
symbolic.equal = lambda answer, _: answer == "a+b" or sum(range(10**13)) == 0
worker.serve()
"""


def test_a_process_that_is_stuck_in_a_comparison_is_ended_and_the_answer_is_wrong(monkeypatch) -> None:
    """In C, where no signal is seen; none of it counts towards giving the reward up."""
    monkeypatch.setattr(worker_pool, "START", STUCK)
    monkeypatch.setattr(call_pool, "MOST_TIMEOUTS", 2)
    monkeypatch.setattr(worker_pool, "LONGEST_COMPARISON_S", 0.05)
    stuck, fine = judged(r"\boxed{y+y}", "2y"), judged(r"\boxed{a+b}", "b+a")
    with RewardRunner([RewardPart("math", Mathematical("answer"))], workers=1) as many:
        table = many.score([stuck, fine, stuck, stuck, judged("8", "8"), fine])
    assert table.values[:, 0].tolist() == [0, 1, 0, 0, 1, 1] and not table.failures
    assert table.late.tolist() == [3] and not table.unjudged.any()
    assert table.verdicts[0, 0].as_json() == {
        "extracted": "y+y",
        "why": "late: comparing it takes too long",
        "late": True,
    }
    assert table.verdicts[1, 0].as_json() == {"extracted": "a+b", "why": "math-verify: equal"}


def test_who_waits_for_a_processor_is_not_late() -> None:
    """A process that sleeps has used none of its processor's time, but may not sleep for ever."""
    worker = CallWorker("import sys, time; sys.stdin.buffer.read(1); time.sleep(60)", "start", timeout_s=60.0)
    try:
        worker.is_ready = True
        worker.make(PoolCall("task", "call", processor_limit_s=0.02))
        worker.deadline = 0.0
        assert not worker.is_late and not worker.is_gone
        worker.deadline = worker._last_deadline = 0.0
        assert worker.is_late and worker.limit_s == 0.02
        worker.call = None
        worker.make(PoolCall("task", "call"))
        worker.deadline = 0.0
        assert worker.is_late, "a limit by the clock is none by the processor"
    finally:
        worker.end()


def test_what_takes_too_long_is_wrong_and_told_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiring(*_: str) -> bool:
        """As math-verify does: it goes on whatever is raised within it."""
        end = time.process_time() + 3 * symbolic.LONGEST_S
        while time.process_time() < end:
            with contextlib.suppress(Exception):
                sum(range(1000))
        return True

    monkeypatch.setattr(symbolic, "equal", tiring)
    (verdict,) = Mathematical("answer").verdicts([judged(r"\boxed{x+x}", "2x")])
    assert (verdict.value, verdict.is_late, verdict.extracted) == (0.0, True, "x+x")
    monkeypatch.setattr(symbolic, "equal", lambda *_: True)
    assert Mathematical("answer")([judged(r"\boxed{x+x}", "2x")]) == [1]
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0), "a time limit that stays"


def test_a_column_without_a_reference_is_no_text() -> None:
    reward = Mathematical("answer")
    for reference in (None, "", math.nan, "  "):
        assert reward([judged("The answer is None", reference)]) == [None]
    assert reward([judged("It is 18", 18), judged("It is 0.00001", 1e-05), judged("2,000,000", 2e6)]) == [1, 1, 1]
    assert reward([judged("It is 5", 1e-05), judged("6", 2e6)]) == [0, 0]
    assert reward([judged("nothing to see in here at all", "18")]) == [0]


def test_any_soup_of_signs_is_judged():
    """What comes out of a model early in training: never an exception, which would leave it unjudged."""
    random = Random(0)
    signs = [*"0123456789xye+-*/^!%|(){}[],.=_<$ ", "\\frac", "\\sqrt", "\\sin", "\\pi", "\\infty", "\\left", "\\cup"]
    signs += ["10^300", "\\pm", "\\le", "\\text{", "\\boxed{", "####", " and ", " cm", "answer is"]
    right = 0
    for _ in range(100):
        text = "".join(random.choices(signs, k=random.randrange(1, 14)))
        for reference in ("7", "(1, x)", "5 cm", "x < 3"):
            match = decide(text, reference)
            right += match is not None and match.is_equal
            final_answer(text, numeric=True)
            final_answer(text)
            to_number(text)
    assert 0 < right < 20, "the soup never is an answer, or always"
