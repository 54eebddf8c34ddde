"""The traffic of a rank from configs alone, against what a process that pretends to be the rank counts in a step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.adapter_folders import adapter_folder
from builders.parallel_steps import config_of, recipe_file, steps_of
from builders.pretended_ranks import pretended_rank
from builders.tiny_world import CONFIG, World

from danlu.parallel.collective_traffic import CollectiveTraffic, table
from danlu.parallel.layout import layout_of
from danlu.planning.step_traffic import MicroBatch, RankModel, step_traffic
from danlu.recipe import load, sections
from danlu.run.read_workload import read_workload
from danlu.verification.collective_traffic import batch_shapes, decoder_traffic
from danlu.verification.proxy import Proxy, ProxyTraining
from danlu.verification.step_traffic import count_step_traffic

DEEP = {**CONFIG, "num_hidden_layers": 4}
NEOX = {**CONFIG, "model_type": "gpt_neox", "num_key_value_heads": None}
LATENT = {
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_k_dense_replace": 2,
}
SHARDED = {"shard": "zero3", "replicate": 2, "tensor": 2, "sequence": True}
LORA = {"kind": "lora", "targets": ["all-linear", "embed_tokens", "lm_head"], "rank": 3}
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "copies of shards, sequence": (8, 7, {"parallel": SHARDED, "memory": "full", "model": {"config": DEEP}}),
    "sandwiched norms": (4, 1, {"parallel": {"tensor": 2}, "model": {"config": {**CONFIG, "model_type": "gemma2"}}}),
    "shared norms": (
        2,
        0,
        {"parallel": {"tensor": 2}, "memory": "full", "model": {"config": {**CONFIG, "model_type": "cohere2"}}},
    ),
    "layer norms": (
        4,
        1,
        {"parallel": {"shard": "zero3", "tensor": 2}, "model": {"config": NEOX}, "precision": "bf16"},
    ),
    "nf4": (4, 3, {"parallel": {"shard": "zero3", "tensor": 2}, "adapter": LORA, "quantization": "nf4"}),
    "bf16": (2, 1, {"parallel": {"shard": "zero3"}, "adapter": "dora", "precision": "bf16"}),
    "bf16, trained": (2, 0, {"parallel": {"shard": "zero2", "reduce": "bf16"}, "precision": "bf16"}),
    "latents around a ring": (
        4,
        2,
        {"parallel": {"shard": "zero3", "context": 2}, "model": {"config": CONFIG | LATENT}},
    ),
    "stages": (
        4,
        3,
        {"parallel": {"pipeline": {"stages": 2, "schedule": "zbv"}, "tensor": 2}, "model": {"config": DEEP}},
    ),
    "copies of shards, interleaved": (
        8,
        7,
        {
            "parallel": {"pipeline": {"stages": 2, "schedule": "interleaved"}, "shard": "zero3", "replicate": 2},
            "model": {"config": DEEP},
        },
    ),
    "prefixes on stages": (
        2,
        1,
        {"parallel": {"pipeline": {"stages": 2, "schedule": "1f1b"}}, "adapter": {"kind": "prefix", "projection": 8}},
    ),
}


def counted_and_predicted(
    world: World, folder: Path, name: str, size: int, rank: int, changes: dict[str, Any]
) -> tuple[list[CollectiveTraffic], list[CollectiveTraffic], list[CollectiveTraffic]]:
    """(counted traffic, that of the rank's own part of the model, that of the recipe's workload)."""
    recipe = load(Path(recipe_file(world, folder, name, **changes))).recipe
    layout, config = layout_of(recipe.parallel, size), config_of(recipe)
    items = steps_of(1, 5)[0]
    with pretended_rank(layout, rank) as ranks:
        training = ProxyTraining(recipe, Proxy(config), ranks, torch.device("cpu"), micro=2)
        counted, micro_batches = count_step_traffic(training, items)
        own = decoder_traffic(training, micro_batches)
        shapes = batch_shapes(training.learner, micro_batches)  # type: ignore[arg-type]
    workload = read_workload(recipe, config, judges=False)
    return counted, own, step_traffic(RankModel.of(workload, layout, rank), shapes)


def calls(traffic: list[CollectiveTraffic]) -> Counter[tuple[str, str]]:
    """Calls by axis and collective."""
    numbers: Counter[tuple[str, str]] = Counter()
    for each in traffic:
        numbers[each.axis, each.kind] += each.calls
    return numbers


def fits(counted: list[CollectiveTraffic], predicted: list[CollectiveTraffic]) -> bool:
    return all(row.agrees for row in table(counted, predicted, beside_bytes=0))


@pytest.mark.parametrize("name", CASES)
def test_a_rank_sends_what_its_config_says(tiny_world: World, tmp_path: Path, name: str) -> None:
    size, rank, changes = CASES[name]
    if "adapter" in changes:
        changes = {**changes, "model": {"path": str(tiny_world.base), "config": None, "tokenizer": None}}
    counted, own, planned = counted_and_predicted(tiny_world, tmp_path, "r", size, rank, changes)
    rows = table(counted, own, beside_bytes=0)
    assert rows and all(row.agrees for row in rows), "\n".join(" ".join(row.cells()) for row in rows)
    assert planned == own
    # Each sum of a loss has two calls, but for a micro-batch without targets.
    assert calls(counted) - calls(own) == Counter() and (calls(own) - calls(counted)).total() in (0, 2)
    # The control: each axis and collective counts.
    for index in range(len(own)):
        assert not fits(counted, [*own[:index], *own[index + 1 :]]), own[index]


def test_an_adapter_that_files_describe_counts(tiny_world: World, tmp_path: Path) -> None:
    below = adapter_folder(tiny_world.base, tmp_path / "below", sections.Lora(targets=["all-linear"], rank=4))
    model = {"path": str(tiny_world.base), "config": None, "tokenizer": None, "adapters": [str(below)]}
    for name, adapter in (("continued", "continue"), ("upon another", {"kind": "lora", "dropout": 0.1})):
        changes = {"adapter": adapter, "model": model, "parallel": {"shard": "zero3", "tensor": 2, "sequence": True}}
        counted, own, planned = counted_and_predicted(tiny_world, tmp_path, name, 4, 1, changes)
        assert fits(counted, own)
        assert not fits(counted, planned)  # the control: the recipe alone does not describe it


def test_full_packs_are_cut_evenly() -> None:
    assert MicroBatch.of_full_packs(2, 4096, 1) == MicroBatch(8192, 8192, (), 2)
    assert MicroBatch.of_full_packs(2, 4096, 4) == MicroBatch(2048, 2048, (2048,) * 4, 2)
