"""The values of a recipe as a tree with the place where each node was written, and the problems found in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Scalar = str | int | float | bool | None


def overlap(key: str, other: str) -> bool:
    """Whether two dotted keys are the same, or one lies below the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


@dataclass(frozen=True)
class Origin:
    """The place where a value was written. `order` sorts problems: the file from top to bottom, then the overrides."""

    place: str  # "sft.yaml:4:3" or "override 'optimizer.learning_rate=1e-4'"
    order: tuple[int, int, int] = (0, 0, 0)  # (0, line, column) of a file; (1, index of the override, 0)
    variables: tuple[str, ...] = ()  # names of the environment variables that the value came from
    default_of: str = ""  # "stage sft, an adapter trained": a default that follows from what stands at `place`

    @property
    def is_override(self) -> bool:
        """Whether the value comes from the command line."""
        return self.order[0] == 1

    def __str__(self) -> str:
        if self.default_of:
            return f"default of {self.default_of} ({self.place})"
        if not self.variables:
            return self.place
        return f"environment {', '.join(f'${name}' for name in self.variables)} ({self.place})"


@dataclass(frozen=True)
class Problem:
    """Something wrong at a dotted key ("" for the recipe as a whole).

    `reads` names the other keys that a rule looked at: when one of those is itself wrong, this problem is not shown.
    """

    key: str
    message: str
    origin: Origin | None = None
    reads: tuple[str, ...] = ()

    def line(self, place: str) -> str:
        """The line of an error message: `sft.yaml:4:3 adapter.rank: ...`; `place` stands in for a missing origin."""
        where = self.origin.place if self.origin is not None else place
        return f"{where} {self.key}: {self.message}" if self.key else f"{where}: {self.message}"


@dataclass
class Node:
    """A value and where it was written. Mappings hold nodes by key, lists hold nodes."""

    value: Scalar | dict[str, Node] | list[Node]
    origin: Origin
    key_origin: Origin | None = None  # of the key in front of the value, where its parent is a mapping

    @property
    def plain(self) -> Any:
        """The value without origins: dictionaries, lists and scalars, as JSON would hold it."""
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
        """The node at a dotted key, or its deepest ancestor that is there; and whether it is the key's own node."""
        node = self
        for part in key.split(".") if key else ():
            child = node.child(part)
            if child is None:
                return node, False
            node = child
        return node, True

    def walk(self, key: str = "") -> Iterator[tuple[str, Node]]:
        """Every node below this one with its dotted key, parents before their children, in the order of the file."""
        if isinstance(self.value, dict):
            entries = list(self.value.items())
        elif isinstance(self.value, list):
            entries = [(str(index), node) for index, node in enumerate(self.value)]
        else:
            entries = []
        for part, node in entries:
            child_key = f"{key}.{part}" if key else part
            yield child_key, node
            yield from node.walk(child_key)
