"""Experts distributed among data ranks compute what one process does, with every kind of sharding and recomputation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import expert_steps
from builders.equal_shards import assemble_equal
from builders.equal_traces import differences, distance
from builders.parallel_steps import recipe_file
from builders.process_group import run_group
from builders.tiny_world import World

from danlu.parallel.collective_traffic import table
from danlu.verification.trace import Trace

pytestmark = pytest.mark.distributed

PACKS, MICRO = 5, 1  # ranks with fewer packs than another end with a micro-batch without tokens
Case = tuple[int, dict[str, Any], str, str]
"""Processes, layout, kind of experts, what is recomputed."""

CASES: dict[str, Case] = {
    "ddp, expert 2": (2, {"expert": 2}, "mixtral", "none"),
    "zero1, expert 2": (2, {"shard": "zero1", "expert": 2}, "deepseek-v3", "none"),
    "zero2, expert 2": (2, {"shard": "zero2", "expert": 2}, "qwen2-moe", "none"),
    "zero3, expert 2": (2, {"shard": "zero3", "expert": 2}, "mixtral", "full"),
    "zero3": (2, {"shard": "zero3"}, "biased", "none"),
    "tensor 2": (2, {"tensor": 2}, "biased", "none"),
    "tensor 2, sequence": (2, {"tensor": 2, "sequence": True}, "qwen2-moe", "selective"),
    "ddp, expert 4": (4, {"expert": 4}, "deepseek-v3", "none"),
    "zero3 of four, expert 2": (4, {"shard": "zero3", "expert": 2}, "deepseek-v3", "none"),
    "zero3 of four, expert 2, full": (4, {"shard": "zero3", "expert": 2}, "mixtral", "full"),
    "zero3 of four, expert 2, every": (4, {"shard": "zero3", "expert": 2}, "qwen2-moe", "every"),
    "zero2 of four, expert 2, selective": (4, {"shard": "zero2", "expert": 2}, "odd", "selective"),
    "zero3 of four, expert 4": (4, {"shard": "zero3", "expert": 4}, "mixtral", "none"),
    "zero3 of four": (4, {"shard": "zero3"}, "qwen2-moe", "none"),
    "hybrid, expert 2": (4, {"shard": "zero3", "replicate": 2, "expert": 2}, "mixtral", "none"),
    "expert 2 x tensor 2": (4, {"expert": 2, "tensor": 2}, "deepseek-v3", "none"),
    "expert 2 x context 2": (2, {"expert": 2, "context": 2}, "deepseek-v3", "none"),
    "zero3, expert 2 x ulysses 2": (
        2,
        {"shard": "zero3", "expert": 2, "context": {"size": 2, "method": "ulysses"}},
        "mixtral",
        "full",
    ),
    "zero3 of four, expert 2 x context 2": (4, {"shard": "zero3", "expert": 2, "context": 2}, "qwen2-moe", "none"),
    "zero2, expert 4 x context 2": (4, {"shard": "zero2", "expert": 4, "context": 2}, "mixtral", "selective"),
    "zero3, expert 2 x tensor 2, sequence": (
        4,
        {"shard": "zero3", "expert": 2, "tensor": 2, "sequence": True},
        "mixtral",
        "full",
    ),
}


@pytest.fixture(scope="module")
def traces(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Trace], Trace]]:
    """Of each case what its processes saw, and one process."""
    folder = tmp_path_factory.mktemp("expert")
    optimizer = {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9}

    def file(name: str, **changes: Any) -> str:
        return recipe_file(tiny_world, folder, name, optimizer=optimizer, **changes)

    files = {name: file(name, parallel=case[1], memory=case[3]) for name, case in CASES.items()}
    kinds = sorted({kind for _, _, kind, _ in CASES.values()})
    alone = dict(zip(kinds, expert_steps.see([(file(kind), kind) for kind in kinds], PACKS, MICRO, 1), strict=True))
    seen: dict[str, tuple[list[Trace], Trace]] = {}
    for size in (2, 4):
        names = [name for name, case in CASES.items() if case[0] == size]
        by_rank = run_group(expert_steps.see, size, [(files[name], CASES[name][2]) for name in names], PACKS, MICRO)
        for number, name in enumerate(names):
            seen[name] = [rank[number] for rank in by_rank], alone[CASES[name][2]]
    return seen


@pytest.mark.parametrize("name", CASES)
def test_distributed_experts_are_one_process(traces: dict[str, tuple[list[Trace], Trace]], name: str) -> None:
    many, one = traces[name]
    assert differences(many, one) == []


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[1].get("expert", 1) > 1])
def test_no_rank_has_anothers_experts(traces: dict[str, tuple[list[Trace], Trace]], name: str) -> None:
    layout = CASES[name][1]
    many, _ = traces[name]
    for trace in many:
        box, _ = trace.steps[0].weights["layers.0.mlp.experts.up_proj.weight"]
        assert box.sizes[0] <= box.global_shape[0] // layout["expert"]


@pytest.mark.parametrize("tokens", [(7, 0, 12, 3), (0, 0, 0, 0), (0, 0, 0, 5)])
def test_rows_and_gradients_come_back_to_the_bit(tokens: tuple[int, ...]) -> None:
    """Uneven shares, experts without rows, and ranks without tokens, which take part all the same."""
    for facts in run_group(expert_steps.exchanged, 4, tokens, 8):
        assert all(facts.values()), facts


@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
def test_rows_that_travel_in_fp8_are_those_of_one_process(activations: str) -> None:
    """Outputs and gradients of tokens to the bit. Tiles of the weights' gradients have other rows than on one process,
    which moves numbers near zero alone. The control has scales of a row's tiles in another order."""
    for facts in run_group(expert_steps.sent_as_codes, 2, activations, False):
        assert facts.pop("outputs") == facts.pop("gradients of inputs") == facts.pop("gradients of the router") == 0
        assert max(facts.values()) < 1e-4, facts
    for facts in run_group(expert_steps.sent_as_codes, 2, activations, True):
        assert facts["outputs"] > 1e-2 and facts["gradients of inputs"] > 1e-2


