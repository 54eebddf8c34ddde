"""Full SFT side by side with the peers: real tokens per second and peak memory, in one run, rounds interleaved.

    python benchmarks/sft.py --peers-python PEERS/bin/python --data alpaca_en_demo.json [--models tiny small wide]
    python benchmarks/sft.py --before CHECKOUT --engines danlu danlu-before --data alpaca_en_demo.json --rounds 9

Every engine trains the same weights on the same rows of token ids (labels on answers only; the tokenizer is trained on
the file, 4096 words), in bf16 with two threads, in a process of its own. A figure is the median over all steps but the
first of all rounds; a ratio is of medians. Peak memory is the process's largest resident set, imports and saving
included. `danlu-before` is the danlu of another checkout, such as the commit before a change.

The peers' environment: `pip install torch transformers trl peft datasets accelerate`.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 688, "vocab_size": 4096},
    "small": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 32000},
    "wide": {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1536, "vocab_size": 128256},
}
PACKS = {"tiny": 2, "small": 1, "wide": 2}  # of 1024 tokens in a step
LENGTH = 1024
WORDS = 4096


def make_tokenizer(data: str, folder: Path) -> Path:
    from danlu.data.tokenizer_training import train_tokenizer

    train_tokenizer((" ".join(row.values()) for row in json.loads(Path(data).read_text())), WORDS, folder)
    return folder


def make_model(name: str, tokenizer: Path, folder: Path) -> None:
    """Random weights in the shape `name`, with a tokenizer beside them."""
    from danlu.models.hf_config import read_config_values
    from danlu.models.initialize import initialize
    from danlu.models.loading import build
    from danlu.models.saving import save

    values: dict[str, Any] = {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": name == "tiny",
        **SHAPES[name],
    }
    model = build(read_config_values(values, where=name))
    initialize(model, 0)
    save(model, folder, tokenizer_from=tokenizer)


def make_rows(data: str, tokenizer: Path, file: Path) -> float:
    """Alpaca rows as token ids, labels on the answer; returns the mean length."""
    from transformers import AutoTokenizer

    chat_tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    lengths = []
    with file.open("w") as out:
        for row in json.loads(Path(data).read_text()):
            question = "\n".join(part for part in (row["instruction"], row.get("input", "")) if part)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
            prompt = chat_tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
            whole = chat_tokenizer.apply_chat_template(messages, tokenize=False)
            context = len(chat_tokenizer(prompt, add_special_tokens=False)["input_ids"])
            ids = chat_tokenizer(whole, add_special_tokens=False)["input_ids"][:LENGTH]
            if context < len(ids):
                json.dump({"input_ids": ids, "labels": [-100] * context + ids[context:]}, out)
                out.write("\n")
                lengths.append(len(ids))
    return statistics.mean(lengths)


def run_danlu(folder: Path, name: str, steps: int, checkout: str | None = None, **changes: Any) -> dict[str, Any]:
    """`changes` are sections of the recipe; `checkout` has another danlu than this one."""
    environment = os.environ | ({} if checkout is None else {"PYTHONPATH": f"{checkout}/src"})
    recipe = {
        "stage": "sft",
        "model": str(folder / name),
        "data": {
            "train": [{"path": str(folder / "rows.jsonl"), "format": "tokenized"}],
            "max_length": LENGTH,
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": PACKS[name]},
        "steps": steps,
        "checkpoint": {"every": 10_000},
        "threads": 2,
        **changes,
    }
    return train_danlu(recipe, environment)


def train_danlu(recipe: dict[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Trains a recipe without `output` in a process of its own, and reads what each step but the first took."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "recipe.yaml"
        file.write_text(json.dumps(recipe | {"output": f"{scratch}/run"}))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "danlu", "train", str(file)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(said)
        lines = [json.loads(line) for line in (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "elapsed_s" in line]
    return {
        "tokens": [line["tokens"] for line in lines[1:]],
        "seconds": [after["elapsed_s"] - before["elapsed_s"] for before, after in itertools.pairwise(lines)],
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "losses": [line["loss"] for line in lines],
    }


def run_peer(
    python: str, engine: str, folder: Path, name: str, steps: int, mean_length: float, options: Sequence[str] = ()
) -> dict[str, Any]:
    rows = PACKS[name] if engine == "trl-packed" else round(PACKS[name] * LENGTH / mean_length)
    command = [python, str(Path(__file__).with_name("peers.py")), engine, "--model", str(folder / name)]
    command += ["--data", str(folder / "rows.jsonl"), "--steps", str(steps), "--rows", str(rows), *options]
    return result_of(command)


def result_of(command: Sequence[str]) -> dict[str, Any]:
    """What a peer's script prints after RESULT."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers-python")
    parser.add_argument("--before", help="a checkout of the danlu that the engine danlu-before is")
    parser.add_argument("--data", required=True, help="a json file of alpaca rows")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--engines", nargs="+", default=["danlu", "hf-flat", "trl-packed"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = make_tokenizer(options.data, folder / "tokenizer")
        mean_length = make_rows(options.data, tokenizer, folder / "rows.jsonl")
        for name in options.models:
            make_model(name, tokenizer, folder / name)
            results: dict[str, list[dict[str, Any]]] = {engine: [] for engine in options.engines}
            for _ in range(options.rounds):
                for engine in options.engines:
                    if engine.startswith("danlu"):
                        checkout = options.before if engine == "danlu-before" else None
                        results[engine].append(run_danlu(folder, name, options.steps, checkout))
                    else:
                        results[engine].append(
                            run_peer(options.peers_python, engine, folder, name, options.steps, mean_length)
                        )
            report(name, results)


def report(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    rates, peaks = {}, {}
    for engine, runs in results.items():
        steps = [
            tokens / seconds for run in runs for tokens, seconds in zip(run["tokens"], run["seconds"], strict=True)
        ]
        rates[engine] = statistics.median(steps)
        peaks[engine] = statistics.median(run["peak_rss_bytes"] for run in runs) / 2**20
        print(
            f"{name:6} {engine:11} {rates[engine]:8.0f} tok/s [{min(steps):.0f}-{max(steps):.0f}]  "
            f"{peaks[engine]:6.0f} MiB  first losses {[round(loss, 3) for loss in runs[0]['losses'][:3]]}"
        )
    for engine in results:
        if engine != "danlu" and "danlu" in results:
            print(
                f"{name:6} danlu / {engine:11} speed {rates['danlu'] / rates[engine]:.2f}x  "
                f"memory {peaks['danlu'] / peaks[engine]:.2f}x"
            )


if __name__ == "__main__":
    main()
