"""Published measurements of memory and speed: which rows count, why others do not, and the errors of rules of thumb.

    python benchmarks/planner.py [--rows CSV] [--configs DIR] --list
    python benchmarks/planner.py [--rows CSV] [--configs DIR] --memory [--each]
    python benchmarks/planner.py [--rows CSV] [--configs DIR] --speed
    python benchmarks/planner.py [--rows CSV] [--configs DIR] --layouts
    python benchmarks/planner.py [--rows CSV] [--configs DIR] --check

`--list` prints by source the rows that count and the reasons of the others, and how far the rules of thumb that people
use are off: 16 bytes a parameter and 34sbh for memory, and a constant MFU, which is that of other cards, or other
sources, than the row's own. `--memory` prints the errors of danlu's expected memory, for which nothing is fitted; with
`--each` every row, and by part what it is expected to take. `--speed` prints the errors of danlu's expected speeds; no
row is judged by constants that were fitted on it: rows of one engine by those of its other cards, or of its other
sizes, and rows of other engines by the first one's constants and one factor of their other rows. It takes a minute.
`--layouts` plans the layouts of two papers: Llama 3's table of parallelism, and DeepSeek-V3's GPU hours.
`--check` counts the parameters of every model and compares them with the published ones.

The table is measurements/published_measurements.csv of the data folder: DANLU_SHARED_DATA names it, or it is
../shared/data.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from planner.architectures import Architecture, read_architectures
from planner.baselines import Errors, Prediction, constant_mfu, rule_of_thumb
from planner.engines import Engine, read_engines
from planner.layouts import PlannedLayout, deepseek_hours, llama_layouts
from planner.memory import expected_memory
from planner.own_figures import errors, figures, host_seconds
from planner.published_cards import card
from planner.rows import LeftOut, PublishedRun, Row, architecture_of, read_rows
from planner.speed import REFERENCE, Constants, Prepared, fit, leaving_out, with_factors

DATA = Path(os.environ.get("DANLU_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=DATA / "measurements" / "published_measurements.csv")
    parser.add_argument("--configs", type=Path, default=DATA / "configs", help="folders with a config.json each")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="rows by source, and the errors of rules of thumb")
    what.add_argument("--memory", action="store_true", help="the errors of danlu's expected memory")
    what.add_argument("--speed", action="store_true", help="the errors of danlu's expected speeds")
    what.add_argument("--layouts", action="store_true", help="plans of the layouts that papers publish")
    what.add_argument("--check", action="store_true", help="parameters of every model beside the published ones")
    parser.add_argument("--each", action="store_true", help="with --memory: every row, by part")
    options = parser.parse_args()
    for path in (options.rows, options.configs):
        if not path.exists():
            parser.error(f"{path} does not exist: name it, or the data folder in DANLU_SHARED_DATA")
    if options.layouts:
        print_layouts(options.configs)
        return 0
    architectures = read_architectures(options.configs)
    if options.check:
        return check_parameters(options.rows, architectures)
    engines = read_engines()
    try:
        rows = read_rows(options.rows, architectures, engines)
    except ValueError as error:
        parser.error(str(error))
    runs = [row.run for row in rows if row.run is not None]
    if options.speed:
        print_speed(runs)
        return 0
    if options.memory:
        list_rows(rows, ("memory",))
        print_memory(runs, {engine.name: engine for engine in engines.values()}, each=options.each)
        return 0
    list_rows(rows)
    print("\n## 16 bytes a parameter and 34sbh")
    print_errors(runs, rule_of_thumb)
    print("\n## One MFU for all")
    print_constant_mfu(runs)
    return 0


_LEFT_OUT: Mapping[str, Callable[[Row], LeftOut | None]] = {
    "memory": lambda row: row.memory_left_out,
    "speed": lambda row: row.speed_left_out,
}


def list_rows(rows: list[Row], of: Iterable[str] = ("memory", "speed")) -> None:
    """Prints rows by source: how many count for memory and for speed, and the reasons of those that do not."""
    for what in of:
        reason_of = _LEFT_OUT[what]
        candidates = [row for row in rows if reason_of(row) is not LeftOut.NO_FIGURE]
        used = sum(reason_of(row) is None for row in candidates)
        print(f"\n## {what}: {used} of {len(candidates)} rows count\n")
        print("| source | count | left out | why |\n|---|---|---|---|")
        by_source: dict[str, list[Row]] = defaultdict(list)
        for row in candidates:
            by_source[row.source].append(row)
        for source, group in by_source.items():
            reasons = Counter(reason for row in group if (reason := reason_of(row)) is not None)
            why = "; ".join(f"{count} {reason.value}" for reason, count in reasons.most_common())
            print(f"| {source} | {len(group) - reasons.total()} | {reasons.total()} | {why} |")


def print_errors(runs: list[PublishedRun], predict: Callable[[PublishedRun], Prediction]) -> None:
    """Prints the errors of a predictor over the rows that count for memory, and over those that count for speed."""
    memory = [run for run in runs if run.memory is not None and run.memory_left_out is None]
    bytes_of = [(run, predict(run).memory_bytes, run.memory.bytes) for run in memory if run.memory is not None]
    if any(predicted is not None for _, predicted, _ in bytes_of):
        print("\n### Memory\n")
        _table(bytes_of)
        too_large = [run for run in runs if run.memory_left_out is LeftOut.OUT_OF_MEMORY and run.card is not None]
        seen = sum((predict(run).memory_bytes or 0) > card(run.card).memory_bytes for run in too_large if run.card)
        print(f"\nOf {len(too_large)} runs that did not fit, it says so of {seen}.")
    timed = [run for run in runs if run.speed is not None and run.speed_left_out is None]
    speeds = [(run, predict(run).tokens_per_s, run.speed.tokens_per_s) for run in timed if run.speed is not None]
    if any(predicted is not None for _, predicted, _ in speeds):
        print("\n### Speed\n")
        _table(speeds)


def print_memory(runs: list[PublishedRun], engines: Mapping[str, Engine], *, each: bool) -> None:
    """Prints the errors of danlu's memory and of the rule of thumb; each: every row first, by part in GiB."""
    expected = {run.id: expected_memory(run, engines[run.engine]) for run in runs if run.memory_left_out is None}
    if each:
        print("\n| row | engine | model | method | length | GiB | expected | error | moment | GiB by part |")
        print("|---|---|---|---|---|---|---|---|---|---|")
    for run in runs if each else ():
        if run.memory is not None and run.id in expected:
            own = expected[run.id]
            parts = ", ".join(f"{name} {count / 2**30:.2f}" for name, count in own.parts.items() if count)
            print(
                f"| {run.id} | {run.engine} | {run.architecture.name} | {run.method.kind} | {run.length} "
                f"| {run.memory.bytes / 2**30:.2f} | {own.bytes / 2**30:.2f} | {own.bytes / run.memory.bytes - 1:+.1%} "
                f"| {own.moment} | {parts} |"
            )
    print("\n## danlu")
    print_errors(runs, lambda run: Prediction(expected_memory(run, engines[run.engine]).bytes, None))
    print("\n## 16 bytes a parameter and 34sbh")
    print_errors(runs, rule_of_thumb)


