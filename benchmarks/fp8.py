"""FP8 training: loss, kept bytes and seconds of every recipe of `precision: fp8`, beside training without it.

    python benchmarks/fp8.py DATA OUTPUT [--recipes tile row ...] [--seeds 0 1 2] [--steps 300] [--activations fp32]

DATA holds text/*.txt. A llama of 2.2M parameters is trained from scratch with each recipe and seed by `danlu train`, on
the first nineteen twentieths of each text; `loss` is that of the last twentieths behind the last step. Results are kept
in OUTPUT/results.json as each run ends, and a run that is there is not repeated: the runs may be made in parts.
The seeds' spread of training without FP8 is the standard deviation of its losses, relative to their mean.

Kept bytes are those of the storages that autograd saves of three layers in a forward pass of 1,024 tokens, and of the
planner's formula. Seconds are processor time of a forward and backward pass of that many tokens, the medians of rounds
in which the recipes take turns. On a CPU products are of decoded numbers: the seconds are those of emulation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from danlu.assembly.arithmetic import set_arithmetic
from danlu.data.tokenizer_training import train_tokenizer
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.numerics.dtypes import DTYPES
from danlu.planning.batch_shape import BatchShape
from danlu.planning.layer_graph import TRAINED, LayerGraph
from danlu.recipe.sections import Fp8Products

TEXTS = ("books/alice.txt", "books/moby_dick.txt", "books/pride_and_prejudice.txt", "tinyshakespeare.txt")
PLAIN = "none"
RECIPES = (PLAIN, "tile", "row", "tensor", "row-with-bf16-weight-gradient", "mxfp8")
VOCABULARY, LENGTH, SEQUENCES = 1024, 256, 4
MODEL = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
}


def write_texts(data: Path, output: Path) -> None:
    """Writes train.txt, held-out.txt and tokenizer/, unless they are there."""
    if (output / "tokenizer").is_dir():
        return
    parts: dict[str, list[str]] = {"train": [], "held-out": []}
    for name in TEXTS:
        text = (data / "text" / name).read_text(encoding="utf-8")
        border = text.rindex("\n", 0, len(text) * 19 // 20)
        parts["train"].append(text[:border])
        parts["held-out"].append(text[border:])
    for name, texts in parts.items():
        (output / f"{name}.txt").write_text("\n".join(texts), encoding="utf-8")
    train_tokenizer(parts["train"], VOCABULARY, output / "tokenizer")


def trained(output: Path, name: str, seed: int, steps: int, activations: str) -> float:
    """The loss on the held-out texts behind the last step of a run."""
    folder = output / f"{name}-{activations}-{seed}"
    precision: Any = activations if name == PLAIN else {"kind": "fp8", "recipe": name, "activations": activations}
    recipe = {
        "stage": "pretrain",
        "model": {"config": MODEL, "tokenizer": str(output / "tokenizer")},
        "data": {
            "train": str(output / "train.txt"),
            "eval": [str(output / "held-out.txt")],
            "max_length": LENGTH,
            "packing": "concatenate",
            "cache": str(output / "cache"),
            "workers": 1,
        },
        "batch": {"sequences": SEQUENCES},
        "optimizer": {"kind": "adamw", "learning_rate": 3e-3},
        "schedule": {"kind": "cosine", "warmup": 30},
        "steps": steps,
        "seed": seed,
        "precision": precision,
        "threads": 1,
        "evaluation": {"every": steps},
        "checkpoint": {"every": steps},
        "log": {"tensorboard": False},
        "output": str(folder),
    }
    file = output / f"{folder.name}.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "danlu", "train", str(file), "--quiet"]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return float([line["eval_loss"] for line in lines if "eval_loss" in line][-1])


def model_with(name: str) -> Decoder:
    """The model from scratch, with the products of a recipe."""
    config = read_config_values({**MODEL, "vocab_size": VOCABULARY, "tie_word_embeddings": False})
    model = Decoder(config)
    initialize(model, 0)
    if name != PLAIN:
        set_arithmetic(model, Fp8Products(recipe=name))  # type: ignore[arg-type]
    return model


def forward(model: Decoder, dtype: torch.dtype) -> Tensor:
    """The loss of `SEQUENCES` sequences of drawn tokens."""
    count = LENGTH * SEQUENCES
    tokens = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(0))
    attend = PackedAttention(tuple(range(0, count + 1, LENGTH)))
    hidden = model(tokens, torch.arange(LENGTH).repeat(SEQUENCES), attend, dtype)
    return torch.nn.functional.cross_entropy(model.logits(hidden).float(), tokens)


def layer_bytes(name: str, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that autograd keeps of a pass through the layers, and those of the planner's formula."""
    config, count = model_with(name).config, LENGTH * SEQUENCES
    sizes = []
    for layers in (1, len(config.layers)):  # what lies outside of layers is in both
        model = Decoder(replace(config, layers=config.layers[:layers]))
        initialize(model, 0)
        if name != PLAIN:
            set_arithmetic(model, Fp8Products(recipe=name))  # type: ignore[arg-type]
        own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
        kept: dict[int, torch.UntypedStorage] = {}  # of which the addresses stay taken while they are held

        def keep(tensor: Tensor, own: set[int] = own, kept: dict[int, torch.UntypedStorage] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage
            return tensor

        tokens, positions = torch.zeros(count, dtype=torch.long), torch.arange(LENGTH).repeat(SEQUENCES)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens, positions, PackedAttention(tuple(range(0, count + 1, LENGTH))), dtype)
        sizes.append(sum(storage.nbytes() for storage in kept.values()))
    training = replace(TRAINED, fp8=None if name == PLAIN else name)
    batch = BatchShape.of_lengths([LENGTH] * SEQUENCES, dtype.itemsize)
    graphs = [LayerGraph(spec, config.hidden_size, batch, training, "none") for spec in config.layers[1:]]
    return sizes[1] - sizes[0], sum(graph.kept_bytes for graph in graphs)


