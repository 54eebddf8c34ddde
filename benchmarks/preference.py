"""DPO and reward models side by side with TRL: real tokens per second and peak memory, beside the same figures of sft.

    python benchmarks/preference.py --peers-python PEERS/bin/python --pairs dpo_en_demo.json --data alpaca_en_demo.json
                                    [--rounds 3] [--steps 5] [--pairs-per-step 4] [--cases dpo dpo-lora reward]

Both engines start from the same weights and train on the same pairs, in bf16 with two threads, each run in a process of
its own. The file of a round holds the pairs of one step, so that every step of both engines consists of the same pairs
and their losses can be compared, whatever order each engine reads rows in; other rounds have other pairs. Tokens are
counted as TRL's two sequences of a pair have them, prompts twice and without padding: danlu is given the same count
though it computes a prompt once. DPO has a live reference in both (`reference: frozen` and `adapter-off`; TRL's second
model and `disable_adapter`). `sft` and `sft-lora` are those of sft.py and adapters.py in the same rounds; what DPO
gains over them is the ratio of ratios in the last lines. TRL may divide a step into several micro-batches
(`--peer-accumulate`), which pads less.

The peers' environment: `pip install torch transformers trl peft datasets accelerate`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers import LEARNING_RATE
from sft import LENGTH, SHAPES, make_model, make_rows, make_tokenizer, result_of, run_danlu, run_peer, train_danlu

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
LORA = {"kind": "lora", "rank": 8, "alpha": 16.0}
DANLU: dict[str, dict[str, Any]] = {
    "dpo": {"stage": "dpo", "reference": "frozen"},
    "dpo-lora": {"stage": "dpo", "reference": "adapter-off", "adapter": LORA},
    "reward": {"stage": "reward"},
}
TRL: dict[str, list[str]] = {
    "dpo": ["trl-dpo"],
    "dpo-lora": ["trl-dpo", "--adapter", "lora"],
    "reward": ["trl-reward"],
}
BESIDE = {"dpo": "sft", "dpo-lora": "sft-lora", "reward": "sft"}
"""The case of plain tuning that a case is compared with."""


def make_pairs(file: str, tokenizer: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows whose two sequences have at most LENGTH tokens, as messages, and the tokens of both together."""
    from transformers import AutoTokenizer

    chat_tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    rows, tokens = [], []
    for row in json.loads(Path(file).read_text()):
        prompt = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        pair = {name: [{"role": "assistant", "content": row[name]["value"]}] for name in ("chosen", "rejected")}
        texts = [chat_tokenizer.apply_chat_template(prompt + answer, tokenize=False) for answer in pair.values()]
        lengths = [len(chat_tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        if max(lengths) <= LENGTH:
            rows.append({"prompt": prompt, **pair})
            tokens.append(sum(lengths))
    return rows, tokens


def train_pairs(folder: Path, name: str, case: str, pairs: Path, steps: int, tokens: int, micro: Any) -> dict[str, Any]:
    """A run of danlu over the pairs of one file, all of them in every step; `tokens` is their number as TRL has it."""
    count = len(pairs.read_text().splitlines())
    recipe = {
        "model": str(folder / name),
        "data": {"train": [str(pairs)], "max_length": LENGTH, "cache": str(folder / "cache")},
        "batch": {"pairs": count, "micro": micro},
        "optimizer": {"kind": "adamw", "learning_rate": LEARNING_RATE, "weight_decay": 0.0, "betas": [0.9, 0.999]},
        "schedule": {"kind": "constant", "warmup": 0},
        "steps": steps,
        "checkpoint": {"every": 10_000},
        "threads": 2,
        **DANLU[case],
    }
    result = train_danlu(recipe, os.environ)
    return result | {"tokens": [tokens] * len(result["seconds"])}


def peer_pairs(options: argparse.Namespace, model: Path, case: str, pairs: Path) -> dict[str, Any]:
    engine, *adapter = TRL[case]
    command = [options.peers_python, str(Path(__file__).with_name("peers.py")), engine, "--model", str(model)]
    command += ["--data", str(pairs), "--steps", str(options.steps), "--rows", str(options.pairs_per_step)]
    return result_of([*command, "--accumulate", str(options.peer_accumulate), *adapter])


def train_plain(
    options: argparse.Namespace, folder: Path, case: str, engine: str, mean_length: float
) -> dict[str, Any]:
    """A run of sft.py (`sft`) or adapters.py (`sft-lora`): packs of 1024 tokens in both engines."""
    if engine == "danlu":
        changes: dict[str, Any] = {"adapter": LORA} if case == "sft-lora" else {}
        return run_danlu(folder, options.model, options.steps, **changes)
    adapter = ["--adapter", "lora"] if case == "sft-lora" else []
    return run_peer(options.peers_python, "trl-packed", folder, options.model, options.steps, mean_length, adapter)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers-python")
    parser.add_argument("--pairs", required=True, help="a json file of pairs as LLaMA-Factory has them")
    parser.add_argument("--data", required=True, help="a json file of alpaca rows, for the tokenizer and sft")
    parser.add_argument("--model", default="small", choices=list(SHAPES))
    parser.add_argument("--cases", nargs="+", default=list(DANLU), choices=list(DANLU))
    parser.add_argument("--engines", nargs="+", default=["danlu", "trl"], choices=["danlu", "trl"])
    parser.add_argument(
        "--no-sft", action="store_true", help="without the runs of sft that the ratios are compared with"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pairs-per-step", type=int, default=4)
    parser.add_argument("--peer-accumulate", type=int, default=1, help="micro-batches of TRL's step")
    parser.add_argument("--micro", default="auto", type=lambda value: value if value == "auto" else int(value))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = make_tokenizer(options.data, folder / "tokenizer")
        mean_length = make_rows(options.data, tokenizer, folder / "rows.jsonl")
        rows, tokens = make_pairs(options.pairs, tokenizer)
        make_model(options.model, tokenizer, folder / options.model)
        plain = [] if options.no_sft else list(dict.fromkeys(BESIDE[case] for case in options.cases))
        runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for number in range(options.rounds):
            of_round = slice(number * options.pairs_per_step, (number + 1) * options.pairs_per_step)
            pairs = folder / f"pairs-{number}.jsonl"
            pairs.write_text("".join(json.dumps(row) + "\n" for row in rows[of_round]))
            count = sum(tokens[of_round])
            for case in [*plain, *options.cases]:
                for engine in options.engines:
                    if case in plain:
                        done = train_plain(options, folder, case, engine, mean_length)
                    elif engine == "danlu":
                        done = train_pairs(folder, options.model, case, pairs, options.steps, count, options.micro)
                    else:
                        done = peer_pairs(options, folder / options.model, case, pairs)
                        assert set(done["tokens"]) == {count}, "TRL has other tokens than those counted here"
                    runs.setdefault((case, engine), []).append(done)
                    losses = ", ".join(f"{loss:.4f}" for loss in done["losses"][:4])
                    print(
                        f"round {number}  {case:8} {engine:5}  {speed([done]):6.0f} tok/s  losses {losses}", flush=True
                    )
        report(runs, options.pairs_per_step)


def speed(runs: list[dict[str, Any]]) -> float:
    """The median over the steps of all runs, in real tokens a second."""
    return statistics.median(
        tokens / seconds for run in runs for tokens, seconds in zip(run["tokens"], run["seconds"], strict=True)
    )


def report(runs: dict[tuple[str, str], list[dict[str, Any]]], pairs_per_step: int) -> None:
    peaks = {key: statistics.median(run["peak_rss_bytes"] for run in done) / 2**20 for key, done in runs.items()}
    for (case, engine), done in runs.items():
        steps = [pairs_per_step / seconds for run in done for seconds in run["seconds"]]
        pairs = "" if case.startswith("sft") else f"{statistics.median(steps):6.3f} pairs/s"
        print(f"{case:8} {engine:5} {speed(done):6.0f} tok/s {pairs:15} {peaks[case, engine]:6.0f} MiB")
    ratios = {
        case: speed(done) / speed(runs[case, "trl"])
        for (case, engine), done in runs.items()
        if engine == "danlu" and (case, "trl") in runs
    }
    for case, ratio in ratios.items():
        memory = peaks[case, "danlu"] / peaks[case, "trl"]
        beside = BESIDE.get(case)
        gain = f"  {ratio / ratios[beside]:.2f}x the ratio of {beside}" if beside in ratios else ""
        print(f"{case:8} danlu / trl  speed {ratio:.2f}x  memory {memory:.2f}x{gain}")


if __name__ == "__main__":
    sys.exit(main())
