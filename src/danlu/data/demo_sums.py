"""Built-in arithmetic: sums of two numbers below 100, answered with or without steps, and checkable for rewards.

A worked answer adds the ones, then the tens with the carry, and ends with the sum: `7+5=12, 4+8+1=13, 132`. A bare
answer is the sum alone, which a small model seldom gets right. One sum in ten is held out of all, to be asked
afterwards. Everything is a pure function of the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product

SMALLEST, LARGEST = 10, 99  # of both numbers
LONGEST_STEPS = 24  # tokens of a worked answer and its end, where each digit is a token


def answered_sums(seed: int, worked: int, bare: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Rows of messages, each a question and a right answer: `worked` with steps and `bare` without, in mixed order.

    All sums differ. Raises ValueError for more than there are.
    """
    for number, (a, b) in enumerate(_drawn(f"answered {seed}", worked + bare)):
        # Evenly among the others, wherever a reader looks.
        is_worked = (number + 1) * worked // (worked + bare) > number * worked // (worked + bare)
        question = {"role": "user", "content": _question(a, b)}
        yield {"messages": [question, {"role": "assistant", "content": _worked(a, b) if is_worked else str(a + b)}]}


def sums_to_answer(seed: int, n: int) -> Iterator[dict[str, str]]:
    """`n` rows with a question and the sum alone, which a reward can check; those of `answered_sums` may be among them.

    Raises ValueError for more than there are."""
    return (_row(a, b) for a, b in _drawn(f"to answer {seed}", n))


def held_out_sums(n: int) -> list[dict[str, str]]:
    """`n` rows as those of `sums_to_answer`, all of sums that neither function has. Raises ValueError past all."""
    return [_row(a, b) for a, b in random.Random("held out").sample(_pairs(held_out=True), n)]


def _drawn(seed: str, n: int) -> list[tuple[int, int]]:
    return random.Random(seed).sample(_pairs(held_out=False), n)


@cache
def _pairs(*, held_out: bool) -> tuple[tuple[int, int], ...]:
    """All pairs of numbers that are held out, or all others."""
    every = product(range(SMALLEST, LARGEST + 1), repeat=2)
    return tuple((a, b) for a, b in every if (random.Random(f"{a} plus {b}").random() < 1 / 10) == held_out)


def _row(a: int, b: int) -> dict[str, str]:
    return {"question": _question(a, b), "answer": str(a + b)}


def _question(a: int, b: int) -> str:
    return f"What is {a} plus {b}?"


def _worked(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    carried = "+1" if ones > 9 else ""
    return f"{a % 10}+{b % 10}={ones}, {a // 10}+{b // 10}{carried}={a // 10 + b // 10 + ones // 10}, {a + b}"