def pass_seconds(names: list[str], dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Processor time of a forward and backward pass, the recipes in turns; the first round is not counted."""
    models = {name: model_with(name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + 1):
        for name, model in models.items():
            start = time.process_time()
            forward(model, dtype).backward()  # type: ignore[no-untyped-call]
            seconds[name].append(time.process_time() - start)
            model.zero_grad()
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def table(results: dict[str, Any], names: list[str], activations: str) -> None:
    losses = {
        name: {key.rpartition("/")[2]: loss for key, loss in results["loss"].items() if key.startswith(f"{name}/")}
        for name in names
    }
    plain = losses.get(PLAIN, {})
    if len(plain) > 1:
        spread = statistics.stdev(plain.values()) / statistics.mean(plain.values())
        print(f"\nwithout fp8, {activations}: the standard deviation over {len(plain)} seeds is {spread:.2%}\n")
    print("| recipe | held-out loss by seed | to the same seed without fp8 | kept, KiB (formula) | of fp8: none | s |")
    print("|---|---|---|---|---|---|")
    for name in names:
        cells = [", ".join(f"{loss:.4f}" for loss in losses[name].values())]
        cells.append(", ".join(f"{loss / plain[s] - 1:+.2%}" for s, loss in losses[name].items() if s in plain))
        real, formula = results["bytes"][name]
        cells += [f"{real / 1024:.0f} ({formula / 1024:.0f})", f"{real / results['bytes'][PLAIN][0]:.2f}"]
        ratio = results["seconds"][name] / results["seconds"][PLAIN]
        print(f"| {name} | {' | '.join(cells)} | {results['seconds'][name]:.3f} ({ratio:.2f}x) |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: bytes and seconds alone")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--activations", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=7, help="of seconds; 0: as they were measured before")
    given = parser.parse_args()
    torch.set_num_threads(1)
    output, dtype = given.output.resolve(), DTYPES[given.activations]
    output.mkdir(parents=True, exist_ok=True)
    write_texts(given.data.resolve(), output)
    file = output / f"results-{given.activations}-{given.steps}.json"
    results: dict[str, Any] = {"loss": {}, "bytes": {}, "seconds": {}}
    if file.exists():
        results = json.loads(file.read_text(encoding="utf-8"))
    names = [PLAIN, *(name for name in given.recipes if name != PLAIN)]
    for name in names:
        results["bytes"][name] = layer_bytes(name, dtype)
    if given.rounds:
        results["seconds"] |= pass_seconds(names, dtype, given.rounds)
    for seed in given.seeds:
        for name in given.recipes:
            if f"{name}/{seed}" not in results["loss"]:
                results["loss"][f"{name}/{seed}"] = trained(output, name, seed, given.steps, given.activations)
            file.write_text(json.dumps(results, indent=1), encoding="utf-8")
            print(f"{name}/{seed}: {results['loss'][f'{name}/{seed}']:.4f}", flush=True)
    file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    table(results, names, given.activations)


if __name__ == "__main__":
    main()