def test_what_is_sent_is_what_the_formulas_say(tiny_world: World, tmp_path: Path) -> None:
    """To the byte, for the rows that each rank really exchanges: uneven, and other rows in other layers."""
    fp8, by_tensor = (
        {"precision": {"kind": "fp8", "recipe": recipe, "activations": "fp32"}} for recipe in ("tile", "tensor")
    )
    in_fp8 = {
        "fp8, expert 2": ((2, {"expert": 2}, "mixtral", "full"), fp8),
        "fp8, expert 2, biases": ((2, {"expert": 2}, "biased, even", "none"), fp8),
        "fp8, tensor 2": ((2, {"tensor": 2}, "mixtral", "full"), by_tensor),
        "fp8, tensor 2, biases": ((2, {"tensor": 2}, "biased", "none"), by_tensor),
        "fp8, tensor 2, sequence": ((2, {"tensor": 2, "sequence": True}, "qwen2-moe", "none"), fp8),
    }
    cases = {name: (case, dict[str, Any]()) for name, case in CASES.items()} | in_fp8
    groups = [(size, [name for name, case in CASES.items() if case[0] == size]) for size in (2, 4)]
    files = {
        name: recipe_file(tiny_world, tmp_path, name, parallel=layout, memory=recompute, **more)
        for name, ((_, layout, _, recompute), more) in cases.items()
    }
    for size, names in [*groups, (2, list(in_fp8))]:
        kinds = [(files[name], cases[name][0][2]) for name in names]
        by_rank = run_group(expert_steps.traffic, size, kinds, PACKS, MICRO)
        for number, name in enumerate(names):
            for traffic in (rank[number] for rank in by_rank):
                rows = table(traffic.counted, traffic.predicted, beside_bytes=0)
                assert rows and all(row.agrees for row in rows), "\n".join(
                    [name, *(" ".join(row.cells()) for row in rows)]
                )
                exchanged = [row for row in rows if row.kind == "all-to-all"]
                assert bool(exchanged) == (cases[name][0][1].get("expert", 1) > 1)


def test_shapes_alone_tell_what_distributed_experts_hold(tiny_world: World, tmp_path: Path) -> None:
    names = ["ddp, expert 4", "zero3 of four, expert 2", "zero3 of four, expert 4", "expert 2 x tensor 2"]
    files = [recipe_file(tiny_world, tmp_path, name, parallel=CASES[name][1]) for name in names]
    for found in run_group(expert_steps.memory, 4, [(file, "mixtral") for file in files]):
        for name, (counted, foreseen) in zip(names, found, strict=True):
            # Optimizer state has a step counter for each tensor besides, of which shards are no smaller.
            assert counted.optimizer == pytest.approx(foreseen.optimizer, rel=1e-3)
            assert vars(replace(counted, optimizer=0)) == vars(replace(foreseen, optimizer=0)), name
        assert (
            found[0][0].weights < found[3][0].weights + found[0][0].weights // 2
        )  # control: other layouts, other bytes


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"expert": 4}, {"shard": "zero3", "expert": 2}),
        ({"shard": "zero3", "expert": 2}, {"expert": 2, "tensor": 2}),
    ],
)
def test_a_checkpoint_is_read_where_experts_lie_otherwise(
    tiny_world: World, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    files = [recipe_file(tiny_world, tmp_path, name, parallel=one) for name, one in (("a", first), ("b", second))]
    seen = run_group(expert_steps.resumed, 4, *files, "deepseek-v3", str(tmp_path / "checkpoints"))
    saved, loaded = (assemble_equal(list(one)) for one in ([s[0] for s in seen], [s[2].loaded_weights for s in seen]))
    assert saved.keys() == loaded.keys() and all(torch.equal(loaded[name], value) for name, value in saved.items())
    following = assemble_equal([one[1].weights for one in seen])
    steps = [one[2].resumed_step for one in seen]
    after = assemble_equal([step.weights for step in steps if step is not None])
    assert distance(after, following)[0] < 1e-5
    assert distance(after, saved)[0] > 1e-3  # control: a step is more than rounding


def test_experts_that_have_changed_places_are_seen(traces: dict[str, tuple[list[Trace], Trace]]) -> None:
    """Negative control: gradients of the first experts taken for those of the last."""
    many, one = traces["ddp, expert 2"]
    name = "layers.0.mlp.experts.up_proj.weight"
    first, last = (trace.steps[0].gradients[name] for trace in many)
    for trace, (box, _), (_, gradient) in zip(many, (first, last), (last, first), strict=True):
        trace.steps[0] = replace(trace.steps[0], gradients={**trace.steps[0].gradients, name: (box, gradient)})
    assert [problem.split(" is ")[0] for problem in differences(many, one)] == [f"step 1: gradient of {name}"]
