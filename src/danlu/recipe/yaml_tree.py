"""YAML text as a tree of nodes that know where they stand.

Scalars follow YAML 1.2's core schema, because the older rules that PyYAML applies surprise: `2e-4` is a number here,
`no` and `on` are words, and `1:30` is a text. Keys are not repeated, and `${VAR}` or `${VAR:-default}` is replaced by
the environment (`$${` writes a plain `${`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Origin:
    """Where a value was written. `order` sorts problems: the file from top to bottom, then the overrides."""

    place: str  # "sft.yaml:4:3" or "override 'optimizer.learning_rate=1e-4'"
    order: tuple[int, int, int] = (0, 0, 0)  # 0, line, column | 1, index of the override, 0
    variables: tuple[str, ...] = ()  # environment variables that the value came from

    @property
    def is_override(self) -> bool:
        return self.order[0] == 1

    def __str__(self) -> str:
        if not self.variables:
            return self.place
        return f"environment {', '.join(f'${name}' for name in self.variables)} ({self.place})"


@dataclass(frozen=True)
class Problem:
    """Something wrong at a dotted key ("" for the recipe as a whole).

    `reads` names other keys that the rule looked at: when one of those is itself wrong, this problem is not shown.
    """

    key: str
    message: str
    origin: Origin | None = None
    reads: tuple[str, ...] = ()


@dataclass
class Node:
    """A value and its place. Mappings hold nodes by key, lists hold nodes."""

    value: Scalar | dict[str, Node] | list[Node]
    origin: Origin
    key_origin: Origin | None = None  # of the key in front of it, in a mapping

    @property
    def plain(self) -> Any:
        """The value without places, as json would hold it."""
        if isinstance(self.value, dict):
            return {key: node.plain for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain for node in self.value]
        return self.value

    def child(self, part: str) -> Node | None:
        """The entry at one part of a dotted key: a key of a mapping, or an index of a list."""
        if isinstance(self.value, dict):
            return self.value.get(part)
        if isinstance(self.value, list) and part.isdecimal() and int(part) < len(self.value):
            return self.value[int(part)]
        return None

    def nearest(self, key: str) -> tuple[Node, bool]:
        """The node at a dotted key, or the deepest one on the way to it; and whether it is the key itself."""
        node = self
        for part in key.split(".") if key else ():
            child = node.child(part)
            if child is None:
                return node, False
            node = child
        return node, True

    def walk(self, key: str = "") -> Iterator[tuple[str, Node]]:
        """Every node below this one with its dotted key, in order."""
        if isinstance(self.value, dict):
            entries = list(self.value.items())
        elif isinstance(self.value, list):
            entries = [(str(index), node) for index, node in enumerate(self.value)]
        else:
            entries = []
        for part, node in entries:
            below = f"{key}.{part}" if key else part
            yield below, node
            yield from node.walk(below)


CORE = "tag:yaml.org,2002:"

# A recipe has some hundred values, four levels deep. What passes these bounds is another file, or was made to hang its
# reader: ten lines of aliases of aliases stand for 3e9 values ("billion laughs").
MAX_BYTES = 1 << 20
MOST_VALUES = 20_000
MOST_LEVELS = 50
MOST_DIGITS = 100  # Python itself refuses more than 4,300

# First characters that may begin a scalar of the type, for PyYAML's table; then what the whole scalar looks like.
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


class Loader(yaml.SafeLoader):
    """PyYAML's parser with the scalars above; only its nodes are used, never its constructors."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  as PyYAML declares it

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._levels = 0
        self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Each value of the file once, so that a bound ends the reading before Python's recursion or memory does."""
        mark = self.peek_event().start_mark
        self._values += 1
        self._levels += 1
        if self._levels > MOST_LEVELS:
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=mark)
        if self._values > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=_TOO_MANY, problem_mark=mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._levels -= 1


_TOO_DEEP = f"nested more than {MOST_LEVELS} levels deep, and no key of a recipe lies below the sixth"
_TOO_MANY = f"more than {MOST_VALUES:,} values, with aliases written out. Name a folder instead of all its files"


