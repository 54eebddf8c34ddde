r"""Mathematical answers as values: LaTeX or plain notation is parsed, and two expressions are equal where they agree.

Equality of formulas with variables is tested by evaluating both at fixed random complex points (Schwartz 1980, Zippel
1979): 2(x+1) and 2x+2 agree everywhere, and two that differ agree at all points with a chance of nearly 0. Nothing of
the text is ever executed.

    expression = term (("+" | "-" | "\pm") term)*
    term       = factor (("*" | "/" | "\cdot" | "\times" | "\div" | nothing) factor)*
    factor     = ("-" | "+") factor | postfix ("^" factor)?
    postfix    = atom ("!" | "%" | "^\circ")*
    atom       = number | variable | constant | function atom | "(" expression ")" | "{" expression "}"
               | "|" expression "|" | "\frac" group group | "\sqrt" ("[" expression "]")? group
"""

from __future__ import annotations

import cmath
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TOLERANCE = 1e-9
"""Relative: two values that differ by less are equal. Text is parsed into double precision, so rounding is far less."""
LONGEST_TEXT = 2000
"""Characters; longer ones are no answer that can be read as a formula."""
MOST_TOKENS = 400
"""Numbers, names and signs; a formula's value is computed by as many nested calls at most."""
DEEPEST_NESTING = 60
LARGEST_FACTORIAL = 170
"""170! is the last that a float64 holds."""

Value = Callable[[Mapping[str, complex]], complex]


@dataclass(frozen=True)
class Expression:
    """A parsed formula: its value at given variables, and which they are."""

    value: Value
    variables: frozenset[str]


class NotMathematics(ValueError):
    """The text is no formula that can be read; the message says where it stops being one."""


FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "cot": lambda z: 1 / cmath.tan(z),
    "sec": lambda z: 1 / cmath.cos(z),
    "csc": lambda z: 1 / cmath.sin(z),
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "ln": cmath.log,
    "log": lambda z: cmath.log(z) / math.log(10),
    "exp": cmath.exp,
    "sqrt": cmath.sqrt,
}
CONSTANTS = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j, "infty": complex(math.inf)}
TIMES = {"*", "cdot", "times", "·", "×"}
OVER = {"/", "div", "÷"}
FRACTIONS = {"frac", "dfrac", "tfrac", "cfrac"}
# Commands that only change how a formula looks, and those whose argument is words.
SILENT = {"left", "right", "displaystyle", "textstyle", "limits", "quad", "qquad", "big", "Big", "bigl", "bigr"}
TEXT_COMMANDS = {"text", "textbf", "textit", "mathrm", "mbox", "operatorname", "mathbf"}

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?|\.\d+)
      | \\(?P<command>[A-Za-z]+)
      | (?P<name>[A-Za-z])
      | (?P<sign>\\[{}%$!,;: ]|\*\*|[-+*/^(){}\[\]|!%_=<>,;:·×÷−∞π√°$])
    )""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class _Token:
    kind: str  # number, command, name or sign
    text: str
    start: int


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Expression:
    """The formula that a text is. Raises NotMathematics where it is none."""
    if len(text) > LONGEST_TEXT:
        raise NotMathematics(f"{len(text)} characters: at most {LONGEST_TEXT} are read as a formula")
    tokens = _tokens(text)
    if len(tokens) > MOST_TOKENS:
        raise NotMathematics(f"{len(tokens)} numbers and signs: at most {MOST_TOKENS} are read as a formula")
    parser = _Parser(tokens)
    value = parser.expression(0)
    parser.end()
    return Expression(value, frozenset(parser.variables))


def equal(left: Expression, right: Expression) -> bool:
    """Whether two formulas have the same value wherever they are evaluated."""
    names = sorted(left.variables | right.variables)
    compared = 0
    for number in range(6 if names else 1):
        point = {name: _POINTS[(number * 7 + index) % len(_POINTS)] for index, name in enumerate(names)}
        try:
            values = left.value(point), right.value(point)
        except (ArithmeticError, ValueError, OverflowError):
            continue  # a pole: another point will do
        if not near(*values):
            return False
        compared += 1
    return compared > 0


