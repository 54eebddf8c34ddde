"""LoRA, QLoRA and DoRA side by side with TRL + PEFT: real tokens per second and peak memory, rounds interleaved.

    python benchmarks/adapters.py --peers-python PEERS/bin/python --data alpaca_en_demo.json [--model small]
                                  [--torchtune-python TORCHTUNE/bin/python] [--before CHECKOUT]

The same weights, rows, packs of 1024 tokens, rank 8 on all linear layers, bf16, two threads, each run in a process of
its own; one step is one pack. A figure is the median over all steps but the first of all rounds; a ratio is of medians.
Peak memory is the process's largest resident set, imports and saving included.

The peers' environment: `pip install torch transformers trl peft datasets accelerate bitsandbytes`; torchtune's is in
peer_torchtune.py.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from sft import SHAPES, make_model, make_rows, make_tokenizer, result_of, run_danlu, run_peer

RANK = {"rank": 8, "alpha": 16.0}
DANLU: dict[str, dict[str, Any]] = {
    "lora": {"adapter": {"kind": "lora", **RANK}},
    "qlora": {"adapter": {"kind": "lora", **RANK}, "quantization": "nf4"},
    "dora": {"adapter": {"kind": "dora", **RANK}},
    "full": {},
}
TORCHTUNE: dict[str, list[str]] = {"lora": [], "dora": ["--dora"]}
TRL: dict[str, list[str]] = {
    "lora": ["--adapter", "lora"],
    "qlora": ["--adapter", "lora", "--nf4"],
    "dora": ["--adapter", "dora"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers-python")
    parser.add_argument("--torchtune-python")
    parser.add_argument("--before", help="a checkout of another danlu, such as the commit before a change")
    parser.add_argument("--data", required=True, help="a json file of alpaca rows")
    parser.add_argument("--model", default="small", choices=list(SHAPES))
    parser.add_argument("--methods", nargs="+", default=["lora", "qlora", "dora"], choices=list(DANLU))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = make_tokenizer(options.data, folder / "tokenizer")
        mean_length = make_rows(options.data, tokenizer, folder / "rows.jsonl")
        make_model(options.model, tokenizer, folder / options.model)
        runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for _ in range(options.rounds):
            for method in options.methods:
                done = run_danlu(folder, options.model, options.steps, batch={"sequences": 1}, **DANLU[method])
                runs.setdefault(("danlu", method), []).append(done)
                if options.before:
                    changes = {"batch": {"sequences": 1}, **DANLU[method]}
                    done = run_danlu(folder, options.model, options.steps, options.before, **changes)
                    runs.setdefault(("before", method), []).append(done)
                if options.peers_python and method in TRL:
                    done = run_peer(
                        options.peers_python,
                        "trl-packed",
                        folder,
                        options.model,
                        options.steps,
                        mean_length,
                        [*TRL[method], "--rows", "1"],
                    )
                    runs.setdefault(("trl", method), []).append(done)
                if options.torchtune_python and method in TORCHTUNE:
                    script = str(Path(__file__).with_name("peer_torchtune.py"))
                    command = [options.torchtune_python, script, "--model", str(folder / options.model)]
                    command += ["--data", str(folder / "rows.jsonl"), "--steps", str(options.steps)]
                    done = result_of([*command, *TORCHTUNE[method]])
                    runs.setdefault(("tune", method), []).append(done)
        report(runs)


def report(runs: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    rates: dict[tuple[str, str], float] = {}
    peaks: dict[tuple[str, str], float] = {}
    for key, results in runs.items():
        steps = [tokens / s for run in results for tokens, s in zip(run["tokens"], run["seconds"], strict=True)]
        rates[key] = statistics.median(steps)
        peaks[key] = statistics.median(run["peak_rss_bytes"] for run in results) / 2**20
        engine, method = key
        losses = ", ".join(f"{loss:.3f}" for loss in results[0]["losses"][:3])
        span = f"[{min(steps):.0f}-{max(steps):.0f}]"
        print(f"{method:6} {engine:6} {rates[key]:8.0f} tok/s {span:12} {peaks[key]:6.0f} MiB  first losses {losses}")
    for engine, method in runs:
        if engine != "danlu":
            speed, memory = (table["danlu", method] / table[engine, method] for table in (rates, peaks))
            print(f"{method:6} danlu / {engine:4}  speed {speed:.2f}x  memory {memory:.2f}x")
        if method != "lora" and (engine, "lora") in runs:
            print(f"{method:6} {engine} / its own LoRA  speed {rates[engine, method] / rates[engine, 'lora']:.2f}x")


if __name__ == "__main__":
    main()
