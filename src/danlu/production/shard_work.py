"""The work on one shard: steps over its rows, its part of summaries, and what it adds to the data set.

Each task is a pure function of files in the work folder, named by what they hang on, so it may run in any process, in
any order, and again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from danlu.curation.rows import Row, content_digest, place_of
from danlu.curation.steps import GatheringStep, Marks, Step, Summary, parts_of_round
from danlu.curation.tables import column, merge_tables, take
from danlu.production.ledger import ledger_part
from danlu.production.marks import MARKS
from danlu.production.shard_state import ShardState, count_decisions, remaining_rows
from danlu.production.shards import RowColumns, Shard, ShardRows, json_line, read_shard
from danlu.production.step_keys import marks_key
from danlu.production.work_files import WorkFolder

BATCH_ROWS = 256  # that are measured together: their arrays stay in the processor's cache
_CONTENT = ("content_upper", "content_lower")
_KEPT_CONCLUSIONS = 4


@dataclass(frozen=True)
class Advance:
    """Takes a shard through steps `first` to `stop` (not included), and gathers the first round of step `stop`.

    Attributes:
        before: the file of the shard's state before; empty for its rows as they came.
        after: the file for its state then.
        conclusion: the file of what step `first` has gathered; empty where it gathers nothing.
        summary: the file for the shard's part in step `stop`; empty behind the last step.
    """

    shard: Shard
    before: str
    after: str
    first: int
    stop: int
    conclusion: str
    summary: str


@dataclass(frozen=True)
class Gather:
    """Gathers a later round of a step. earlier: the files of the conclusions of the rounds before."""

    shard: Shard
    state: str
    step: int
    round: int
    earlier: tuple[str, ...]
    summary: str


@dataclass(frozen=True)
class Write:
    """Makes what a shard adds to the data set.

    Attributes:
        previous: the place of the last row that is left before the shard; -1 for none.
        next: that of the first row behind it.
        output: the file for it, of which `read_output` gives the content.
    """

    shard: Shard
    state: str
    previous: int
    next: int
    output: str


Task = Advance | Gather | Write


@dataclass(frozen=True)
class Report:
    """The outcome of a task, the same when its work was done before.

    Attributes:
        rows: how many rows of the shard are left.
        ends: the places of the first and the last of them; -1 where none is.
        parts: those parts of the summary that the shard has rows in.
    """

    shard: Shard
    rows: int = 0
    ends: tuple[int, int] = (-1, -1)
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class CurateJob:
    """The steps and the folder, pickled to each process."""

    steps: tuple[Step, ...]
    folder: WorkFolder
    skip_bad: bool

    def start(self) -> Callable[[Task], Report]:
        """The function of tasks."""
        return _Worker(self).run


@dataclass(frozen=True)
class Output:
    """The part of a data set that a shard adds: lines of rows, a part of the ledger, and counts of the card."""

    rows: bytes
    ledger: bytes
    outcomes: dict[str, int]
    decisions: list[list[Any]] = field(default_factory=list)


def read_output(content: bytes) -> Output:
    """The output of a shard, from the content of its file."""
    head, _, rest = content.partition(b"\n")
    values = json.loads(head)
    return Output(rest[: values["rows"]], rest[values["rows"] :], values["outcomes"], values["decisions"])


class _Worker:
    def __init__(self, job: CurateJob) -> None:
        self._steps, self._work, self._skip_bad = job.steps, job.folder, job.skip_bad
        self._conclusions = dict[str, Summary]()

    def run(self, task: Task) -> Report:
        if isinstance(task, Advance):
            return self._advance(task)
        return self._gather_later(task) if isinstance(task, Gather) else self._write(task)

    def _advance(self, task: Advance) -> Report:
        done, parts = self._work.read(task.after), self._parts(task.summary) if task.summary else []
        if done is not None and (parts is not None or not remaining_rows(done)):
            return _report(task.shard, remaining_rows(done), parts or [])
        content = read_shard(task.shard, self._work)
        if done is not None:
            state = ShardState.from_bytes(content, done)
        else:
            state = self._state(content, task.before)
            for number in range(task.first, task.stop):
                if state.rows:
                    summary = self._conclusion(task.conclusion) if number == task.first and task.conclusion else {}
                    step = self._steps[number]
                    state.apply(step.name, step.decide(state.rows, self._marks(state, step), summary))
            self._work.write(task.after, state.to_bytes())
        parts = self._gather(state, task.stop, 0, (), task.summary) if task.summary and state.rows else []
        return _report(task.shard, state.numbers, parts)

    def _gather_later(self, task: Gather) -> Report:
        parts = self._parts(task.summary)
        if parts is None:
            state = self._state(read_shard(task.shard, self._work), task.state)
            parts = self._gather(state, task.step, task.round, task.earlier, task.summary)
        return Report(task.shard, parts=tuple(parts))

    def _write(self, task: Write) -> Report:
        if self._work.read(task.output) is None:
            content = read_shard(task.shard, self._work)
            state = self._state(content, task.state)
            lines = state.lines(content.where)
            rows, ledger = b"".join(_output_lines(content, state, task)), ledger_part(lines)
            outcomes = {fate: sum(line.outcome == fate for line in lines) for fate in ("kept", "changed", "dropped")}
            decisions = [[*key, count] for key, count in count_decisions(lines).items()]
            head = json.dumps({"rows": len(rows), "outcomes": outcomes, "decisions": decisions})
            self._work.write(task.output, head.encode() + b"\n" + rows + ledger)
        return Report(task.shard)

    def _state(self, content: ShardRows, file: str) -> ShardState:
        if not file:
            return ShardState.read(content, skip_bad=self._skip_bad)
        state = self._work.read(file)
        assert state is not None, f"{file} was written before"
        return ShardState.from_bytes(content, state)

    def _conclusion(self, file: str) -> Summary:
        """A conclusion from its file; the last ones are kept."""
        if file not in self._conclusions:
            conclusion = self._work.read_table(file)
            assert conclusion is not None, f"{file} was written before"
            self._conclusions[file] = conclusion
            if len(self._conclusions) > _KEPT_CONCLUSIONS:
                del self._conclusions[next(iter(self._conclusions))]
        return self._conclusions[file]

    def _marks(self, state: ShardState, step: Step) -> Marks:
        """The marks of a shard's rows, those that are kept from before and those that are measured now, which are kept
        too.

        They are kept by the texts of a row: rows that other thresholds of earlier steps leave are measured, no others.
        """
        rows, file = state.rows, state.shard.file(f"{MARKS}{step.name}", marks_key(state.shard.key, step))
        contents = np.frombuffer(b"".join(content_digest(row.parts) for row in rows), "<u8").reshape(len(rows), 2)
        table = self._work.read_table(file)
        at = _rows_with(table, contents)
        if (missing := np.flatnonzero(at < 0)).size:
            measured = [
                {**step.measure([rows[number] for number in batch.tolist()]), **_content_columns(contents[batch])}
                for batch in np.array_split(missing, range(BATCH_ROWS, len(missing), BATCH_ROWS))
            ]
            table = merge_tables([*([] if table is None else [table]), *measured], _CONTENT)
            self._work.write_table(file, table)
            at = _rows_with(table, contents)
        assert table is not None
        return take({name: values for name, values in table.items() if name not in _CONTENT}, at)

    def _parts(self, summary: str) -> list[int] | None:
        """The parts of a summary that are there; None where not all are."""
        index = self._work.read(summary)
        return None if index is None else json.loads(index)

    def _gather(self, state: ShardState, number: int, round: int, earlier: Sequence[str], summary: str) -> list[int]:
        """Writes a shard's part in the summary of a round, a file for each part of it, and returns those with rows."""
        step = self._steps[number]
        assert isinstance(step, GatheringStep)
        marks, rows = self._marks(state, step), state.rows
        batches = [slice(first, first + BATCH_ROWS) for first in range(0, len(rows), BATCH_ROWS)]
        parts = list[int]()
        for part, conclusions in enumerate(parts_of_round(step, round, [self._conclusion(each) for each in earlier])):
            table = step.merge([step.gather(rows[each], _slice(marks, each), conclusions) for each in batches])
            if part == 0 or _length(table):  # the first one is always there: a summary has columns
                self._work.write_table(part_file(summary, part), table)
                parts.append(part)
        self._work.write(summary, json.dumps(parts).encode())
        return parts


