"""Memory that a process needs to read a frozen base: a layer at a time, or all of it before it is shared out.

    python benchmarks/frozen_base.py [--processes 1 2 4] [--quantization nf4]

Processes are gloo on this machine. The base is a model of 454M parameters in bfloat16, with LoRA on every linear layer,
under zero3. What is told is how far a process's largest resident memory grew from before the model was placed (the
program, its imports) to after it: the most over the processes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from danlu.assembly import parallelize
from danlu.assembly.parallelize import place, subject_of
from danlu.models.hf_folder import read_config
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.presets import from_scratch
from danlu.models.saving import save
from danlu.parallel.layout import layout_of
from danlu.parallel.ranks import ranks_of
from danlu.recipe import Recipe, sections

MIB = 2**20


def write_base(folder: Path) -> int:
    """Its bytes."""
    values = {
        "model_type": "llama",
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    model = build(from_scratch(sections.Model(config=values, tokenizer="none"), 512, 1, 2))
    initialize(model, 0)
    save(model, folder, dtype=torch.bfloat16)
    return 2 * sum(parameter.numel() for parameter in model.parameters())


def recipe(base: Path, quantization: str | None) -> Recipe:
    return Recipe.model_validate(
        {
            "stage": "pretrain",
            "model": {"path": str(base), "tokenizer": "none"},
            "data": {"train": [{"path": "none"}]},
            "adapter": {"kind": "lora"},
            "quantization": None if quantization is None else {"kind": quantization},
            "parallel": {"shard": "zero3"},
            "output": "none",
        }
    )


def largest_resident() -> int:
    """Of this process so far, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def work(rank: int, size: int, at_once: bool, base: str, quantization: str | None, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    made = recipe(Path(base), quantization)
    ranks = ranks_of(layout_of(made.parallel, size), "cpu")
    device, config = torch.device("cpu"), read_config(Path(base))
    if at_once:
        parallelize.layer_by_layer = lambda *_: False
    before = largest_resident()
    place(subject_of(made, config, device, ranks=ranks), made, ranks, device)
    Path(folder, f"{rank}.txt").write_text(str(largest_resident() - before))
    dist.barrier()
    dist.destroy_process_group()


def grown(size: int, at_once: bool, base: Path, quantization: str | None) -> int:
    with tempfile.TemporaryDirectory() as folder:
        arguments: Any = (size, at_once, str(base), quantization, folder)
        mp.spawn(work, arguments, nprocs=size)
        return max(int(file.read_text()) for file in Path(folder).glob("*.txt"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--quantization", choices=["nf4", "fp4", "int8", "int4"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        stored = write_base(base)
        print(
            f"base: {stored / MIB:,.0f} MiB in bfloat16; held as {options.quantization or 'bfloat16'}; grown by (MiB):"
        )
        print(f"{'processes':>9} {'at once':>9} {'by layers':>9} {'ratio':>6}")
        for size in options.processes:
            one, other = (grown(size, at_once, base, options.quantization) for at_once in (True, False))
            print(f"{size:>9} {one / MIB:>9,.0f} {other / MIB:>9,.0f} {other / one:>6.2f}")


if __name__ == "__main__":
    main()