def near(left: complex, right: complex) -> bool:
    """Whether two values agree to `TOLERANCE`; infinities agree where their signs do."""
    if not (cmath.isfinite(left) and cmath.isfinite(right)):
        return left == right
    try:
        return abs(left - right) <= TOLERANCE * max(1.0, abs(left), abs(right))
    except OverflowError:  # both parts are near the end of float64
        return left == right


# Off the real line and the unit circle, so that roots and logarithms of different forms do not agree by accident.
_POINTS = tuple(complex(0.61 + 0.173 * n % 1.9, 0.27 + 0.311 * n % 1.3) for n in range(1, 24))


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    place = 0
    text = text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise NotMathematics(f"character {place + 1}, {text[place]!r}, is not mathematics")
        kind = match.lastgroup or ""
        tokens.append(_Token(kind, match.group(kind), match.start(kind)))
        place = match.end()
    return [plain for token in tokens if (plain := _plain(token)) is not None]


def _plain(token: _Token) -> _Token | None:
    """A token in the spelling that the parser knows; None for one that only changes how a formula looks."""
    if token.kind == "command" and token.text in SILENT:
        return None
    if token.kind == "sign":
        spelled = {"−": "-", "**": "^", "\\{": "{", "\\}": "}", "\\%": "%"}.get(token.text, token.text)
        if spelled in ("$", "\\$", "\\!", "\\,", "\\;", "\\:", "\\ "):
            return None
        if spelled in ("π", "∞", "√", "°"):
            return _Token("command", {"π": "pi", "∞": "infty", "√": "sqrt", "°": "circ"}[spelled], token.start)
        return _Token("sign", spelled, token.start)
    return token


