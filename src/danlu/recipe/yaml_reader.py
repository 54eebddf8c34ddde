"""YAML text parsed into a tree of nodes that know their line and column.

PyYAML composes the text into nodes with marks; they become Python values here, for three reasons. Scalars follow YAML
1.2's core schema, because the older rules that PyYAML applies surprise: `2e-4` is a number here, `no` and `on` are
words, and `1:30` is a text. `${VAR}` or `${VAR:-default}` is replaced by the environment (`$${` writes a plain `${`).
And every problem is reported, not the first alone: duplicate keys, variables that are not set, tags.

ruamel.yaml, tried in its place (0.19, November 2026), reads YAML 1.2 by itself, which would save the table of
scalars. It stops at the first duplicate key, needs the same bounds on depth and size, reads dates, takes 9 ms instead
of 3 for a shipped recipe, and would be a dependency of danlu alone, where PyYAML comes with Hugging Face's libraries.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import yaml

from danlu.recipe.yaml_tree import Node, Origin, Problem

CORE = "tag:yaml.org,2002:"
"""The prefix of the tags of YAML's own types: `tag:yaml.org,2002:int`."""

# A recipe has some hundred values, four levels deep. What passes these bounds is another file, or was made to hang its
# reader: ten lines of aliases of aliases stand for 3e9 values ("billion laughs").
MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_LEVELS = 50
MAX_DIGITS = 100  # Python itself refuses more than 4,300

