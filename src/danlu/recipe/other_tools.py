"""The keys of other tools: the recipe's key or the flag that does the same here, or the reason why there is none.

The rows are text files in `keys_of_other_tools/`, one a tool. Their columns are

    names | what danlu has | values | note

with one or several names, of which one that ends in `.*` covers all keys below it; a key of the recipe, a command
(`danlu train --resume`), `by itself` or `not there`; and how values become danlu's, where they mean something else. A
line `[rl]` begins rows that hold in one stage. `docs/scripts/keys_of_other_tools.py` compares them with the tools.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from danlu.recipe.sections import Recipe

BY_ITSELF, NOT_THERE = "by itself", "not there"
TITLES = {
    "llama-factory": "LLaMA-Factory",
    "trl": "TRL",
    "transformers": "transformers",
    "unsloth": "Unsloth",
    "axolotl": "Axolotl",
    "torchtune": "torchtune",
    "accelerate": "accelerate",
}
"""The tools as messages call them, in the order in which their keys are looked for."""
BASES = {
    "llama-factory": ("transformers",),
    "trl": ("transformers", "accelerate"),
    "axolotl": ("transformers",),
    "unsloth": ("trl", "transformers"),
}
"""The tools with keys that another one takes too: it inherits their classes of arguments."""
SAME, NOTHING, REFUSED = "same", "-", "!"
"""Results of a value: itself, nothing to write (danlu does so anyway), and a value that danlu does not have."""
KINDS = {"optimizer": "optim"}
"""Another name under which tools have the kind of a section."""
LIST, SUM, PRODUCT = "@list", "@sum", "@product"
"""A text with commas becomes a list; several keys of the tool together give the value."""


@dataclass(frozen=True)
class ForeignKey:
    """A key of another tool, and its equivalent."""

    tool: str
    name: str  # dotted, without the indices of lists; all keys below where it ends in `.*`
    stage: str  # the stage in which the row holds; "" for all
    target: str  # a key of the recipe, `danlu VERB --flag`, BY_ITSELF or NOT_THERE
    values: str
    note: str

    @property
    def is_key(self) -> bool:
        """Whether it has a key of the recipe as its equivalent."""
        return self.target not in (BY_ITSELF, NOT_THERE) and not self.is_command

    @property
    def is_command(self) -> bool:
        """Whether it has a flag, or a verb, of the command line as its equivalent."""
        return self.target.startswith("danlu ")

    @property
    def parts(self) -> tuple[str, list[str]]:
        """PRODUCT or SUM, and the tool's keys that together give the value; ("", []) for a key by itself."""
        kind, *names = self.values.split()[:1] + self.values.split()[1:] or [""]
        return (kind, names) if kind in (SUM, PRODUCT) else ("", [])

    def convert(self, value: Any, others: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """The recipe's keys and values for a value of this key; empty where there is nothing to write, as of a section,
        of which each key has a row of its own.

        others: the tool's other keys, for values that several of them give together; 1 (of a sum 0) where one is
        missing.

        Returns None for a value that danlu does not have.
        """
        if self.target == BY_ITSELF or self.is_command:
            return {}
        kind, names = self.parts
        if kind:
            numbers = [self._number((others or {}).get(name), int(kind == PRODUCT)) for name in names]
            return {self.target: _product(numbers) if kind == PRODUCT else sum(numbers)}
        for pattern, result in self._cases():
            if any(fnmatchcase(_as_text(value), each) for each in pattern.split()):
                written = self._written(result, value)
                return {} if written is None and self._is_section(value) else written
        return {self.target: value} if self.is_key else None

    def _is_section(self, value: Any) -> bool:
        """Whether a value is a mapping, or a list of such, with keys that have rows of their own."""
        entries = value if isinstance(value, list) else [value]
        return all(isinstance(each, dict) for each in entries) and self.name in _sections(self.tool)

    def _cases(self) -> Iterator[tuple[str, str]]:
        """Patterns of values with their results."""
        if self.values == LIST:
            yield "*", LIST
            return
        for case in filter(None, self.values.split("; ")):
            pattern, _, result = case.partition(": ")
            yield pattern, result

    def _written(self, result: str, value: Any) -> dict[str, Any] | None:
        """The keys that the result of a case names: the target's own first, others as `key=value`."""
        if result == REFUSED:
            return None
        keys: dict[str, Any] = {}
        for index, part in enumerate(result.split(", ")):
            key, equals, text = part.partition("=")
            key, text = (key, text) if equals else (self.target, part)
            assert equals or index == 0, f"{self.tool}: {self.name}: {result}"
            if text == LIST:
                keys[key] = [each.strip() for each in value.split(",")] if isinstance(value, str) else value
            elif text != NOTHING:
                keys[key] = value if text == SAME else _filled(yaml.safe_load(text), value)
        return keys

    @staticmethod
    def _number(value: Any, default: int) -> Any:
        return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _filled(result: Any, value: Any) -> Any:
    """A result in which `same` inside a mapping is the tool's value."""
    return (
        {name: value if each == SAME else each for name, each in result.items()} if isinstance(result, dict) else result
    )


def _product(numbers: list[Any]) -> Any:
    result = 1
    for number in numbers:
        result *= number
    return result


def _as_text(value: Any) -> str:
    """A value as patterns compare it: true, null, 0 for 0.0, a list without brackets."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return ",".join(_as_text(each) for each in value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) or "''"


@cache
def rows(tool: str) -> tuple[ForeignKey, ...]:
    """The rows of one tool's file, in order."""
    text = (files("danlu.recipe") / "keys_of_other_tools" / f"{tool}.txt").read_text(encoding="utf-8")
    listed, stage = [], ""
    for line in text.splitlines():
        if line.startswith("[") and line.endswith("]"):
            stage = line[1:-1]
        elif line and not line.startswith("#"):
            names, target, values, note = (*(part.strip() for part in line.split("|")), "", "")[:4]
            listed += [ForeignKey(tool, name, stage, target, values, note) for name in names.split()]
    return tuple(listed)


@cache
def _sections(tool: str) -> frozenset[str]:
    """The keys of a tool with keys below them that have rows."""
    return frozenset(row.name.rpartition(".")[0] for row in rows(tool))


@cache
def of_tool(tool: str, name: str, stage: str = "") -> ForeignKey | None:
    """The row for a dotted key of one tool, of its own file first and then of those that it inherits from.

    A row of this stage goes before one of all stages, a key before a pattern; without a stage the rows of all stages
    count. Returns None where there is no row.
    """
    for each in (tool, *BASES.get(tool, ())):
        matches = [row for row in rows(each) if _matches(row.name, name) and (not stage or row.stage in (stage, ""))]
        if matches:
            return max(matches, key=lambda row: (row.name == name, len(row.name), (row.stage == stage)))
    return None


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or (pattern.endswith(".*") and name.startswith(pattern[:-1]))


def find(name: str, stage: str = "") -> list[ForeignKey]:
    """The rows of a name as a user may write it (`lora-rank`, `--lora_rank`, `optimizer.lr`), one for each equivalent.

    A dotted name that no tool has is looked for by its last part, for a key that some tool has at the top. With a stage
    its rows go before those of all stages, and rows of other stages are left out where there are such.
    """
    wanted = name.lower().lstrip("-").replace("-", "_")
    section, _, last = wanted.rpartition(".")
    everything = [row for tool in TITLES for row in rows(tool)]
    matches = [row for row in everything if row.name.lower() == wanted]
    if not matches and section:
        matches = [row for row in everything if row.name.lower() == last and row.is_key]
    if not matches and section and section.partition(".")[0] not in Recipe.model_fields:
        matches = [row for row in everything if _matches(row.name.lower(), wanted)]
    if stage:
        matches = [row for row in matches if row.stage == stage] or [row for row in matches if not row.stage] or matches
    equivalents: dict[str, ForeignKey] = {}
    for row in sorted(matches, key=lambda row: (not row.is_key, not row.is_command, bool(row.stage))):
        equivalents.setdefault(row.target, row)
    return list(equivalents.values())


def advice(name: str, value: Any = None, stage: str = "", others: Mapping[str, Any] | None = None) -> str | None:
    """A sentence that leads from another tool's key to danlu's; None for a name that no tool has.

    value: the value that the user gave, if known; the sentence then says what to write, where that is something else.
    others: the other keys that the user gave, for values that several of them give together.
    """
    matches = find(name, stage)
    if not matches:
        return None
    keys = [row for row in matches if row.is_key]
    row, note = matches[0], f": {matches[0].note}" if matches[0].note else ""
    if len(keys) > 1:
        return f"danlu's keys for it are {_listed(keys)}"
    if row.is_command:
        return f"danlu has `{row.target}` for it{note}"
    if not row.is_key:
        return f"danlu {'does it by itself' if row.target == BY_ITSELF else 'does not have it'}{note}. Leave it out"
    how, (kind, _) = _how(row, value, others), row.parts
    has_note = row.note and (kind or ": write" not in how)
    return f"danlu's key for it is {row.target}{how}{f'. {row.note}' if has_note else ''}"


def value_lines(key: str, value: str | int) -> str | None:
    """The lines that a recipe has for a value that other tools take: `adapter: qlora`, `quantization: 4`.

    key: danlu's key, of a section for its kind. Values of keys that other tools call so go before those of other keys
    with the same equivalent, which must name the value and agree. Returns None for a value that no tool has, or that
    danlu has nothing for.
    """
    for tool in TITLES:
        for row in rows(tool):
            names_kind = row.name in (key, KINDS.get(key)) and row.target in (key, f"{key}.kind")
            if names_kind and (keys := row.convert(value)) and keys != {row.target: value}:
                return _assignments(keys)
    lines = {_assignments(keys) for keys in _conversions(key.removesuffix(".kind"), _as_text(value)) if keys}
    return lines.pop() if len(lines) == 1 else None


def _conversions(key: str, value: str) -> Iterator[dict[str, Any] | None]:
    """The results of a value, in whatever letters, in the rows with this equivalent that name it."""
    for row in (row for tool in TITLES for row in rows(tool) if row.target in (key, f"{key}.kind")):
        named = (word for pattern, _ in row._cases() for word in pattern.split())
        if (word := next((each for each in named if each.lower() == value.lower() != "*"), None)) is not None:
            yield row.convert(word)


def _listed(keys: list[ForeignKey]) -> str:
    """Several keys, each with the stage in which it holds, or the tool that calls it so."""
    unstaged = sum(not row.stage for row in keys)
    labels = [f"stage {row.stage}" if row.stage else TITLES[row.tool] if unstaged > 1 else "" for row in keys]
    listed = [f"{row.target} ({label})" if label else row.target for row, label in zip(keys, labels, strict=True)]
    return f"{', '.join(listed[:-1])} and {listed[-1]}"


def _such(names: list[str], keys: Mapping[str, Any], is_given: bool) -> list[str]:
    return [name for name in names if (name in keys) == is_given]


def _how(row: ForeignKey, value: Any, others: Mapping[str, Any] | None) -> str:
    """How danlu's key has its value, where it is another than the tool's."""
    kind, names = row.parts
    given, missing = (_such(names, others or {}, is_given) for is_given in (True, False))
    if kind == PRODUCT and given:
        number = _assignments(row.convert(value, others) or {})
        return f": write {number} ({' x '.join(given)})" + (f", times {' and '.join(missing)}" if missing else "")
    if kind:
        return f": {(' x ' if kind == PRODUCT else ' + ').join(names)}"
    if value is None or isinstance(value, dict):
        return ""
    keys = row.convert(value)
    if keys is None:
        return f", which takes other values than {_as_text(value)!r}"
    if not keys:
        return f", and {_as_text(value)} is what it does anyway: leave it out"
    if keys == {row.target: value}:
        return ""
    return f": write {_assignments(keys)}"


def _assignments(keys: Mapping[str, Any]) -> str:
    return " and ".join(f"{key}: {_as_yaml(value)}" for key, value in keys.items())


def _as_yaml(value: Any) -> str:
    """A value on one line, as a recipe has it."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_as_yaml(each)}' for key, each in value.items())}}}"
    return f"[{', '.join(map(_as_yaml, value))}]" if isinstance(value, list) else _as_text(value)
