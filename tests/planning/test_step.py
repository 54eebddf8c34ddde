"""The plan of a step: its memory is that of the closed forms, its seconds those of its operations in their schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import CONFIG, World

from danlu.models.hf_config import read_config_values
from danlu.parallel.layout import layout_of
from danlu.planning.cards import Card, find_card
from danlu.planning.cluster import Cluster
from danlu.planning.lengths import Lengths
from danlu.planning.mean_documents import mean_documents
from danlu.planning.rank_memory import chunks_step, gathered_bytes_of, rank_states
from danlu.planning.step import plan_step
from danlu.planning.step_plan import StepPlan
from danlu.planning.target import Target
from danlu.planning.workload import Workload
from danlu.recipe import load
from danlu.run.read_workload import read_workload

WIDE = {**CONFIG, "num_hidden_layers": 8, "vocab_size": 1000, "tie_word_embeddings": False}
NODE = "8xH100-80G"


def workload_of(world: World, folder: Path, **changes: Any) -> Workload:
    common = {"model": {"config": WIDE}, "batch": {"sequences": 64, "micro": 2}, "precision": "bf16"}
    recipe = load(world.recipe(folder / "run", **{**common, **changes})).recipe
    return read_workload(recipe, read_config_values(WIDE), judges=False)


def plan_of(workload: Workload, on: str = NODE) -> StepPlan:
    target = Target(Cluster.of(on))
    return plan_step(workload, layout_of(workload.recipe.parallel, target.cluster.ranks), target)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memory": {"recompute": "full"}},
        {"parallel": {"shard": "zero3", "tensor": 2}},
        {"parallel": {"context": 2}, "ema": 0.9},
        {"optimizer": "adamw8bit", "memory": {"offload": ["optimizer"]}},
    ],
)
def test_memory_of_the_walk_is_that_of_the_closed_form(tiny_world: World, tmp_path: Path, changes: Any) -> None:
    workload = workload_of(tiny_world, tmp_path, **changes)
    plan = plan_of(workload)
    states = rank_states(workload, plan.layout, device_type="cuda")
    step = chunks_step(workload, workload.chunks(0), "cuda", "flash", plan.micro)
    # From the second micro-batch on the head has a gradient, while the loss makes another one.
    section, config = workload.recipe.parallel, workload.config
    element_bytes = 4 if section.shard == "none" else 2
    head_gradient = config.vocab_rows // section.tensor * config.hidden_size * element_bytes
    memory = plan.worst.memory
    whole_gradients = gathered_bytes_of(workload, states.tensors)[1]  # there in backward passes alone
    at_loss = step.activations.kept + step.logits + head_gradient - whole_gradients
    in_backward = step.activations.kept + step.activations.recomputed
    assert memory.allocated == states.parts.total + max(at_loss, in_backward)
    assert memory.by_role == states.by_role and memory.host.step == states.offloaded
    alone = workload_of(tiny_world, tmp_path, batch={"sequences": 16, "micro": 2})
    assert plan_of(alone).micro_batches == 1
    # The first micro-batch of a step makes its gradients while activations are freed.
    assert plan_of(alone).worst.memory.allocated <= plan_of(workload_of(tiny_world, tmp_path)).worst.memory.allocated


def test_seconds_are_those_of_operations_in_their_schedule(tiny_world: World, tmp_path: Path) -> None:
    alone = plan_of(workload_of(tiny_world, tmp_path), "H100-80G")
    assert alone.seconds is not None
    assert alone.seconds.total == pytest.approx(sum(alone.seconds.compute.values()), rel=0.1)
    pipeline = {"stages": 4, "schedule": "1f1b"}
    staged = plan_of(workload_of(tiny_world, tmp_path, parallel={"pipeline": pipeline}), "4xH100-80G")
    assert staged.seconds is not None and staged.seconds.bubble > 0
    assert alone.seconds.total / 4 < staged.seconds.total < alone.seconds.total
    assert len(staged.stages) == 4 and staged.flops == alone.flops


def test_compiled_operators_go_over_memory_once(tiny_world: World, tmp_path: Path) -> None:
    eager, compiled = (plan_of(workload_of(tiny_world, tmp_path, compile=own), "L4-24G") for own in (False, True))
    assert eager.seconds is not None and compiled.seconds is not None
    assert compiled.seconds.compute["norm"] < eager.seconds.compute["norm"]
    assert compiled.seconds.compute["product"] == eager.seconds.compute["product"], "control: no product is fused"
    assert compiled.seconds.total < eager.seconds.total


def test_seconds_of_collectives_are_waited_for_or_hidden(tiny_world: World, tmp_path: Path) -> None:
    parallel = {"tensor": 2, "shard": "zero3"}
    workload = workload_of(tiny_world, tmp_path, parallel=parallel)
    near, far = plan_of(workload, "8xH100-80G"), plan_of(workload, "8x1xH100-80G")
    assert near.seconds is not None and far.seconds is not None
    assert near.seconds.communication.keys() == {"tensor", "shard"}
    assert near.stages[0].traffic == far.stages[0].traffic
    for axis, seconds in near.seconds.communication.items():
        assert 0 < seconds < far.seconds.communication[axis], "between nodes messages take longer"
    assert near.seconds.communication["tensor"] <= near.seconds.exposed, "tensor ranks wait for sums"
    assert near.seconds.exposed <= sum(near.seconds.communication.values())
    computed = sum(near.seconds.compute.values())
    assert near.seconds.total == pytest.approx(computed + near.seconds.exposed, rel=0.02)


def test_more_micro_batches_have_a_smaller_share_of_bubble(tiny_world: World, tmp_path: Path) -> None:
    parallel = {"pipeline": {"stages": 4, "schedule": "1f1b"}}
    shares = []
    for sequences in (8, 64):
        batch = {"sequences": sequences, "micro": 2}
        plan = plan_of(workload_of(tiny_world, tmp_path, parallel=parallel, batch=batch), "4xH100-80G")
        assert plan.seconds is not None
        shares.append(plan.seconds.bubble / plan.seconds.total)
    assert shares[1] < shares[0] / 3


def test_stages_of_pipedream_keep_versions_of_weights(tiny_world: World, tmp_path: Path) -> None:
    def stashes(schedule: str) -> list[int]:
        parallel = {"pipeline": {"stages": 4, "schedule": schedule}}
        workload = workload_of(tiny_world, tmp_path, parallel=parallel)
        plan = plan_of(workload, "4xH100-80G")
        states = [rank_states(workload, plan.layout, stage=stage, device_type="cuda") for stage in range(4)]
        found = [stage.memory.parts.stash for stage in plan.stages]
        assert found == [each.parts.stash for each in states]
        return found

    assert stashes("pipedream")[0] > stashes("pipedream")[2] > 0 and stashes("1f1b") == [0] * 4


def test_a_cpu_that_was_not_measured_has_memory_and_no_seconds(tiny_world: World, tmp_path: Path) -> None:
    card = Card("CPU", 2**34, None, {})
    workload = workload_of(tiny_world, tmp_path)
    target = Target(Cluster(card, 1, 1, ()))
    plan = plan_step(workload, layout_of(workload.recipe.parallel, 1), target)
    assert plan.seconds is None and plan.tokens_per_s is None and plan.worst.memory.allocated > 0
    assert plan.assumptions == ("every packed sequence is one document of data.max_length (64) tokens",)
    known = replace(workload, lengths=Lengths((64, 10), "file"))
    assert plan_step(known, plan.layout, target).assumptions == ()


def test_the_largest_micro_batch_fits(tiny_world: World, tmp_path: Path) -> None:
    batch = {"sequences": 4096, "micro": "auto"}
    workload = workload_of(tiny_world, tmp_path, batch=batch, model={"config": WIDE}, data={"max_length": 2048})
    card = find_card("H100-80G")
    assert isinstance(card, Card)
    small = Target(Cluster.of_card(replace(card, memory_bytes=2**30)))
    layout = layout_of(workload.recipe.parallel, 1)
    plan = plan_step(workload, layout, small)
    assert 1 < plan.micro < 4096 and plan.worst.memory.allocated <= 2**30
    assert plan_step(workload, layout, Target(Cluster.of_card(card))).micro > plan.micro


def test_mean_documents_have_the_mix_of_all() -> None:
    lengths = Lengths(tuple([100] * 30 + [900] * 10), "token cache")
    documents = mean_documents(lengths, 3, 1000)
    assert sum(documents) == 3000 and documents.count(100) >= 7 and 2 <= documents.count(900) <= 3
    assert mean_documents(lengths, 3, 50) == [50] * 3
    assert mean_documents(Lengths(None, "full packs"), 2, 64) == [64, 64]
    assert mean_documents(Lengths((7,), "file"), 1, 64) == [7] * 9 + [1]


def test_chunks_of_a_stage_share_the_bytes_of_whole_gradients(tiny_world: World, tmp_path: Path) -> None:
    """Under zero3 a layer's whole gradients come and go; with `accumulate: local` those of each chunk wait."""

    def gradients(chunks: int, **changes: Any) -> int:
        schedule = {"schedule": "interleaved", "chunks": chunks} if chunks > 1 else {}
        parallel = {"pipeline": {"stages": 2, **schedule}, "shard": "zero3", **changes}
        plan = plan_of(workload_of(tiny_world, tmp_path, parallel=parallel))
        return plan.stages[0].memory.parts.gradients

    assert gradients(4) <= gradients(1)
    assert gradients(4, accumulate="local") > gradients(1), "control"
