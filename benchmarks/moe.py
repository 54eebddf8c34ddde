"""Mixtures of experts: training speed and memory beside transformers', and how evenly each kind of balance loads them.

    python benchmarks/moe.py [--steps 12] [--balance-steps 300] [--only speed|balance] [--threads 2]

60M parameters: 8 layers of width 256 with 32 experts of width 256, four of which a token goes to, bfloat16 activations
over float32 weights, AdamW.

speed    documents of 2048 tokens, one a step. danlu is `danlu train` in a process; transformers is its own forward and
         backward pass and fused AdamW in a bare loop, in a process of its own, under autocast and all in bfloat16, each
         with every experts implementation that fits ("batched_mm" does not: it copies the weights of an expert for each
         of 8192 rows). A figure is the median over all steps but the first three; the peers take turns with danlu.
balance  the demo's documents, packed to 1024 tokens, one pack a step: for each layer the counts of its experts in the
         last 50 steps, summed; of these the largest over the mean, in the worst layer.
"""

from __future__ import annotations

import argparse
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
PEERS = [("eager", "autocast"), ("grouped_mm", "autocast"), ("eager", "bfloat16"), ("grouped_mm", "bfloat16")]
BALANCES: dict[str, dict[str, Any]] = {
    "bias": {"balance": "bias", "rate": 0.001, "sequence": 0.0001, "z": 0.001},
    "sequence": {"balance": "sequence", "sequence": 0.01},
    "step": {"balance": "step", "rate": 0.01},
    "none": {"balance": "none"},
}
LAST = 50


def recipe(folder: Path, config: dict[str, Any], steps: int, length: int, threads: int) -> dict[str, Any]:
    return {
        "stage": "pretrain",
        "model": {"config": config, "tokenizer": str(folder / "tokenizer")},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": length, "cache": str(folder / "cache")},
        "batch": {"sequences": 1, "micro": 1},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
        "steps": steps,
        "precision": "bf16",
        "threads": threads,
        "log": {"every": 1, "tensorboard": False},
        "checkpoint": {"every": 100_000},
    }


def danlu_speed(folder: Path, steps: int, threads: int) -> dict[str, float]:
    from throughput import first_steps

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        written = Path(scratch) / "recipe.yaml"
        values = recipe(folder, QWEN3, steps + 1000, LENGTH, threads)  # ended before it exports
        written.write_text(json.dumps(values | {"output": f"{scratch}/run"}))
        lines = first_steps(
            [sys.executable, "-m", "danlu", "train", str(written)], Path(scratch) / "run" / "metrics.jsonl", steps
        )
    steady = [line for line in lines if "tokens_per_second" in line][3:]
    return {
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steady),
        "rss_bytes": max(line["memory_bytes"] for line in steady),
    }


def peer(implementation: str, precision: str, steps: int, threads: int) -> None:
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
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        speeds.append(LENGTH / (time.perf_counter() - started))
    with open("/proc/self/status") as status:
        rss = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    parameters = sum(each.numel() for each in model.parameters())
    print(json.dumps({"tokens_per_second": statistics.median(speeds[3:]), "rss_bytes": rss, "parameters": parameters}))


def speed(folder: Path, steps: int, threads: int) -> None:
    chance = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w") as out:
        for _ in range(steps + 20):
            out.write(json.dumps({"input_ids": chance.integers(10, 500, LENGTH).tolist()}) + "\n")
    ours: list[dict[str, float]] = []
    theirs: list[tuple[str, dict[str, float]]] = []
    for implementation, precision in PEERS:
        ours.append(danlu_speed(folder, steps, threads))
        _print("danlu", ours[-1])
        command = [sys.executable, __file__, "--peer", implementation, precision]
        command += ["--steps", str(steps), "--threads", str(threads)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            print(f"transformers {implementation} {precision}: {answer.stderr.strip().splitlines()[-1]}")
            continue
        theirs.append((f"transformers {implementation} {precision}", json.loads(answer.stdout.splitlines()[-1])))
        _print(*theirs[-1])
    best = statistics.median(one["tokens_per_second"] for one in ours)
    memory = statistics.median(one["rss_bytes"] for one in ours)
    for precision in ("autocast", "bfloat16"):
        name, fastest = max(
            (one for one in theirs if one[0].endswith(precision)), key=lambda one: one[1]["tokens_per_second"]
        )
        print(
            f"danlu / {name}: {best / fastest['tokens_per_second']:.2f}x the tokens per second, "
            f"{memory / fastest['rss_bytes']:.2f}x the memory"
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


def balance(folder: Path, steps: int, threads: int, kinds: list[str]) -> None:
    from danlu.data.demo_data import pretraining_documents

    length = LENGTH // 2
    with (folder / "rows.jsonl").open("w") as out:
        for text in pretraining_documents(1, steps * length // 25):
            out.write(json.dumps({"text": text}) + "\n")
    for kind in kinds:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            written = Path(scratch) / "recipe.yaml"
            values = recipe(folder, GLM4, steps, length, threads) | {"router": BALANCES[kind]}
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
    parser.add_argument("--balance-steps", type=int, default=300)
    parser.add_argument("--only", choices=["speed", "balance"])
    parser.add_argument("--kinds", nargs="+", choices=list(BALANCES), default=list(BALANCES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", nargs=2, metavar=("IMPLEMENTATION", "PRECISION"), help=argparse.SUPPRESS)
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
            speed(folder, options.steps, options.threads)
        if options.only != "speed":
            balance(folder, options.balance_steps, options.threads, options.kinds)


if __name__ == "__main__":
    main()
