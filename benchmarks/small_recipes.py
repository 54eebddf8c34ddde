"""Small recipes of many kinds with synthetic rows, for `same_bits.py`, `bits.py` and `operators.py`.

They use only what a user sees (recipe keys, the command line), so that they run in any checkout; nothing of danlu is
imported.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

STEPS = 8
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = (
    "the",
    "cat",
    "sat",
    "upon",
    "a",
    "mat",
    "and",
    "saw",
    "seven",
    "birds",
    "above",
    "an",
    "old",
    "river",
    "stone",
)


@dataclass(frozen=True)
class Case:
    """A recipe as changes of `DEFAULTS`, section by section, and the number of processes that train it."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    on_base: bool = False  # starts from the model folder that the case "pretrain" has trained
    is_quick: bool = True  # one of those that `operators.py` compares


LORA: dict[str, Any] = {"adapter": {"kind": "lora", "rank": 4, "dropout": 0.1}}
CASES = {
    "pretrain": Case({"stage": "pretrain", "model": {"config": SHAPE}, "precision": "bf16"}),
    "sft": Case({"model": {"config": SHAPE}, "ema": {"decay": 0.9}}),
    "sft-recompute": Case({"model": {"config": SHAPE}, "memory": {"recompute": "full"}}, is_quick=False),
    "lora": Case(LORA, on_base=True),
    "qlora": Case({**LORA, "quantization": {"kind": "nf4", "block": 32}}, on_base=True),
    "zero3": Case({"model": {"config": SHAPE}, "parallel": "zero3"}, processes=2, is_quick=False),
    "tensor-2": Case({"model": {"config": SHAPE}, "parallel": {"tensor": 2}}, processes=2, is_quick=False),
    "tensor-2-lora": Case({**LORA, "parallel": {"tensor": 2}}, processes=2, on_base=True, is_quick=False),
    "classify": Case({"stage": "classify", "model": {"preset": "lenet5"}, "loss": {"label_smoothing": 0.1}}),
}

_REWARDS = {"rewards": [{"kind": "format", "pattern": "[aeiou]", "weight": 0.5}, {"kind": "length", "most": 6}]}
_ROLLOUT = {"batch": {"prompts": 4, "micro": 2}, **_REWARDS, "rollout": {"samples": 3, "max_new_tokens": 8}}
_PAIRS = {"batch": {"pairs": 4, "micro": 2}}
STAGE_CASES = {
    "pretrain": CASES["pretrain"],
    "sft": CASES["sft"],
    "classify": CASES["classify"],
    "reward": Case({"stage": "reward", **_PAIRS}, on_base=True),
    "dpo": Case({"stage": "dpo", **_PAIRS}, on_base=True),
    "kto": Case({"stage": "kto", **_PAIRS}, on_base=True),
    "distill": Case({"stage": "distill", "teacher": {"model": "BASE"}}, on_base=True),
    "grpo": Case({"stage": "grpo", **_ROLLOUT}, on_base=True),
    "grpo-exact": Case({"stage": "grpo", **_ROLLOUT, "numerics": "exact"}, on_base=True),
    "ppo": Case({"stage": "ppo", **_ROLLOUT, "value": {"share": "policy"}}, on_base=True),
    "online-dpo": Case({"stage": "online-dpo", **_ROLLOUT}, on_base=True),
}
"""One recipe for each stage; "BASE" in it is the model folder that the case "pretrain" has trained."""
ROWS = {"sft": "chat", "distill": "chat", "pretrain": "text", "reward": "pairs", "dpo": "pairs", "kto": "judged"}
"""The file of rows of a stage; the others read prompts.jsonl."""


def write_inputs(folder: Path) -> None:
    """Writes tokenizer/, images/ and the files of rows with fixed seeds, unless they are there."""
    if folder.is_dir():
        return
    folder.mkdir(parents=True)
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=generator.randint(4, 60))) for _ in range(120)]
    _write_tokenizer(folder / "tokenizer", texts)
    chats = [
        {
            "messages": [
                {"role": role, "content": " ".join(generator.choices(WORDS, k=generator.randint(2, 12)))}
                for role in ("user", "assistant") * generator.randint(1, 3)
            ]
        }
        for _ in range(80)
    ]

    def words(most: int) -> str:
        return " ".join(generator.choices(WORDS, k=generator.randint(1, most)))

    rows_of: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": text} for text in texts],
        "chat": chats,
        "pairs": [{"prompt": words(8), "chosen": words(10), "rejected": words(10)} for _ in range(60)],
        "judged": [{"prompt": words(8), "completion": words(10), "label": number % 3 > 0} for number in range(60)],
        "prompts": [{"question": words(8)} for _ in range(60)],
    }
    for name, rows in rows_of.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _write_images(folder / "images")


def _write_tokenizer(folder: Path, texts: list[str]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(special, normalized=False) for special in specials])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _write_images(folder: Path) -> None:
    """The training files of MNIST's format (idx), of noise."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    images, labels = generator.integers(0, 256, (64, 28, 28), np.uint8), generator.integers(0, 10, 64, np.uint8)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        (folder / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))


def write_recipe(file: Path, case: Case, inputs: Path, output: Path, base: Path, cache: Path) -> None:
    """Writes the recipe of a case. base: the model folder for cases that start from one; cache: for its tokens."""
    stage = case.changes.get("stage", "sft")
    rows = "images" if stage == "classify" else f"{ROWS.get(stage, 'prompts')}.jsonl"
    values: dict[str, Any] = {
        "stage": "sft",
        "model": {"path": str(base)} if case.on_base else {},
        "data": {"train": str(inputs / rows)},
        "batch": {"sequences": 4, "micro": 2} if stage != "classify" else {"sequences": 8},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-2},
        "schedule": {"kind": "cosine", "warmup": 2},
        "steps": STEPS,
        "precision": "fp32",
        "threads": 1,
        "checkpoint": {"every": 1, "keep": 100},
        "log": {"every": 1, "tensorboard": False},
        "output": str(output),
        **case.changes,
    }
    if "teacher" in values:
        values["teacher"] = {"model": str(base)}
    if rows == "prompts.jsonl":
        values["data"]["prompt"] = "{question}"
    if stage != "classify":
        values["data"] |= {"max_length": 64, "cache": str(cache), "workers": 1}
        if not case.on_base:
            values["model"] = {**values["model"], "tokenizer": str(inputs / "tokenizer")}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(values))


def environment(checkout: Path, *first: Path) -> dict[str, str]:
    """The environment in which `import danlu` gives that checkout; `first` folders come before it on the path."""
    path = os.pathsep.join(map(str, (*first, checkout / "src")))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def command(recipe: Path, case: Case, *overrides: str) -> list[str]:
    """`danlu train`."""
    processes = ["--processes", str(case.processes)] if case.processes > 1 else []
    return [sys.executable, "-P", "-m", "danlu", "train", str(recipe), *overrides, "--quiet", *processes]


def run(arguments: list[str], env: dict[str, str], *, expected: tuple[int, ...] = (0,)) -> None:
    """Runs a command to its end. Raises RuntimeError with what it printed for another exit code."""
    ended = subprocess.run(arguments, env=env, capture_output=True, text=True, check=False, timeout=900)
    if ended.returncode not in expected:
        raise RuntimeError(f"{' '.join(arguments)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
