r"""Whether two formulas are equal, by the package math-verify: with bounded formulas, and in bounded time.

It is loaded where it is first needed, which is in reward processes alone. It computes powers, factorials and sums while
it reads them, where its own time limit does not work: too large ones are refused before, and the rest has `LONGEST_S`
of processor time, in the main thread of a process that is ended when this does not help.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from danlu.rewards.math_notation import FUNCTIONS, GREEK, nesting
from danlu.rewards.plain_numbers import LARGEST_EXPONENT

LONGEST_S = 0.5
LONGEST_FORMULA = 500
"""Characters."""
DEEPEST_NESTING = 16
LARGEST_FACTORIAL = 200
LONGEST_INTEGER = 60
"""Digits of a number that stands in a formula."""
HIGHEST_DEGREE = 12
"""The degree of a polynomial equation that is compared by its square-free part, at most."""

_COMMANDS = {
    *FUNCTIONS,
    *GREEK,
    *(name.capitalize() for name in GREEK),
    *("frac", "sqrt", "pm", "mp", "cdot", "times", "div", "infty", "binom", "le", "ge", "ne", "circ", "cup", "in"),
    *("begin", "end", "emptyset", "ast", "cap", "cosh", "lceil", "rceil", "lfloor", "rfloor"),
}
_ENVIRONMENTS = ("pmatrix", "bmatrix", "matrix", "vmatrix")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_DEGREES = re.compile(r"(\d++(?:\.\d++)?)\s*+\^\\circ")
_IMAGINARY = re.compile(r"\\[A-Za-z]++(?:\s*+\{[a-z]*matrix\})?|i(?:\s*+(?P<power>\^))?")
_PI_TIMES = re.compile(r"\\pi\s*+\(")
"""No function, as latex2sympy reads any other letter before a bracket that holds no sum."""
_QUOTIENT = re.compile(r"(?<![\w/.)}^])(\d++)\s*+/\s*+(\d++)(?![.\d])")
"""A quotient of integers, which is computed before the factor behind it: 1/2x is x/2."""
_DECIMAL = re.compile(r"(?<![\d.])(\d*+\.\d++)(?![\d.])")


_FIRST_READ = (
    (r"\frac{x+1}{2}", r"\frac{1}{2}+\frac{x}{2}"),
    (r"\sin(2x)", r"2\sin(x)\cos(x)"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"x^2+y^2=4", "x^2+y^2=2"),
    (r"\sin(x)=\frac{1}{2}", r"\cos(x)=\frac{1}{3}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
)
"""One pair of each kind, so that math-verify and sympy load their modules before the first answer comes."""


class NotRead(ValueError):
    """A text is not given to math-verify; the message says why."""


class TooLate(BaseException):
    """The time is up; no `except Exception` between here and the formula may take it for an answer."""


def prepare() -> None:
    """Loads math-verify and lets it read something once, which takes a second that no answer has to pay for."""
    for answer, reference in _FIRST_READ:
        _equal(answer, reference)


def equal(answer: str, reference: str) -> bool:
    """Whether two formulas in the notation of `math_notation.plain` are equal.

    Raises NotRead for a text that is too large, or no formula; TooLate where the time is up.
    """
    formulas = [_readable(text) for text in (answer, reference)]
    return _equal(*formulas)


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Raises TooLate after LONGEST_S of the process's time, in the main thread: no other can be interrupted."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TooLate

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _equal(answer: str, reference: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.parser import NormalizationConfig

    notation = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="last", equations=False
    )
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    config = [LatexExtractionConfig(normalization_config=notation, boxed_match_priority=0)]
    read: Callable[[str], list[Any]] = lambda text: parse(  # noqa: E731
        rf"\boxed{{{text}}}", config, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=0
    )
    given, wanted = read(answer), read(reference)
    if not given or not wanted:
        raise NotRead(f"math-verify does not read {answer if not given else reference}")
    if (same := _same_roots(given[0], wanted[0])) is not None:
        return same
    if bool(verify(wanted, given, timeout_seconds=0)):
        return _agree_in_value(given[0], wanted[0])
    return _same_solutions(given[0], wanted[0])


def _same_roots(given: Any, wanted: Any) -> bool | None:
    """Whether two polynomial equations with rational coefficients have the same complex roots; None for all others.

    They have where their square-free parts are multiples of each other (Hilbert's Nullstellensatz). math-verify solves
    both equations for a variable and simplifies the roots: half a second for an ellipse, where this takes a hundredth.
    """
    from sympy import Poly
    from sympy.core.relational import Equality
    from sympy.polys.polyerrors import PolynomialError

    if not (isinstance(given, Equality) and isinstance(wanted, Equality)):
        return None
    names = sorted(given.free_symbols | wanted.free_symbols, key=str)
    try:
        sides = [Poly(each.lhs - each.rhs, *names) for each in (given, wanted)] if names else []
    except PolynomialError:
        return None
    if not sides or any(each.is_ground or each.total_degree() > HIGHEST_DEGREE for each in sides):
        return None
    if any(not (each.domain.is_ZZ or each.domain.is_QQ) for each in sides):
        return None
    first, second = (each.set_domain("QQ").sqf_part().monic() for each in sides)
    return bool(first == second)


def _agree_in_value(given: Any, wanted: Any) -> bool:
    """Two numbers to 12 digits of their own size: math-verify compares to six decimals, where 1e-19 is 1e-31."""
    try:
        if given.free_symbols or wanted.free_symbols or not (given.is_number and wanted.is_number):
            return True
        difference, size = abs((given - wanted).evalf(20)), abs(wanted.evalf(20))
        return bool(difference <= size * Fraction(1, 10**12)) or given == wanted
    except (AttributeError, TypeError, ValueError, ArithmeticError):
        return True  # sets, matrices and infinities, of which it has no number


def _same_solutions(given: Any, wanted: Any) -> bool:
    """Whether two inequalities of one variable hold for the same numbers: 2x < 6 and x < 3."""
    from sympy.core.relational import Equality, Relational

    relations = [each for each in (given, wanted) if isinstance(each, Relational) and not isinstance(each, Equality)]
    if len(relations) < 2 or given.free_symbols != wanted.free_symbols or len(given.free_symbols) != 1:
        return False
    try:
        return bool(given.as_set() == wanted.as_set())
    except Exception:  # of sympy, for what it cannot solve
        return False


def _readable(text: str) -> str:
    """The formula as LaTeX with exact fractions. Raises NotRead."""
    if len(text) > LONGEST_FORMULA:
        raise NotRead(f"a formula of {len(text)} characters: at most {LONGEST_FORMULA} are read")
    if nesting(text) > DEEPEST_NESTING:
        raise NotRead(f"brackets within more than {DEEPEST_NESTING} others")
    for command in re.findall(r"\\([A-Za-z]++)", text):
        if command not in _COMMANDS:
            raise NotRead(f"the command \\{command} is not read")
    for environment in re.findall(r"\\(?:begin|end)\s*+\{([^{}]*+)\}", text):
        if environment not in _ENVIRONMENTS:
            raise NotRead(f"{environment} is not read")
    bare = re.sub(r"\\(?:begin|end)\s*+\{[^{}]*+\}", " ", text)
    if word := _WORD.search(re.sub(r"\\[A-Za-z]++", " ", bare)):
        raise NotRead(f"the word {word.group()!r} is no mathematics")
    if re.search(r"[^\x20-\x7e]|[\"'`?@#$:;]|\\prime", text):
        raise NotRead("signs that are no mathematics")
    if re.search(r"\d\s*+_|(?<![\\A-Za-z])[A-Za-z]\d", bare):
        raise NotRead("a number in another base, or a name with a digit")
    if re.search(r"\d\s++\d|\d\.\d*+\.|\d\s*+\\frac\{\d++\}\{\d++\}", bare):
        raise NotRead("two numbers without an operation between them")
    if re.search(r"\\frac\s*+\{\s*+d\s*+[A-Za-z]?\s*+\}\s*+\{\s*+d\s*+[A-Za-z]", bare):
        raise NotRead("derivatives are not read")
    _check_size(bare)
    text = _DEGREES.sub(r"(\\frac{\1 \\pi}{180})", text)
    if "_i" not in text and "_{i" not in text and "I" not in text:
        text = _IMAGINARY.sub(_as_imaginary, text)
    text = _PI_TIMES.sub(r"\\pi \\cdot (", text)
    return _DECIMAL.sub(_as_fraction, _QUOTIENT.sub(r"\\frac{\1}{\2}", text))


def _check_size(text: str) -> None:
    """Raises NotRead where a power, a factorial or a number is so large that computing it may never end."""
    if max(map(len, re.findall(r"\d++", text)), default=0) > LONGEST_INTEGER:
        raise NotRead(f"a number of more than {LONGEST_INTEGER} digits in a formula")
    product = 1
    for match in re.finditer(r"\^\s*+(?:(\w|\\[A-Za-z]++)|\{)", text):
        exponent = match[1] if match[1] is not None else _group(text, match.end())
        if not re.search(r"(?<!\\)[A-Za-z]", re.sub(r"\\[A-Za-z]++", "", exponent)) and re.search(r"[\^!]", exponent):
            raise NotRead("a power of a power")
        for digits in re.findall(r"\d++", exponent):
            product *= max(1, int(digits))
    if product > LARGEST_EXPONENT:
        raise NotRead(f"powers of more than {LARGEST_EXPONENT}")
    if re.search(r"[^\d\sA-Za-z]\s*+!|!\s*+[!^]", text):
        raise NotRead("a factorial of what is no number")
    for digits in re.findall(r"(\d++)\s*+!", text):
        if int(digits) > LARGEST_FACTORIAL:
            raise NotRead(f"a factorial of more than {LARGEST_FACTORIAL}")
    for match in re.finditer(r"\\binom|\\sqrt\s*+\[", text):
        if re.search(r"\d{4}|\^|!", text[match.end() : match.end() + 40]):
            raise NotRead(f"{match.group()} of more than 999")


def _group(text: str, start: int) -> str:
    """Returns the text in the braces that are open at a place."""
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start:place]
    return text[start:]


def _as_imaginary(match: re.Match[str]) -> str:
    """The unit as latex2sympy reads it: without brackets behind a letter, with them under a power."""
    if match.group().startswith("\\"):
        return match.group()
    return "(I)^" if match["power"] else " I "


def _as_fraction(match: re.Match[str]) -> str:
    value = Fraction(match[1])
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator != 1 else str(value.numerator)
