"""LeNet-5 on MNIST under DDP: time and accuracy with 1, 2 and 4 processes that share the same steps.

    python benchmarks/lenet_scaling.py --data mnist [--processes 1 2 4] [--parallel none] [--epochs 5] [--plot FILE]

Each row is a run of `recipes/lenet_mnist.yaml` by `danlu train --processes N`, one thread a process, in a folder of its
own. Time is that of steps and evaluations, without loading; images/s are the median over steps; the accuracy is that of
`danlu eval` on the test files. The last column tells how long losses are those of the first row to five digits:
rounding differs, and training amplifies it, with processes as with threads.

The table goes to stdout, the plot (accuracy on test images over seconds) to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "lenet_mnist.yaml"
COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df")


@dataclass(frozen=True)
class Row:
    processes: int
    seconds: float
    images_per_second: float
    loss: float
    accuracy: float
    curve: list[tuple[float, float]]  # (seconds, accuracy) of each evaluation
    losses: list[float]


def danlu(*arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "danlu", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout


def measure(data: str, folder: Path, processes: int, overrides: Sequence[str]) -> Row:
    output = folder / f"{processes}"
    sources = [f"data.train={data}", f"data.eval=[{{path: {data}, split: test}}]"]
    settings = [*sources, "threads=1", "log={every: 1, tensorboard: false}", f"output={output}", *overrides]
    danlu("train", str(RECIPE), *settings, *(["--processes", str(processes)] if processes > 1 else []))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((output / "summary.json").read_text())
    judged = json.loads(danlu("eval", str(output), "--data", data, "--json"))
    curve, now = [], 0.0
    for line in lines:
        now = line.get("elapsed_s", now)
        if "eval_accuracy" in line:
            curve.append((now, line["eval_accuracy"]))
    return Row(
        processes,
        summary["seconds"],
        summary["tokens_per_second"],
        summary["loss"],
        judged["accuracy"],
        curve,
        [line["loss"] for line in lines if "loss" in line],
    )


def table(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    lines = [
        "| processes | time | images/s | last loss | accuracy on test images | same losses up to step |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        pairs = zip(row.losses, first.losses, strict=True)
        same = next(
            (step for step, (ours, theirs) in enumerate(pairs) if abs(ours - theirs) > 1e-5 * theirs), "the end"
        )
        lines.append(
            f"| {row.processes} | {row.seconds:.1f} s | {row.images_per_second:,.0f} | {row.loss:.4f} | "
            f"{row.accuracy:.2%} | {'' if row is first else same} |"
        )
    return lines


def plot(rows: Sequence[Row], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for row, colour in zip(rows, COLOURS, strict=False):
        name = "one process" if row.processes == 1 else f"{row.processes} processes"
        axes.plot(*zip(*row.curve, strict=True), "-o", color=colour, label=name, markersize=4)
    axes.axhline(0.985, color="#59636e", linewidth=0.8, linestyle="--")
    axes.set_xlabel("seconds")
    axes.set_ylabel("accuracy on test images")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="the folder with MNIST's files")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--parallel", default="none", help="none (DDP), zero1, zero2 or zero3")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="an SVG or PNG file")
    asked = parser.parse_args()
    overrides = [f"epochs={asked.epochs}", f"parallel={asked.parallel}"]
    with tempfile.TemporaryDirectory(prefix="lenet-") as folder:
        rows = [measure(asked.data, Path(folder), processes, overrides) for processes in asked.processes]
    print("\n".join(table(rows)))
    if asked.plot is not None:
        plot(rows, asked.plot)


if __name__ == "__main__":
    main()