# (tag, what the whole scalar looks like, first characters that may begin it: PyYAML's table goes by those first).
SCALARS: list[tuple[str, re.Pattern[str], list[str]]] = [
    (f"{CORE}null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    (f"{CORE}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    (f"{CORE}int", re.compile(r"(?:[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)\Z"), list("-+0123456789")),
    (
        f"{CORE}float",
        re.compile(r"(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)\Z", re.I),
        list("-+.0123456789"),
    ),
]
# The value of a scalar's text by its tag; a ValueError where the text does not fit.
CONVERTERS: dict[str, Callable[[str], Any]] = {
    f"{CORE}str": str,
    f"{CORE}null": lambda text: None,
    f"{CORE}bool": lambda text: text.lower() == "true",
    f"{CORE}int": lambda text: int(text.replace("_", ""), 0 if text[:2] in ("0x", "0o") else 10),
    f"{CORE}float": lambda text: float(text.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan")),
}

VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\$\{")
_SURROGATE = re.compile("[\ud800-\udfff]")

_TOO_DEEP = f"nested more than {MAX_LEVELS} levels deep, and no key of a recipe lies below the sixth"
_TOO_MANY = f"more than {MAX_VALUES:,} values, with aliases written out. Name a folder instead of all its files"


class Loader(yaml.SafeLoader):
    """PyYAML's parser with the scalars above; only its nodes are used, never its constructors."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  as PyYAML declares it

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._levels = 0
        self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """PyYAML calls this once for each value; counting here stops before its recursion or the memory runs out."""
        mark = self.peek_event().start_mark
        self._values += 1
        self._levels += 1
        if self._levels > MAX_LEVELS:
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=mark)
        if self._values > MAX_VALUES:
            raise yaml.MarkedYAMLError(problem=_TOO_MANY, problem_mark=mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._levels -= 1


for _tag, _pattern, _first in SCALARS:
    Loader.add_implicit_resolver(_tag, _pattern, _first)


def parse(text: str, name: str, problems: list[Problem], *, override: int | None = None) -> Node | None:
    """Reads one YAML document. None if it cannot be read at all; smaller problems are added and reading goes on.

    Args:
        name: the name in origins: the file's path, or the override's text. problems: receives all problems. override:
            the index of the override with `text` as its value; None for a file.
    """
    reader = _Reader(name, problems, override, os.environ)
    if len(text) > MAX_BYTES:
        problems.append(Problem("", f"more than {MAX_BYTES >> 20} MiB, so this is no recipe", reader.whole))
        return None
    try:
        root = Loader(text).get_single_node()
        return Node(None, reader.whole) if root is None else reader.node(root, ())
    except yaml.reader.ReaderError as error:
        problems.append(Problem("", f"a character that YAML does not allow (code {error.character})", reader.whole))
    except yaml.MarkedYAMLError as error:
        problems.append(reader.syntax_problem(error))
    return None


class _Reader:
    """Turns PyYAML's nodes into ours and collects their problems."""

    def __init__(self, name: str, problems: list[Problem], override: int | None, environ: Mapping[str, str]) -> None:
        self.name = name
        self.problems = problems
        self.override = override
        self.environ = environ
        self.whole = Origin(name, (0, 0, 0) if override is None else (1, override, 0))
        self.ancestors: list[yaml.Node] = []  # of the node under way, to notice an alias of one of them
        self.values = 0  # an alias counts as all that it stands for, which the Loader's own count does not

    def origin(self, mark: yaml.Mark) -> Origin:
        """The place of a mark of PyYAML; for an override, the override as a whole."""
        if self.override is not None:
            return self.whole
        line, column = mark.line + 1, mark.column + 1
        return Origin(f"{self.name}:{line}:{column}", (0, line, column))

    def syntax_problem(self, error: yaml.MarkedYAMLError) -> Problem:
        """Returns PyYAML's error in terms of the written text rather than of its scanner."""
        mark = error.problem_mark or error.context_mark
        cause = error.problem or error.context or "it cannot be read"
        if r"'\t'" in cause:
            cause = "a tab: indent with spaces"
        elif "mapping values are not allowed" in cause:
            cause = "a second ': ' on this line: quote the value if the colon is part of it, or start a new line"
        elif "could not find expected ':'" in cause:
            cause = "a key without its ':'"
        elif "expected a single document" in str(error.context):
            cause = "a second document ('---'): a recipe is one"
        elif "expected ',' or" in cause:
            cause += " (inside { } and [ ], quote a value that holds ${VAR}, a comma or a bracket)"
        message = cause if cause in (_TOO_DEEP, _TOO_MANY) else f"not valid YAML: {cause}"
        return Problem("", message, self.whole if mark is None else self.origin(mark))

    def complain(self, path: tuple[str, ...], message: str, origin: Origin) -> None:
        """Adds a problem at a path of keys and indices."""
        self.problems.append(Problem(".".join(path), message, origin))

    def node(self, raw: yaml.Node, path: tuple[str, ...]) -> Node:
        """A value of PyYAML's tree as ours, with its aliases written out."""
        origin = self.origin(raw.start_mark)
        self.values += 1
        if self.values > MAX_VALUES:
            raise yaml.MarkedYAMLError(problem=_TOO_MANY, problem_mark=raw.start_mark)
        if any(raw is ancestor for ancestor in self.ancestors):
            self.complain(path, "an alias of a value that it is part of", origin)
            return Node(None, origin)
        self.ancestors.append(raw)
        try:
            if isinstance(raw, yaml.MappingNode):
                return Node(self.mapping(raw, path), origin)
            if isinstance(raw, yaml.SequenceNode):
                return Node([self.node(entry, (*path, str(i))) for i, entry in enumerate(raw.value)], origin)
            assert isinstance(raw, yaml.ScalarNode)
            return self.scalar(raw, path, origin)
        finally:
            self.ancestors.pop()

    def mapping(self, raw: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Node]:
        """The entries of a mapping; reports keys that are no text or occur twice, and leaves them out."""
        entries: dict[str, Node] = {}
        for key_node, value_node in raw.value:
            key_origin = self.origin(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                self.complain(path, "a key must be a word", key_origin)
                continue
            key = key_node.value
            if _SURROGATE.search(key):
                self.complain(path, f"the key {key[:60]!r} is not Unicode text. Write it in UTF-8", key_origin)
                continue
            if key in entries:
                first = entries[key].key_origin
                first_line = f", first on line {first.order[1]}" if first and self.override is None else ""
                self.complain((*path, key), f"given twice{first_line}. Keep one", key_origin)
                continue
            entries[key] = replace(self.node(value_node, (*path, key)), key_origin=key_origin)
        return entries

    def scalar(self, raw: yaml.ScalarNode, path: tuple[str, ...], origin: Origin) -> Node:
        """A scalar with its variables expanded, as the value that its tag and text say."""
        text, variables = self.expand_variables(raw.value, path, origin)
        tag = raw.tag
        if variables or text != raw.value:
            origin = replace(origin, variables=variables)
            if raw.style is None:  # written without quotes: ${STEPS} may stand for a number
                tag = _implicit_tag(text)
        if _SURROGATE.search(text):
            # Bytes of the command line or the environment that are no UTF-8 come as such characters too.
            self.complain(path, f"{text[:60]!r} is not Unicode text. Write it in UTF-8; rename a file so named", origin)
            return Node(None, origin)
        if tag == f"{CORE}int" and len(text) > MAX_DIGITS:
            self.complain(path, f"a number of {len(text):,} digits, and no key takes more than 19", origin)
            return Node(None, origin)
        try:
            return Node(CONVERTERS[tag](text), origin)
        except (KeyError, ValueError):  # `!!set`: not of the core schema; `!!int word`: does not fit its text
            self.complain(path, f"YAML tags such as '{tag.replace(CORE, '!!')}' are not used in a recipe", origin)
            return Node(None, origin)

    def expand_variables(self, text: str, path: tuple[str, ...], origin: Origin) -> tuple[str, tuple[str, ...]]:
        """The text with `${VAR}` replaced by the environment, and the names of the variables that it came from."""
        names: list[str] = []

        def value(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            name, default = match["name"], match["default"]
            if name is None:
                self.complain(path, "a '${' that names no variable. Write ${NAME}, or $${ for the text itself", origin)
                return match[0]
            if name in self.environ:
                names.append(name)
                return self.environ[name]
            if default is None:
                message = f"environment variable {name} is not set. Set it, or write ${{{name}:-default}}"
                self.complain(path, message, origin)
                return match[0]
            return default

        return VARIABLE.sub(value, text), tuple(dict.fromkeys(names))


def _implicit_tag(text: str) -> str:
    """The tag of a scalar written without quotes."""
    return next((tag for tag, pattern, _ in SCALARS if pattern.match(text)), f"{CORE}str")
