"""Time of a step and memory of AdamW and its smaller relatives, beside torch's, bitsandbytes' and torchao's.

    python benchmarks/optimizers.py [--rounds 9] [--threads 2]

The parameters are those of a Llama of 63M (hidden 512, 8 layers, vocabulary 32000, float32). `step` is the median time
of an optimizer step over rounds in which the engines take turns in one process; gradients are given, so GaLore's time
holds the projection that a backward pass would do, but not a new projector, whose time is apart. Memory is of a process
of its own, each: `state` is counted from tensors; `held` is how far the resident set lies above the weights after some
steps; `peak` is how far it rose, gradients of a backward pass included. An engine that is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.memory.pages import paged_state
from danlu.optim.build import Optimizers, build
from danlu.recipe import sections

HIDDEN, INNER, LAYERS, VOCABULARY = 512, 1792, 8, 32000
PEERS = {"bitsandbytes AdamW8bit": "bitsandbytes", "torchao AdamW8bit": "torchao"}
SECTIONS: dict[str, sections.Optimizer] = {
    "danlu adamw": sections.AdamW(),
    "danlu adamw8bit": sections.AdamW8bit(),
    "danlu paged-adamw": sections.PagedAdamW(),
    "danlu paged-adamw, 8 bits": sections.PagedAdamW(bits=8),
    "danlu galore": sections.GaLore(),
    "danlu galore, 8 bits": sections.GaLore(states="adamw8bit"),
}
NAMES = ["torch AdamW, fused", *SECTIONS, *PEERS]


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"layers.{layer}.attention.{name}.weight", (HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            yield f"layers.{layer}.mlp.{name}.weight", (INNER, HIDDEN)
        yield f"layers.{layer}.mlp.down_proj.weight", (HIDDEN, INNER)
        yield f"layers.{layer}.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def make(name: str) -> tuple[dict[str, Parameter], Any]:
    generator = torch.Generator().manual_seed(0)
    parameters = {key: Parameter(torch.randn(shape, generator=generator).mul_(0.02)) for key, shape in shapes()}
    options: dict[str, Any] = {"lr": 2e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if name == "torch AdamW, fused":
        return parameters, torch.optim.AdamW(parameters.values(), fused=True, **options)
    if name == "bitsandbytes AdamW8bit":
        import bitsandbytes

        return parameters, bitsandbytes.optim.AdamW8bit(parameters.values(), **options)
    if name == "torchao AdamW8bit":
        from torchao.optim import AdamW8bit

        return parameters, AdamW8bit(parameters.values(), **options)
    return parameters, build(parameters.items(), SECTIONS[name], paged_state=paged_state)


def state_bytes(parameters: Mapping[str, Parameter], optimizer: Any) -> int:
    """Of the tensors that belong to a parameter; tables that all of them share are not counted."""
    if isinstance(optimizer, Optimizers):
        return sum(tensor.nbytes for tensor in optimizer.state_tensors().values())
    shared = ("qmap1", "qmap2")
    states = [optimizer.state[parameter] for parameter in parameters.values()]
    tensors = [
        value for state in states for key, value in state.items() if isinstance(value, Tensor) and key not in shared
    ]
    return sum(
        sum(getattr(tensor, part).nbytes for part in ("codes", "scale")) if hasattr(tensor, "codes") else tensor.nbytes
        for tensor in tensors
    )


def compare_time(names: list[str], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round's step, the engines in turns. Rounds that renew projectors are not among them."""
    engines = {name: make(name) for name in names}
    generator = torch.Generator().manual_seed(1)
    gradients = {key: torch.randn(shape, generator=generator).mul_(1e-3) for key, shape in shapes()}
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 2):  # the first step makes the state, the second one settles
        for name, (parameters, optimizer) in engines.items():
            for key, parameter in parameters.items():
                parameter.grad = gradients[key]
            start = time.perf_counter()
            optimizer.step()
            seconds = time.perf_counter() - start
            for parameter in parameters.values():
                parameter.grad = None
            if isinstance(optimizer, Optimizers):
                optimizer.zero_grad()
            if turn > 1:
                times[name].append(1000 * seconds)
    return times


def projector_ms() -> float:
    """Of a new projector for every hidden matrix."""
    from danlu.optim.galore import leading_vectors

    matrices = [torch.randn(shape) for name, shape in shapes() if "layers" in name and len(shape) == 2]
    start = time.perf_counter()
    for matrix in matrices:
        leading_vectors(matrix, sections.GaLore().rank)
    return 1000 * (time.perf_counter() - start)


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"/proc/self/status has no {field}")


def measure_memory(name: str) -> None:
    """Runs in a process of its own and prints one JSON object."""
    parameters, optimizer = make(name)
    one = {key: torch.ones(()) for key in parameters}
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    for _ in range(3):
        sum(((parameter * one[key]).sum() for key, parameter in parameters.items()), torch.zeros(())).backward()
        if isinstance(optimizer, Optimizers):
            optimizer.step(free_gradients=True)
        else:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    held, peak = resident_bytes("VmRSS") - before, resident_bytes("VmHWM") - before
    print(json.dumps({"state": state_bytes(parameters, optimizer), "held": held, "peak": peak}))


def memory_of(name: str, threads: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--memory-of", name, "--threads", str(threads)]
    # Freed blocks go back to the system at once: what stays is what is held.
    quiet = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=quiet, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return {key: value / 2**20 for key, value in json.loads(done.stdout).items()}


def table(names: list[str], rounds: int, threads: int) -> None:
    times = compare_time(names, rounds)
    count = sum(torch.Size(shape).numel() for _, shape in shapes())
    print(f"{count / 1e6:.1f}M parameters in float32, {threads} threads, {rounds} rounds, torch {torch.__version__}\n")
    print("| optimizer | step, ms (fastest to slowest) | state, MiB | bytes a parameter | held, MiB | peak, MiB |")
    print("|---|---|---|---|---|---|")
    for name in names:
        memory = memory_of(name, threads)
        taken = times[name]
        middle = f"{statistics.median(taken):.0f} ({min(taken):.0f} to {max(taken):.0f})"
        each = memory["state"] * 2**20 / count
        sizes = f"{memory['state']:.0f} | {each:.2f} | {memory['held']:.0f} | {memory['peak']:.0f}"
        print(f"| {name} | {middle} | {sizes} |", flush=True)
    print(f"\nNew projectors (galore, every {sections.GaLore().update_every} steps): {projector_ms():.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.memory_of is not None:
        measure_memory(given.memory_of)
        return
    installed: Callable[[str], bool] = lambda name: name not in PEERS or find_spec(PEERS[name]) is not None  # noqa: E731
    table([name for name in NAMES if installed(name)], given.rounds, given.threads)


if __name__ == "__main__":
    main()
