"""A run of several processes, one of which is killed at random again and again, ends as an undisturbed run does.

    python benchmarks/kills.py [--processes 4] [--kills 10] [--seed 0] [RECIPE [section.key=value ...]]

Without a recipe, a small model is trained on data that danlu makes. The recipe is trained twice with
`danlu train --processes`: once undisturbed, and once while a random one of its processes is killed (SIGKILL) at random
steps; the group starts again from its last checkpoint each time. At the end the weights have to be equal bit for bit,
and the metrics of each step. Exit code 1 if they are not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from danlu.data.demo_data import pretraining_documents
from danlu.data.tokenizer_training import train_tokenizer

COMPARED = ("step", "loss", "grad_norm", "learning_rate", "tokens")
STEPS = 200


def small_recipe(folder: Path) -> Path:
    documents = list(pretraining_documents(0, 2000))
    train_tokenizer(documents, 512, folder / "tokenizer")
    rows = folder / "text.jsonl"
    rows.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents))
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    values = {
        "stage": "pretrain",
        "model": {"tokenizer": str(folder / "tokenizer"), "config": {"model_type": "llama", **shape, **heads}},
        "data": {"train": str(rows), "max_length": 128, "cache": str(folder / "cache"), "workers": 1},
        "batch": {"sequences": 8, "micro": 1},
        "optimizer": {"kind": "adamw", "learning_rate": 3e-3},
        "steps": STEPS,
        "precision": "fp32",
        "threads": 1,
        "checkpoint": {"every": 10, "keep": 2},
        "log": {"tensorboard": False},
        "output": str(folder / "unused"),
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def start(arguments: list[str], output: Path, processes: int, restarts: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "danlu", "train", *arguments, f"output={output}"]
    command += [f"parallel.restarts={restarts}", "--processes", str(processes)]
    return subprocess.Popen(command)


def last_step(run: Path) -> int:
    """The last step in the metrics; 0 where there is none, or while its line is being written."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


def workers(launcher: int) -> list[int]:
    """Process numbers of the launcher's children."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    return [int(pid) for pid, parent, command in rows if int(parent) == launcher and " danlu train " in command]


def disturb(process: subprocess.Popen[bytes], run: Path, targets: list[int], rng: random.Random) -> int:
    """Kills a random worker whenever the run has come to the next step; returns how many were killed."""
    killed = 0
    for target in targets:
        while process.poll() is None and last_step(run) < target:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.3))
        there = workers(process.pid)
        if process.poll() is not None or not there:
            break
        victim = rng.choice(there)
        print(f"-- kill {killed + 1}: process {victim}, at step {last_step(run)}", flush=True)
        os.kill(victim, signal.SIGKILL)
        killed += 1
        while process.poll() is None and victim in workers(process.pid):
            time.sleep(0.02)
        # Until the group is there again: its metrics go back to the checkpoint's.
        time.sleep(1.0)
    return killed


def digest(run: Path) -> dict[str, str]:
    folder = run / "model" if (run / "model").is_dir() else run / "adapter"
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.safetensors"))}


def metrics(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in COMPARED} for line in lines if "grad_norm" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("arguments", nargs="*", metavar="RECIPE [section.key=value]")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        arguments = options.arguments or [str(small_recipe(folder))]
        whole, broken = folder / "whole", folder / "broken"
        began = time.perf_counter()
        if start(arguments, whole, options.processes, 0).wait():
            print("the undisturbed run failed")
            return 1
        undisturbed_s = time.perf_counter() - began
        steps = last_step(whole)
        targets = sorted(rng.sample(range(1, steps), options.kills))
        began = time.perf_counter()
        process = start(arguments, broken, options.processes, options.kills)
        try:
            killed = disturb(process, broken, targets, rng)
            code = process.wait()
        finally:
            process.terminate()
        disturbed_s = time.perf_counter() - began
        if code:
            print(f"the disturbed run failed with exit code {code}")
            return 1
        equal = digest(whole) == digest(broken) and bool(digest(whole))
        same_metrics = metrics(whole) == metrics(broken) and len(metrics(whole)) == steps
        print(
            f"{options.processes} processes, {steps} steps, {killed} kills: {undisturbed_s:.0f} s undisturbed, "
            f"{disturbed_s:.0f} s disturbed; weights {'equal' if equal else 'DIFFER'}, "
            f"metrics {'equal' if same_metrics else 'DIFFER'}"
        )
        return 0 if equal and same_metrics and killed == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())
