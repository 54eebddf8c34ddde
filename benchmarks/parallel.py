"""Memory per rank by part against what ZeRO promises, and time per step against DDP or FSDP2 in a bare script.

    python benchmarks/parallel.py [--processes 1 2 4] [--rounds 7] [--memory-only]

Processes are gloo on this machine, one thread each. Memory is counted from the storages that are alive: of parameters
at the end of the last forward pass of a step, of gradients before the step's sum leaves the last micro-batch (what is
accumulated) and after it, of optimizer state after an update. What tensor and sequence parallelism keep for the
backward pass are the storages that autograd saves, weights apart. Times are of whole optimizer steps of two
micro-batches, danlu's and the bare script's in turns in the same processes, on the same data; only their ratio means
anything.

Psi parameters, mixed precision (bf16 activations and gathered weights, float32 masters, gradients and moments):

    layout  weights        gradients           optimizer   in sum                     the paper (arXiv:1910.02054)
    none    4              4                   8           16                         16
    zero1   2 + 4/N        4 (reduce: bf16 2)  8/N         6 + 12/N (bf16: 4 + 12/N)  4 + 12/N
    zero2   2 + 4/N        4/N                 8/N         2 + 16/N                   2 + 14/N
    zero3   4/N (+ rest)   4/N                 8/N         16/N                       16/N

The paper keeps gradients in half precision; danlu sums them in float32, so zero2 holds 2/N bytes more. Without shards
danlu casts float32 weights on the fly, so there is no half-precision copy and 16 bytes are the same. The rest:
embedding and head, which zero3 gathers once for a micro-batch (2 bytes of each), and one layer at a time, of which none
is whole when memory is counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from danlu.assembly.parallelize import place, subject_of
from danlu.core.types import Pack, Sample
from danlu.models.attend import PackedAttention
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.presets import from_scratch
from danlu.objectives.linear_cross_entropy import linear_cross_entropy
from danlu.optim.build import build as build_optimizer
from danlu.parallel.layout import layout_of
from danlu.parallel.ranks import ranks_of
from danlu.recipe import Recipe, sections
from danlu.stages.builder import placed_decoder
from danlu.stages.table import STAGES
from danlu.training.step import accumulate

WORDS = 4096
LENGTH = 1024
PACKS, MICRO = 2, 1  # of a step and of a micro-batch, on each data rank
BYTES = {  # of N ranks, and of the share of parameters outside of layers, which zero3 holds whole meanwhile
    "none": lambda n, rest: (4.0, 4.0, 8.0),
    "zero1": lambda n, rest: (2 + 4 / n, 4.0, 8 / n),
    "zero1-bf16": lambda n, rest: (2 + 4 / n, 2.0, 8 / n),
    "zero2": lambda n, rest: (2 + 4 / n, 4 / n, 8 / n),
    "zero3": lambda n, rest: (2 * rest + 4 / n, 4 / n, 8 / n),
}
TENSOR = ("tensor", "tensor-sequence")
PAPER = {"none": lambda n: 16, "zero1": lambda n: 4 + 12 / n, "zero2": lambda n: 2 + 14 / n, "zero3": lambda n: 16 / n}


def config() -> ModelConfig:
    values = {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": False,
    }
    return from_scratch(sections.Model(config=values, tokenizer="none"), WORDS, 1, 2)


def recipe(layout: str) -> Recipe:
    first, _, second = layout.partition("-")
    sharded = {"shard": first, "reduce": second or "fp32"}
    values: dict[str, Any] = {
        "stage": "pretrain",
        "model": {"config": {}, "tokenizer": "none"},
        "data": {"train": [{"path": "none"}], "max_length": LENGTH},
        "parallel": {"tensor": dist.get_world_size(), "sequence": bool(second)} if layout in TENSOR else sharded,
        "precision": "bf16",
        "output": "none",
    }
    return Recipe.model_validate(values)


def packs(count: int, seed: int) -> list[Pack]:
    random = np.random.default_rng(seed)
    packs = []
    for number in range(count):
        weights = np.ones(LENGTH, dtype=np.float32)
        weights[0] = 0
        packs.append(Pack((Sample(random.integers(0, WORDS, LENGTH).astype(np.int32), weights, f"row {number}"),)))
    return packs


def storages(tensors: Iterator[Tensor | None]) -> int:
    """Bytes of the storages that tensors are views of, each once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


def fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                if group is not None:
                    yield from group.fsdp_params


def gathered(model: nn.Module) -> Iterator[Tensor | None]:
    """Whole parameters that FSDP2 holds at the moment."""
    for one in fsdp_parameters(model):
        yield getattr(one, "_unsharded_param", None)


def accumulated(model: nn.Module) -> Iterator[Tensor | None]:
    """Whole gradients that wait for the last micro-batch."""
    for one in fsdp_parameters(model):
        yield getattr(one, "unsharded_accumulated_grad", None)
        whole = getattr(one, "_unsharded_param", None)
        yield None if whole is None else whole.grad


def memory_of(layout: str) -> dict[str, float]:
    """Bytes a parameter on this rank, by part, at their most in the second step."""
    chosen = recipe(layout)
    ranks = ranks_of(layout_of(chosen.parallel, dist.get_world_size()), "cpu")
    device = torch.device("cpu")
    subject = subject_of(chosen, config(), device, ranks=ranks)
    placed = place(subject, chosen, ranks, device)
    compute = placed_decoder(chosen, STAGES[chosen.stage], placed, config(), device).learner(MICRO)
    optimizer = build_optimizer(placed.parameters(), chosen.optimizer)
    model = placed.subject.model
    count = sum(p.numel() for p in Decoder(config()).parameters())
    most = dict.fromkeys(("weights", "gradients", "optimizer"), 0)

    def look(*_: Any) -> None:
        weights = storages(iter([p for _, p in placed.parameters()])) + storages(gathered(model))
        grads = storages(iter([p.grad for _, p in placed.parameters()])) + storages(accumulated(model))
        most["weights"] = max(most["weights"], weights)
        most["gradients"] = max(most["gradients"], grads)

    model.norm.register_forward_hook(look)
    everyone = packs(PACKS * dist.get_world_size(), 0)
    for step in (1, 2):
        accumulate(compute, everyone, step=step, clip=1.0, holders=optimizer.gradient_holders())
        grads = storages(iter([p.grad for _, p in placed.parameters()]))
        most["gradients"] = max(most["gradients"], grads)
        optimizer.step(free_gradients=True)
        optimizer.zero_grad()
    most["optimizer"] = sum(tensor.nbytes for tensor in optimizer.state_tensors().values())
    return {name: value / count for name, value in most.items()}


def kept_of(layout: str) -> int:
    """Bytes that this rank keeps between forward and backward of a micro-batch."""
    chosen = recipe(layout)
    ranks = ranks_of(layout_of(chosen.parallel, dist.get_world_size()), "cpu")
    device = torch.device("cpu")
    placed = place(subject_of(chosen, config(), device, ranks=ranks), chosen, ranks, device)
    compute = placed_decoder(chosen, STAGES[chosen.stage], placed, config(), device).learner(MICRO)
    accumulate(compute, packs(MICRO, 0), step=1, clip=1.0)
    assert compute.activations is not None, "a model that is not compiled has them counted"
    return compute.activations.peak_bytes


def times_of(layout: str, rounds: int) -> list[float]:
    """Seconds of our step over those of the bare script, round by round."""
    chosen = recipe(layout)
    ranks = ranks_of(layout_of(chosen.parallel, dist.get_world_size()), "cpu")
    device = torch.device("cpu")
    placed = place(subject_of(chosen, config(), device, ranks=ranks), chosen, ranks, device)
    compute = placed_decoder(chosen, STAGES[chosen.stage], placed, config(), device).learner(MICRO)
    optimizer = build_optimizer(placed.parameters(), chosen.optimizer)
    everyone = packs(PACKS * dist.get_world_size(), 0)

    def ours(step: int) -> None:
        accumulate(compute, everyone, step=step, clip=1.0, holders=optimizer.gradient_holders())
        optimizer.step(free_gradients=True)
        optimizer.zero_grad()

    theirs = bare(layout, everyone)
    ratios = []
    for number in range(rounds + 1):
        seconds = []
        for step in (ours, theirs) if number % 2 else (theirs, ours):
            dist.barrier()
            start = time.perf_counter()
            step(number + 1)
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        own, other = seconds if number % 2 else reversed(seconds)
        if number:  # the first warms up
            ratios.append(own / other)
    return ratios


