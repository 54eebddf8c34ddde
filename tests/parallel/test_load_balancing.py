"""What keeps experts evenly loaded is the same in every layout: its gradients, its biases, what it counts."""

from __future__ import annotations

from typing import Any

import pytest
from builders import expert_steps
from builders.equal_traces import differences
from builders.parallel_steps import recipe_file
from builders.process_group import run_group
from builders.tiny_world import World

from danlu.verification.trace import Trace

pytestmark = pytest.mark.distributed

PACKS, MICRO = 5, 1  # one process has a micro-batch more than the other, which then has no tokens
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bias": ("deepseek-v3", {"balance": "bias", "rate": 0.05, "sequence": 0.3, "z": 0.1}),
    "sequence": ("qwen2-moe", {"balance": "sequence", "sequence": 0.5, "z": 0.1}),
    "step": ("mixtral", {"balance": "step", "rate": 0.5, "capacity": 1.0}),
    "step without capacity": ("mixtral", {"balance": "step", "rate": 0.5, "z": 0.1}),
}
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({}, "none"),
    "zero3, expert 2": ({"shard": "zero3", "expert": 2}, "full"),
    "tensor": ({"tensor": 2}, "none"),
    "tensor, sequence": ({"tensor": 2, "sequence": True}, "selective"),
    "context": ({"context": 2}, "none"),
    "zero3, expert 2 x ulysses": (
        {"shard": "zero3", "expert": 2, "context": {"size": 2, "method": "ulysses"}},
        "full",
    ),
}
CASES = [
    (layout, router)
    for layout, (parallel, _) in LAYOUTS.items()
    for router in ROUTERS
    if router != "step" or "context" not in parallel  # which knows no capacity
    if router != "step without capacity" or "context" in parallel or layout == "ddp"
]


@pytest.fixture(scope="module")
def traces(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case what its processes saw, by router what one process did, and without any router."""
    folder = tmp_path_factory.mktemp("balance")
    optimizer = {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9}

    def file(name: str, router: str | None, **changes: Any) -> str:
        balanced = {} if router is None else {"router": ROUTERS[router][1]}
        return recipe_file(tiny_world, folder, name, optimizer=optimizer, **balanced, **changes)

    one = [(file(f"one {name}", name), kind) for name, (kind, _) in ROUTERS.items()]
    plain = [(file(f"plain {name}", None), kind) for name, (kind, _) in ROUTERS.items()]
    alone = expert_steps.see([*one, *plain], PACKS, MICRO, 1)
    files = [
        (
            file(f"{layout} {router}", router, parallel=LAYOUTS[layout][0], memory=LAYOUTS[layout][1]),
            ROUTERS[router][0],
        )
        for layout, router in CASES
    ]
    by_rank = run_group(expert_steps.see, 2, files, PACKS, MICRO)
    return {
        "many": {case: [rank[number] for rank in by_rank] for number, case in enumerate(CASES)},
        "one": dict(zip(ROUTERS, alone, strict=False)),
        "plain": dict(zip(ROUTERS, alone[len(ROUTERS) :], strict=True)),
    }


@pytest.mark.parametrize(("layout", "router"), CASES)
def test_experts_are_balanced_as_on_one_process(traces: dict[str, Any], layout: str, router: str) -> None:
    many: list[Trace] = traces["many"][layout, router]
    assert differences(many, traces["one"][router]) == []


@pytest.mark.parametrize("router", ROUTERS)
def test_what_does_not_balance_is_seen(traces: dict[str, Any], router: str) -> None:
    """The control."""
    many: list[Trace] = traces["many"]["ddp", router]
    assert differences(many, traces["plain"][router]) != []
