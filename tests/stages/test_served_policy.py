"""A policy on a rollout server: what is trained is what answers, and where it is not, the run stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import served_policy_worker
from builders.process_group import run_group
from builders.rollout_worker import placed_policy
from builders.served_policy_worker import REQUESTS, served
from builders.tiny_world import World

from danlu.core.errors import ResourceError, TrainingError
from danlu.parallel.ranks import Ranks
from danlu.recipe import load
from danlu.stages.rollout import rollout_engine

LORA: dict[str, Any] = {"adapter": {"kind": "lora"}}
STALE = "model.layers.1.mlp.down_proj.weight"
NOWHERE = "http://127.0.0.1:9"


def recipe_file(world: World, folder: Path, kind: str, **changes: Any) -> str:
    start = {"model": {"path": str(world.base), "config": None, "tokenizer": None}}
    rollout = {"engine": kind, "url": NOWHERE, "server": {"timeout_s": 20, "reconnect_s": 0.2}}
    sampled = {"evaluation": {"every": 5, "samples": "hi"}, "rollout": rollout}
    return str(world.recipe(folder / "run", **{**start, **sampled, **changes}))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("changes", [{}, LORA], ids=["whole", "adapter"])
def test_what_is_trained_is_what_answers(tiny_world: World, tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with served(recipe_file(tiny_world, tmp_path, kind, **changes)) as policy:
        answers = []
        for version in (1, 2):
            policy.train()
            policy.engine.update(version)
            completions = policy.engine.generate(REQUESTS)
            assert policy.gap(completions) < 1e-4
            assert {each for completion in completions for each in completion.versions} == {version}
            answers.append([each.logprobs for each in completions])
        assert answers[0] != answers[1]
        assert [(each.number, each.sample) for each in completions] == [(4, 0), (4, 1), (1, 0), (1, 1)]
        policy.train()  # the control: what the server was not handed does not answer
        policy.engine.version = 3  # type: ignore[misc]
        assert policy.gap(policy.engine.generate(REQUESTS)) > 1e-2


@pytest.mark.parametrize(
    ("changes", "faults", "said"),
    [
        ({}, {"ignored": (STALE,)}, f"canary: .*version 1: {STALE} has other values there"),
        (LORA, {"ignores_adapters": True}, "canary: adapter policy .version 1. does not reach the rollout engine"),
    ],
    ids=["tensor", "adapter"],
)
def test_weights_that_do_not_arrive_stop_the_run(
    tiny_world: World, tmp_path: Path, changes: dict[str, Any], faults: dict[str, Any], said: str
) -> None:
    with served(recipe_file(tiny_world, tmp_path, "vllm", **changes), **faults) as policy:
        policy.train()
        policy.engine.update(1)
        with pytest.raises(TrainingError, match=said):
            policy.engine.generate(REQUESTS)


def test_a_server_that_is_not_there_is_told(tiny_world: World, tmp_path: Path) -> None:

    recipe = load(Path(recipe_file(tiny_world, tmp_path, "vllm"))).recipe
    with pytest.raises(ResourceError, match=f"{NOWHERE}: no rollout server answers"):
        rollout_engine(recipe, placed_policy(recipe, Ranks()))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("parallel", "changes"),
    [({"shard": "zero3"}, {}), ({"tensor": 2}, LORA), ({"pipeline": 2}, {}), ({"pipeline": 2}, LORA)],
    ids=["zero3", "tensor, adapter", "pipeline", "pipeline, adapter"],
)
def test_all_processes_hand_over_and_one_asks(
    tiny_world: World, tmp_path: Path, parallel: dict[str, Any], changes: dict[str, Any]
) -> None:
    file = recipe_file(tiny_world, tmp_path, "vllm", parallel=parallel, **changes)
    first, second = run_group(served_policy_worker.sampled_twice, 2, file)
    assert max(first["gap 1"], first["gap 2"]) < 1e-4
    assert first["answers 1"] == second["answers 1"] and first["answers 2"] == second["answers 2"]
    if not changes:
        assert first["error"] == second["error"] and first["error"].startswith("TrainingError: rank 0: canary: ")
