"""Whole runs on several processes: they end where one process does, and go on at any other number and layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import failing_samples_worker
from builders.process_group import run_group
from builders.tiny_world import World, last_state, write_rows
from builders.train_worker import interrupted, train
from builders.worst_errors import worst_relative_error
from safetensors.torch import load_file
from torch import Tensor

from danlu.training.checkpoints.verification import verify

pytestmark = pytest.mark.distributed

STEPS, STOP = 12, 7
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (4, {}),
    "zero3": (2, {"shard": "zero3"}),
    "hybrid": (4, {"shard": "zero2", "replicate": 2}),
    "tensor": (2, {"tensor": 2, "sequence": True}),
    "zero3+tensor": (4, {"shard": "zero3", "tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {"ema": 0.9},
    "qlora": {"adapter": {"kind": "dora", "dropout": 0.2}, "quantization": {"kind": "nf4", "block": 32}},
}
EXPORTED = {
    "full": ("model/model.safetensors", "model-ema/model.safetensors"),
    "qlora": ("adapter/adapter_model.safetensors",),
}


def recipe(world: World, folder: Path, name: str, kind: str, layout: str, **changes: Any) -> str:
    model = {"model": {"path": str(world.base), "config": None, "tokenizer": None}} if kind == "qlora" else {}
    values = {**KINDS[kind], **model, "data": {"eval": 5}, "evaluation": {"every": 4}, "steps": STEPS, **changes}
    return str(world.recipe(folder / name, folder / f"{name}.yaml", parallel=LAYOUTS[layout][1], **values))


def start(file: str, layout: str) -> None:
    size = LAYOUTS[layout][0]
    found = train([file]) if size == 1 else run_group(train, size, [file])
    assert all(one == [(STEPS, 0)] for one in (found if size > 1 else [found]))


def weights(folder: Path, kind: str) -> dict[str, Tensor]:
    return {f"{name}:{key}": value for name in EXPORTED[kind] for key, value in load_file(folder / name).items()}


def lines(folder: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def distance(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return worst_relative_error(found, wanted)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(tiny_world: World, folder: Path) -> dict[tuple[str, str], Path]:
    """Runs that nothing befell, by kind and layout."""
    found = {}
    for kind in KINDS:
        for layout in ("one", "zero3", "ddp", "pipeline"):
            start(recipe(tiny_world, folder, f"{kind}-{layout}", kind, layout), layout)
            found[kind, layout] = folder / f"{kind}-{layout}"
    return found


@pytest.fixture(scope="module")
def stopped(tiny_world: World, folder: Path) -> dict[str, Path]:
    """Runs on two processes of which one got Ctrl-C, by kind."""
    found = {}
    for kind in KINDS:
        file = recipe(tiny_world, folder, f"{kind}-stopped", kind, "zero3")
        assert run_group(interrupted, 2, [file], STOP, 1) == [[(STOP, 130)]] * 2
        found[kind] = folder / f"{kind}-stopped"
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["zero3", "ddp", "pipeline"])
def test_a_run_on_several_processes_ends_where_one_does(
    undisturbed: dict[tuple[str, str], Path], kind: str, layout: str
) -> None:
    one, many = undisturbed[kind, "one"], undisturbed[kind, layout]
    assert distance(weights(many, kind), weights(one, kind)) < 2e-5
    wanted, found = lines(one), lines(many)
    assert len(found) == len(wanted) and any("mfu" in line for line in wanted)
    for got, want in zip(found, wanted, strict=True):
        for key in ("step", "tokens", "trained_tokens", "eval_tokens"):
            assert got.get(key) == want.get(key)
        for key in ("loss", "grad_norm", "accuracy", "eval_loss"):
            assert got.get(key, 0) == pytest.approx(want.get(key, 0), rel=1e-4)
        if "mfu" in want:  # the same operations for a token, and as many times the peak as there are processes
            share = want["mfu"] / want["tokens_per_second"] / LAYOUTS[layout][0]
            assert got["mfu"] / got["tokens_per_second"] == pytest.approx(share)


@pytest.mark.parametrize("kind", KINDS)
def test_a_summary_counts_the_whole_model_and_the_memory_of_one_process(
    undisturbed: dict[tuple[str, str], Path], kind: str
) -> None:
    one, ddp, zero3, pipeline = (
        json.loads((undisturbed[kind, layout] / "summary.json").read_text())
        for layout in ("one", "ddp", "zero3", "pipeline")
    )
    for key in ("parameters", "trained_parameters", "tokens", "steps"):
        assert one[key] == ddp[key] == zero3[key] == pipeline[key]
    for part in ("weights", "optimizer"):
        assert ddp["memory"][part] == one["memory"][part]
        assert one["memory"][part] / 2 <= zero3["memory"][part] < one["memory"][part] * 0.75  # norms are on both


@pytest.mark.parametrize("kind", KINDS)
def test_one_interrupted_process_stops_all_after_the_same_step(stopped: dict[str, Path], kind: str) -> None:
    assert [line["step"] for line in lines(stopped[kind]) if "loss" in line] == list(range(1, STOP + 1))
    assert (stopped[kind] / "checkpoints" / f"step-{STOP:08}").is_dir()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_bit_for_bit_as_an_undisturbed_one(
    tiny_world: World, stopped: dict[str, Path], undisturbed: dict[tuple[str, str], Path], folder: Path, kind: str
) -> None:
    place = folder / f"{kind}-same"
    shutil.copytree(stopped[kind], place)
    start(recipe(tiny_world, folder, place.name, kind, "zero3"), "zero3")
    found, wanted = weights(place, kind), weights(undisturbed[kind, "zero3"], kind)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())
    other = weights(undisturbed[kind, "ddp"], kind)
    assert not all(torch.equal(found[name], one) for name, one in other.items())  # another order of sums is seen


@pytest.mark.parametrize("layout", ["one", "hybrid", "tensor", "zero3+tensor", "pipeline"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_at_another_number_of_processes_and_layout(
    tiny_world: World,
    stopped: dict[str, Path],
    undisturbed: dict[tuple[str, str], Path],
    folder: Path,
    kind: str,
    layout: str,
) -> None:
    place = folder / f"{kind}-to-{layout}"
    shutil.copytree(stopped[kind], place)
    start(recipe(tiny_world, folder, place.name, kind, layout), layout)
    assert distance(weights(place, kind), weights(undisturbed[kind, "one"], kind)) < 2e-5
    assert [line["step"] for line in lines(place) if "loss" in line] == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("everywhere", [True, False])
def test_samples_that_fail_are_an_error_of_all_processes_and_lose_no_step(
    tiny_world: World, folder: Path, everywhere: bool
) -> None:
    samples = {"every": 3, "samples": {"prompts": ["Who?"], "max_new_tokens": 4}}
    name = f"failing-{everywhere}"
    file = recipe(tiny_world, folder, name, "full", "zero3", evaluation=samples, checkpoint={"every": 100})
    found = run_group(failing_samples_worker.ended, 2, file, 1, not everywhere)
    assert found == [("ModelError", "step 3, while evaluating: not finite at position 9")] * 2
    path, _, state = last_state(folder / name)
    assert path.name == "step-00000003" and verify(path) == []
    assert state["run"]["assessed_step"] == 0, "a resumed run evaluates this step again"


def test_at_the_end_of_uneven_data_no_row_is_dropped_and_nobody_waits(tiny_world: World, folder: Path) -> None:
    changes = {"steps": None, "epochs": 1, "batch": {"sequences": 7, "micro": 1}, "data": {}, "evaluation": {}}
    tokens = []
    for layout in ("one", "ddp"):
        file = recipe(tiny_world, folder, f"epoch-{layout}", "full", layout, **changes)
        size = LAYOUTS[layout][0]
        train([file]) if size == 1 else run_group(train, size, [file])
        tokens.append([line["tokens"] for line in lines(folder / f"epoch-{layout}") if "loss" in line])
    assert tokens[0] == tokens[1]
    assert tokens[0][-1] < tokens[0][0]  # the last step has fewer packs than there are processes times micro-batches


@pytest.mark.slow
def test_steps_without_targets_are_left_out_alike_by_one_process_and_two(
    tiny_world: World, tmp_path: Path, tokenising_here: None
) -> None:
    """One long row of which only the end is trained: most packs are context only."""
    tokens = [number % 300 for number in range(40 * 64)]
    labels = [-100] * (len(tokens) - 90) + tokens[-90:]
    rows = write_rows(tmp_path / "long.jsonl", [{"input_ids": tokens, "labels": labels}])
    data = {"train": str(rows), "packing": "concatenate", "max_length": 64, "cache": str(tmp_path / "cache")}
    values: dict[str, Any] = {"stage": "pretrain", "data": data, "steps": STEPS}
    one, again, two = (
        str(tiny_world.recipe(tmp_path / name, tmp_path / f"{name}.yaml", **values)) for name in ("one", "again", "two")
    )
    assert train([one]) == [(STEPS, 0)]
    assert all(found == [(STEPS, 0)] for found in run_group(train, 2, [two]))
    passed_over = {name: [line for line in lines(tmp_path / name) if "event" in line] for name in ("one", "two")}
    assert passed_over["one"] == passed_over["two"]
    assert {line["event"] for line in passed_over["one"]} == {"no_targets"}
    assert 6 <= len(passed_over["one"]) < STEPS
    losses = {name: [line["loss"] for line in lines(tmp_path / name) if "loss" in line] for name in ("one", "two")}
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-5)
    assert len(losses["one"]) == STEPS - len(passed_over["one"])
    assert all(found == [(3, 130)] for found in run_group(interrupted, 2, [again], 3, 1))
    assert train([again]) == [(STEPS, 0)]  # goes on from within such steps
    assert [line for line in lines(tmp_path / "again") if "event" in line] == passed_over["one"]


@pytest.fixture(scope="module")
def sampled(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Mapping[str, Any]]]:
    """metrics.jsonl of runs that sample as they train, by layout."""
    folder = tmp_path_factory.mktemp("sampled")
    prompts = ["Who?", "What is a fox?", "And then it rained for three days"]
    evaluation = {"every": 2, "samples": {"prompts": prompts, "max_new_tokens": 24}}

    def file(name: str, layout: str, **rollout: Any) -> str:
        return recipe(tiny_world, folder, name, "full", layout, evaluation=evaluation, steps=4, rollout=rollout)

    run_group(train, 2, [file("zero3", "zero3"), file("in step", "zero3", gather="layer"), file("tensor", "tensor")])
    run_group(train, 4, [file("ddp", "ddp"), file("zero3+tensor", "zero3+tensor")])
    train([file("one", "one")])
    return {path.name: lines(path) for path in folder.iterdir() if path.is_dir()}


@pytest.mark.parametrize("layout", ["zero3", "in step", "tensor", "ddp", "zero3+tensor"])
def test_every_layout_samples_the_same_texts_while_it_trains(
    sampled: dict[str, list[Mapping[str, Any]]], layout: str
) -> None:
    texts = {
        name: [(line["step"], line["prompt"], line["text"]) for line in seen if line.get("event") == "sample"]
        for name, seen in sampled.items()
    }
    assert texts[layout] == texts["one"] and len(texts["one"]) == 6
    assert texts["one"][0][2] != texts["one"][3][2], "two steps change what the model says"
    gaps = [line["rollout_gap_max"] for line in sampled[layout] if "rollout_gap_max" in line]
    assert len(gaps) == 2 and max(gaps) < 1e-4
