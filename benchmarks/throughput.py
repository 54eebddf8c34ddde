"""Real tokens per second, utilisation and peak memory of `danlu train` on this machine, by model and precision.

    python benchmarks/throughput.py [--steps 12]

Rows are random token ids of 32 to 1024 tokens, packed to 2048: what is measured depends on lengths only. A figure is
the median over all steps but the first three. MFU is against the machine's own matrix products in the same type.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from planned_figures import figures_of_plan

from danlu.data.demo_data import pretraining_documents
from danlu.data.tokenizer_training import train_tokenizer

LENGTH = 2048
SHAPES: dict[str, dict[str, Any]] = {
    "7M": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 688, "vocab_size": 4096},
    "58M": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 32000},
    "0.6B": {"hidden_size": 1536, "num_hidden_layers": 20, "intermediate_size": 4096, "vocab_size": 32000},
    "1.5B": {"hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 6144, "vocab_size": 64000},
}
# Model, precision, packs in a step, compiled.
CPU_RUNS = [("7M", "fp32", 1, False), ("7M", "bf16", 1, False), ("58M", "bf16", 1, False)]
CUDA_RUNS = [
    ("58M", "bf16", 8, False),
    ("0.6B", "bf16", 8, False),
    ("0.6B", "bf16", 8, True),
    ("1.5B", "bf16", 8, True),
    ("58M", "bf16", 8, True),
    ("58M", "fp32", 8, False),
]


def write_rows(file: Path, count: int) -> None:
    chance = np.random.default_rng(0)
    with file.open("w") as out:
        for length in np.exp(chance.uniform(np.log(32), np.log(1024), count)).astype(int):
            out.write(json.dumps({"input_ids": chance.integers(10, 500, length).tolist()}) + "\n")


def measure(folder: Path, name: str, precision: str, packs: int, compiled: bool, steps: int) -> dict[str, float]:
    config = {
        "model_type": "llama",
        "num_attention_heads": SHAPES[name]["hidden_size"] // (32 if name == "7M" else 64),
        "num_key_value_heads": 4,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": name == "7M",
        **SHAPES[name],
    }
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        recipe = {
            "stage": "pretrain",
            "model": {"config": config, "tokenizer": str(folder / "tokenizer")},
            "data": {"train": str(folder / "rows.jsonl"), "max_length": LENGTH, "cache": str(folder / "cache")},
            "batch": {"sequences": packs},
            "steps": steps + 1000,  # ended before: what a run saves and exports at its end is as large as its model
            "precision": precision,
            "compile": compiled,
            "checkpoint": {"every": 100_000},
            "output": f"{scratch}/run",
        }
        (Path(scratch) / "recipe.yaml").write_text(json.dumps(recipe))
        command = [sys.executable, "-m", "danlu", "train", f"{scratch}/recipe.yaml"]
        lines = first_steps(command, Path(scratch) / "run" / "metrics.jsonl", steps)
        plan = Path(scratch) / "run" / "plan.json"
        predicted = figures_of_plan(json.loads(plan.read_text()) if plan.is_file() else None)
    steady = [line for line in lines if "tokens_per_second" in line][3:]
    return {
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steady),
        "mfu": statistics.median(line["mfu"] for line in steady),
        "memory_bytes": max(line["memory_bytes"] for line in steady),
        **predicted,
    }


def first_steps(command: list[str], metrics: Path, steps: int) -> list[dict[str, Any]]:
    """The lines that a run writes of so many steps; it is killed then."""
    with tempfile.TemporaryFile() as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        while True:
            ended = process.poll() is not None
            whole = metrics.read_bytes().rpartition(b"\n")[0] if metrics.is_file() else b""
            lines = [json.loads(line) for line in whole.splitlines()]
            if len([line for line in lines if "tokens_per_second" in line]) >= steps:
                process.kill()
                return lines
            if ended:
                said.seek(0)
                raise SystemExit(said.read().decode(errors="replace")[-3000:])
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        train_tokenizer(pretraining_documents(0, 500), 600, folder / "tokenizer")
        write_rows(folder / "rows.jsonl", 3000 if cuda else 400)
        for name, precision, packs, compiled in CUDA_RUNS if cuda else CPU_RUNS:
            result = measure(folder, name, precision, packs, compiled, options.steps)
            print(
                f"{name:5} {precision} {'compiled' if compiled else 'eager   '} {packs} x {LENGTH}: "
                f"{result['tokens_per_second']:9,.0f} tok/s   MFU {result['mfu']:.0%}   "
                f"{result['memory_bytes'] / 2**30:.2f} GiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