def bare(layout: str, everyone: list[Pack]) -> Any:
    """DDP or FSDP2 as their tutorials have them, around the same decoder and loss."""
    model = build(config())
    initialize(model, 0)
    if layout == "none":
        return _bare_step(DistributedDataParallel(model, gradient_as_bucket_view=True), model, everyone)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers.values():
        fully_shard(layer, mp_policy=policy, reshard_after_forward=layout == "zero3")
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    return _bare_step(model, model, everyone)


def _bare_step(wrapped: nn.Module, model: Decoder, everyone: list[Pack]) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rank = dist.get_rank()
    own = everyone[rank * PACKS : (rank + 1) * PACKS]
    tokens = [torch.from_numpy(pack.samples[0].tokens.astype(np.int64)) for pack in own]
    positions, attend = torch.arange(LENGTH), PackedAttention((0, LENGTH))
    weights = torch.ones(LENGTH - 1)

    def step(_: int) -> None:
        for number, micro in enumerate(tokens, 1):
            waits = isinstance(wrapped, DistributedDataParallel) and number < len(tokens)
            with wrapped.no_sync() if waits else nullcontext():
                hidden = wrapped(micro, positions, attend, torch.bfloat16)
                loss = linear_cross_entropy(hidden[:-1], model.head_weight, micro[1:], weights).total
                (loss / (PACKS * (LENGTH - 1))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(rank: int, world: int, folder: str, what: str, layout: str, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    result = {"memory": memory_of, "kept": kept_of}[what](layout) if what != "times" else times_of(layout, rounds)
    torch.save(result, f"{folder}/{rank}.pt")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that ends in the ordinary way


def spread(world: int, what: str, layout: str, rounds: int) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (world, folder, what, layout, rounds), nprocs=world)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-only", action="store_true")
    options = parser.parse_args()
    whole = Decoder(config())
    count = sum(p.numel() for p in whole.parameters())
    rest = (count - sum(p.numel() for p in whole.layers.parameters())) / count
    print(f"{count / 1e6:.1f}M parameters, bf16; bytes a parameter on the fullest rank (formula)\n")
    print("layout      N   weights         gradients       optimizer       in sum          paper")
    for layout, formula in BYTES.items():
        for world in options.processes:
            if world == 1 and layout != "none":
                continue
            results = spread(world, "memory", layout, 0)
            parts = [max(result[name] for result in results) for name in ("weights", "gradients", "optimizer")]
            cells = [f"{got:6.2f} ({want:5.2f})" for got, want in zip(parts, formula(world, rest), strict=True)]
            total, wanted = sum(parts), sum(formula(world, rest))
            paper = PAPER.get(layout.partition("-")[0], lambda n: 0)(world)
            print(f"{layout:11} {world}   {'  '.join(cells)}  {total:6.2f} ({wanted:5.2f})  {paper:5.2f}", flush=True)
    print("\nkept between forward and backward of a micro-batch, on the fullest rank")
    (alone,) = spread(1, "kept", "none", 0)
    print(f"none            1   {alone / 2**20:6.1f} MiB")
    for layout in TENSOR:
        for world in (count for count in options.processes if count > 1):
            kept = max(spread(world, "kept", layout, 0))
            print(f"{layout:15} {world}   {kept / 2**20:6.1f} MiB  {kept / alone:.3f}", flush=True)
    if options.memory_only:
        return
    print("\nstep time over a bare DDP or FSDP2 script: median (lowest to highest)")
    for layout in ("none", "zero2", "zero3"):
        for world in (count for count in options.processes if count > 1):
            ratios = spread(world, "times", layout, options.rounds)[0]
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            print(f"{layout:11} {world}   {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