def part_file(summary: str, part: int) -> str:
    """The file of a part of a shard's summary."""
    return f"{summary}.{part}"


def _report(shard: Shard, numbers: Sequence[int], parts: Sequence[int]) -> Report:
    """The report about a shard of which the rows with these numbers are left."""
    ends = [place_of(shard.source, shard.first + number) for number in (numbers[0], numbers[-1])] if numbers else []
    return Report(shard, len(numbers), (ends[0], ends[1]) if ends else (-1, -1), tuple(parts))


def _slice(marks: Marks, rows: slice) -> Marks:
    return take(marks, np.arange(rows.start, min(rows.stop, _length(marks))))


def _length(table: Marks) -> int:
    return len(next(iter(table.values())))


def _content_columns(contents: np.ndarray) -> dict[str, np.ndarray]:
    return {name: contents[:, half] for half, name in enumerate(_CONTENT)}


def _rows_with(table: Marks | None, contents: np.ndarray) -> np.ndarray:
    """The row of a table with each content [N, 2]; -1 where none has it."""
    if table is None:
        return np.full(len(contents), -1)
    upper, lower = (column(table, name) for name in _CONTENT)
    at = np.minimum(np.searchsorted(upper, contents[:, 0]), len(upper) - 1)
    return np.where((upper[at] == contents[:, 0]) & (lower[at] == contents[:, 1]), at, -1)


def _output_lines(content: ShardRows, state: ShardState, task: Write) -> Iterator[bytes]:
    """The lines of the rows that are left; those that no step has changed stand as they came."""
    numbers, rows = state.numbers, state.rows
    ends = [task.previous, *(row.place for row in rows), task.next]
    for at, number in enumerate(numbers):
        columns = content.read(number)
        assert isinstance(columns, RowColumns), "rows that cannot be read are dropped"
        texts = state.changed_texts(number)
        line = content.line(number) if texts is None else columns.line_with(texts)
        if borders := _borders(columns.value, rows[at], ends[at], ends[at + 2]):
            line = json_line({**json.loads(line), **borders})
        yield line + b"\n"


def _borders(columns: dict[str, Any], row: Row, previous: int, following: int) -> dict[str, bool]:
    """The borders that a part of a document has newly: its neighbour is gone."""
    borders = {}
    if columns.get("document_begins") is False and previous != row.place - 1:
        borders["document_begins"] = True
    if columns.get("document_ends") is False and following != row.place + 1:
        borders["document_ends"] = True
    return borders