def print_constant_mfu(runs: list[PublishedRun]) -> None:
    """Prints the errors of one MFU for all, learnt from runs of other cards and of other engines."""
    timed = [run for run in runs if run.speed is not None and run.speed_left_out is None]
    for name, within, held_out in (
        ("other cards of all engines", lambda run: "", lambda run: run.card),
        ("other cards of the same engine", lambda run: run.engine, lambda run: run.card),
        ("other engines", lambda run: "", lambda run: run.engine),
    ):
        print(f"\n### Speed: the median of the {name}\n")
        predicted = constant_mfu(timed, held_out, within)
        _table((run, tokens, run.speed.tokens_per_s) for run, tokens in zip(timed, predicted, strict=True) if run.speed)


def print_speed(runs: list[PublishedRun]) -> None:
    """Prints the errors of danlu's speeds, of each row by constants that other rows gave."""
    prepared = [Prepared(run) for run in runs if run.speed is not None and run.speed_left_out is None]
    reference = [each for each in prepared if each.run.engine == REFERENCE]
    others = [each for each in prepared if each.run.engine != REFERENCE]

    def table(title: str, of: list[Prepared], predicted: list[float | None]) -> None:
        print(f"\n### {title}\n")
        _table((each.run, tokens, each.measured) for each, tokens in zip(of, predicted, strict=True))

    if reference:
        table("Constants of the engine's other cards", reference, leaving_out(reference, lambda run: run.card))
        sizes = leaving_out(reference, lambda run: run.architecture.name)
        table("Constants of the engine's other sizes", reference, sizes)
    constants = replace(fit(reference) if reference else Constants(), call_s=host_seconds())
    print(f"\nConstants of {len(reference)} rows of {REFERENCE}, the host's of danlu's own figures:")
    print(", ".join(f"{name} {value:.3g}" for name, value in vars(constants).items()))
    table(f"Constants of {REFERENCE}, no factor", others, [each.tokens_per_s(constants) for each in others])
    by_engine = with_factors(others, constants, lambda run: run.engine)
    table(f"Constants of {REFERENCE}, one factor of the engine's other rows", others, by_engine)
    by_card = with_factors(others, constants, lambda run: (run.engine, run.card))
    table(f"Constants of {REFERENCE}, one factor of the other rows of engine and card", others, by_card)
    print_own_figures()


