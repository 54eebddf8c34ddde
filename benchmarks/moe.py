"""Mixtures of experts: training speed and memory beside transformers', and how evenly each kind of balance loads them.

    python benchmarks/moe.py [--steps 12] [--rounds 1] [--experts eager grouped_mm] [--balance-steps 300]
                             [--precision bf16|fp32] [--documents packed|whole]
                             [--kinds bias sequence step none] [--bias-rate 0.03] [--memory none|elementwise|selective]
                             [--only speed|balance] [--threads 2]

60M parameters: 8 layers of width 256 with 32 experts of width 256, four of which a token goes to, AdamW over float32
weights, activations in bfloat16 or, for processors without products of it, in float32.

speed    2048 tokens a step, in documents of 32 to 1024 tokens end to end (packed) or in one (whole). danlu is `danlu
         train` in a process; transformers is its own forward and backward pass and fused AdamW in a bare loop, in a
         process of its own, told where documents begin by `position_ids`; in float32, or under autocast and all in
         bfloat16, each with every experts implementation that fits ("batched_mm" does not: it copies the weights of an
         expert for each of 8192 rows). A figure is the median over all steps but the first three; the peers take turns
         with danlu, and a ratio is the median over these turns.
balance  the demo's documents, packed to 1024 tokens, one pack a step: for each layer the counts of its experts in the
         last 50 steps, summed; of these the largest over the mean, in the worst layer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = 2048
VOCABULARY = 8192
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3: dict[str, Any] = {
    **SIZES,
    "model_type": "qwen3_moe",
    "num_experts": 32,
    "moe_intermediate_size": 256,
    "intermediate_size": 1024,
    "norm_topk_prob": True,
}
# A family that keeps the biases of `balance: bias`, with the same parameters but for them.
GLM4: dict[str, Any] = {
    **SIZES,
    "model_type": "glm4_moe",
    "n_routed_experts": 32,
    "n_shared_experts": None,
    "moe_intermediate_size": 256,
    "intermediate_size": 1024,
    "first_k_dense_replace": 0,
    "use_qk_norm": True,
}
IMPLEMENTATIONS = ("eager", "grouped_mm")
PEER_PRECISIONS = {"bf16": ("autocast", "bfloat16"), "fp32": ("float32",)}
SHORTEST, LONGEST = 32, 1024  # documents that are packed
# In so few steps biases move by `rate` times their number at most: at 0.001, which is for long runs, by 0.3 of a score.
BALANCES: dict[str, dict[str, Any]] = {
    "bias": {"balance": "bias", "rate": 0.03, "sequence": 0.0001, "z": 0.001},
    "sequence": {"balance": "sequence", "sequence": 0.01},
    "step": {"balance": "step", "rate": 0.01},
    "none": {"balance": "none"},
}
LAST = 50


def recipe(
    folder: Path, config: dict[str, Any], steps: int, length: int, threads: int, precision: str
) -> dict[str, Any]:
    return {
        "stage": "pretrain",
        "model": {"config": config, "tokenizer": str(folder / "tokenizer")},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": length, "cache": str(folder / "cache")},
        "batch": {"sequences": 1, "micro": 1},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
        "steps": steps,
        "precision": precision,
        "threads": threads,
        "log": {"every": 1, "tensorboard": False},
        "checkpoint": {"every": 100_000},
    }


def danlu_speed(folder: Path, steps: int, threads: int, precision: str, memory: str) -> dict[str, float]:
    from throughput import first_steps

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        written = Path(scratch) / "recipe.yaml"
        values = recipe(folder, QWEN3, steps + 1000, LENGTH, threads, precision)  # ended before it exports
        written.write_text(json.dumps(values | {"output": f"{scratch}/run", "memory": memory}))
        lines = first_steps(
            [sys.executable, "-m", "danlu", "train", str(written)], Path(scratch) / "run" / "metrics.jsonl", steps
        )
    steady = [line for line in lines if "tokens_per_second" in line][3:]
    return {
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steady),
        "rss_bytes": max(line["memory_bytes"] for line in steady),
    }


def document_lengths(chance: np.random.Generator, documents: str) -> list[int]:
    """Tokens of each document of a sequence of `LENGTH`; the last is cut."""
    if documents == "whole":
        return [LENGTH]
    lengths: list[int] = []
    while sum(lengths) < LENGTH:
        drawn = int(np.exp(chance.uniform(np.log(SHORTEST), np.log(LONGEST))))
        lengths.append(min(drawn, LENGTH - sum(lengths)))
    return lengths


def peer(implementation: str, precision: str, documents: str, steps: int, threads: int) -> None:
    """Trains transformers' model and prints what it took as JSON. Nothing of danlu is imported here."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**QWEN3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.set_experts_implementation(implementation)
    model.to(torch.bfloat16 if precision == "bfloat16" else torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    chance = np.random.default_rng(0)
    speeds = []
    for _ in range(steps):
        tokens = torch.from_numpy(chance.integers(10, 500, (1, LENGTH)))
        positions = torch.cat([torch.arange(length) for length in document_lengths(chance, documents)])[None]
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = model(tokens, position_ids=positions, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        speeds.append(LENGTH / (time.perf_counter() - started))
    with open("/proc/self/status") as status:
        rss = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    parameters = sum(each.numel() for each in model.parameters())
    print(json.dumps({"tokens_per_second": statistics.median(speeds[3:]), "rss_bytes": rss, "parameters": parameters}))


def speed(folder: Path, options: argparse.Namespace) -> None:
    chance, steps, threads = np.random.default_rng(0), options.steps, options.threads
    with (folder / "rows.jsonl").open("w") as out:
        for _ in range(steps + 20):
            for length in document_lengths(chance, options.documents):
                out.write(json.dumps({"input_ids": chance.integers(10, 500, length).tolist()}) + "\n")
    turns: dict[tuple[str, str], list[tuple[dict[str, float], dict[str, float]]]] = {}
    for _ in range(options.rounds):
        for precision, implementation in itertools.product(PEER_PRECISIONS[options.precision], options.experts):
            ours = danlu_speed(folder, steps, threads, options.precision, options.memory)
            _print("danlu", ours)
            command = [sys.executable, __file__, "--peer", implementation, precision, options.documents]
            command += ["--steps", str(steps), "--threads", str(threads)]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            if answer.returncode:
                print(f"transformers {implementation} {precision}: {answer.stderr.strip().splitlines()[-1]}")
                continue
            theirs = json.loads(answer.stdout.splitlines()[-1])
            _print(f"transformers {implementation} {precision}", theirs)
            turns.setdefault((precision, implementation), []).append((ours, theirs))
    for (precision, implementation), pairs in turns.items():
        ratios = {
            key: [ours[key] / theirs[key] for ours, theirs in pairs] for key in ("tokens_per_second", "rss_bytes")
        }
        fastest, slowest = max(ratios["tokens_per_second"]), min(ratios["tokens_per_second"])
        print(
            f"danlu / transformers {implementation} {precision}: {statistics.median(ratios['tokens_per_second']):.2f}x "
            f"the tokens per second [{slowest:.2f}-{fastest:.2f}, {len(pairs)} turns], "
            f"{statistics.median(ratios['rss_bytes']):.2f}x the memory"
        )


def _print(name: str, result: dict[str, float]) -> None:
    print(f"{name:36} {result['tokens_per_second']:8,.0f} tok/s  {result['rss_bytes'] / 2**30:5.2f} GiB", flush=True)


def balance_of(path: str) -> None:
    """Trains a recipe in this process and prints, for each layer, max/mean of its counts in the last steps."""
    from danlu.cli.main import main as danlu
    from danlu.models.load_balancing import Balancer

    counts: list[dict[str, np.ndarray]] = []
    end_step = Balancer.end_step

    def recording(self: Balancer, *arguments: Any) -> dict[str, float]:
        metrics = end_step(self, *arguments)
        counts.append({name: layer.counts.numpy().copy() for name, layer in self.layers.items()})
        return metrics

    Balancer.end_step = recording  # type: ignore[method-assign]
    code = danlu(["train", path])
    assert not code, f"danlu train ended with {code}"
    sums = {name: sum(step[name] for step in counts[-LAST:]) for name in counts[-1]}
    print(json.dumps({name: float(total.max() / total.mean()) for name, total in sums.items()}))


def balance(folder: Path, options: argparse.Namespace) -> None:
    from danlu.data.demo_data import pretraining_documents

    length, steps = LENGTH // 2, options.balance_steps
    with (folder / "rows.jsonl").open("w") as out:
        for text in pretraining_documents(1, steps * length // 25):
            out.write(json.dumps({"text": text}) + "\n")
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            written = Path(scratch) / "recipe.yaml"
            values = recipe(folder, GLM4, steps, length, options.threads, options.precision)
            values["router"] = BALANCES[kind] | ({"rate": options.bias_rate} if kind == "bias" else {})
            written.write_text(json.dumps(values | {"output": f"{scratch}/run"}))
            command = [sys.executable, __file__, "--balance-of", str(written)]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            if answer.returncode:
                raise SystemExit(answer.stdout[-2000:] + answer.stderr[-2000:])
            by_layer = json.loads(answer.stdout.splitlines()[-1])
            metrics = [json.loads(line) for line in (Path(scratch) / "run/metrics.jsonl").read_text().splitlines()]
            losses = [line["loss"] for line in metrics if "tokens_per_second" in line]
        worst = max(by_layer, key=by_layer.__getitem__)
        others = ", ".join(f"{value:.2f}" for value in by_layer.values())
        print(
            f"{kind:9} max/mean {by_layer[worst]:.2f} in layer {worst} (all: {others}), "
            f"loss {statistics.mean(losses[-LAST:]):.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--experts", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--balance-steps", type=int, default=300)
    parser.add_argument("--only", choices=["speed", "balance"])
    parser.add_argument("--kinds", nargs="+", choices=list(BALANCES), default=list(BALANCES))
    parser.add_argument("--bias-rate", type=float, default=BALANCES["bias"]["rate"])
    parser.add_argument(
        "--memory", choices=["none", "elementwise", "selective"], default="elementwise", help="what danlu recomputes"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=list(PEER_PRECISIONS), default="bf16")
    parser.add_argument("--documents", choices=["packed", "whole"], default="packed")
    parser.add_argument("--peer", nargs=3, metavar=("IMPLEMENTATION", "PRECISION", "DOCUMENTS"), help=argparse.SUPPRESS)
    parser.add_argument("--balance-of", metavar="RECIPE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        peer(*options.peer, options.steps, options.threads)
        return
    if options.balance_of:
        balance_of(options.balance_of)
        return
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    from danlu.data.demo_data import pretraining_documents
    from danlu.data.tokenizer_training import train_tokenizer

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        train_tokenizer(pretraining_documents(0, 500), 600, folder / "tokenizer")
        if options.only != "balance":
            speed(folder, options)
        if options.only != "speed":
            balance(folder, options)


if __name__ == "__main__":
    main()
