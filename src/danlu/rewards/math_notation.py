r"""One notation for mathematics that is written in LaTeX, in Unicode or plainly: `\dfrac`, `½`, `sqrt(2)`, `\text{or}`.

Nothing is decided here; texts that mean the same need not become the same, but no two that differ become equal. Every
pattern is linear in the length of a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

FUNCTIONS = (
    *("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc"),
    *("log", "ln", "exp", "gcd", "min", "max"),
)
GREEK = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa"),
    *("lambda", "mu", "nu", "xi", "pi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega"),
)
NO_SOLUTION = ("no solution", "no solutions", "no real solution", "no real solutions", "does not exist", "dne")

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": r"\div ",
        "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ",
        "∈": r"\in ", "±": r"\pm ", "≈": r"\approx ", "∅": r"\emptyset ", "°": r"^\circ ", "√": r"\sqrt ",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "²": "^2", "³": "^3", "’": "'", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "％": "%", "，": ",",
        "θ": r"\theta ",
    }
)  # fmt: skip
_WRAPPINGS = (
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"),
    ("__", "__"), ("_", "_"), ("*", "*"), ('"', '"'), ("'", "'"), ("\u201c", "\u201d"),
)  # fmt: skip
_SIZES = re.compile(r"\\(?:left|right|big|Big|bigl|bigr|Bigl|Bigr|bigg|Bigg|mleft|mright)(?![A-Za-z])\s*+\.?")
_LOOKS = re.compile(r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits)(?![A-Za-z])")
_SPACES = re.compile(
    r"(?<!\\)\\(?:[,;: ]|quad(?![A-Za-z])|qquad(?![A-Za-z])|enspace(?![A-Za-z])|thinspace(?![A-Za-z]))|~"
)
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal|sf|tt|up)?|mathrm|mathbf|mathit|mathsf|mbox|hbox)\s*+\{([^{}]*+)\}")
_STARTS = re.compile(r"(?:^|[,;(]|\\\{|(?:and|or)[\s}])\s*+$")
_ENDS = re.compile(r"\s*+(?:$|[,;)]|\\\}|(?:\\text\{\s*+)?(?:and|or)(?![A-Za-z]))")
_SYNONYMS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"[(\[]\s*+\\begin\{array\}\{[^{}]*+\}(.*?)\\end\{array\}\s*+[)\]]", r"\\begin{pmatrix}\1\\end{pmatrix}"),
        (r"\\(?:leq|leqslant)(?![A-Za-z])|<=|=<", r"\\le "),
        (r"\\(?:geq|geqslant)(?![A-Za-z])|>=|=>", r"\\ge "),
        (r"\\(?:neq)(?![A-Za-z])|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:lvert|rvert|vert)(?![A-Za-z])", "|"),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\(?:varnothing)(?![A-Za-z])|\\\{\s*+\\\}", r"\\emptyset "),
        (r"\\bold(?:symbol)?(?![A-Za-z])", ""),
        (r"\\mathbb\s*+\{?\s*+R\s*+\}?|ℝ|all real numbers|all reals", r"(-\\infty,\\infty)"),
        (r"\\%", "%"),
        (r"\\\$", "$"),
        (r"\\#", "#"),
        (r"\*\*", "^"),
        (r"\^\s*+\{\s*+\\circ\s*+\}|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (rf"(?<![\\A-Za-z])({'|'.join(FUNCTIONS)})(?=\s*+[\\({{^_]|\s++[A-Za-z0-9])(?![A-Za-z])", r"\\\1"),
        (rf"(?<![\\A-Za-z])({'|'.join(GREEK)})(?![A-Za-z])", r"\\\1 "),
        (r"\b([ap])\.\s?m\.?(?![A-Za-z])", r"\1m"),
        (r"(?<=:\d\d)\s*+A\.?M\.?(?![A-Za-z])", " am"),
        (r"(?<=:\d\d)\s*+P\.?M\.?(?![A-Za-z])", " pm"),
        (r"(?<![\d.,])\.(?=\d)", "0."),
        (r"(?<=\d)\.(?!\d)(?=\s*+(?:$|[^\s\d.\\]))", ""),
        (r"\^\s*+(-?\d++)", r"^{\1}"),
        (r"\^\s*+\(([^()]*+)\)", r"^{\1}"),
        (r"_\s*+(\d++(?=\s)|\d\d++)", r"_{\1}"),
        (r"(?<=\d)\s*+o'clock(?![A-Za-z])", ""),
        (r"(?<=\d)(?:st|nd|rd|th)(?![A-Za-z])|(?<=\d)\s*+\^\s*+\{\s*+(?:st|nd|rd|th)\s*+\}", ""),
        (r"(?<=[\d}])\s*+\(\s*+([A-Za-z]{2,}[A-Za-z\s]*+)\)$", r" \1"),
        (r"(?<=\d)\s++to\s++(?=\d)", ":"),
        (r"^(?:about|approximately|around|roughly)\s++(?=[\d$\\])", ""),
        (r"\\frac\s*+(\d)\s*+(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*+([A-Za-z])\s*+([A-Za-z0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*+(\d)\s*+([A-Za-z]|\{)", r"\\frac{\1}\2"),
        (r"\\sqrt\s*+(\d++|[A-Za-z])", r"\\sqrt{\1}"),
    )
)
_BRACED_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*+\(|\\sqrt\s*+\(")


def plain(text: str) -> str:
    """Returns the text in the one notation, without its frame: dollar signs, emphasis, a full stop."""
    text = unwrapped(text).translate(_UNICODE).replace("{,}", ",").replace("{:}", ":")
    text = re.sub(r"(?<=,)\s*+\\!\s*+", "", text).replace(r"\!", "")
    text = _SPACES.sub(" ", _LOOKS.sub("", _SIZES.sub("", text)))
    text = _TEXT.sub(_short_word, text)
    for _ in range(3):  # \text{\textbf{...}}
        text = _TEXT.sub(r" \1 ", text)
    for pattern, new in _SYNONYMS:
        text = pattern.sub(new, text)
    return " ".join(_with_braced_roots(text).split())


def _short_word(match: re.Match[str]) -> str:
    r"""A \text that stands alone and has a word of three letters: with a capital, for it is no product of letters."""
    text, word = match.string, match[1].strip()
    is_word = len(word) == 3 and word.isalpha() and word.islower() and word not in FUNCTIONS and word not in GREEK
    stands_alone = _STARTS.search(text[max(0, match.start() - 8) : match.start()]) if match.start() else True
    return f" {word.capitalize()} " if is_word and stands_alone and _ENDS.match(text, match.end()) else match.group()


def unwrapped(text: str) -> str:
    r"""Returns the text without marks that frame all of it: `$...$`, `\(...\)`, `**...**`, `\boxed{...}`, a full stop
    behind it.
    """
    for _ in range(6):
        before = text
        text = (
            text.strip().rstrip(".,;:。").strip() if not text.rstrip().endswith((r"\!", r"\,", r"\;", r"\:")) else text
        )
        for opening, closing in _WRAPPINGS:
            inner = text[len(opening) : len(text) - len(closing)]
            is_framed = len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing)
            if is_framed and opening not in inner and closing not in inner:
                text = inner
        if text.startswith((r"\boxed{", r"\fbox{")) and closes_at_end(text, text.index("{")):
            text = text[text.index("{") + 1 : -1]
        if text == before:
            break
    return text


def compact(text: str) -> str:
    """Returns one form for texts in the one notation that differ by spaces and needless braces alone."""
    text = re.sub(r"(\\[A-Za-z]++)\s++(?=[A-Za-z])", "\\1\0", text)  # \pi r is no \pir
    text = re.sub(r"(?<=\d)\s++(?=\d)|(?<=\d,)\s++(?=\d{3}(?!\d))", "\0", text)  # 1 2 is no 12
    text = re.sub(r"\s++", "", text).replace("\0", " ")
    return re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)


def closes_at_end(text: str, start: int) -> bool:
    """Whether the bracket at `start` is closed by the last character."""
    depth = 0
    for place in range(start, len(text)):
        character = text[place]
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False


def nesting(text: str) -> int:
    """How deep brackets lie in one another."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def split_top(text: str, separator: re.Pattern[str], keep: Callable[[str, int], bool] | None = None) -> list[str]:
    r"""The parts between separators that stand in no bracket and in no \begin...\end.

    keep: whether a separator at a place of the text is none after all.
    """
    depth, start, parts = 0, 0, list[str]()
    ends = {match.start(): match.end() for match in separator.finditer(text)}
    place = 0
    while place < len(text):
        if depth == 0 and place in ends and not (keep is not None and keep(text, place)):
            parts.append(text[start:place])
            start = place = ends[place]
            continue
        if text.startswith((r"\begin", r"\end"), place):
            depth += 1 if text.startswith(r"\begin", place) else -1
        depth += (text[place] in "([{") - (text[place] in ")]}")
        place += 1
    return [*parts, text[start:]]


def _with_braced_roots(text: str) -> str:
    r"""sqrt(2) as \sqrt{2}."""
    for _ in range(8):
        match = _BRACED_ROOT.search(text)
        if match is None:
            return text
        depth, end = 0, None
        for place in range(match.end() - 1, len(text)):
            depth += (text[place] == "(") - (text[place] == ")")
            if depth == 0:
                end = place
                break
        if end is None:
            return text
        text = text[: match.start()] + r"\sqrt{" + text[match.end() : end] + "}" + text[end + 1 :]
    return text
