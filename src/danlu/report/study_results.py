"""The results of a study, one recipe trained with some of its values varied, read from its folder.

::

    runs/rank_study/
      study.json                    the keys that vary; each run's name and its values, as they were written
      rank-4.yaml                   the run's recipe in full
      rank-4.log its output
      rank-4/                       its run folder
      ...
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import stdev

from danlu.core.errors import ResourceError
from danlu.core.run_files import METRICS, SUMMARY
from danlu.recipe.parameter_grid import SEED, Combination
from danlu.report.run_record import lines_of

STUDY = "study.json"


@dataclass(frozen=True)
class RunSummary:
    """The totals of a finished run, from its summary.json; None for a number that the run does not have."""

    seconds: float
    tokens_per_second: float | None  # median of the steps
    peak_memory_bytes: int
    parameters: int
    trained_parameters: int
    loss: float | None  # of the last step
    evaluation_last: float | None
    evaluation_best: float | None
    result_bytes: int

    @property
    def trained_share(self) -> float:
        """Trained parameters by all parameters."""
        return self.trained_parameters / self.parameters


@dataclass(frozen=True)
class RunResult:
    """A run of a study as far as it has got. Losses are (step, mean over trained tokens in nats)."""

    name: str
    values: Mapping[str, str]
    summary: RunSummary | None  # None until the run is finished
    losses: tuple[tuple[int, float], ...]
    evaluations: tuple[tuple[int, float], ...]

    @property
    def step(self) -> int:
        """The last step in its metrics; 0 before the first."""
        return self.losses[-1][0] if self.losses else 0


@dataclass(frozen=True)
class SeedGroup:
    """The finished runs of one combination of values: one, or several that differ in their seed."""

    values: Mapping[str, str]  # without the seed
    results: tuple[RunResult, ...]

    @property
    def summaries(self) -> list[RunSummary]:
        """The summaries of the group's runs."""
        return [result.summary for result in self.results if result.summary is not None]


@dataclass(frozen=True)
class Study:
    """The contents of a study folder, in the order of the values: numbers rising, texts in the order they were
    given."""

    keys: tuple[str, ...]
    results: tuple[RunResult, ...]

    @property
    def varied(self) -> tuple[str, ...]:
        """The keys without the seed."""
        return tuple(key for key in self.keys if key != SEED)

    @property
    def finished(self) -> list[RunResult]:
        """The runs that have a summary."""
        return [result for result in self.results if result.summary is not None]

    @property
    def unfinished(self) -> list[RunResult]:
        """The runs that have none yet."""
        return [result for result in self.results if result.summary is None]

    @cached_property
    def groups(self) -> list[SeedGroup]:
        """The finished runs, those that differ only in their seed together."""
        results: dict[tuple[str, ...], list[RunResult]] = {}  # by the values of the keys that vary
        for result in self.finished:
            results.setdefault(tuple(result.values[key] for key in self.varied), []).append(result)
        return [SeedGroup(dict(zip(self.varied, key, strict=True)), tuple(group)) for key, group in results.items()]

    @property
    def evaluated(self) -> bool:
        """Whether every finished run has an evaluation loss, so that they can be compared by it."""
        return all(summary.evaluation_last is not None for group in self.groups for summary in group.summaries)


def known_runs(folder: Path) -> tuple[tuple[str, ...], list[Combination]]:
    """The keys that vary and the runs that study.json of a study folder lists; none where there is no such file.

    Raises ResourceError if it cannot be read as one.
    """
    file = folder / STUDY
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        keys = tuple(map(str, content["keys"]))
        return keys, [Combination(run["name"], {key: run["values"][key] for key in keys}) for run in content["runs"]]
    except FileNotFoundError:
        return (), []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResourceError(
            f"{file}: not what danlu study wrote ({error}). Put it right, or choose another `output`."
        ) from error


def study_json(keys: Sequence[str], runs: Sequence[Combination]) -> str:
    """The text of study.json, which `known_runs` reads."""
    content = {"keys": list(keys), "runs": [{"name": run.name, "values": dict(run.values)} for run in runs]}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def read_study(folder: Path) -> Study:
    """Every run that a study folder lists, finished or not."""
    keys, runs = known_runs(folder)
    results = [_read_run(folder / run.name, run) for run in runs]
    ranks = [_ranks([run.values[key] for run in runs]) for key in keys]
    results.sort(key=lambda result: [rank[result.values[key]] for key, rank in zip(keys, ranks, strict=True)])
    return Study(keys, tuple(results))


def is_finished(run: Path) -> bool:
    """Whether the run in a folder is finished: its summary is written last."""
    return (run / SUMMARY).is_file()


def parse_numbers(texts: Sequence[str]) -> list[float] | None:
    """All of them as finite numbers, for an axis or an order, or None if one is a text."""
    try:
        numbers = list(map(float, texts))
    except ValueError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def standard_deviation(values: Sequence[float]) -> float:
    """The standard deviation over seeds (of a sample); 0 for a single value, NaN where one is not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return stdev(values) if len(values) > 1 else 0.0


def _ranks(texts: Sequence[str]) -> dict[str, float]:
    """The sort key of each value among the others: the number itself, or the order in which texts were given."""
    parsed = parse_numbers(texts)
    if parsed is not None:
        return dict(zip(texts, parsed, strict=True))
    return {text: float(place) for place, text in enumerate(dict.fromkeys(texts))}


def _read_run(folder: Path, run: Combination) -> RunResult:
    """A run's losses from its metrics, and its summary once it is finished."""
    losses: dict[int, float] = {}  # a step that a rewind went through twice counts as it was in the end
    evaluations: dict[int, float] = {}
    for line in filter(None, lines_of(folder / METRICS)):
        if "loss" in line:
            losses[line["step"]] = float(line["loss"])
        elif "eval_loss" in line:
            evaluations[line["step"]] = float(line["eval_loss"])
    summary = read_summary(folder) if is_finished(folder) else None
    return RunResult(run.name, run.values, summary, tuple(losses.items()), tuple(evaluations.items()))


def read_summary(run: Path) -> RunSummary:
    """The summary of the finished run in a folder. Raises ResourceError if it cannot be read."""
    file = run / SUMMARY
    try:
        content = json.loads(file.read_text())
        evaluation = content["evaluation"] or {"last": None, "best": None}
        return RunSummary(
            seconds=float(content["seconds"]),
            tokens_per_second=content["tokens_per_second"],
            peak_memory_bytes=int(content["peak_memory_bytes"]),
            parameters=int(content["parameters"]),
            trained_parameters=int(content["trained_parameters"]),
            loss=_finite_or_not(content["loss"]),
            evaluation_last=_finite_or_not(evaluation["last"]),
            evaluation_best=_finite_or_not(evaluation["best"]),
            result_bytes=int(content["result"]["bytes"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResourceError(
            f"{file}: not what danlu train wrote ({error!r}). Delete it; the same command makes it again."
        ) from error


def _finite_or_not(value: float | str | None) -> float | None:
    """ "nan" and "inf", which JSON has no numbers for, as floats."""
    return None if value is None else float(value)
