"""Context ranks compute what one process does: gradients, norms, weights and evaluation, of packs that are cut."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from builders.equal_traces import Seen, differences
from builders.parallel_steps import LINEAR_ATTENTION, recipe_file, see
from builders.process_group import run_group
from builders.small_experts import EXPERT_CONFIGS
from builders.tiny_world import CONFIG, World

from danlu.models.hf_config import read_config_values
from danlu.verification.role_proxies import write_model

pytestmark = pytest.mark.distributed

PACKS, MICRO = 5, 2
ULYSSES = {"context": {"size": 2, "method": "ulysses"}}
LORA = {"adapter": {"kind": "lora", "dropout": 0.1}}
GEMMA = {"model_type": "gemma2", "sliding_window": 7, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 12}
WINDOWS = {"model": {"config": {**CONFIG, **GEMMA, "head_dim": 8}}}  # in every other layer
LATENT = {"model": {"config": EXPERT_CONFIGS["deepseek_v3"]}}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": LORA,
    "linear attention": LINEAR_ATTENTION,
    "windows": WINDOWS,
    "windows, lora": WINDOWS | LORA,
    "latent": LATENT,
}

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "context": (2, {"context": 2}, {}),
    "gather, zero2": (2, {"context": {"size": 2, "method": "gather"}, "shard": "zero2"}, {}),
    "ulysses, zero1": (2, {**ULYSSES, "shard": "zero1"}, {}),
    "zero3, recompute": (2, {"context": 2, "shard": "zero3"}, {"memory": "full"}),
    "selective": (2, {"context": 2}, {"memory": "selective"}),
    "lora": (2, {"context": 2}, LORA),
    "lora, ulysses": (2, ULYSSES, LORA),
    "ring x ulysses": (4, {"context": {"size": 4, "ulysses": 2}}, {}),
    "data x context": (4, {"context": 2}, {}),
    "zero3 of data x context": (4, {"context": 2, "shard": "zero3"}, {}),
    "hybrid": (4, {"context": 2, "shard": "zero3", "replicate": 2}, {}),
    "context x tensor, sequence": (4, {"context": 2, "tensor": 2, "sequence": True}, {}),
    "linear attention": (2, ULYSSES, LINEAR_ATTENTION),
    "linear attention, zero3, recompute": (2, {**ULYSSES, "shard": "zero3"}, {**LINEAR_ATTENTION, "memory": "full"}),
    "linear attention, selective": (2, ULYSSES, {**LINEAR_ATTENTION, "memory": "selective"}),
    "linear attention x tensor, sequence": (4, {**ULYSSES, "tensor": 2, "sequence": True}, LINEAR_ATTENTION),
    "linear attention of four": (4, {"context": {"size": 4, "method": "ulysses"}}, LINEAR_ATTENTION),
    "context of four, zero3": (4, {"context": 4, "shard": "zero3"}, {}),
    "windows": (2, {"context": 2}, WINDOWS),
    "windows, gather, zero2": (2, {"context": {"size": 2, "method": "gather"}, "shard": "zero2"}, WINDOWS),
    "windows, zero3": (2, {"context": 2, "shard": "zero3"}, {**WINDOWS, "memory": "selective"}),
    "windows, lora": (2, {"context": 2}, WINDOWS | LORA),
    "windows, ring x ulysses": (4, {"context": {"size": 4, "ulysses": 2}}, WINDOWS),
    "latent": (2, {"context": 2}, LATENT),
    "latent, ulysses, full": (2, ULYSSES, {**LATENT, "memory": "full"}),
}


@pytest.fixture(scope="module")
def traces(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """Of each case what its processes saw, and one process."""
    folder = tmp_path_factory.mktemp("context")
    optimizer = {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9}
    write_model(read_config_values({"vocab_size": 400, **WINDOWS["model"]["config"]}), folder / "windows", 0)
    shutil.copytree(tiny_world.tokenizer, folder / "windows", dirs_exist_ok=True)

    def file(name: str, **changes: Any) -> str:
        if "adapter" in changes:
            base = folder / "windows" if "model" in changes else tiny_world.base
            changes["model"] = {"path": str(base), "config": None, "tokenizer": None}
        return recipe_file(tiny_world, folder, name, optimizer=optimizer, **changes)

    files = {name: file(name, parallel=layout, **changes) for name, (_, layout, changes) in CASES.items()}
    alone = {kind: file(f"one-{kind}", **changes) for kind, changes in KINDS.items()}
    reference = see(list(alone.values()), PACKS, MICRO, 1)
    rounded = see(list(alone.values()), PACKS, MICRO, 1, rounded=True)
    seen: dict[str, Seen] = {}
    for size in (2, 4):
        names = [name for name, case in CASES.items() if case[0] == size]
        by_rank = run_group(see, size, [files[name] for name in names], PACKS, MICRO)
        for name in names:
            changes = {key: value for key, value in CASES[name][2].items() if key != "memory"}
            kind = next(kind for kind, own in KINDS.items() if own == changes)
            by_one = reference[alone[kind]], rounded[alone[kind]]
            seen[name] = [rank[files[name]] for rank in by_rank], *by_one
    return seen


@pytest.mark.parametrize("name", CASES)
def test_context_ranks_are_one_process(traces: dict[str, Seen], name: str) -> None:
    assert differences(*traces[name]) == []


def test_a_model_without_its_windows_is_another(tiny_world: World, tmp_path: Path, traces: dict[str, Seen]) -> None:
    config = {**WINDOWS["model"]["config"], "sliding_window": 128}
    optimizer = {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9}
    file = recipe_file(tiny_world, tmp_path, "wide", optimizer=optimizer, model={"config": config})
    assert differences(traces["windows"][0], see([file], PACKS, MICRO, 1)[file])
