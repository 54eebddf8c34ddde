"""What stages of a pipeline send in a step is what the formulas say of it, to the byte, with the other axes too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from builders.parallel_steps import recipe_file
from builders.process_group import run_group
from builders.step_traffic_worker import sendings
from builders.tiny_world import CONFIG, World

from danlu.parallel.collective_traffic import table
from danlu.parallel.schedules import placement
from danlu.planning.traffic import messages_by_stage
from danlu.verification.step_traffic import StepTraffic

DEEP = {**CONFIG, "num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model": {"config": DEEP}},
    "tied": {"model": {"config": {**DEEP, "tie_word_embeddings": True}}},
    "experts": {
        "model": {"config": {**DEEP, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}}
    },
    "lora": {"adapter": {"kind": "lora", "dropout": 0.1}},
    "vera": {"adapter": {"kind": "vera", "rank": 4}},
    "lora on the last layer": {"adapter": {"kind": "lora", "targets": ["1.attention.q_proj"]}},
}


def stages(schedule: str, **layout: Any) -> dict[str, Any]:
    return {"pipeline": {"stages": 2, "schedule": schedule}, **layout}


CASES: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "1f1b": (2, stages("1f1b"), "llama", "none"),
    "gpipe, tied": (2, stages("gpipe"), "tied", "none"),
    "interleaved": (2, stages("interleaved"), "llama", "full"),
    "zbv, tied": (2, stages("zbv"), "tied", "none"),
    "lora": (2, stages("1f1b"), "lora", "none"),
    "vera": (2, stages("1f1b"), "vera", "none"),
    "x data": (4, stages("1f1b"), "tied", "none"),
    "x zero1": (4, stages("1f1b", shard="zero1"), "llama", "none"),
    "x zero2": (4, stages("1f1b", shard="zero2"), "llama", "none"),
    "x zero3": (4, stages("1f1b", shard="zero3"), "tied", "none"),
    "zbv x zero3": (4, stages("zbv", shard="zero3"), "llama", "none"),
    "1f1b x zero3, full": (4, stages("1f1b", shard="zero3"), "llama", "full"),
    "interleaved x zero3": (4, stages("interleaved", shard="zero3"), "llama", "none"),
    "zb-h1 x zero3": (4, stages("zb-h1", shard="zero3"), "llama", "none"),
    "x tensor": (4, stages("1f1b", tensor=2), "tied", "none"),
    "x tensor, selective": (4, stages("interleaved", tensor=2), "llama", "selective"),
    "x tensor, sequence": (4, stages("1f1b", tensor=2, sequence=True), "llama", "full"),
    "interleaved x tensor, sequence": (4, stages("interleaved", tensor=2, sequence=True), "llama", "none"),
    "x tensor, sequence, lora": (4, stages("1f1b", tensor=2, sequence=True), "lora", "none"),
    "x tensor, lora on the last layer": (4, stages("1f1b", tensor=2), "lora on the last layer", "none"),
    "x context": (4, stages("1f1b", context=2), "llama", "selective"),
    "interleaved x context": (4, stages("interleaved", context=2), "llama", "full"),
    "x expert": (4, stages("1f1b", expert=2), "experts", "none"),
    "interleaved x expert": (4, stages("interleaved", expert=2), "experts", "full"),
}


@pytest.fixture(scope="module")
def by_rank(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[StepTraffic]]:
    """Of each case what each process sends."""
    folder = tmp_path_factory.mktemp("sending")
    base = {"path": str(tiny_world.base), "config": None, "tokenizer": None}
    files: dict[int, dict[str, str]] = {2: {}, 4: {}}
    for name, (size, parallel, model, memory) in CASES.items():
        changes = {"model": base, **MODELS[model]}
        number = f"{size}-{len(files[size])}"
        files[size][name] = recipe_file(tiny_world, folder, number, parallel=parallel, memory=memory, **changes)
    seen: dict[str, list[StepTraffic]] = {}
    for size in files:
        ranks = run_group(sendings, size, files[size])
        seen |= {name: [rank[name] for rank in ranks] for name in files[size]}
    return seen


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_each_rank_sends_what_the_formulas_say(by_rank: Mapping[str, list[StepTraffic]], name: str) -> None:
    for traffic in by_rank[name]:
        rows = table(traffic.counted, traffic.predicted, beside_bytes=0)
        assert any(row.axis == "pipeline" and row.formula_bytes for row in rows)
        assert all(row.agrees for row in rows), "\n".join(" ".join(row.cells()) for row in rows)


@pytest.mark.distributed
def test_the_formula_of_another_recipe_does_not_fit(by_rank: Mapping[str, list[StepTraffic]]) -> None:
    """Negative control, for pairs of which one does what the other does not."""
    for one, other in (("1f1b", "interleaved"), ("x data", "x zero1"), ("1f1b", "gpipe, tied")):
        rows = table(by_rank[one][0].counted, by_rank[other][0].predicted, beside_bytes=0)
        assert not all(row.agrees for row in rows), (one, other)


@pytest.mark.parametrize(
    ("kind", "stages", "chunks", "expected"),
    [
        ("1f1b", 4, 1, [1, 2, 2, 1]),
        ("interleaved", 2, 2, [3, 3]),
        ("interleaved", 4, 3, [5, 6, 6, 5]),
        ("zbv", 4, 2, [2, 4, 4, 2]),
        ("zbv", 1, 2, [0]),
    ],
)
def test_messages_by_stage(kind: str, stages: int, chunks: int, expected: list[int]) -> None:
    """In a loop both ends send one message less than the stages between; at the turn of a V nothing is sent."""
    assert messages_by_stage(placement(kind, stages, chunks)) == expected