class Dumper(yaml.SafeDumper):
    """Writes texts that would read as something else in quotes, by the same table."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  as PyYAML declares it

    def text(self, value: str) -> yaml.Node:
        # Line ends of other alphabets come back from single quotes as a newline; double quotes write them as escapes.
        style = '"' if _ODD_LINE_END.search(value) else None
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)


Dumper.add_representer(str, Dumper.text)
_ODD_LINE_END = re.compile("[\x85\u2028\u2029]")


for _tag, _pattern, _first in SCALARS:
    Loader.add_implicit_resolver(_tag, _pattern, _first)
    Dumper.add_implicit_resolver(_tag, _pattern, _first)

VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\$\{")


def parse(text: str, name: str, problems: list[Problem], *, override: int | None = None) -> Node | None:
    """Read one YAML document. None if it cannot be read at all; smaller problems are added and reading goes on.

    Args: `name` is what places are called: the file's path, or the override's text when `override` is its index.
    """
    reader = _Reader(name, problems, override, os.environ)
    if len(text) > MAX_BYTES:
        problems.append(Problem("", f"more than {MAX_BYTES >> 20} MiB, so this is no recipe", reader.whole))
        return None
    try:
        loader = Loader(text)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        problems.append(Problem("", f"a character that YAML does not allow (code {error.character})", reader.whole))
        return None
    except yaml.MarkedYAMLError as error:
        problems.append(reader.syntax_problem(error))
        return None
    if root is None:
        return Node(None, reader.whole)
    try:
        return reader.node(root, ())
    except yaml.MarkedYAMLError as error:
        problems.append(reader.syntax_problem(error))
        return None


class _Reader:
    def __init__(self, name: str, problems: list[Problem], override: int | None, environ: Mapping[str, str]) -> None:
        self.name = name
        self.problems = problems
        self.override = override
        self.environ = environ
        self.whole = Origin(name, (0, 0, 0) if override is None else (1, override, 0))
        self.open: list[yaml.Node] = []  # nodes on the way down, to notice an alias of a parent
        self.values = 0  # an alias counts as all that it stands for

    def origin(self, mark: yaml.Mark) -> Origin:
        if self.override is not None:
            return self.whole
        line, column = mark.line + 1, mark.column + 1
        return Origin(f"{self.name}:{line}:{column}", (0, line, column))

    def syntax_problem(self, error: yaml.MarkedYAMLError) -> Problem:
        mark = error.problem_mark or error.context_mark
        said = error.problem or error.context or "it cannot be read"
        if r"'\t'" in said:
            said = "a tab: indent with spaces"
        elif "mapping values are not allowed" in said:
            said = "a second ': ' on this line: quote the value if the colon is part of it, or start a new line"
        elif "could not find expected ':'" in said:
            said = "a key without its ':'"
        elif "expected a single document" in str(error.context):
            said = "a second document ('---'): a recipe is one"
        elif "expected ',' or" in said:
            said += " (inside { } and [ ], quote a value that holds ${VAR}, a comma or a bracket)"
        told = said if said in (_TOO_DEEP, _TOO_MANY) else f"not valid YAML: {said}"
        return Problem("", told, self.whole if mark is None else self.origin(mark))

    def complain(self, path: tuple[str, ...], message: str, origin: Origin) -> None:
        self.problems.append(Problem(".".join(path), message, origin))

    def node(self, raw: yaml.Node, path: tuple[str, ...]) -> Node:
        origin = self.origin(raw.start_mark)
        self.values += 1
        if self.values > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=_TOO_MANY, problem_mark=raw.start_mark)
        if any(raw is parent for parent in self.open):
            self.complain(path, "an alias of a value that it is part of", origin)
            return Node(None, origin)
        self.open.append(raw)
        try:
            if isinstance(raw, yaml.MappingNode):
                return Node(self.mapping(raw, path), origin)
            if isinstance(raw, yaml.SequenceNode):
                return Node([self.node(item, (*path, str(i))) for i, item in enumerate(raw.value)], origin)
            assert isinstance(raw, yaml.ScalarNode)
            return self.scalar(raw, path, origin)
        finally:
            self.open.pop()

    def mapping(self, raw: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Node]:
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
                before = f", first on line {first.order[1]}" if first and self.override is None else ""
                self.complain((*path, key), f"given twice{before}. Keep one", key_origin)
                continue
            entries[key] = replace(self.node(value_node, (*path, key)), key_origin=key_origin)
        return entries

    def scalar(self, raw: yaml.ScalarNode, path: tuple[str, ...], origin: Origin) -> Node:
        text, names = self.expand(raw.value, path, origin)
        tag = raw.tag
        if names or text != raw.value:
            origin = replace(origin, variables=names)
            if raw.style is None:  # written without quotes: ${STEPS} may stand for a number
                tag = _implicit_tag(text)
        if _SURROGATE.search(text):
            # Bytes of the command line or the environment that are no UTF-8 come as such characters too.
            self.complain(path, f"{text[:60]!r} is not Unicode text. Write it in UTF-8; rename a file so named", origin)
            return Node(None, origin)
        if tag == f"{CORE}int" and len(text) > MOST_DIGITS:
            self.complain(path, f"a number of {len(text):,} digits, and no key takes more than 19", origin)
            return Node(None, origin)
        value = _convert(tag.removeprefix(CORE), text)
        if value is _UNREADABLE:
            self.complain(path, f"YAML tags such as '{tag.replace(CORE, '!!')}' are not used in a recipe", origin)
            value = None
        return Node(value, origin)

    def expand(self, text: str, path: tuple[str, ...], origin: Origin) -> tuple[str, tuple[str, ...]]:
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


_UNREADABLE: Any = object()
_SURROGATE = re.compile("[\ud800-\udfff]")


def _implicit_tag(text: str) -> str:
    for tag, pattern, _ in SCALARS:
        if pattern.match(text):
            return tag
    return f"{CORE}str"


def _convert(tag: str, text: str) -> Any:
    if tag == "str":
        return text
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    try:
        if tag == "int":
            return int(text.replace("_", ""), 0 if text[:2] in ("0x", "0o") else 10)
        if tag == "float":
            return float(text.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:  # `!!int word`: a tag that does not fit its text
        return _UNREADABLE
    return _UNREADABLE
