"""What a step of a recipe sends is what the formulas say of it, to the byte: adapters, recomputation, tensor ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from builders.adapter_folders import adapter_folder
from builders.parallel_steps import recipe_file
from builders.process_group import run_group
from builders.step_traffic_worker import sendings
from builders.tiny_world import World

from danlu.parallel.collective_traffic import CollectiveTraffic, table
from danlu.recipe import sections
from danlu.verification.step_traffic import StepTraffic

pytestmark = pytest.mark.distributed

ADAPTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "lora": {"kind": "lora", "targets": ["all-linear", "embed_tokens", "lm_head"]},
    "lora on heads": {"kind": "lora", "targets": ["q_proj", "v_proj"], "dropout": 0.1},
    "lora on rows": {"kind": "lora", "targets": ["o_proj", "down_proj"], "bias": "all"},
    "lora and a norm": {"kind": "lora", "targets": ["down_proj"], "modules_to_save": ["0.attention_norm"]},
    "lora on another": {"kind": "lora", "targets": ["all-linear"]},
    "dropout on another": {"kind": "lora", "targets": ["all-linear"], "dropout": 0.1},
    "lora-fa": {"kind": "lora-fa"},
    "dora": {"kind": "dora"},
    "dora, exact norm": {"kind": "dora", "exact_norm": True},
    "vera": {"kind": "vera", "rank": 16},
    "mora": {"kind": "mora"},
    "ia3": {"kind": "ia3", "targets": ["q_proj", "gate_proj", "down_proj"], "feedforward": ["q_proj"]},
    "bottlenecks": {"kind": "bottleneck", "width": 8},
    "bottlenecks behind MLPs": {"kind": "bottleneck", "width": 8, "placement": "pfeiffer"},
    "prefix": {"kind": "prefix", "tokens": 3},
}
REMADE = ("none", "dora, exact norm", "bottlenecks")
MEMORY: dict[str, Any] = {
    "kept": "none",
    "selective": "selective",
    "full": "full",
    "every": {"recompute": {"kind": "every", "layers": 2}},
    "planned": {"recompute": {"kind": "planned", "budget": 0.01}},
}
CASES = [
    *((adapter, memory, True) for adapter in ADAPTERS for memory in (MEMORY if adapter in REMADE else ("kept",))),
    *((adapter, memory, False) for adapter in ("none", "dora") for memory in ("kept", "full", "every")),
    *((adapter, "kept", False) for adapter in ("dora, exact norm", "bottlenecks")),
]


@pytest.fixture(scope="module")
def found(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, StepTraffic]:
    folder = tmp_path_factory.mktemp("sending")
    base = {"path": str(tiny_world.base), "config": None, "tokenizer": None}
    below = adapter_folder(tiny_world.base, folder / "below", sections.Lora(targets=["all-linear"]))
    files = {}
    for adapter, memory, sequence in CASES:
        changes = {"parallel": {"tensor": 2, "sequence": sequence}, "memory": MEMORY[memory]}
        if ADAPTERS[adapter] is not None:
            model = {**base, "adapters": [str(below)]} if adapter.endswith("on another") else base
            changes |= {"adapter": ADAPTERS[adapter], "model": model}
        name = named(adapter, memory, sequence)
        files[name] = recipe_file(tiny_world, folder, f"{len(files)}", **changes)
    first: Mapping[str, StepTraffic] = run_group(sendings, 2, files)[0]
    return first


def named(adapter: str, memory: str, sequence: bool) -> str:
    return f"{adapter}, {memory}, {'sequence' if sequence else 'tensor'}"


@pytest.mark.parametrize("name", [named(*case) for case in CASES])
def test_a_step_sends_what_the_formulas_say(found: Mapping[str, StepTraffic], name: str) -> None:
    rows = table(found[name].counted, found[name].predicted, beside_bytes=0)
    assert rows
    assert all(row.agrees for row in rows), "\n".join(" ".join(row.cells()) for row in rows)


def test_the_formula_of_another_recipe_does_not_fit(found: Mapping[str, StepTraffic]) -> None:
    """Negative control, for pairs of which one does what the other does not."""
    for one, other in (
        ("none, kept, sequence", "none, kept, tensor"),
        ("none, kept, sequence", "none, full, sequence"),
        ("none, full, sequence", "none, every, sequence"),
        ("lora on heads, kept, sequence", "lora on rows, kept, sequence"),
        ("lora on another, kept, sequence", "dropout on another, kept, sequence"),
        ("dora, kept, tensor", "dora, exact norm, kept, tensor"),
        ("bottlenecks, kept, sequence", "bottlenecks behind MLPs, kept, sequence"),
    ):
        assert not fits(found[one].counted, found[other].predicted), f"{one} as {other}"


def fits(counted: list[CollectiveTraffic], formula: list[CollectiveTraffic]) -> bool:
    return all(row.agrees for row in table(counted, formula, beside_bytes=0))
