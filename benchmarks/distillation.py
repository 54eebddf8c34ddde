"""Distillation: a student beside the same student without a teacher, and what the divergence takes beside whole logits.

    python benchmarks/distillation.py TEXT TOKENIZER OUTPUT [--steps 60] [--seeds 0 1 2]     students
    python benchmarks/distillation.py --divergence                                          time and memory

Students: TEXT (such as tinyshakespeare.txt) is cut into paragraphs, of which the last 7 % are held out; the teacher is
trained by `danlu train` first. Every student of a seed has the same first weights, rows and steps; what is compared is
the held-out negative log-likelihood. Divergence: forward and backward for 512 targets and 32000 words in one thread,
each way in a process of its own; the peak is that of the process less what it held before.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TARGETS, STUDENT_WIDTH, TEACHER_WIDTH, VOCABULARY = 512, 256, 512, 32000
WAYS = ("whole logits", "forward", "reverse", "jensen-shannon", "top 64, live")


def config(width: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
    }


def train(options: argparse.Namespace, name: str, model: dict[str, Any], **changes: Any) -> float:
    """The held-out negative log-likelihood at the end of a run, in nats a token."""
    folder: Path = options.output
    recipe = {
        "model": {"tokenizer": options.tokenizer, "config": model},
        "data": {
            "train": str(folder / "rows.jsonl"),
            "eval": str(folder / "held-out.jsonl"),
            "max_length": 128,
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 16, "micro": 8},
        "optimizer": {"kind": "adamw", "learning_rate": 3e-3},
        "schedule": {"kind": "cosine", "warmup": 15},
        "precision": "fp32",
        "threads": options.threads,
        "evaluation": {"every": 10_000},
        "checkpoint": {"every": 10_000},
        "output": str(folder / name),
        **changes,
    }
    file = folder / f"{name}.json"
    file.write_text(json.dumps(recipe))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "danlu", "train", str(file)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return math.log([line["eval_perplexity"] for line in lines if "eval_perplexity" in line][-1])


def students(options: argparse.Namespace) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    paragraphs = [part for part in Path(options.text).read_text(encoding="utf-8").split("\n\n") if part.strip()]
    cut = int(len(paragraphs) * 0.93)
    for name, rows in (("rows", paragraphs[:cut]), ("held-out", paragraphs[cut:])):
        (options.output / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    print(f"teacher: {train(options, 'teacher', config(128, 3), stage='pretrain', steps=100):.3f}", flush=True)
    teacher, objective = str(options.output / "teacher"), {"kind": "forward", "cross_entropy": 0.3}
    cached = {"model": teacher, "top_k": 32, "cache": True}
    print("| seed | alone | distilled | distilled, top 32 cached |\n|---|---|---|---|")
    for seed in options.seeds:
        run = {"steps": options.steps, "seed": seed}
        losses = [
            train(options, f"alone-{seed}", config(48, 2), stage="pretrain", **run),
            train(options, f"live-{seed}", config(48, 2), stage="distill", teacher=teacher, objective=objective, **run),
            train(options, f"top-{seed}", config(48, 2), stage="distill", teacher=cached, objective=objective, **run),
        ]
        print(f"| {seed} | {' | '.join(f'{loss:.3f}' for loss in losses)} |", flush=True)


def measure(way: str) -> None:
    """Forward and backward of one way, in this process."""
    import torch

    from danlu.objectives.divergence import Head, categorical_divergence, divergence
    from danlu.objectives.top_tokens import logprobs_of_tokens, top_tokens

    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(TARGETS, STUDENT_WIDTH, generator=random).requires_grad_()
    head = (torch.randn(VOCABULARY, STUDENT_WIDTH, generator=random) * 0.05).requires_grad_()
    teacher_hidden = torch.randn(TARGETS, TEACHER_WIDTH, generator=random)
    teacher_head = torch.randn(VOCABULARY, TEACHER_WIDTH, generator=random) * 0.05
    student, teacher = Head(hidden, head), Head(teacher_hidden, teacher_head)

    def divergences() -> torch.Tensor:
        if way == "whole logits":
            logprobs = (hidden @ head.t()).log_softmax(1)
            teacher_logprobs = (teacher_hidden @ teacher_head.t()).log_softmax(1)
            return (teacher_logprobs.exp() * (teacher_logprobs - logprobs)).sum(1)
        if way == "top 64, live":
            top = top_tokens(teacher, 64)
            return categorical_divergence(logprobs_of_tokens(student, top.ids), top.logprobs, kind="forward")
        return divergence(student, teacher, kind=way)  # type: ignore[arg-type]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(5):
        hidden.grad = head.grad = None
        started = time.process_time()
        divergences().sum().backward()
        seconds.append(time.process_time() - started)
    held = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"| {way} | {sorted(seconds)[2]:.2f} | {held:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", nargs="?")
    parser.add_argument("tokenizer", nargs="?")
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--divergence", action="store_true")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        measure(options.way)
    elif options.divergence:
        print("| way | CPU s | MiB |\n|---|---|---|", flush=True)
        for way in WAYS:
            subprocess.run([sys.executable, __file__, "--way", way], check=True)
    elif options.output is None:
        parser.error("give TEXT, TOKENIZER and OUTPUT, or --divergence")
    else:
        students(options)


if __name__ == "__main__":
    main()
