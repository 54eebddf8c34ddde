"""The inputs of a synthesis: tasks, documents, kinds of task and rubrics, read and checked before a model is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from danlu.core.errors import DataError, RecipeError
from danlu.curation.rows import Part, Row, row_of
from danlu.data.messages import Conversation
from danlu.data.prompt_formats import parse_prompt
from danlu.data.raw_rows import BadRow, RawRow
from danlu.data.sources import read_rows
from danlu.production.synthesis.candidates import Candidate
from danlu.production.synthesis.generators.self_instruct import TaskType

if TYPE_CHECKING:
    from danlu.recipe.sections.data import Source

MAX_SHOWN = 20


def read_tasks(sources: Sequence[Source], first: int = 0) -> list[Candidate]:
    """The prompts of rows, without the answers that they may have, each with all columns of its row.

    first: the number of the first source among all of the run.

    Raises:
        DataError: with file and line of every row that has no prompt.
    """
    return _read(sources, first, _prompt_parts)


def read_documents(sources: Sequence[Source], first: int = 0) -> list[Candidate]:
    """The texts of rows, as `read_tasks`."""
    return _read(sources, first, _document_parts)


def _read(
    sources: Sequence[Source], first: int, parts_of: Callable[[Mapping[str, Any], Source, str], tuple[Part, ...]]
) -> list[Candidate]:
    candidates, problems = list[Candidate](), list[str]()
    for number, source in enumerate(sources, first):
        for raw in read_rows(source):
            try:
                value = _columns(raw)
                row = row_of(parts_of(value, source, raw.where), number, raw.index)
            except DataError as error:
                problems.append(str(error))
                continue
            candidates.append(Candidate(row, row.id, given=value, where=raw.where))
    if problems:
        more = [f"and {len(problems) - MAX_SHOWN:,} rows more"] if len(problems) > MAX_SHOWN else []
        raise DataError("\n  ".join([*problems[:MAX_SHOWN], *more]))
    return candidates


def _columns(raw: RawRow) -> Mapping[str, Any]:
    value = raw.value
    if isinstance(value, BadRow):
        raise DataError(value.message)
    return value


def _prompt_parts(value: Mapping[str, Any], source: Source, where: str) -> tuple[Part, ...]:
    """The messages of a row's prompt. Self-instruct's seed tasks have their input in a list of instances."""
    instances = value.get("instances")
    if isinstance(instances, list) and instances and isinstance(instances[0], Mapping) and "input" not in value:
        value = {**value, "input": instances[0].get("input") or ""}
    prompt = parse_prompt(value, None, source.format, where)
    if isinstance(prompt, Conversation):
        if prompt.tools or any(message.tool_calls for message in prompt.messages):
            raise DataError(f"{where}: the row has tools or calls of them, which synthesis cannot ask with; remove it")
        return tuple(Part(message.role, message.content) for message in prompt.messages)  # type: ignore[arg-type]
    return (Part("user", prompt),)


def _document_parts(value: Mapping[str, Any], source: Source, where: str) -> tuple[Part, ...]:
    text = value.get("text")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: no text in a column 'text'; the columns are {', '.join(value) or '(none)'}")
    return (Part("text", text),)


def read_types(path: str) -> list[TaskType]:
    """The kinds of task in a YAML file, a list of {name: ..., about: ..., share: 1}.

    Raises RecipeError for a file that cannot be read or is no such list.
    """
    problem = f"data.types: {path}: a list of kinds of task is wanted, each {{name: ..., about: ..., share: 1}}"
    try:
        entries = yaml.safe_load(read_text(path, "data.types"))
    except yaml.YAMLError as error:
        raise RecipeError(f"{problem}. It is no YAML: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise RecipeError(problem)
    types = list[TaskType]()
    for number, entry in enumerate(entries, 1):
        known = entry if isinstance(entry, dict) else {}
        share = known.get("share", 1)
        texts = [known.get(name) for name in ("name", "about")]
        is_share = isinstance(share, int | float) and not isinstance(share, bool) and share > 0
        if not all(isinstance(text, str) and text.strip() for text in texts) or not is_share or known.keys() - _KEYS:
            raise RecipeError(f"{problem}. Entry {number} is {entry!r}")
        types.append(TaskType(known["name"], known["about"], float(share)))
    if len({each.name for each in types}) < len(types):
        raise RecipeError(f"{problem}. Two of them have one name")
    return types


_KEYS = {"name", "about", "share"}


def read_text(path: str, key: str) -> str:
    """The text of a small file. Raises RecipeError, which names the key, for one that cannot be read or is empty."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{key}: {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{key}: {path}: not UTF-8 text; save it as UTF-8") from None
    if not text.strip():
        raise RecipeError(f"{key}: {path}: the file is empty")
    return text


def slot(source: int, number: int) -> Candidate:
    """A row without texts, which stands for a request that is made of no row."""
    row: Row = row_of((), source, number)
    return Candidate(row, row.id)
