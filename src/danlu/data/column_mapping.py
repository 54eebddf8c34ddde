"""Columns of a file under the names that row formats read, as `data.columns` or a dataset_info.json gives them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from danlu.core.errors import DataError
from danlu.core.prompt_template import PromptTemplate, PromptTemplateError
from danlu.core.spelling import did_you_mean
from danlu.data.column_values import decode_messages
from danlu.data.rows import QUESTIONS, detect_format
from danlu.recipe.sections.data import TAG_NAMES, Columns

LOOKED_THROUGH = 256
"""The rows at the start of a source that are looked through for the columns that are named; the rows behind them are
only for a column that these lack, and can be read without."""
_PROMPTS = frozenset({"text", "prompt", "messages", "conversations", *QUESTIONS})  # a row has one of them
_DECIDING = _PROMPTS | {
    "input_ids", "completion", "output", *QUESTIONS.values(), "chosen", "rejected", "rejected_response",
    "rejected_messages", "completions", "labels",
}  # fmt: skip
"""The columns by which `detect_format` tells row formats apart."""
_TURNS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected", "rejected_messages")
_TAGGED_ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "tool_call",
    "system_tag": "system",
}
_ROLE_AND_CONTENT = ("role", "content", "from", "value")


@dataclass(frozen=True)
class ColumnMapping:
    """The columns that a row format reads, made of the columns that a file has.

    Attributes:
        origin: the place that says so, for messages: "data.columns".
        columns: (name, column of the file, template over columns, or None to hide it).
        tags: (name, key of a message or value of its role), by the names of `TAG_NAMES`.
        others: whether columns that `columns` does not mention keep their names; else they are not read.
    """

    origin: str
    columns: tuple[tuple[str, str | PromptTemplate | None], ...]
    tags: tuple[tuple[str, str], ...] = ()
    others: bool = True

    @classmethod
    def of(cls, columns: Columns, origin: str, *, others: bool = True) -> ColumnMapping:
        """The mapping that a recipe's `columns` describe. Raises DataError for a template that cannot be read."""
        read = list[tuple[str, str | PromptTemplate | None]]()
        for name, column in columns.items():
            if name in TAG_NAMES:
                continue
            try:
                is_template = column is not None and bool({"{", "}"} & set(column))
                read.append((name, PromptTemplate.parse(column) if is_template and column is not None else column))
            except PromptTemplateError as error:
                raise DataError(f"{origin}: {name}: {error}") from None
        tags = [(name, tag) for name, tag in columns.items() if name in TAG_NAMES and tag is not None]
        return cls(origin, tuple(read), tuple(tags), others)

    def describe(self) -> str:
        """The mapping in words: "prompt = ques, completion = resp"."""
        columns = [
            f"{name} = {'{…} over ' + ', '.join(column.columns) if isinstance(column, PromptTemplate) else column}"
            for name, column in self.columns
            if column is not None
        ]
        hidden = [f"{name} hidden" for name, column in self.columns if column is None]
        return ", ".join((*columns, *hidden, *(f"{name} = {tag}" for name, tag in self.tags)))

    def key(self) -> list[Any]:
        """JSON that two mappings share if they make the same rows of the same file."""
        columns = [
            [name, [column.texts, column.columns] if isinstance(column, PromptTemplate) else column]
            for name, column in self.columns
        ]
        return [columns, self.tags, self.others]

    def apply(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The row under the names of row formats, which may lack a column: some of row formats are optional.

        Raises:
            DataError: a template names a column that the row lacks, or that holds no text.
        """
        named = dict[str, Any]()
        for name, column in self.columns:
            if isinstance(column, PromptTemplate):
                try:
                    named[name] = column.fill(row)
                except PromptTemplateError as error:
                    missing = next((each for each in column.columns if each not in row), None)
                    hint = "" if missing is None else did_you_mean(missing, list(row))
                    raise DataError(f"{where}: {self.origin}: {name}: {error}.{hint}") from None
            elif column is not None and column in row:
                named[name] = row[column]
        gone = self._gone
        others = {name: value for name, value in row.items() if name not in gone} if self.others else {}
        return self._with_roles({**others, **named})

    def absent(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """The columns of the file that it names and none of these rows has, each with the name that it is to have."""
        there = set(chain.from_iterable(rows))
        named = {wanted: name for name, column in self.columns for wanted in _names_in(column)}
        return {wanted: name for wanted, name in named.items() if wanted not in there}

    def can_read(self, row: Mapping[str, Any]) -> bool:
        """Whether the row holds something to train on or to answer, whatever it lacks: a text, a prompt, a pair."""
        try:
            named = self.apply(row, "row")
            return not _PROMPTS.isdisjoint(named) or bool(detect_format(named))
        except DataError:
            return False

    def refuse(self, absent: Mapping[str, str], rows: Sequence[Mapping[str, Any]], where: str) -> DataError:
        """The error for columns that no row of a source has. absent: see there. rows: the first ones of the source."""
        wanted, name = next(iter(absent.items()))
        there = list(dict.fromkeys(chain.from_iterable(rows)))
        return DataError(
            f"{where}: {self.origin}: {name}: there is no column {wanted!r} in its rows, of which the first have "
            f"{', '.join(map(repr, there))}.{did_you_mean(wanted, there)}"
        )

    @property
    def _gone(self) -> frozenset[str]:
        """Columns of the file that are not read under their own names."""
        used = {name for _, column in self.columns for name in _names_in(column)}
        names = {name for name, _ in self.columns}
        return frozenset(used | names | _unread(names))

    def _with_roles(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with messages under `role` and `content`, where tags name other keys and roles."""
        if not self.tags:
            return row
        tags = dict(self.tags)
        for name in _TURNS:
            turns = decode_messages(row.get(name))
            if isinstance(turns, Mapping):
                row[name] = _renamed(turns, tags)
            elif isinstance(turns, list):
                row[name] = [_renamed(turn, tags) if isinstance(turn, Mapping) else turn for turn in turns]
        return row


def _renamed(turn: Mapping[str, Any], tags: Mapping[str, str]) -> Mapping[str, Any]:
    """A message under `role` and `content`; as it is where it has no role under the key that the tags name."""
    other_keys = ("from", "value") if turn.get("from") is not None else ("role", "content")
    role_key, content_key = tags.get("role_tag", other_keys[0]), tags.get("content_tag", other_keys[1])
    role = turn.get(role_key)
    if not isinstance(role, str):
        return turn
    roles = {tags[tag]: known for tag, known in _TAGGED_ROLES.items() if tag in tags}
    rest = {key: value for key, value in turn.items() if key not in (role_key, content_key, *_ROLE_AND_CONTENT)}
    return {"role": roles.get(role, role), "content": turn.get(content_key), **rest}


def _names_in(column: str | PromptTemplate | None) -> tuple[str, ...]:
    if column is None:
        return ()
    return column.columns if isinstance(column, PromptTemplate) else (column,)


def _unread(names: Collection[str]) -> frozenset[str]:
    """The columns that would make another row format, or another prompt, of a row with these names."""
    is_asked = bool(_PROMPTS & set(names))
    try:
        format = detect_format(names)
    except DataError:
        return _PROMPTS if is_asked else frozenset()
    return _DECIDING - _PROMPTS if format in ("preference", "stepwise") and not is_asked else _DECIDING
