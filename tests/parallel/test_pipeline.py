"""Stages of a pipeline compute what one process does: gradients, norms, weights and evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders.adapter_folders import adapter_folder
from builders.equal_traces import Seen, differences, gradients
from builders.parallel_steps import LINEAR_ATTENTION, recipe_file, see, see_without_sums
from builders.process_group import run_group
from builders.small_experts import EXPERT_CONFIGS
from builders.tiny_world import CONFIG, World

from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.saving import save
from danlu.recipe import sections

pytestmark = pytest.mark.distributed

PACKS, MICRO = 9, 1  # of a step: no number of data ranks divides the packs
FOUR = {**CONFIG, "num_hidden_layers": 4}
LAYERS = ["linear_attention", "full_attention"] * 2
TIED = {"model": {"config": {**FOUR, "tie_word_embeddings": True}}}
LORA = {"adapter": {"kind": "lora", "dropout": 0.1}}
VERA = {"adapter": {"kind": "vera", "rank": 4, "dropout": 0.1}}
SAVED = {"adapter": {"kind": "lora", "modules_to_save": ["embed_tokens", "lm_head", "norm"]}}
BELOW = {"path": "BASE", "adapters": ["BELOW"], "config": None, "tokenizer": None}
CONTINUE = {"adapter": "continue", "model": BELOW}
ON_ANOTHER = {"adapter": {"kind": "lora", "rank": 3, "dropout": 0.1}, "model": BELOW}
PREFIX = {"adapter": {"kind": "prefix", "tokens": 3}}
PROJECTED = {"adapter": {"kind": "prefix", "tokens": 3, "projection": 16}}
GEMMA = {"model_type": "gemma2", "sliding_window": 7, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 12}
WINDOWS = {"model": {"config": {**FOUR, **GEMMA, "head_dim": 8}}}  # in every other layer
LINEAR = {"model": {"config": {**LINEAR_ATTENTION["model"]["config"], "num_hidden_layers": 4, "layer_types": LAYERS}}}
LATENT = {"model": {"config": {**EXPERT_CONFIGS["deepseek_v3"], "num_hidden_layers": 4}}}
FULL = {"memory": "full"}
COMPILED = {"compile": True}
PLANNED = {"memory": {"recompute": {"kind": "planned", "budget": 0.002}}}

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "1f1b": (2, {"pipeline": 2}, {}),
    "naive, by hand": (2, {"pipeline": {"stages": 2, "schedule": "naive", "split": [3, 1]}}, {}),
    "gpipe, by cost": (2, {"pipeline": {"stages": 2, "schedule": "gpipe", "split": "cost"}}, TIED),
    "1f1b, tied": (2, {"pipeline": 2}, TIED),
    "interleaved, tied": (2, {"pipeline": {"stages": 2, "schedule": "interleaved"}}, TIED),
    "lora": (2, {"pipeline": 2}, LORA),
    "vera": (2, {"pipeline": 2}, VERA),
    "continue": (2, {"pipeline": 2}, CONTINUE),
    "continue x zero3": (4, {"pipeline": 2, "shard": "zero3"}, CONTINUE),
    "lora on another, zbv": (2, {"pipeline": {"stages": 2, "schedule": "zbv"}}, ON_ANOTHER),
    "lora on another, interleaved x tensor": (
        4,
        {"pipeline": {"stages": 2, "schedule": "interleaved"}, "tensor": 2},
        ON_ANOTHER,
    ),
    "prefix, interleaved": (2, {"pipeline": {"stages": 2, "schedule": "interleaved"}}, PREFIX),
    "prefix of a projection, full": (2, {"pipeline": 2}, PROJECTED | FULL),
    "prefix of a projection, zbv x tensor": (
        4,
        {"pipeline": {"stages": 2, "schedule": "zbv"}, "tensor": 2},
        PROJECTED,
    ),
    "lora, modules_to_save": (2, {"pipeline": 2}, SAVED),
    "every": (2, {"pipeline": 2}, {"memory": {"recompute": {"kind": "every", "layers": 2}}}),
    "planned": (2, {"pipeline": 2}, PLANNED),
    "planned, interleaved x tensor": (4, {"pipeline": {"stages": 2, "schedule": "interleaved"}, "tensor": 2}, PLANNED),
    "planned, zbv, lora": (2, {"pipeline": {"stages": 2, "schedule": "zbv"}}, LORA | PLANNED),
    "compiled": (2, {"pipeline": 2}, COMPILED | TIED),
    "compiled, interleaved, lora": (2, {"pipeline": {"stages": 2, "schedule": "interleaved"}}, COMPILED | LORA),
    "compiled x zero3": (4, {"pipeline": 2, "shard": "zero3"}, COMPILED | TIED),
    "four stages": (4, {"pipeline": 4}, {}),
    "x data": (4, {"pipeline": 2}, TIED),
    "x zero1": (4, {"pipeline": 2, "shard": "zero1"}, {}),
    "x zero2": (4, {"pipeline": 2, "shard": "zero2"}, TIED),
    "x zero3": (4, {"pipeline": 2, "shard": "zero3"}, TIED),
    "x zero3, lora": (4, {"pipeline": 2, "shard": "zero3"}, LORA),
    "x zero3, vera": (4, {"pipeline": 2, "shard": "zero3"}, VERA),
    "interleaved x zero1": (4, {"pipeline": {"stages": 2, "schedule": "interleaved"}, "shard": "zero1"}, TIED),
    "interleaved x zero3": (4, {"pipeline": {"stages": 2, "schedule": "interleaved"}, "shard": "zero3"}, {}),
    "x tensor": (4, {"pipeline": 2, "tensor": 2}, TIED),
    "x tensor, sequence": (4, {"pipeline": 2, "tensor": 2, "sequence": True}, {}),
    "x context": (4, {"pipeline": 2, "context": 2}, {}),
    "zb-h1": (2, {"pipeline": {"stages": 2, "schedule": "zb-h1"}}, {}),
    "zbv, tied": (2, {"pipeline": {"stages": 2, "schedule": "zbv"}}, TIED),
    "dualpipev, lora": (2, {"pipeline": {"stages": 2, "schedule": "dualpipev"}}, LORA),
    "zb-h1 x tensor, sequence": (
        4,
        {"pipeline": {"stages": 2, "schedule": "zb-h1"}, "tensor": 2, "sequence": True},
        {},
    ),
    "zbv x zero1": (4, {"pipeline": {"stages": 2, "schedule": "zbv"}, "shard": "zero1"}, {}),
    "zbv x zero3": (4, {"pipeline": {"stages": 2, "schedule": "zbv"}, "shard": "zero3"}, TIED),
    "windows, interleaved": (2, {"pipeline": {"stages": 2, "schedule": "interleaved"}}, WINDOWS),
    "linear attention, full": (2, {"pipeline": 2}, LINEAR | FULL),
    "linear attention, zbv": (2, {"pipeline": {"stages": 2, "schedule": "zbv"}}, LINEAR),
    "latent, by hand, zb-h1": (2, {"pipeline": {"stages": 2, "schedule": "zb-h1", "split": [3, 1]}}, LATENT),
    "windows x context": (4, {"pipeline": 2, "context": 2}, WINDOWS),
    "dualpipev x data": (4, {"pipeline": {"stages": 2, "schedule": "dualpipev"}}, TIED),
}
SLOW = ("compiled, interleaved, lora", "compiled x zero3")  # a minute each, in which every process compiles
FAST = tuple(name for name in CASES if name not in SLOW)


@pytest.fixture(scope="module")
def traces(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    return traces_of(FAST, tiny_world, tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def slow_traces(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    return traces_of(SLOW, tiny_world, tmp_path_factory.mktemp("pipeline"))


def traces_of(chosen: tuple[str, ...], tiny_world: World, folder: Path) -> dict[str, Seen]:
    """Of each case what its processes saw, and one process."""
    cases = {name: CASES[name] for name in chosen}
    optimizer = {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9}
    base = build(read_config_values({**FOUR, "vocab_size": 400, "tie_word_embeddings": False}))
    initialize(base, 0)
    save(base, folder / "base", tokenizer_from=tiny_world.tokenizer)
    below = adapter_folder(folder / "base", folder / "below", sections.Lora(targets=["all-linear"]))
    of_base = {"model": {"path": str(folder / "base"), "config": None, "tokenizer": None}}

    def file(name: str, **changes: Any) -> str:
        model = of_base if "adapter" in changes else {"model": {"config": FOUR}}
        values = {"optimizer": optimizer, **model, **changes}
        if values["model"] == BELOW:
            values["model"] = {**of_base["model"], "adapters": [str(below)]}
        return recipe_file(tiny_world, folder, name, **values)

    kinds = {json.dumps(changes): changes for _, _, changes in cases.values()}
    files = {name: file(name, parallel=layout, **changes) for name, (_, layout, changes) in cases.items()}
    alone = {
        kind: file(
            f"one-{number}", **{key: value for key, value in changes.items() if key not in ("memory", "compile")}
        )
        for number, (kind, changes) in enumerate(kinds.items())
    }
    reference = see(list(alone.values()), PACKS, MICRO, 1)
    rounded = see(list(alone.values()), PACKS, MICRO, 1, rounded=True)
    seen: dict[str, Seen] = {}
    for size in (2, 4):
        names = [name for name, case in cases.items() if case[0] == size]
        by_rank = run_group(see, size, [files[name] for name in names], PACKS, MICRO, timeout=900)
        for name in names:
            kind = alone[json.dumps(cases[name][2])]
            seen[name] = [rank[files[name]] for rank in by_rank], reference[kind], rounded[kind]
    return seen


@pytest.mark.parametrize("name", FAST)
def test_stages_are_one_process(traces: dict[str, Seen], name: str) -> None:
    assert differences(*traces[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_stages_are_one_process(slow_traces: dict[str, Seen], name: str) -> None:
    assert differences(*slow_traces[name]) == []


def test_a_tie_between_stages_that_is_not_summed_shows(tiny_world: World, tmp_path: Path) -> None:
    file = recipe_file(tiny_world, tmp_path, "tied", **TIED, parallel={"pipeline": 2})
    by_rank = [seen[file] for seen in run_group(see_without_sums, 2, [file], PACKS, MICRO)]
    with pytest.raises(ValueError, match=r"embed_tokens.weight: processes that hold the same part of it differ"):
        gradients(by_rank, 0)
