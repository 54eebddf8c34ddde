"""Preferences learnt from real rows: how often held-out pairs are told apart, by cross-validation, as a Markdown table.

    python benchmarks/held_out_preferences.py DATA OUTPUT [KEY=VALUE ...] --model runs/sft [--stages dpo ...]
                                              [--files dpo_en ...] [--folds 3] [--seeds 0 1]

DATA holds preference/*.json|jsonl. Of every file each fold is held out once, so that each row is judged once, by a
policy that has not seen it; another seed divides the rows anew. Pairs: the share whose chosen answer has the higher
implicit reward beta log(policy / reference). Judged answers (kto): the mean reward of the held-out good answers less
that of the bad ones. Beside it stands the standard error that guessing has with as many rows. The recipes are written
to OUTPUT and run by `danlu train`; a run that is finished is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

FILES = {
    "dpo_en": "dpo_en_demo.json",
    "dpo_zh": "dpo_zh_demo.json",
    "hh": "hh_rlhf_harmless_slice.jsonl",
    "kto_en": "kto_en_demo.json",
}


def rows_of(file: Path) -> list[Any]:
    text = file.read_text(encoding="utf-8")
    return json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def divide(rows: list[Any], folds: int, seed: int) -> list[list[Any]]:
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    return [[rows[number] for number in order[fold::folds]] for fold in range(folds)]


def train(folder: Path, stage: str, options: argparse.Namespace, seed: int, parts: list[list[Any]], fold: int) -> Any:
    """The last evaluation of a run that is trained on all parts but `fold`, and judged by that one."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"held-out": parts[fold], "rows": [row for part in parts if part is not parts[fold] for row in part]}
    for name, rows in files.items():
        (folder / f"{name}.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    recipe = {
        "stage": stage,
        "model": options.model,
        "data": {
            "train": str(folder / "rows.json"),
            "eval": [str(folder / "held-out.json")],
            "max_length": 384,
            "cache": str(options.output / "cache"),
        },
        "optimizer": {"kind": "adamw", "learning_rate": 3e-4, "weight_decay": 0.0},
        "schedule": {"kind": "linear", "warmup": 0.1},
        "batch": {"pairs": 16},
        "epochs": 2,
        "precision": "auto",
        "threads": options.threads,
        "seed": seed,
        "checkpoint": {"every": 100_000, "keep": 1},
        "output": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "danlu", "train", str(folder / "recipe.yaml"), *options.overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval_loss" in line][-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--stages", nargs="+", default=["dpo"])
    parser.add_argument("--files", nargs="+", default=list(FILES), choices=list(FILES))
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--threads", type=int, default=1)
    options, options.overrides = parser.parse_known_args()
    print(
        "| rows | stage | seed | held out, all folds | guessing | by fold | last loss |\n|---|---|---|---|---|---|---|"
    )
    for name in options.files:
        rows = rows_of(options.data / "preference" / FILES[name])
        for stage in ["kto"] if name == "kto_en" else options.stages:
            for seed in options.seeds:
                parts = divide(rows, options.folds, seed)
                folder = options.output / f"{name}-{stage}-{seed}"
                ends = [train(folder / str(fold), stage, options, seed, parts, fold) for fold in range(options.folds)]
                print(f"| {name} | {stage} | {seed} | {row_of(ends, parts)} |", flush=True)


def row_of(ends: list[dict[str, Any]], parts: list[list[Any]]) -> str:
    """The cells of the held-out figures: of pairs the accuracy, of judged answers the margin."""
    loss = statistics.mean(end["eval_loss"] for end in ends)
    if "eval_accuracy" not in ends[0]:
        margins = [end["eval_margin"] for end in ends]
        spread = statistics.stdev(margins) / math.sqrt(len(margins))
        by_fold = ", ".join(f"{margin:+.3f}" for margin in margins)
        return f"margin {statistics.mean(margins):+.3f} ± {spread:.3f} | 0 | {by_fold} | {loss:.3f}"
    count = sum(map(len, parts))
    accuracy = sum(end["eval_accuracy"] * len(part) for end, part in zip(ends, parts, strict=True)) / count
    by_fold = ", ".join(f"{end['eval_accuracy']:.2f}" for end in ends)
    return f"{accuracy:.1%} | 50% ± {0.5 / math.sqrt(count):.1%} | {by_fold} | {loss:.3f}"


if __name__ == "__main__":
    main()
