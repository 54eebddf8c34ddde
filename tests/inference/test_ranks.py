"""Rollouts on several processes: every layout answers what one process does, and none waits for ever."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import rollout_worker
from builders.parallel_steps import recipe_file
from builders.process_group import run_group
from builders.rollout_worker import TIGHT, difference
from builders.tiny_world import World

from danlu.inference.request import Completion
from danlu.models.packed_weights import can_pack

pytestmark = pytest.mark.distributed

LAYER: dict[str, Any] = {"gather": "layer"}
LAYOUTS: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    2: {
        "ddp": ({}, {}),
        "zero1": ({"shard": "zero1"}, {}),
        "zero2": ({"shard": "zero2"}, {}),
        "zero3": ({"shard": "zero3"}, {"gather": "all"}),
        "zero3 in step": ({"shard": "zero3"}, LAYER),
        "tensor": ({"tensor": 2}, {}),
        "tensor+sequence": ({"tensor": 2, "sequence": True}, {}),
        "context": ({"context": 2}, {}),
        "zero3 of context in step": ({"context": 2, "shard": "zero3"}, LAYER),
        "pipeline": ({"pipeline": 2}, {}),
    },
    4: {
        "hybrid": ({"shard": "zero3", "replicate": 2}, {}),
        "ddp+tensor": ({"tensor": 2}, {}),
        "zero2+tensor": ({"shard": "zero2", "tensor": 2}, {}),
        "zero3+tensor in step": ({"shard": "zero3", "tensor": 2}, LAYER),
        "tensor": ({"tensor": 4}, {}),  # of two key/value heads
        "ddp+pipeline": ({"pipeline": 2}, {}),
        "zero2+pipeline": ({"pipeline": 2, "shard": "zero2"}, {}),
        "zero3+pipeline in step": ({"pipeline": 2, "shard": "zero3"}, LAYER),
        "context+pipeline": ({"pipeline": 2, "context": 2}, {}),
        "tensor+pipeline": ({"pipeline": 2, "tensor": 2, "sequence": True}, {}),
    },
}
"""Processes -> name -> (`parallel`, `rollout`) of the recipe."""
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "exact": {"numerics": "exact"},
    "lora": {"adapter": {"kind": "lora", "init": "olora"}},
    "prompt": {"adapter": {"kind": "prompt", "tokens": 3}},
    "qlora": {"adapter": "lora", "quantization": {"kind": "nf4", "block": 32}},
    "fp8": {"rollout": {"cache": "fp8", "block": 4}},
    "int8": {"rollout": {"cache": "int8", "block": 4}},
    "int4": {"rollout": {"cache": "int4", "block": 4}},
}
CACHES = ("fp8", "int8", "int4")
WITH_CACHES = [(2, "tensor"), (2, "pipeline"), (4, "tensor"), (4, "tensor+pipeline")]
WITH_ADAPTERS = ("zero3 in step", "tensor+sequence", "zero2+tensor", "pipeline", "tensor+pipeline")
EXACT = [(2, layout) for layout in ("ddp", "zero2", "zero3", "zero3 in step")]
CASES = [
    (size, layout, kind)
    for size, layouts in LAYOUTS.items()
    for layout in layouts
    for kind in KINDS
    if (
        (size, layout) in EXACT
        if kind == "exact"
        else (size, layout) in WITH_CACHES
        if kind in CACHES
        else kind == "full" or layout in WITH_ADAPTERS
    )
    and not (kind == "prompt" and "pipeline" in layout)  # virtual tokens begin at the embedding
]


def files_of(world: World, folder: Path, cases: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    start = {"model": {"path": str(world.base), "config": None, "tokenizer": None}}
    sampled = {"evaluation": {"every": 5, "samples": "hi"}}
    return {
        name: recipe_file(world, folder, f"r{number}", **{**start, **sampled, **changes})
        for number, (name, changes) in enumerate(cases.items())
    }


@dataclass(frozen=True)
class Answers:
    many: Mapping[tuple[int, str, str], list[list[Completion]]]  # by each process
    one: Mapping[str, list[Completion]]  # by one process, of each kind


@pytest.fixture(scope="module")
def found(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("rollouts")
    many: dict[tuple[int, str, str], list[list[Completion]]] = {}
    for size, layouts in LAYOUTS.items():
        changes = {
            f"{layout}|{kind}": {
                **KINDS[kind],
                "parallel": layouts[layout][0],
                "rollout": {**KINDS[kind].get("rollout", {}), **layouts[layout][1]},
            }
            for case_size, layout, kind in CASES
            if case_size == size
        }
        files = files_of(tiny_world, folder / str(size), changes)
        by_rank = run_group(rollout_worker.answers, size, list(files.values()))
        for name, file in files.items():
            layout, _, kind = name.partition("|")
            many[size, layout, kind] = [seen[file] for seen in by_rank]
    alone = files_of(tiny_world, folder / "1", KINDS)
    one = rollout_worker.answers(list(alone.values()), 1)
    return Answers(many, {kind: one[file] for kind, file in alone.items()})


@pytest.mark.parametrize(("size", "layout", "kind"), CASES)
def test_every_layout_answers_what_one_process_does(found: Answers, size: int, layout: str, kind: str) -> None:
    wanted = found.one[kind]
    assert [each.number for each in wanted] == [3, 0, 0, 0, 8, 1, 2, 2], "in the order of the requests, by sample"
    for seen in found.many[size, layout, kind]:
        assert difference(seen, wanted) <= (0 if kind == "exact" else 1e-5)
        supports = [[] if each.support is None else [one.ids.tolist() for one in each.support] for each in seen]
        assert supports == [
            [] if each.support is None else [one.ids.tolist() for one in each.support] for each in wanted
        ]
        assert [each.top is None for each in seen] == [each.top is None for each in wanted]


def test_answers_of_another_model_are_noticed(found: Answers) -> None:
    """The comparison finds an adapter that has an effect, a log-probability that is off by little, and rounding."""
    assert max(difference(found.many[2, layout, "full"][0], found.one["full"]) for _, layout in EXACT) > 0
    assert difference(found.one["prompt"], found.one["full"]) > 1e-3
    for cache, other in itertools.pairwise(("full", *CACHES)):
        assert difference(found.one[cache], found.one[other]) > 1e-4
    wanted = found.one["full"]
    off = wanted[1].logprobs[2]
    wanted[1].logprobs[2] += 1e-4
    assert 1e-5 < difference(found.many[2, "ddp", "full"][0], wanted) < 1e-3
    wanted[1].logprobs[2] = off


TWO = ["ddp", "zero2", "zero3", "zero3 in step", "tensor", "pipeline"]


@pytest.fixture(scope="module")
def checks(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Any]]:
    """What each check gave in each of its layouts on two processes, by process."""
    changes = {
        f"{check}: {layout}": {"parallel": LAYOUTS[2][layout][0], "rollout": {**LAYOUTS[2][layout][1], **extra}}
        for check, extra in {"uneven": {}, "failing": {}, "tight": TIGHT, "trains afterwards": {}}.items()
        for layout in TWO
        if not (check == "trains afterwards" and layout == "pipeline")  # its step is that of a whole model
    }
    for layout in ("ddp", "zero3", "zero3 in step"):
        changes[f"weight copies: {layout}"] = {**changes[f"uneven: {layout}"], "precision": "bf16"}
    files = files_of(tiny_world, tmp_path_factory.mktemp("checks"), changes)
    by_rank = run_group(rollout_worker.each_check, 2, files)
    return {name: [seen[name] for seen in by_rank] for name in files}


@pytest.mark.parametrize("layout", TWO)
def test_ranks_that_have_little_or_nothing_to_answer(checks: Mapping[str, list[Any]], layout: str) -> None:
    first, second = checks[f"uneven: {layout}"]
    assert first == second
    together, alone, none = first
    assert [len(each.tokens) for each in together] == [1, 1, 1, 1, 40]
    assert alone[0].tokens == together[-1].tokens and none == []


@pytest.mark.parametrize("layout", TWO)
def test_an_error_on_one_rank_is_raised_on_all(checks: Mapping[str, list[Any]], layout: str) -> None:
    (said, afterwards), other = checks[f"failing: {layout}"]
    assert said == other[0]
    assert said[0].startswith("DataError: rank ") and "prompt 99 has token 1000000" in said[0]
    assert said[1] == "ModelError: rank 1: not finite at position 9"
    assert difference(afterwards, other[1]) == 0


@pytest.mark.parametrize("layout", TWO)
def test_answers_that_wait_for_room_in_the_cache(checks: Mapping[str, list[Any]], found: Answers, layout: str) -> None:
    first, second = checks[f"tight: {layout}"]
    assert difference(first, second) == 0
    assert difference(first, found.one["full"]) < 1e-5


@pytest.mark.parametrize("layout", TWO[:-1])
def test_weights_can_be_trained_after_a_rollout(checks: Mapping[str, list[Any]], found: Answers, layout: str) -> None:
    first, second = checks[f"trains afterwards: {layout}"]
    assert difference(first, second) == 0
    assert difference(first, checks["trains afterwards: ddp"][0]) < 1e-5
    assert difference(first, found.one["full"]) > 1e-2, "the weights have changed"
    assert {version for each in first for version in each.versions} == {1}


@pytest.mark.parametrize(("layout", "kept"), [("ddp", True), ("zero3", True), ("zero3 in step", False)])
def test_weights_that_each_pass_gathers_are_not_copied(
    checks: Mapping[str, list[Any]], layout: str, kept: bool
) -> None:
    """Copies in bfloat16 would be of the whole model, on a process that has no room for it."""
    packs = can_pack(torch.bfloat16, torch.device("cpu"))
    for here, unpacked in checks[f"weight copies: {layout}"]:
        for (copies, asleep), packed in ((here, packs), (unpacked, False)):
            # ddp casts its float32 weights; zero3 gathers them in bfloat16, which only a packed order copies.
            assert (copies > 0) == (kept and (layout == "ddp" or packed)) and asleep == 0


@pytest.mark.slow
def test_a_rank_that_leaves_early_is_noticed(tiny_world: World, tmp_path: Path) -> None:
    """The control of the empty passes: without them the others wait for what never comes."""
    files = files_of(tiny_world, tmp_path, {"x": {"parallel": {"shard": "zero3"}, "rollout": LAYER}})
    with pytest.raises(AssertionError, match=r"failed|wrote no result"):
        run_group(rollout_worker.leaves_early, 2, files["x"], timeout=12)


def test_bytes_of_any_length_are_gathered() -> None:
    for rank in run_group(rollout_worker.gathered_bytes, 2):
        assert rank == [[b"", b""], [b"", b"\x00\xff"], [b"a" * 1000, b""]]
