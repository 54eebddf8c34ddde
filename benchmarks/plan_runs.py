"""Runs on this CPU beside what `danlu plan` says of each: memory by part, and seconds a step.

    python benchmarks/plan_runs.py [NAME ...] [--length 512] [--memory]

24 runs: stages, layouts of two processes, adapters, quantized bases, recomputation, optimizers. Each is trained twice:
once for its times, and once for three steps in torch's profiler, which counts what the third one allocates. Measure the
machine first, with `OMP_NUM_THREADS=1 danlu bench machine`, and `--processes 2` for layouts; else there are no seconds.
Columns are expected over measured; 1 is exact.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from planner.cpu_runs import RUNS, CpuRuns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(RUNS)}")
    parser.add_argument("--length", type=int, default=512, help="data.max_length")
    parser.add_argument("--memory", action="store_true", help="memory alone: each run is trained once")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in RUNS]:
        parser.error(f"no such run: {', '.join(unknown)}. There are {', '.join(RUNS)}")
    print("| run | states | step | all | seconds |\n|---|---|---|---|---|", flush=True)
    totals, times = [], []
    with tempfile.TemporaryDirectory() as folder:
        runs = CpuRuns(Path(__file__).resolve().parents[1], Path(folder), options.length)
        for each in runs.compare(options.names or list(RUNS), timed=not options.memory):
            states = max(each.states.values(), key=lambda ratio: abs(ratio - 1))
            seconds = "" if each.seconds is None else f"{each.seconds:.2f}"
            print(f"| {each.name} | {states:.3f} | {each.step:.3f} | {each.total:.3f} | {seconds} |", flush=True)
            totals.append(abs(each.total - 1))
            times += [] if each.seconds is None else [abs(each.seconds - 1)]
    print(f"\nallocated: median {statistics.median(totals):.1%}, worst {max(totals):.1%} off")
    if times:
        print(f"seconds: median {statistics.median(times):.1%}, worst {max(times):.1%} off")


if __name__ == "__main__":
    main()
