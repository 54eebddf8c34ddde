"""What full training, LoRA and QLoRA hold: measured on small models, carried to 7B and 65B by counting bytes.

    python benchmarks/memory_table.py [--measure 5M 58M 300M]

Each model is trained for three steps of one pack of 1024 tokens; the parts are those of its summary.json, and the part
that depends on the method (weights, adapter, gradients, optimizer) has to equal what `danlu preview` counts from the
config (`rank_memory.rank_states`). For the large ones nothing is allocated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from danlu.data.demo_data import pretraining_documents
from danlu.data.tokenizer_training import train_tokenizer
from danlu.models.hf_folder import read_config
from danlu.parallel.layout import Layout
from danlu.planning.rank_memory import rank_states
from danlu.recipe import load
from danlu.run.read_workload import read_workload

LENGTH = 1024
SHAPES: dict[str, dict[str, int]] = {
    "5M": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 688, "vocab_size": 4096},
    "58M": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 32000},
    "300M": {"hidden_size": 1024, "num_hidden_layers": 20, "intermediate_size": 2816, "vocab_size": 32000},
}
LARGE: dict[str, dict[str, int]] = {  # Llama, arXiv:2302.13971, table 2
    "7B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 11008, "num_attention_heads": 32},
    "65B": {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 22016, "num_attention_heads": 64},
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": {"kind": "lora", "rank": 8}},
    "qlora": {"adapter": {"kind": "lora", "rank": 8}, "quantization": "nf4"},
}
COUNTED = ("weights", "adapter", "gradients", "optimizer")


def write_config(folder: Path, shape: dict[str, int]) -> None:
    heads = shape.get("num_attention_heads", shape["hidden_size"] // 64)
    values = {
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if "num_attention_heads" in shape else max(1, heads // 2),
        **shape,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))


def make_base(folder: Path, tokenizer: Path) -> None:
    from danlu.models.initialize import initialize
    from danlu.models.loading import build
    from danlu.models.saving import save

    model = build(read_config(folder))
    initialize(model, 0)
    save(model, folder, tokenizer_from=tokenizer)


def write_recipe(folder: Path, name: str, method: str) -> Path:
    recipe = {
        "stage": "pretrain",
        "model": str(folder / name),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": LENGTH, "cache": str(folder / "cache")},
        "precision": "bf16",
        "batch": {"sequences": 1},
        "steps": 3,
        "checkpoint": {"every": 1000},
        "output": str(folder / f"{name}-{method}"),
        **METHODS[method],
    }
    file = folder / f"{name}-{method}.yaml"
    file.write_text(json.dumps(recipe))
    return file


def count(file: Path) -> dict[str, int]:
    """Bytes of a recipe's run by part, from the config of its model alone."""
    recipe = load(file).recipe
    assert recipe.model.path is not None
    config = read_config(recipe.model.path)
    parts = vars(rank_states(read_workload(recipe, config, judges=True), Layout()).parts)
    return {part: parts[part] for part in COUNTED}


def measure(file: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "danlu", "train", str(file)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    summary: dict[str, Any] = json.loads((file.with_suffix("") / "summary.json").read_text())
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    columns = (
        f"{'model':6}{'method':7}{'parameters':>14}{'weights':>10}{'adapter':>9}{'gradients':>10}{'optimizer':>10}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        train_tokenizer(pretraining_documents(0, 500), 600, folder / "tokenizer")
        chance = np.random.default_rng(0)
        rows = [{"input_ids": chance.integers(10, 500, LENGTH).tolist()} for _ in range(8)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{columns}{'activations':>12}{'logits':>8}   (MiB){'held':>8}")
        for name in options.measure:
            write_config(folder / name, SHAPES[name])
            make_base(folder / name, folder / "tokenizer")
            parameters = read_config(folder / name).parameter_count()
            for method in METHODS:
                file = write_recipe(folder, name, method)
                summary, counted = measure(file), count(file)
                parts = summary["memory"]
                assert {part: parts[part] for part in counted} == counted, (parts, counted)
                numbers = "".join(
                    f"{parts[part] / 2**20:>{width}.1f}"
                    for part, width in (
                        ("weights", 10), ("adapter", 9), ("gradients", 10), ("optimizer", 10), ("activations", 12),
                        ("logits", 8),
                    )
                )  # fmt: skip
                resident = summary["peak_memory_bytes"] / 2**20
                print(f"{name:6}{method:7}{parameters:>14,}{numbers}        {resident:8.0f}", flush=True)
        print(f"\n{columns}{'total':>10}   (GB, without activations)")
        for name, shape in LARGE.items():
            write_config(folder / name, shape)
            # Only a file's header is looked at, for the fingerprint of an adapter's base.
            save_file({"no_weights": np.zeros(1, dtype=np.float32)}, folder / name / "model.safetensors")
            parameters = read_config(folder / name).parameter_count()
            for method in METHODS:
                counted = count(write_recipe(folder, name, method))
                values = (*counted.values(), sum(counted.values()))
                numbers = "".join(
                    f"{value / 1e9:>{width}.2f}" for value, width in zip(values, (10, 9, 10, 10, 10), strict=True)
                )
                print(f"{name:6}{method:7}{parameters:>14,}{numbers}")


if __name__ == "__main__":
    main()
