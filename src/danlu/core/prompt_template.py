"""Templates of prompts: `"{Body} {Question}"` names columns of a row, and `{{`, `}}` are braces. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PARTS = re.compile(r"(?P<text>[^{}]+)|\{\{|\}\}|\{(?P<name>[^{}]*)\}|(?P<stray>[{}])")


class PromptTemplateError(ValueError):
    """A template that cannot be read, or a row that lacks a column that it names. The message says which."""


@dataclass(frozen=True)
class PromptTemplate:
    """A template as its texts and the columns between them: column i stands between text i and text i + 1."""

    texts: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, template: str) -> PromptTemplate:
        """Reads a template. Raises PromptTemplateError for braces without a partner or without a name."""
        texts, columns = [""], []
        for part in _PARTS.finditer(template):
            if part["stray"] is not None:
                brace = part["stray"]
                raise PromptTemplateError(
                    f"a {brace!r} without its partner at character {part.start() + 1}. Write {brace * 2!r} for a brace"
                )
            if part["name"] is None:
                texts[-1] += part["text"] or part[0][0]
                continue
            if not part["name"].strip():
                raise PromptTemplateError("{} names no column. Write its name, as in {question}, or {{}} for braces")
            columns.append(part["name"])
            texts.append("")
        return cls(tuple(texts), tuple(columns))

    def fill(self, row: Mapping[str, Any]) -> str:
        """The prompt of a row: numbers and texts as they are.

        Raises PromptTemplateError for a column that the row lacks, naming those that it has, and for one that holds
        neither a text nor a number.
        """
        filled = [self.texts[0]]
        for name, following in zip(self.columns, self.texts[1:], strict=True):
            if name not in row:
                there = ", ".join(map(repr, row)) or "none"
                raise PromptTemplateError(f"the template names the column {name!r}, and the row has {there}")
            value = row[name]
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                kind = "nothing (null)" if value is None else f"a {type(value).__name__}"
                raise PromptTemplateError(f"the column {name!r} of the template holds {kind}, not a text or a number")
            filled += [str(value), following]
        return "".join(filled)
