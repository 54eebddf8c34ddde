"""What recomputation and offloaded activations cost and save: bytes that autograd keeps, and time of a step.

    python benchmarks/recompute.py [--model small] [--tokens 2048] [--documents 4] [--rounds 5] [--adapter]

One process, forward and backward over one pack in bf16 with all kinds taking turns; a time is the median of rounds, a
ratio is of medians. `kept` counts storages, weights left out, between forward and backward of the decoder; `peak` is
the most that tensors took beyond the weights and gradients at any time of the step, as torch's operators made them;
tensors in a file count there too, though what is not in use of them is in no memory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.build import BuildContext
from danlu.adapters.dropout import DropoutState
from danlu.assembly.frozen_base import adapter_sites
from danlu.memory.activation_offload import ActivationOffload, offload_for
from danlu.memory.layer_plan import LayerPlan
from danlu.memory.recompute import describe, plan_of, unwrap_layer, wrap
from danlu.memory.recompute_choice import fastest_plan
from danlu.memory.recompute_planner import measure_layers
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder, Layer
from danlu.models.families import FAMILIES
from danlu.models.hf_layout import hf_name
from danlu.models.initialize import initialize, named_generator
from danlu.models.loading import build
from danlu.models.presets import from_scratch
from danlu.recipe import sections

VOCABULARY = 32000


class Live(TorchDispatchMode):
    """The most bytes that storages made within it took at a time.

    excluded: tensors whose storages are not counted, though operators give views of them.
    """

    def __init__(self, excluded: Sequence[Tensor]) -> None:
        super().__init__()
        self._excluded = {tensor.untyped_storage()._cdata for tensor in excluded}
        self.peak_bytes = self._bytes = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, tuple | list) else (out,):
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in self._excluded:
                    self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self._bytes += storage.nbytes()
        for key in [key for key, (ref, _) in self._known.items() if ref.expired()]:
            self._bytes -= self._known.pop(key)[1]
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return out


class Bench:
    def __init__(self, model: Decoder, tokens: int, documents: int) -> None:
        self.model = model
        self.boundaries = tuple(tokens * index // documents for index in range(documents + 1))
        self.tokens = torch.randint(0, VOCABULARY, (tokens,))
        self.positions = torch.cat([torch.arange(end - start) for start, end in pairwise(self.boundaries)])

    def attend(self) -> PackedAttention:
        return PackedAttention(self.boundaries, recomputed_layers=self.model.recomputed_attention)

    def step(self, offload: ActivationOffload | None) -> float:
        start = time.perf_counter()
        with nullcontext() if offload is None else offload.active():
            hidden = self.model(self.tokens, self.positions, self.attend(), torch.bfloat16)
        hidden.float().square().sum().backward()
        seconds = time.perf_counter() - start
        self.model.zero_grad(set_to_none=False)
        return seconds

    def kept(self) -> int:
        weights = {tensor.untyped_storage().data_ptr() for tensor in (*self.model.parameters(), *self.model.buffers())}
        storages: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        with saved_tensors_hooks(count, lambda tensor: tensor):
            self.model(self.tokens, self.positions, self.attend(), torch.bfloat16)
        return sum(storages.values())

    def peak(self, offload: ActivationOffload | None) -> int:
        weights = [*self.model.parameters(), *self.model.buffers()]
        with Live([*weights, *(weight.grad for weight in weights if weight.grad is not None)]) as live:
            self.step(offload)
        return live.peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--adapter", action="store_true", help="LoRA of rank 8 on all linear layers")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = build(from_scratch(sections.Model(preset=options.model, tokenizer="none"), VOCABULARY, 1, 2))
    initialize(model, 0)
    if options.adapter:
        add_lora(model)
    bench = Bench(model, options.tokens, options.documents)
    bench.step(None)  # from here on there are gradients
    start = time.perf_counter()
    attend = PackedAttention(bench.boundaries)
    recomputing = PackedAttention(bench.boundaries, recomputed_layers=range(len(model.layers)))
    costs = measure_layers(model, bench.tokens, bench.positions, attend, torch.bfloat16, recomputing=recomputing)
    seconds = time.perf_counter() - start
    whole = sum(cost.whole_bytes for cost in costs)
    half = fastest_plan(costs, whole // 2)
    print(f"measured in {seconds:.1f} s; half of {mib(whole)} MiB: {describe(half)}")
    plans: dict[str, Sequence[LayerPlan]] = {
        kind: plan_of(sections.Recompute(kind=kind), model) for kind in ("none", "selective", "full", "every")
    }
    plans["elementwise"] = [LayerPlan(cost.layer, "elementwise") for cost in costs]
    plans["planned, half"] = half
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        to_files = offload_for(torch.device("cpu"), Path(folder))
        cases: list[tuple[str, Sequence[LayerPlan], ActivationOffload | None]] = [
            *((name, plan, None) for name, plan in plans.items()),
            ("none, offloaded to a file", plans["none"], to_files),
            ("full, offloaded to a file", plans["full"], to_files),
        ]
        report(bench, cases, options.rounds)


def report(
    bench: Bench, cases: Sequence[tuple[str, Sequence[LayerPlan], ActivationOffload | None]], rounds: int
) -> None:
    times: dict[str, list[float]] = {}
    kept: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for turn in range(rounds + 1):  # the first warms up, and is counted instead of timed
        for name, plan, offload in cases:
            wrap(bench.model, plan)
            if turn == 0:
                kept[name], peaks[name] = 0 if offload else bench.kept(), bench.peak(offload)
            else:
                times.setdefault(name, []).append(bench.step(offload))
            unwrap(bench.model)
    first = statistics.median(times["none"])
    print(f"{'':28}{'kept MiB':>10}{'':>8}{'peak MiB':>10}{'':>8}{'seconds':>10}")
    for name, *_ in cases:
        seconds = statistics.median(times[name])
        print(
            f"{name:28}{mib(kept[name]):>10}{kept[name] / kept['none']:>8.2f}{mib(peaks[name]):>10}"
            f"{peaks[name] / peaks['none']:>8.2f}{seconds:>10.3f}{seconds / first:>8.2f}"
        )


def unwrap(model: Decoder) -> None:
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        unwrap_layer(layer)
    model.segments = {}
    model.recomputed_attention = frozenset()


def add_lora(model: Decoder) -> None:
    modules = FAMILIES[model.config.family].modules
    name: Callable[[str], str] = lambda one: hf_name(one, modules)  # noqa: E731
    build_context = BuildContext(lambda one: named_generator(0, one), DropoutState(0), torch.device("cpu"))
    adapters = AdapterSet(model, adapter_sites(model), name, build_context, head_as_linear=model.head_as_linear)
    adapters.add("one", sections.Lora(rank=8))
    adapters.train_only("one")


def mib(count: int) -> str:
    return f"{count / 2**20:.0f}"


if __name__ == "__main__":
    main()
