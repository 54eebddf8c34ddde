"""Stage curate: all rows of the sources through the steps of a recipe, and what is left as a data set.

The rows are read once, into shards. Between two steps that gather, each shard goes through the steps by itself, in
whatever process and order; a step that gathers waits for all shards. All work is kept in files that are named by what
they hang on (`work_files`), so a run that was killed goes on, and one with other thresholds measures nothing again.

    memory: the shard that each process has, and the summary of one part of one step
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from danlu.core.errors import DataError, ResourceError
from danlu.core.machine import usable_cores
from danlu.core.run_files import RunLock
from danlu.curation.steps import GatheringStep, Step, Summary, join_parts, parts_of_round
from danlu.data.sources import source_names
from danlu.data.worker_pool import WorkerPool
from danlu.production.data_set import WORK, DataSetWriter, check_output, read_card
from danlu.production.marks import MARKS, bounds_of
from danlu.production.shard_state import READING, dropped_by_step
from danlu.production.shard_work import Advance, CurateJob, Gather, Report, Task, Write, part_file, read_output
from danlu.production.shards import SHARD_BYTES, SHARD_ROWS, Shard, split_into_shards
from danlu.production.step_keys import decisions_key
from danlu.production.work_files import WorkFolder, key_of
from danlu.recipe.sections import Source

RunTasks = Callable[[Iterable[Task]], Iterator[Report]]
"""Runs tasks, each at least once, and yields their reports in any order."""
_CONCLUSIONS = "conclusions"


@dataclass(frozen=True)
class Curated:
    """The outcome of a run.

    Attributes:
        outcomes: rows by fate: kept, changed, dropped.
        decisions: (step, outcome, reason, rows) of all that steps have changed or dropped.
        was_there: whether the folder had this data set already.
    """

    folder: Path
    outcomes: dict[str, int]
    decisions: list[list[Any]]
    was_there: bool = False

    @property
    def remaining(self) -> int:
        """The rows of the data set."""
        return self.outcomes["kept"] + self.outcomes["changed"]


@dataclass(frozen=True)
class CurateSettings:
    """The settings of a run.

    Attributes:
        recipe: what the card says about the recipe, as JSON.
        workers: the processes over shards; 1 is this process, None one for each core.
        skip_bad: whether rows that cannot be read are dropped; else the first one is an error.
        keep_marks: whether what was measured stays in the folder.
        overwrite: whether a data set by another recipe is replaced.
    """

    sources: Sequence[Source]
    steps: Sequence[Step]
    folder: Path
    recipe: Any
    workers: int | None = 1
    skip_bad: bool = False
    keep_marks: bool = True
    overwrite: bool = False
    shard_rows: int = SHARD_ROWS
    shard_bytes: int = SHARD_BYTES


def curate(
    settings: CurateSettings, *, log: Callable[[str], None] = lambda text: None, run_tasks: RunTasks | None = None
) -> Curated:
    """Curates rows as the settings say, or goes on where a run of the same settings stopped.

    Args:
        log: is given a line when a step over all rows is done.
        run_tasks: runs the tasks in place of this machine's processes.

    Raises:
        DataError: a source or a row cannot be read, or no row is left.
        ResourceError: the folder holds something else, a data set by another recipe, or is in use; a package is
            missing; the disk is full.
    """
    check_output(settings.folder)
    with RunLock(settings.folder):
        job = CurateJob(tuple(settings.steps), WorkFolder(settings.folder / WORK), settings.skip_bad)
        count = usable_cores() if settings.workers is None else settings.workers
        pool: AbstractContextManager[Any] = nullcontext()
        if run_tasks is None:
            if count == 1:
                work = job.start()
                run_tasks = lambda tasks: map(work, tasks)  # noqa: E731
            else:
                pool = WorkerPool(job, count, ending=": try fewer of them (workers)", doing="curating")
                run_tasks = pool.map
        with pool:
            try:
                return _Run(settings, run_tasks, log).run()
            except OSError as error:
                raise ResourceError(f"{settings.folder}: cannot be written: {error.strerror or error}") from error


class _Run:
    def __init__(self, settings: CurateSettings, run_tasks: RunTasks, log: Callable[[str], None]) -> None:
        self._settings, self._run_tasks, self._log = settings, run_tasks, log
        self._steps = list(settings.steps)
        self._work = WorkFolder(settings.folder / WORK)
        self._shards = list[Shard]()
        self._past = ""  # a key of the steps so far, with what they have gathered

    def run(self) -> Curated:
        """Steps, then the data set."""
        gathering = [number for number, step in enumerate(self._steps) if isinstance(step, GatheringStep)]
        if (there := self._data_set_there()) is not None:
            return there
        first, conclusion, reports = 0, "", dict[Shard, Report]()
        for stop in [*gathering, len(self._steps)]:
            reports = self._advance(reports, first, stop, conclusion)
            if stop < len(self._steps):
                conclusion = self._gather(stop, reports)
            first = stop
        return self._write(reports)

    def _advance(self, reports: dict[Shard, Report], first: int, stop: int, conclusion: str) -> dict[Shard, Report]:
        """All shards through steps `first` to `stop`, and the first round of step `stop`."""
        before = self._past
        self._past = key_of(before, [decisions_key(step) for step in self._steps[first:stop]], conclusion)
        is_last = stop == len(self._steps)

        def task(shard: Shard) -> Task:
            summary = "" if is_last else self._summary_file(shard, stop, 0)
            state = self._state_file(shard, before) if before else ""
            return Advance(shard, state, self._state_file(shard, self._past), first, stop, conclusion, summary)

        shards = iter(reports) if before else self._shards or self._read_shards()
        results = {report.shard: report for report in self._run_tasks(map(task, shards))}
        names = ", ".join(step.name for step in self._steps[first:stop])
        if names:
            self._log(f"{names}: {sum(report.rows for report in results.values()):,} rows are left")
        return {shard: results[shard] for shard in sorted(results, key=lambda shard: shard.number)}

    def _read_shards(self) -> Iterator[Shard]:
        settings = self._settings
        for shard in split_into_shards(
            settings.sources, self._work, shard_rows=settings.shard_rows, shard_bytes=settings.shard_bytes
        ):
            self._shards.append(shard)
            yield shard
        count = len(self._shards)
        rows = sum(shard.rows for shard in self._shards)
        self._log(f"{rows:,} rows in {count} shard{'s' if count > 1 else ''}")

    def _gather(self, number: int, reports: dict[Shard, Report]) -> str:
        """All rounds of a step over the shards; returns the file of the last conclusion, empty where no row is left."""
        step = self._steps[number]
        assert isinstance(step, GatheringStep)
        shards = [report for report in reports.values() if report.rows]
        conclusions, files = list[Summary](), list[str]()
        for round in range(step.rounds if shards else 0):
            if round:
                earlier = tuple(files)
                tasks = (
                    Gather(each.shard, self._state_file(each.shard, self._past), number, round, earlier, summary)
                    for each in shards
                    for summary in [self._summary_file(each.shard, number, round, earlier)]
                )
                shards = sorted(self._run_tasks(tasks), key=lambda report: report.shard.number)
                shards = list({report.shard: report for report in shards}.values())
            earlier = tuple(files)
            summaries = [(self._summary_file(each.shard, number, round, earlier), each.parts) for each in shards]
            conclusion, file = self._conclude(step, round, conclusions, summaries)
            conclusions.append(conclusion)
            files.append(file)
        return files[-1] if files else ""

    def _conclude(
        self,
        step: GatheringStep,
        round: int,
        earlier: Sequence[Summary],
        summaries: Sequence[tuple[str, Sequence[int]]],
    ) -> tuple[Summary, str]:
        """The conclusion of a round and its file, a part after the other."""
        names = [name for name, _ in summaries]
        file = f"{_CONCLUSIONS}/{step.name}-{key_of(decisions_key(step), round, names)}"
        conclusion = self._work.read_table(file)
        if conclusion is None:
            of_parts = [
                step.conclude(round, step.merge(tables))
                for part in range(len(parts_of_round(step, round, earlier)))
                if (tables := [self._table(part_file(name, part)) for name, parts in summaries if part in parts])
            ]
            conclusion = join_parts(step, round, of_parts)
            self._work.write_table(file, conclusion)
        return conclusion, file

    def _table(self, file: str) -> Summary:
        table = self._work.read_table(file)
        if table is None:
            raise DataError(f"{self._work.folder / file}: gone or altered. Run the command again")
        return table

    def _write(self, reports: dict[Shard, Report]) -> Curated:
        """The data set of what is left, and its card."""
        self._refuse_nothing(reports)
        tasks = [
            Write(report.shard, self._state_file(report.shard, self._past), previous, following, self._output(report))
            for report, previous, following in _with_neighbors(list(reports.values()))
        ]
        for _ in self._run_tasks(tasks):
            pass
        writer = DataSetWriter(self._settings.folder)
        outcomes, decisions, of_sources = Counter[str](), Counter[tuple[str, str, str]](), dict[int, Counter[str]]()
        for task in tasks:
            content = self._work.read(task.output)
            assert content is not None, f"{task.output} was written before"
            output = read_output(content)
            writer.add(output.rows, output.ledger)
            outcomes.update(output.outcomes)
            of_sources.setdefault(task.shard.source, Counter()).update(output.outcomes)
            decisions.update({(step, outcome, reason): count for step, outcome, reason, count in output.decisions})
        order = {name: number for number, name in enumerate([READING, *(step.name for step in self._steps)])}
        rows = [
            [*key, count] for key, count in sorted(decisions.items(), key=lambda item: (order[item[0][0]], item[0]))
        ]
        card = {
            **self._card_head(),
            "outcomes": dict(outcomes),
            "decisions": rows,
            "sources": self._sources(of_sources),
            "bounds": {step.name: bounds for step in self._steps if (bounds := bounds_of(step))},
        }
        writer.finish(card)
        self._tidy()
        return Curated(self._settings.folder, dict(outcomes), rows)

    def _card_head(self) -> dict[str, Any]:
        """The part of the card that says what the data set was made of and how."""
        return {
            "stage": "curate",
            "recipe": self._settings.recipe,
            "steps": {step.name: decisions_key(step) for step in self._steps},
            "rows_read": key_of([shard.key for shard in self._shards]),
        }

    def _sources(self, outcomes: dict[int, Counter[str]]) -> list[dict[str, Any]]:
        names = source_names(self._settings.sources)
        return [{"name": name, **dict(outcomes.get(number, {}))} for number, name in enumerate(names)]

    def _data_set_there(self) -> Curated | None:
        """The data set that the folder has already, made of the same rows by the same steps.

        Raises ResourceError for one that was made otherwise, unless the settings say that it is replaced.
        """
        card = read_card(self._settings.folder)
        if card is None:
            return None
        head = self._card_head()
        same_steps = card.get("stage") == head["stage"] and card.get("steps") == head["steps"]
        if not same_steps and not self._settings.overwrite:
            raise self._made_otherwise("by other steps or settings")
        for _ in self._read_shards():
            pass
        same_rows = card.get("rows_read") == self._card_head()["rows_read"]
        if same_steps and same_rows:
            self._tidy()
            return Curated(self._settings.folder, card["outcomes"], card["decisions"], was_there=True)
        if not self._settings.overwrite:
            raise self._made_otherwise("of other rows")
        return None

    def _made_otherwise(self, how: str) -> ResourceError:
        return ResourceError(
            f"{self._settings.folder}: has a data set that was made {how}. Choose another `output`, or replace it with "
            "--overwrite, which measures nothing again that was measured"
        )

    def _refuse_nothing(self, reports: dict[Shard, Report]) -> None:
        """Raises DataError where no row is left, with the steps that dropped them."""
        if any(report.rows for report in reports.values()):
            return
        steps = Counter[str]()
        for shard in reports:
            steps.update(dropped_by_step(self._work.read(self._state_file(shard, self._past)) or b""))
        dropped = ", ".join(f"{step} dropped {count:,}" for step, count in steps.most_common())
        total = sum(shard.rows for shard in reports)
        raise DataError(f"no row is left of {total:,}: {dropped}. Nothing was written. Change these steps' settings")

    def _tidy(self) -> None:
        """Deletes the work that only a run which is not finished needs."""
        if not self._settings.keep_marks:
            shutil.rmtree(self._work.folder)
            return
        self._work.remove_others(keep=lambda name: name.startswith(MARKS))

    def _state_file(self, shard: Shard, past: str) -> str:
        return shard.file("state", key_of(shard.key, past, self._settings.skip_bad))

    def _summary_file(self, shard: Shard, step: int, round: int, earlier: Sequence[str] = ()) -> str:
        past = key_of(shard.key, self._past, decisions_key(self._steps[step]), round, list(earlier))
        return shard.file("summary", past)

    def _output(self, report: Report) -> str:
        return report.shard.file("output", key_of(report.shard.key, self._past, "output"))


def _with_neighbors(reports: Sequence[Report]) -> Iterator[tuple[Report, int, int]]:
    """Each report with the places of the last row that is left before its shard, and of the first one behind it."""
    left = [report for report in reports if report.rows]
    before = {after.shard: report.ends[1] for report, after in pairwise(left)}
    behind = {report.shard: after.ends[0] for report, after in pairwise(left)}
    for report in reports:
        yield report, before.get(report.shard, -1), behind.get(report.shard, -1)
