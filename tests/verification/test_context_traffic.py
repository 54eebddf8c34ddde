"""What context ranks send in a step is what the formulas say of it, to the byte: forward, backward and recomputed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from builders.parallel_steps import recipe_file
from builders.process_group import run_group
from builders.step_traffic_worker import sendings
from builders.tiny_world import CONFIG, World

from danlu.parallel.collective_traffic import CollectiveTraffic, table
from danlu.verification.step_traffic import StepTraffic

pytestmark = pytest.mark.distributed

ADAPTERS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"kind": "lora", "targets": ["all-linear"], "dropout": 0.1},
    "lora on heads": {"kind": "lora", "targets": ["q_proj", "v_proj"]},
    "lora on rows": {"kind": "lora", "targets": ["o_proj", "down_proj"]},
    "lora on the last layer": {"kind": "lora", "targets": ["1.attention.k_proj", "1.mlp.down_proj"]},
}
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
FP8 = {"precision": {"kind": "fp8", "recipe": "tensor"}}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "latent": LATENT,
    "windows": {"model_type": "mistral", "sliding_window": 4},
    "one key": {"num_key_value_heads": 1},
    "fp8": {},
    "fp8 experts": MIXTRAL,
    "linear attention": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    },
}
MEMORY: dict[str, Any] = {
    "kept": "none",
    "selective": "selective",
    "full": "full",
    "every": {"recompute": {"kind": "every", "layers": 2}},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ring": (2, {"context": 2}),
    "gather": (2, {"context": {"size": 2, "method": "gather"}}),
    "ulysses": (2, {"context": {"size": 2, "method": "ulysses"}}),
    "ring of 4": (4, {"context": 4}),
    "gather of 4, zero3": (4, {"context": {"size": 4, "method": "gather"}, "shard": "zero3"}),
    "ulysses of 4": (4, {"context": {"size": 4, "method": "ulysses"}}),
    "ring x ulysses": (4, {"context": {"size": 4, "ulysses": 2}}),
    "gather x ulysses": (4, {"context": {"size": 4, "ulysses": 2, "method": "gather"}}),
    "data x context, zero2": (4, {"context": 2, "shard": "zero2"}),
    "context x tensor": (4, {"context": {"size": 2, "method": "ulysses"}, "tensor": 2, "sequence": True}),
}
METHODS = ("ring", "gather", "ulysses")
CASES = [
    *((method, adapter, "selective", "llama") for method in METHODS for adapter in ADAPTERS),
    *((method, adapter, memory, "llama")
      for method in METHODS
      for adapter in ("full", "lora on heads", "lora on the last layer")
      for memory in ("kept", "full", "every")),
    *((method, "full", "selective", "latent") for method in METHODS),
    *((layout, "full", "kept", "llama") for layout in list(LAYOUTS)[3:]),
    ("ring", "full", "kept", "windows"),
    ("ulysses of 4", "full", "full", "one key"),
    ("ring x ulysses", "full", "selective", "latent"),
    ("ulysses", "full", "kept", "linear attention"),
    ("ulysses", "full", "selective", "linear attention"),
    ("context x tensor", "full", "full", "linear attention"),
    *(("ring", adapter, memory, "fp8") for adapter, memory in (
        ("full", "kept"), ("full", "every"), ("lora", "selective"), ("lora on heads", "full"))),
    ("ulysses", "full", "full", "fp8 experts"),
    ("ring x ulysses", "full", "kept", "fp8"),
    ("context x tensor", "full", "full", "fp8"),
]  # fmt: skip


@pytest.fixture(scope="module")
def by_rank(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[StepTraffic]]:
    """Of each case what each process sends."""
    folder = tmp_path_factory.mktemp("sending")
    base = {"path": str(tiny_world.base), "config": None, "tokenizer": None}
    files: dict[int, dict[str, str]] = {2: {}, 4: {}}
    for case in CASES:
        layout, adapter, memory, model = case
        size, parallel = LAYOUTS[layout]
        changes: dict[str, Any] = {"parallel": parallel, "memory": MEMORY[memory]}
        if ADAPTERS[adapter] is not None:
            changes |= {"adapter": ADAPTERS[adapter], "model": base}
        elif model != "llama":
            changes |= {"model": {"config": CONFIG | MODELS[model]}}
        changes |= FP8 if model.startswith("fp8") else {}
        files[size][named(case)] = recipe_file(tiny_world, folder, f"{size}-{len(files[size])}", **changes)
    seen: dict[str, list[StepTraffic]] = {}
    for size in files:
        ranks = run_group(sendings, size, files[size])
        seen |= {name: [rank[name] for rank in ranks] for name in files[size]}
    return seen


def named(case: tuple[str, str, str, str]) -> str:
    return ", ".join(case)


@pytest.mark.parametrize("name", map(named, CASES))
def test_each_rank_sends_what_the_formulas_say(by_rank: Mapping[str, list[StepTraffic]], name: str) -> None:
    for traffic in by_rank[name]:
        rows = table(traffic.counted, traffic.predicted, beside_bytes=0)
        assert any(row.axis == "context" and row.formula_bytes for row in rows)
        assert all(row.agrees for row in rows), "\n".join(" ".join(row.cells()) for row in rows)


def test_the_formula_of_another_recipe_does_not_fit(by_rank: Mapping[str, list[StepTraffic]]) -> None:
    """Negative control, for pairs of which one does what the other does not."""
    for one, other in (
        ("ring, full, kept, llama", "ring, full, full, llama"),
        ("ring, lora on heads, selective, llama", "ring, lora on rows, selective, llama"),
        ("gather, full, kept, llama", "ring, full, kept, llama"),
        ("ulysses, lora on heads, selective, llama", "ulysses, lora, selective, llama"),
        ("ring, full, selective, latent", "ring, full, selective, llama"),
    ):
        assert not fits(by_rank[one][0].counted, by_rank[other][0].predicted), f"{one} as {other}"
    ring = by_rank["ring of 4, full, kept, llama"]  # of four ranks, which have different rows
    assert not fits(ring[0].counted, ring[1].predicted)


def fits(counted: list[CollectiveTraffic], formula: list[CollectiveTraffic]) -> bool:
    return all(row.agrees for row in table(counted, formula, beside_bytes=0) if row.axis == "context")