class _Parser:
    """Recursive descent over the grammar above; each method returns a function of the variables."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._next = 0
        self.variables: set[str] = set()

    def expression(self, depth: int) -> Value:
        value = self._term(depth)
        while (sign := self._sign("+", "-")) is not None:
            value = _combined(value, self._term(depth), sign)
        return value

    def end(self) -> None:
        if (token := self._peek()) is not None:
            raise NotMathematics(f"character {token.start + 1}: {token.text!r} is not expected here")

    def _term(self, depth: int) -> Value:
        value = self._factor(depth)
        while (token := self._peek()) is not None:
            if token.text in TIMES and token.kind != "name":
                self._next += 1
                value = _combined(value, self._factor(depth), "*")
            elif token.text in OVER and token.kind != "name":
                self._next += 1
                value = _combined(value, self._factor(depth), "/")
            elif token.kind in ("name", "command") or (token.kind == "sign" and token.text in ("(", "{", "|")):
                if token.text == "|" or token.text == "circ":
                    return value
                value = _combined(value, self._factor(depth), "*")  # 2x, 3(x + 1)
            elif token.kind == "number":
                raise NotMathematics(f"character {token.start + 1}: a number right behind another value")
            else:
                return value
        return value

    def _factor(self, depth: int) -> Value:
        _check_depth(depth)
        if (sign := self._sign("-", "+")) is not None:
            inner = self._factor(depth + 1)
            return inner if sign == "+" else (lambda point: -inner(point))
        base = self._postfix(depth)
        if self._sign("^") is None:
            return base
        token = self._peek()
        if token is not None and token.text == "circ":  # degrees
            self._next += 1
            return base
        exponent = self._factor(depth + 1)
        return _combined(base, exponent, "^")

    def _postfix(self, depth: int) -> Value:
        value = self._atom(depth)
        while (sign := self._sign("!", "%")) is not None:
            value = _factorial_of(value) if sign == "!" else _percent_of(value)
        return value

    def _atom(self, depth: int) -> Value:
        _check_depth(depth)
        token = self._take()
        if token.kind == "number":
            number = complex(float(token.text.replace(",", "")))
            return lambda point: number
        if token.kind == "name":
            return self._variable(token)
        if token.kind == "command":
            return self._command(token, depth)
        closing = {"(": ")", "{": "}", "|": "|"}.get(token.text)
        if closing is None:
            raise NotMathematics(f"character {token.start + 1}: {token.text!r} where a value is expected")
        inner = self.expression(depth + 1)
        self._expect(closing)
        return (lambda point: complex(abs(inner(point)))) if closing == "|" else inner

    def _variable(self, token: _Token) -> Value:
        if token.text in CONSTANTS:
            constant = CONSTANTS[token.text]
            return lambda point: constant
        name = token.text
        if self._sign("_") is not None:  # x_1, x_{12}
            name += "_" + self._subscript()
        self.variables.add(name)
        return lambda point: point[name]

    def _subscript(self) -> str:
        token = self._take()
        if token.text != "{":
            return token.text
        parts = []
        while (token := self._take()).text != "}":
            parts.append(token.text)
        return "".join(parts)

    def _command(self, token: _Token, depth: int) -> Value:
        name = token.text
        if name in CONSTANTS:
            constant = CONSTANTS[name]
            return lambda point: constant
        if name in FRACTIONS:
            above, below = self._group(depth), self._group(depth)
            return _combined(above, below, "/")
        if name == "sqrt" and self._sign("[") is not None:
            index = self.expression(depth + 1)
            self._expect("]")
            inner = self._group(depth)
            return lambda point: inner(point) ** (1 / index(point))
        if name in FUNCTIONS:
            function = FUNCTIONS[name]
            power = self._factor(depth + 1) if self._sign("^") is not None else None  # sin^2 x
            argument = self._group(depth) if self._opens() else self._factor(depth + 1)
            if power is None:
                return lambda point: function(argument(point))
            return lambda point: function(argument(point)) ** power(point)
        if len(name) > 1 and name not in TEXT_COMMANDS:  # a Greek letter, or another name
            self.variables.add(name)
            return lambda point: point[name]
        raise NotMathematics(f"character {token.start}: \\{name} is not known")

    def _group(self, depth: int) -> Value:
        """What a command takes: a group, or one digit or name as in \\frac12."""
        token = self._peek()
        if token is not None and token.kind == "number" and len(token.text) > 1 and token.text.isdecimal():
            rest = _Token("number", token.text[1:], token.start + 1)
            self._tokens = [*self._tokens[: self._next], rest, *self._tokens[self._next + 1 :]]
            digit = complex(float(token.text[0]))
            return lambda point: digit
        return self._atom(depth + 1)

    def _opens(self) -> bool:
        token = self._peek()
        return token is not None and token.text in ("(", "{")

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self) -> _Token:
        token = self._peek()
        if token is None:
            raise NotMathematics("it ends where a value is expected")
        self._next += 1
        return token

    def _sign(self, *signs: str) -> str | None:
        token = self._peek()
        if token is None or token.kind != "sign" or token.text not in signs:
            return None
        self._next += 1
        return token.text

    def _expect(self, sign: str) -> None:
        if self._sign(sign) is None:
            token = self._peek()
            present = "the end" if token is None else repr(token.text)
            raise NotMathematics(f"{sign!r} is expected, and {present} is there")


def _check_depth(depth: int) -> None:
    """Raises NotMathematics where groups, signs and powers are nested too deep to go on."""
    if depth > DEEPEST_NESTING:
        raise NotMathematics(f"nested more than {DEEPEST_NESTING} deep")


def _combined(left: Value, right: Value, sign: str) -> Value:
    match sign:
        case "+":
            return lambda point: left(point) + right(point)
        case "-":
            return lambda point: left(point) - right(point)
        case "*":
            return lambda point: left(point) * right(point)
        case "/":
            return lambda point: left(point) / right(point)
        case _:
            return lambda point: _power(left(point), right(point))


def _power(base: complex, exponent: complex) -> complex:
    if abs(exponent) * math.log10(max(abs(base), 1e-300)) > 300 if base else False:
        raise OverflowError("a power that no float64 holds")
    return base**exponent


def _percent_of(value: Value) -> Value:
    return lambda point: value(point) / 100


def _factorial_of(value: Value) -> Value:
    return lambda point: _factorial(value(point))


def _factorial(value: complex) -> complex:
    number = round(value.real)
    if value.imag or abs(value.real - number) > TOLERANCE or not 0 <= number <= LARGEST_FACTORIAL:
        raise ValueError("factorials are of whole numbers")
    return complex(math.factorial(number))