def print_own_figures() -> None:
    """Prints danlu's own figures on GPUs beside what its roofline expects, whose constants were set by them."""
    own = list(figures())
    print("\n### danlu's own figures\n\n| step | card | tokens/s | expected | error |\n|---|---|---|---|---|")
    wrong = errors(own)
    for figure, error in zip(own, wrong, strict=True):
        expected = figure.tokens_per_s * (1 + error)
        print(f"| {figure.name} | {figure.card} | {figure.tokens_per_s:,} | {expected:,.0f} | {error:+.1%} |")
    sizes = sorted(map(abs, wrong))
    print(f"\nMedian {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}, signed {statistics.median(wrong):+.1%}.")


def print_layouts(configs: Path) -> None:
    """Prints the speeds of papers' layouts next to their plans."""
    print("## Llama 3 405B: TFLOP/s of a GPU\n")
    _print_layouts(llama_layouts(configs), 1)
    print("\n## DeepSeek-V3: thousands of GPU hours for a trillion tokens\n")
    _print_layouts(deepseek_hours(configs), 1000)


def _print_layouts(layouts: Iterable[PlannedLayout], unit: int) -> None:
    print("| layout | published | expected | error | s a step | bubble | exposed | GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for each in layouts:
        seconds = each.plan.seconds
        assert seconds is not None, "a cluster has speeds"
        print(
            f"| {each.name} | {each.published / unit:.0f} | {each.expected / unit:.0f} | {each.error:+.1%} "
            f"| {seconds.total:.2f} | {seconds.bubble / seconds.total:.1%} | {seconds.exposed / seconds.total:.1%} "
            f"| {each.plan.worst.memory.allocated / 2**30:.0f} |"
        )


def _table(results: Iterable[tuple[PublishedRun, float | None, float]]) -> None:
    """Prints median, 90th percentile and worst error, and the signed median, by engine and over all."""
    results = list(results)
    print("| engine | rows | median | 90th | worst | signed |\n|---|---|---|---|---|---|")
    groups: dict[str, list[tuple[float | None, float]]] = defaultdict(list)
    for run, predicted, measured in results:
        groups[run.engine].append((predicted, measured))
        groups["all"].append((predicted, measured))
    for engine, pairs in sorted(groups.items(), key=lambda item: item[0] == "all"):
        errors = Errors.of(pairs)
        if errors is not None:
            print(
                f"| {engine} | {errors.rows} | {errors.median:.1%} | {errors.ninetieth:.1%} | {errors.worst:.1%} "
                f"| {errors.signed:+.1%} |"
            )


def check_parameters(path: Path, architectures: dict[str, Architecture]) -> int:
    """Prints counted beside published parameters; 1 where one differs by more than the published digits allow."""
    print("| model | length | counted | published | difference |\n|---|---|---|---|---|")
    seen, wrong = set(), 0
    with path.open(newline="", encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            shape = architecture_of(cells, architectures)
            if shape is None or not cells["params"] or (shape, cells["params"]) in seen:
                continue
            seen.add((shape, cells["params"]))
            published = round(float(cells["params"]))
            allowed = rounding(published)
            differs = abs(shape.parameters - published) > allowed
            wrong += differs
            mark = " WRONG" if differs else ""
            print(
                f"| {cells['model']} | {cells['seq_len']} | {shape.parameters:,} | {published:,} "
                f"| {shape.parameters - published:+,}{mark} |"
            )
    return 1 if wrong else 0


def rounding(published: int) -> float:
    """Half of the last digit that a published count has, as 1.84 billion has hundredths; 0 of an exact count."""
    digits = len(str(published)) - len(str(published).rstrip("0"))
    return 0 if digits < 5 else 10**digits / 2


if __name__ == "__main__":
    sys.exit(main())
