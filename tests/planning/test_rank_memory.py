"""The bytes of a process in any layout, from shapes alone, against models that pretended ranks have placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders.expert_folder import EXPERTS, expert_folder
from builders.placed_decoder import placed_of
from builders.planned_memory import counted_states
from builders.pretended_ranks import pretended_rank
from builders.tiny_world import CONFIG, World

from danlu.assembly.optimizer import optimizer_of
from danlu.core.memory_parts import MemoryParts
from danlu.models.config import ModelConfig
from danlu.models.hf_config import read_config_values
from danlu.models.hf_folder import read_config
from danlu.parallel.layout import Layout, layout_of
from danlu.planning.rank_memory import RankStates, rank_states
from danlu.planning.workload import Workload
from danlu.recipe import Recipe, load
from danlu.run.read_workload import read_workload

CPU = torch.device("cpu")
LORA = {"kind": "lora", "targets": ["all-linear", "lm_head"], "modules_to_save": ["norm"]}
PIPELINE = {"pipeline": {"stages": 2, "schedule": "1f1b"}}
SHARED = {"shard": "zero3", "tensor": 2}
UNTIED = {**CONFIG, "vocab_size": 401, "tie_word_embeddings": False, "num_hidden_layers": 4}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (8, {"parallel": {"shard": "zero3"}, "model": {"config": UNTIED}}),
    "zero1, 8-bit": (4, {"parallel": {"shard": "zero1"}, "optimizer": {"kind": "adamw8bit", "smallest": 256}}),
    "zero3, bf16": (4, {"parallel": {"shard": "zero3"}, "optimizer": {"kind": "adamw", "moments": "bf16"}}),
    "zero2, average": (4, {"parallel": {"shard": "zero2"}, "ema": 0.9, "optimizer": "lion"}),
    "tensor": (4, {"parallel": {"tensor": 4}, "model": {"config": UNTIED}, "optimizer": "sgd"}),
    "copies of shards": (8, {"parallel": {**SHARED, "replicate": 2}, "precision": "fp32"}),
    "context": (4, {"parallel": {"shard": "zero3", "context": 2}}),
    "pipeline": (2, {"parallel": PIPELINE, "model": {"config": {**UNTIED, "tie_word_embeddings": True}}}),
    "pipeline, V": (2, {"parallel": {"pipeline": {"stages": 2, "schedule": "zbv"}}, "model": {"config": UNTIED}}),
    "updates of each micro-batch": (
        2,
        {
            "parallel": {"pipeline": {"stages": 2, "schedule": "pipedream"}},
            "model": {"config": UNTIED},
            "batch": {"sequences": 2, "micro": 2},
        },
    ),
    "experts": (4, {"parallel": {"expert": 2, "shard": "zero3"}, "model": {"config": EXPERTS}}),
    "experts, more shards than experts": (16, {"parallel": {"shard": "zero3"}, "model": {"config": EXPERTS}}),
    "experts, tensor": (4, {"parallel": {"expert": 2, "tensor": 2}, "model": {"config": EXPERTS}}),
    "experts, nf4": (4, {"parallel": {"expert": 2, "shard": "zero3"}, "adapter": LORA, "quantization": "nf4"}),
    "lora, nf4": (4, {"parallel": SHARED, "adapter": LORA, "quantization": {"kind": "nf4", "double": True}}),
    "lora, int4": (2, {"parallel": {"tensor": 2}, "adapter": "lora", "quantization": {"kind": "int4", "group": 12}}),
    "dora": (4, {"parallel": SHARED, "adapter": "dora"}),
    "pissa": (2, {"parallel": {"tensor": 2}, "adapter": "pissa"}),
    "vera, pipeline": (2, {"parallel": PIPELINE, "adapter": {"kind": "vera", "rank": 16}}),
    "prefix": (2, {"parallel": {"tensor": 2}, "adapter": {"kind": "prefix", "tokens": 3, "projection": 8}}),
    "bottleneck": (4, {"parallel": SHARED, "adapter": {"kind": "bottleneck", "width": 8}}),
    "reference": (
        4,
        {
            "parallel": SHARED,
            "stage": "preference",
            "objective": ["sigmoid"],
            "reference": "frozen",
            "batch": {"sequences": None, "rows": 4},
        },
    ),
}


def recipe_of(world: World, folder: Path, name: str) -> tuple[Recipe, ModelConfig]:
    changes = {"precision": "bf16", **CASES[name][1]}
    if "adapter" in changes:
        base = expert_folder(world) if "experts" in name else world.base
        changes["model"] = {"path": str(base), "config": None, "tokenizer": None}
        return load(world.recipe(folder / "run", **changes)).recipe, read_config(base)
    recipe = load(world.recipe(folder / "run", **changes)).recipe
    return recipe, read_config_values({"vocab_size": 400, **recipe.model.config})  # type: ignore[dict-item]


def counted(recipe: Recipe, config: ModelConfig, layout: Layout, rank: int) -> MemoryParts:
    """The parts of a step that a rank's placed model, optimizer and shards take."""
    with pretended_rank(layout, rank) as ranks:
        decoder = placed_of(recipe, config, ranks=ranks)
        return counted_states(decoder, optimizer_of(decoder.parameters(), recipe, CPU))[0]


def states(parts: MemoryParts) -> dict[str, int]:
    return {name: value for name, value in vars(parts).items() if name not in ("activations", "logits")}


@pytest.mark.parametrize("name", CASES)
def test_states_of_each_stage_are_those_of_the_rank_that_has_most(tiny_world: World, tmp_path: Path, name: str) -> None:
    recipe, config = recipe_of(tiny_world, tmp_path, name)
    layout = layout_of(recipe.parallel, CASES[name][0])
    workload = read_workload(recipe, config, judges=False)
    for stage in range(layout.pipeline):
        firsts = range(stage * layout.world // layout.pipeline, (stage + 1) * layout.world // layout.pipeline)
        of_ranks = [states(counted(recipe, config, layout, rank)) for rank in firsts[: layout.tensor]]
        found = rank_states(workload, layout, stage=stage)
        assert states(found.parts) == max(of_ranks, key=lambda parts: sum(parts.values()))
        assert found.by_role.keys() == {"policy", *([] if recipe.stage == "sft" else ["reference"])}
        control(workload, layout, stage, found)


def control(workload: Workload, layout: Layout, stage: int, found: RankStates) -> None:
    """A process that is alone, or whole where it has a part, has other bytes."""
    other = rank_states(workload, Layout(pipeline=layout.pipeline, tensor=3 - min(layout.tensor, 2)), stage=stage)
    assert other.parts != found.parts
