"""Twelve layouts of one recipe on two processes of this CPU, in turns: does `danlu plan` know which one is fastest?

    OMP_NUM_THREADS=1 danlu bench machine --processes 2
    python benchmarks/plan_layouts.py [--turns 5] [--length 512]

Every turn trains the recipe once in each layout, so that a change of the machine's speed meets all of them. The seconds
of a layout are the median of its turns, and its spread is that of their range. The verdict: the layout that is expected
to be the fastest, next to the one that is; and the rank correlation (Spearman) of expected and measured seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.cpu_runs import TEXT, CpuRuns, step_seconds
from small_recipes import Case


def _layout(parallel: dict[str, Any], **sections: Any) -> Case:
    batch = {"batch": {"sequences": 16, "micro": 2}}
    return Case({**TEXT, **batch, "parallel": parallel, **sections}, processes=2)


LAYOUTS = {
    "data": _layout({"data": 2}),
    "data, micro-batches of 1": _layout({"data": 2}, batch={"sequences": 16, "micro": 1}),
    "data, recompute full": _layout({"data": 2}, memory={"recompute": "full"}),
    "zero1": _layout({"shard": "zero1", "data": 2}),
    "zero2": _layout({"shard": "zero2", "data": 2}),
    "zero3": _layout({"shard": "zero3", "data": 2}),
    "tensor": _layout({"tensor": 2}),
    "tensor, sequence": _layout({"tensor": 2, "sequence": True}),
    "context": _layout({"context": 2}),
    "pipeline": _layout({"pipeline": 2}),
    "pipeline, naive": _layout({"pipeline": {"stages": 2, "schedule": "naive"}}),
    "pipeline, interleaved": _layout({"pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 2}}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--length", type=int, default=512, help="data.max_length")
    options = parser.parse_args()
    measured: dict[str, list[float]] = defaultdict(list)
    expected: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = CpuRuns(Path(__file__).resolve().parents[1], Path(folder), options.length)
        for turn in range(options.turns):
            for name, case in LAYOUTS.items():
                output = runs.train(f"{name}-{turn}", case)
                measured[name].append(step_seconds(output))
                if name not in expected:
                    expected[name] = _expected_seconds(runs.plan(output), name)
    print("| layout | expected s | measured s | range of turns | expected / measured |\n|---|---|---|---|---|")
    for name in sorted(expected, key=expected.__getitem__):
        turns, median = measured[name], statistics.median(measured[name])
        print(
            f"| {name} | {expected[name]:.3f} | {median:.3f} | {min(turns):.3f}-{max(turns):.3f} "
            f"| {expected[name] / median:.2f} |"
        )
    print(f"\n{_verdict(expected, measured)}")


def _expected_seconds(plan: dict[str, Any], name: str) -> float:
    if plan["seconds"] is None:
        raise SystemExit(f"no seconds are expected of {name!r}: measure the machine first, with the command above")
    return float(plan["seconds"]["total"])


def _verdict(expected: dict[str, float], measured: dict[str, list[float]]) -> str:
    medians = {name: statistics.median(turns) for name, turns in measured.items()}
    chosen, fastest = min(expected, key=expected.__getitem__), min(medians, key=medians.__getitem__)
    slower = medians[chosen] - medians[fastest]
    spread = max(max(measured[name]) - min(measured[name]) for name in (chosen, fastest))
    errors = [abs(expected[name] / medians[name] - 1) for name in expected]
    correlation = statistics.correlation(_ranks(expected), _ranks({name: medians[name] for name in expected}))
    return (
        f"expected to be fastest: {chosen}; measured: {fastest}; the first takes {slower:.3f} s more, "
        f"where turns of one layout are {spread:.3f} s apart\n"
        f"rank correlation {correlation:.2f}; error: median {statistics.median(errors):.1%}, worst {max(errors):.1%}"
    )


def _ranks(seconds: dict[str, float]) -> Sequence[float]:
    """The place of each layout in the order of seconds."""
    order = sorted(seconds, key=seconds.__getitem__)
    return [float(order.index(name)) for name in seconds]


if __name__ == "__main__":
    main()
