"""The bytes that each rank of a large layout sends in a step: predicted from its config, and counted by pretending.

    python benchmarks/traffic.py [--ranks N] [--layout NAME]

One process stands for each rank in turn (torch's fake process group): it makes the rank's part of a small model and
runs a step, of which `TrafficCounter` counts every collective. Tokens choose experts in turn, so that each rank sends
as many rows as the plan expects. Each rank's traffic and the sum over all ranks have to be equal to the byte.

--ranks: only so many, evenly spaced. It prints seconds of counting and of predicting, and exits with 1 where a number
differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from danlu.core.types import Pack, Sample
from danlu.models.hf_config import read_config_values
from danlu.models.router_replay import routers_of
from danlu.parallel import expert, ranks
from danlu.parallel.collective_traffic import CollectiveTraffic, table
from danlu.parallel.comm import Group, new_group
from danlu.parallel.layout import Layout, layout_of
from danlu.parallel.ranks import ranks_of
from danlu.parallel.traffic_counter import fake_process_group
from danlu.planning.step_traffic import RankModel, step_traffic
from danlu.planning.workload import Workload
from danlu.recipe import Recipe, load
from danlu.run.read_workload import read_workload
from danlu.verification.collective_traffic import batch_shapes
from danlu.verification.proxy import Proxy, ProxyTraining
from danlu.verification.step_traffic import count_step_traffic

VOCABULARY, EXPERTS = 401, 8
CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
}
TOKENS = 64
LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "all axes": (
        512,
        {
            "pipeline": {"stages": 2, "schedule": "interleaved"},
            "shard": "zero3",
            "replicate": 2,
            "expert": 4,
            "context": 2,
            "tensor": 8,
        },
        "none",
    ),
    "sequence, recomputed": (512, {"shard": "zero2", "tensor": 8, "sequence": True, "expert": 8}, "full"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="so many of them, evenly spaced")
    parser.add_argument("--layout", choices=LAYOUTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in [arguments.layout] if arguments.layout else LAYOUTS:
            wrong += compare(name, Path(folder), arguments.ranks)
    return 1 if wrong else 0


def compare(name: str, folder: Path, count: int | None) -> int:
    """Prints how many ranks of a layout send what was predicted; returns how many do not."""
    world, parallel, recompute = LAYOUTS[name]
    recipe, workload = prepared(folder, parallel, recompute)
    layout = layout_of(recipe.parallel, world)
    sums = {"counted": Fraction(0), "predicted": Fraction(0)}
    seconds = {"counted": 0.0, "predicted": 0.0}
    wrong, chosen = 0, range(0, world, 1 if count is None else max(1, world // count))
    for rank in chosen:
        started = time.perf_counter()
        counted, shapes = counted_traffic(recipe, workload, layout, rank)
        begun = time.perf_counter()
        predicted = step_traffic(RankModel.of(workload, layout, rank), shapes)
        seconds["counted"] += begun - started
        seconds["predicted"] += time.perf_counter() - begun
        sums["counted"] += sum((each.bytes for each in counted), Fraction(0))
        sums["predicted"] += sum((each.bytes for each in predicted), Fraction(0))
        rows = table(counted, predicted, beside_bytes=0)
        if not all(row.agrees for row in rows):
            wrong += 1
            for row in rows:
                print(f"rank {rank}", *row.cells(), sep=" | ", flush=True)
    print(
        f"{name}: {layout}; {len(chosen) - wrong} of {len(chosen)} ranks send what was predicted; all of them "
        f"{float(sums['counted']):,.0f} bytes counted, {float(sums['predicted']):,.0f} predicted; seconds a rank "
        f"{seconds['counted'] / len(chosen):.3f} to count, {seconds['predicted'] / len(chosen):.4f} to predict",
        flush=True,
    )
    return wrong + (sums["counted"] != sums["predicted"])


def prepared(folder: Path, parallel: Mapping[str, Any], recompute: str) -> tuple[Recipe, Workload]:
    """The recipe of a small model with experts, and its workload."""
    (folder / "text.txt").write_text("text")
    file = folder / "recipe.yaml"
    lines = {
        "stage": "pretrain",
        "output": str(folder / "run"),
        "model": {"config": CONFIG, "tokenizer": "bytes"},
        "data": {"train": [str(folder / "text.txt")], "max_length": TOKENS},
        "batch": {"sequences": 512, "micro": 1},
        "steps": 1,
        "precision": "fp32",
        "memory": {"recompute": recompute},
        "parallel": parallel,
    }
    file.write_text(json.dumps(lines))
    recipe = load(file).recipe
    config = read_config_values(CONFIG)
    return recipe, read_workload(recipe, config, judges=False)


def counted_traffic(
    recipe: Recipe, workload: Workload, layout: Layout, rank: int
) -> tuple[list[CollectiveTraffic], Any]:
    """What one rank sends in a step of two micro-batches, or as many as its pipeline needs; and their shapes."""
    packs = [pack(number) for number in range(2 * layout.pipeline * layout.data)]
    with pretended(layout, rank) as own:
        training = ProxyTraining(recipe, Proxy(workload.config), own, torch.device("cpu"), micro=1)
        for router in routers_of(training.placed.model).values():  # type: ignore[arg-type]
            router.replay = in_turn  # type: ignore[assignment]
        counted, micro_batches = count_step_traffic(training, packs)
        return counted, batch_shapes(training.learner, micro_batches)  # type: ignore[arg-type]


def pack(number: int) -> Pack:
    """A pack of one document."""
    tokens = ((np.arange(TOKENS) * 7 + number) % VOCABULARY).astype(np.int32)
    weights = np.ones(TOKENS, np.float32)
    weights[0] = 0
    return Pack((Sample(tokens, weights, f"made.jsonl:{number}"),))


def in_turn(experts: Tensor) -> Tensor:
    """Experts [T, k] of tokens that choose them one after the other."""
    return (torch.arange(experts.numel()) % EXPERTS).view_as(experts)


@contextmanager
def pretended(layout: Layout, rank: int) -> Iterator[ranks.Ranks]:
    """The groups of a rank of a world that is not there; groups that it is not in are not made."""

    def own_group(name: str, members: Any, own: int) -> Group:
        mine = next((tuple(each) for each in members if own in each), (own,))
        return new_group(name, mine) if len(mine) > 1 else Group(name, mine)

    def agreed(self: expert.Exchange, counts: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Every rank has as many rows for each expert."""
        size = self.group.size
        even = [len(counts) // size] * size
        self.group.all_to_all(counts, even, even)
        by_source = counts.view(size, -1)[self.group.index].repeat(size, 1)
        return by_source, counts.view(size, -1).sum(1).tolist(), by_source.sum(1).tolist()

    with (
        fake_process_group(layout.world, rank),
        mock.patch.object(ranks, "own_of_new_groups", own_group),
        mock.patch.object(expert.Exchange, "_agreed", agreed),
    ):
        assert dist.get_rank() == rank
        yield ranks_of(layout, "cpu")


if __name__ == "__main__":
    sys.exit(main())
