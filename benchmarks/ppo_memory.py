"""What the four models of PPO hold: as adapters on one base, and as models of their own, for the same policy.

    python benchmarks/ppo_memory.py [--size 58M]

Two steps of two prompts with four answers each. Policy, reference, reward and values are

    one base     an adapter each (the reference: none) on one frozen base
    own, lora    the same policy; reference, reward model and model of values are models of their own, the last trained
    own, full    four models, of which policy and values are trained whole

The parts are those of summary.json, counted byte by byte, activations by the tensors that autograd kept; `held` is the
peak of the process, with the program itself (some 330 MiB on a CPU).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from memory_table import SHAPES, make_base, measure, write_config

from danlu.adapters.peft_folder import write_adapter
from danlu.assembly.base_model import find_base
from danlu.assembly.frozen_base import adapters_of
from danlu.data.demo_data import pretraining_documents
from danlu.data.tokenizer_training import train_tokenizer
from danlu.models.hf_folder import read_config
from danlu.models.initialize import initialize
from danlu.models.loading import build, load
from danlu.models.saving import save
from danlu.models.score_head import head_tensors, new_score_head
from danlu.recipe.sections import Lora

LORA = {"kind": "lora", "rank": 16}
PARTS = ("weights", "adapter", "gradients", "optimizer", "activations", "logits")


def reward_folders(folder: Path, base: Path, tokenizer: Path) -> tuple[Path, Path]:
    """(a reward model that is an adapter on the base, one that is a model of its own)."""
    head = new_score_head(read_config(base).hidden_size, 1, bias=False, seed=1)
    adapters, named = adapters_of(load(base)), find_base(base)
    adapters.add("made", Lora(rank=16))
    adapter = folder / "reward-adapter"
    adapter.mkdir()
    write_adapter(
        adapters,
        "made",
        adapter,
        base=named.named,
        base_fingerprint=named.fingerprint,
        task="sequence-classification",
        head=head_tensors(head),
    )
    model = build(replace(read_config(base), task="sequence-classification"))
    initialize(model, 1)
    save(model, folder / "reward", tokenizer_from=tokenizer, score_head=head)
    return adapter, folder / "reward"


def recipes(base: Path, adapter: Path, reward: Path) -> dict[str, dict[str, Any]]:
    own = {
        "reference": {"kind": "frozen"},
        "rewards": [{"kind": "model", "path": str(reward)}],
        "value": {"share": "none"},
    }
    return {
        "one base": {
            "adapter": LORA,
            "rewards": [{"kind": "model", "path": str(adapter)}],
            "value": {"share": "base", "adapter": LORA},
        },
        "own, lora": {"adapter": LORA, **own},
        "own, full": own,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="58M", choices=list(SHAPES))
    size = parser.parse_args().size
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = folder / "base"
        train_tokenizer(pretraining_documents(0, 500), 600, folder / "tokenizer")
        write_config(base, SHAPES[size])
        make_base(base, folder / "tokenizer")
        rows = ({"question": f"Once upon a time there were {number}"} for number in range(8))
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{size}: {read_config(base).parameter_count():,} parameters; MiB, activations in bf16")
        print(f"{'models':12}" + "".join(f"{part:>12}" for part in PARTS) + f"{'sum':>10}{'held':>10}")
        for name, models in recipes(base, *reward_folders(folder, base, folder / "tokenizer")).items():
            recipe = {
                "stage": "ppo",
                "model": str(base),
                "data": {"train": str(folder / "rows.jsonl"), "prompt": "{question}", "max_length": 128},
                "rollout": {"samples": 4, "max_new_tokens": 32},
                "batch": {"prompts": 2, "micro": 1},
                "precision": "bf16",
                "steps": 2,
                "checkpoint": {"every": 1000},
                "output": str(folder / name.replace(", ", "-").replace(" ", "-")),
                **models,
            }
            file = Path(recipe["output"]).with_suffix(".yaml")
            file.write_text(json.dumps(recipe))
            summary = measure(file)
            parts = summary["memory"]
            numbers = [*(parts.get(part, 0) for part in PARTS), sum(parts.values()), summary["peak_memory_bytes"]]
            print(f"{name:12}" + "".join(f"{number / 2**20:>12.1f}" for number in numbers[:-2]), end="")
            print("".join(f"{number / 2**20:>10.1f}" for number in numbers[-2:]), flush=True)


if __name__ == "__main__":
    main()
