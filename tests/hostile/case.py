"""One bad input: how it is made, the command line that meets it, and what must come of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from builders.tiny_world import World, write_rows


@dataclass(frozen=True)
class Place:
    """Where a case is made: an empty folder, which is the working directory, and a world to take good parts from."""

    tmp: Path
    world: World

    def said(self, text: str) -> str:
        """`@` stands for the folder, `@base` for a model, `@tokenizer`, `@chat`, `@text` for the world's files."""
        for name in ("base", "tokenizer", "chat", "text"):
            if f"@{name}" in text:  # making the base takes a moment
                text = text.replace(f"@{name}", str(getattr(self.world, name)))
        return text.replace("@", str(self.tmp))

    def recipe(self, name: str = "r.yaml", **changes: Any) -> None:
        """A recipe that trains, with these changes laid over it."""
        output = changes.pop("output", "@/run")
        values = self.world.values(self.tmp / "run", **_replaced(changes, self))
        values = {**values, "output": _replaced(output, self)} if output is not None else _without_output(values)
        (self.tmp / name).write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")

    def rows(self, *rows: object, name: str = "rows.jsonl") -> None:
        """JSON lines; a text stands in its line as it is."""
        write_rows(self.tmp / name, rows)


def _without_output(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "output"}


def _replaced(value: Any, place: Place) -> Any:
    if isinstance(value, str):
        return place.said(value)
    if isinstance(value, Mapping):
        return {key: _replaced(one, place) for key, one in value.items()}
    return [_replaced(one, place) for one in value] if isinstance(value, list) else value


Arrange = Callable[[Place], None]


def nothing(place: Place) -> None:
    """The world is good as it is."""


@dataclass(frozen=True)
class Case:
    """A bad input.

    Attributes:
        arguments  the command line; `@` as in `Place.said`
        says       fragments of what stderr is told (or stdout, of a verb that reports there), `@` as above; together
                   they name what is wrong and where
        arrange    makes the input
        most_calls Python functions, and those in C that Python calls, until it is told
        max_bytes read until it is told
        on_stdout  whether it is the report of a verb that looks for faults, not an error of it
        environ    variables to set, or with None to unset
    """

    name: str
    arguments: tuple[str, ...]
    exit_code: int
    says: tuple[str, ...]
    arrange: Arrange = nothing
    most_calls: int = 1_000_000
    max_bytes: int = 20 << 20
    on_stdout: bool = False
    environ: Mapping[str, str | None] = field(default_factory=dict)


def recipe(**changes: Any) -> Arrange:
    """Arranges `r.yaml`: a recipe that trains, with these changes."""
    return lambda place: place.recipe(**changes)


def text(content: str | bytes, name: str = "r.yaml") -> Arrange:
    """Arranges a file of this content, in which `@` is replaced as in `Place.said`."""

    def arrange(place: Place) -> None:
        if isinstance(content, bytes):
            (place.tmp / name).write_bytes(content)
        else:
            (place.tmp / name).write_text(place.said(content), encoding="utf-8")

    return arrange


def rows(*lines: object, name: str = "rows.jsonl", **changes: Any) -> Arrange:
    """Arranges a file of rows and a recipe that trains on it."""

    def arrange(place: Place) -> None:
        place.rows(*lines, name=name)
        data = {"train": f"@/{name}", "cache": "@/cache", **changes.pop("data", {})}
        place.recipe(data=data, **changes)

    return arrange


def file_of_rows(content: str | bytes, name: str = "rows.jsonl", **changes: Any) -> Arrange:
    """Arranges a file with this content, whatever it is, and a recipe that trains on it."""

    def arrange(place: Place) -> None:
        text(content, name)(place)
        place.recipe(data={"train": f"@/{name}", "cache": "@/cache", **changes.get("data", {})})

    return arrange


def folder_of(*, source: str, name: str, changed: Callable[[Path], None]) -> Arrange:
    """Arranges a copy of the world's model (`base`) or tokenizer, spoilt by `changed`."""
    import shutil

    def arrange(place: Place) -> None:
        shutil.copytree(getattr(place.world, source), place.tmp / name)
        changed(place.tmp / name)

    return arrange


def both(*parts: Arrange) -> Arrange:
    """Arranges one after the other."""

    def arrange(place: Place) -> None:
        for part in parts:
            part(place)

    return arrange


def json_with(file: Path, **changes: Any) -> None:
    """Changes keys of a JSON file; None takes one out."""
    values = {**json.loads(file.read_text(encoding="utf-8")), **changes}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}), encoding="utf-8")
