"""Each stage learns with the defaults of its recipe: what it is judged by in the first and the last tenth of a run.

    python benchmarks/stage_defaults.py DATA OUTPUT [--steps 60] [--stages sft dpo ...] [KEY=VALUE ...]

DATA holds weights/stories260K-hf, instruct/, preference/ and rl/. A recipe names its stage, the model, the rows and the
run's length; learning rate, weight decay, schedule and batch are the stage's. `adapter` is a LoRA on the same base.
Stages that follow others start from the result of sft. The table says the mean of the first and of the last tenth of
the steps' metric, and the highest loss of a step as a multiple of the first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from danlu.data.tokenizer_training import CHATML

METRICS = {
    "pretrain": "loss",
    "sft": "loss",
    "distill": "loss",
    "gkd": "loss",
    "dpo": "margin",
    "kto": "margin",
    "orpo": "loss",
    "reward": "accuracy",
    "grpo": "reward",
}
"""What shows that a stage learns: a loss that falls, or a number that rises."""
SHARED = {"precision": "fp32", "checkpoint": {"every": 1000}, "log": {"tensorboard": False}}


def rows(file: Path) -> list[Any]:
    text = file.read_text(encoding="utf-8")
    return json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def write_data(data: Path, folder: Path) -> None:
    """Short rows of each kind: the model sees 512 tokens."""
    kinds = {
        "instructions": [row for row in rows(data / "instruct/alpaca_en_demo.json") if len(row["output"]) < 400],
        "pairs": rows(data / "preference/dpo_en_demo.json"),
        "judged": rows(data / "preference/kto_en_demo.json"),
        "sums": [row for row in rows(data / "rl/gsm8k_train.jsonl") if len(row["question"]) < 150],
    }
    for name, kept in kinds.items():
        (folder / f"{name}.json").write_text(json.dumps(kept, ensure_ascii=False), encoding="utf-8")
    (folder / "chatml.jinja").write_text(CHATML, encoding="utf-8")
    (folder / "short.py").write_text(
        "def short(completion, **row):\n    return max(0.0, 1 - len(completion) / 200)\n", encoding="utf-8"
    )


def recipe(stage: str, folder: Path, base: Path, tuned: Path, steps: int) -> dict[str, Any]:
    """The recipe of a stage with nothing in it that the stage decides."""
    files = {"pretrain": "books", "dpo": "pairs", "orpo": "pairs", "reward": "pairs", "kto": "judged", "grpo": "sums"}
    name = files.get(stage, "instructions")
    train = str(base.parents[1] / "text/tinyshakespeare.txt") if stage == "pretrain" else str(folder / f"{name}.json")
    data: dict[str, Any] = {"train": train, "max_length": 256, "cache": str(folder / "cache")}
    model: dict[str, Any] = {"path": str(base if stage in ("pretrain", "sft") else tuned)}
    if stage == "sft":
        model["chat_template"] = str(folder / "chatml.jinja")
    values = {"stage": "distill" if stage == "gkd" else stage, "model": model, "data": data, "steps": steps, **SHARED}
    if stage in ("distill", "gkd"):
        values |= {"teacher": str(tuned)}
        model["path"] = str(base)
        model["chat_template"] = str(folder / "chatml.jinja")
    if stage == "gkd":
        values |= {"on_policy": 0.5, "rollout": {"max_new_tokens": 32}}
    if stage == "grpo":
        data["prompt"] = "{question}"
        values |= {"rewards": [f"{folder / 'short.py'}:short"], "rollout": {"samples": 4, "max_new_tokens": 32}}
    return values


def train(values: dict[str, Any], output: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """The lines of the steps of a run."""
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump({**values, "output": str(output)}), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "danlu", "train", str(file), *overrides], check=True, stdout=subprocess.DEVNULL
    )
    lines = map(json.loads, (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "loss" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value for every run")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stages", nargs="+", choices=METRICS, default=list(METRICS))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    write_data(options.data, options.output)
    base, tuned = options.data.resolve() / "weights/stories260K-hf", options.output / "sft"
    print("| stage | trained | rate | judged by | first tenth | last tenth | highest loss / first |")
    print("|---|---|---|---|---|---|---|")
    stages = sorted(options.stages, key=lambda stage: stage not in ("pretrain", "sft"))
    for stage in stages:
        for adapter in (None, "lora"):
            if stage == "pretrain" and adapter:
                continue
            values = recipe(stage, options.output, base, tuned, options.steps)
            name = stage if adapter is None else f"{stage}-lora"
            lines = train(
                values | ({} if adapter is None else {"adapter": adapter}), options.output / name, options.overrides
            )
            metric, tenth = METRICS[stage], max(1, len(lines) // 10)
            first, last = (sum(line[metric] for line in part) / tenth for part in (lines[:tenth], lines[-tenth:]))
            highest = max(line["loss"] for line in lines) / lines[0]["loss"] if abs(lines[0]["loss"]) > 1e-3 else None
            resolved = yaml.safe_load((options.output / name / "recipe.yaml").read_text(encoding="utf-8"))
            cells = [stage, adapter or "all weights", f"{resolved['optimizer']['learning_rate']:.0e}", metric]
            cells += [f"{first:.4f}", f"{last:.4f}", "" if highest is None else f"{highest:.2f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
