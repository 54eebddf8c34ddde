"""Runs whose layers lie on several devices of one process equal those on one device, bit for bit.

The devices are stubs: the CPU by other names, to and from which tensors are copied. What is moved is recorded.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import distillation_worker, reference_stage, reward_stage
from builders.small_experts import EXPERT_CONFIGS
from builders.tiny_world import CONFIG, World, danlu, differences, last_state
from torch import Tensor

from danlu.assembly import devices, parallelize
from danlu.core import device_moves
from danlu.core.errors import RecipeError
from danlu.models.hf_folder import read_config
from danlu.parallel.layout import layout_of
from danlu.parallel.ranks import Ranks
from danlu.planning.device_map import Device
from danlu.recipe import load
from danlu.recipe.sections import Parallel
from danlu.training import loop

pytestmark = pytest.mark.usefixtures("tokenising_here")

MAP = {"parallel": {"device_map": "balanced"}}
DEEP = {**CONFIG, "num_hidden_layers": 4}
EVALUATED = {"data": {"eval": 10}, "evaluation": {"every": 2}}

RUNS: dict[str, dict[str, Any]] = {
    "whole": {"model": {"config": DEEP}, "ema": 0.9, "memory": {"recompute": "selective"}},
    "tied": {"model": {"config": {**DEEP, "tie_word_embeddings": True}}, "precision": "bf16"},
    "experts": {
        "model": {"config": EXPERT_CONFIGS["mixtral"]},
        "router": {"balance": "sequence", "sequence": 0.1, "z": 0.01, "capacity": 1.5},
    },
    "lora": {
        "adapter": {
            "kind": "lora",
            "dropout": 0.3,
            "targets": ["all-linear", "embed_tokens"],
            "modules_to_save": ["norm"],
        },
        "memory": {"recompute": {"kind": "every", "layers": 2}},
    },
    "vera": {"adapter": {"kind": "vera", "rank": 16}, "optimizer": {"learning_rate": 0.1}},
    "prefix": {"adapter": {"kind": "prefix", "tokens": 3, "projection": 16}},
    "qlora": {"adapter": "lora", "quantization": "nf4", "precision": "bf16", "optimizer": {"kind": "adamw8bit"}},
}


def recipe(world: World, output: Path, **changes: Any) -> Path:
    if "adapter" in changes:
        changes = {"model": {"config": None, "path": str(world.base), "tokenizer": None}, **changes}
    return world.recipe(output, **{**EVALUATED, "steps": 4, "checkpoint": {"every": 2}, **changes})


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, str]]:
    """Three stub devices; each move between them, by shape and where to."""
    recorded: list[tuple[torch.Size, str]] = []
    real = device_moves.move

    def move(x: Tensor, device: str) -> Tensor:
        recorded.append((x.shape, device))
        return real(x, device)

    monkeypatch.setattr(device_moves, "move", move)
    monkeypatch.setattr(devices, "visible_devices", lambda device: tuple(Device(f"cpu:{n}", 2**30) for n in range(3)))
    return recorded


def cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM in the middle of the third step, once."""
    real = loop.accumulate

    def accumulate(*arguments: Any, **options: Any) -> Any:
        if options["step"] == 3:
            monkeypatch.setattr(loop, "accumulate", real)
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(loop, "accumulate", accumulate)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_several_devices_equals_the_one_on_one_device(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: list[Any], name: str
) -> None:
    assert danlu("train", recipe(tiny_world, tmp_path / "one", **RUNS[name])) == 0
    assert not moves  # control: nothing is moved on one device
    mapped = recipe(tiny_world, tmp_path / "several", **RUNS[name], **MAP)
    cut_off(monkeypatch)
    assert danlu("train", mapped) == 143
    assert last_state(tmp_path / "several")[0].name == "step-00000003"
    assert danlu("train", mapped) == 0
    assert differences(tmp_path / "one", tmp_path / "several") == []
    assert {device for _, device in moves} >= {"cpu:0", "cpu:1"}


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_frozen_base_is_read_layer_by_layer_onto_its_devices(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    """The second device has its layer before the model is placed; it is the meta device, which shows what is there."""
    monkeypatch.setattr(devices, "visible_devices", lambda device: (Device("cpu", None), Device("meta", None)))
    changes: dict[str, Any] = {"adapter": "lora", "quantization": quantization}
    recipes = [load(recipe(tiny_world, tmp_path / "run", **changes, **layout)).recipe for layout in (MAP, {})]
    config, host = read_config(tiny_world.base), torch.device("cpu")
    mapped, alone = (parallelize.subject_of(each, config, host, ranks=Ranks()).model for each in recipes)
    tensors = dict((*mapped.named_parameters(), *mapped.named_buffers()))
    assert {name for name, each in tensors.items() if each.is_meta} == {x for x in tensors if x.startswith("layers.1.")}
    assert any(".adapter." in name and each.is_meta for name, each in tensors.items())
    assert not any(each.is_meta for each in (*alone.parameters(), *alone.buffers()))  # control


def test_a_run_goes_on_upon_other_devices_with_its_state_in_a_file(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: list[Any]
) -> None:
    paged = {"memory": {"offload": ["optimizer"], "folder": str(tmp_path / "pages")}}
    (tmp_path / "pages").mkdir()
    assert danlu("train", recipe(tiny_world, tmp_path / "one", model={"config": DEEP})) == 0
    begun = recipe(tiny_world, tmp_path / "several", model={"config": DEEP})
    cut_off(monkeypatch)
    assert danlu("train", begun) == 143 and not moves
    assert danlu("train", recipe(tiny_world, tmp_path / "several", model={"config": DEEP}, **paged, **MAP)) == 0
    assert moves and differences(tmp_path / "one", tmp_path / "several") == []


SHORT: dict[str, Any] = {"steps": 2, "evaluation": {"every": 1}, "checkpoint": {"every": 1}}
REFERENCES: dict[str, dict[str, Any]] = {
    "frozen": {"reference": {"kind": "frozen"}},
    "moving": {"reference": {"kind": "frozen", "every": 1, "mix": 0.6}},
    "cached": {"reference": {"kind": "cached"}},
    "adapter-off": {
        "reference": {"kind": "adapter-off"},
        "adapter": {"kind": "lora", "modules_to_save": ["norm"]},
        "quantization": "nf4",
    },
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_lies_on_the_devices_of_the_policy(
    tiny_world: World, tmp_path: Path, moves: list[Any], name: str
) -> None:
    for where, layout in (("one", {}), ("several", MAP)):
        (tmp_path / where).mkdir()
        file = reference_stage.recipe_file(tiny_world, tmp_path / where, "run", **REFERENCES[name], **SHORT, **layout)
        assert reference_stage.train([file]) == [0]
        assert bool(moves) == (where == "several")
    assert differences(tmp_path / "one" / "run", tmp_path / "several" / "run") == []


@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "modules_to_save": ["norm"]}], ids=["whole", "lora"])
def test_samples_and_own_answers_are_drawn_on_the_devices(
    tiny_world: World, tmp_path: Path, moves: list[Any], adapter: Any
) -> None:
    """What is drawn, its gap to training and what is learnt of it; weights are multiplied as they are on both sides."""
    changes: dict[str, Any] = {
        "on_policy": 0.5,
        "objective": {"kind": "reverse"},
        "data": {"eval": 5},
        "rollout": {"max_new_tokens": 6, "packed_gib": 0.0},
        "evaluation": {"every": 1, "samples": {"prompts": ["Who?", "What is it?"], "max_new_tokens": 5}},
        "steps": 2,
        "checkpoint": {"every": 1},
    }
    if adapter is not None:
        changes |= {"adapter": adapter, "model": {"path": str(tiny_world.base), "config": None, "tokenizer": None}}
    for where, layout in (("one", {}), ("several", MAP["parallel"])):
        file = distillation_worker.recipe(tiny_world, tmp_path / where, layout, **changes)
        assert distillation_worker.train([file]) == [0]
        assert bool(moves) == (where == "several")
    assert differences(tmp_path / "one", tmp_path / "several") == []
    drawn = [(tmp_path / where / "rollouts.jsonl").read_text() for where in ("one", "several")]
    assert drawn[0] == drawn[1] and drawn[0].count("\n") > 2


def test_teachers_of_other_shapes_are_dealt_their_own_layers(
    tiny_world: World, tmp_path: Path, moves: list[Any]
) -> None:
    wider = distillation_worker.teacher_folder(tiny_world)
    deeper = distillation_worker.teacher_folder(tiny_world, "deep-teacher", hidden_size=32, num_hidden_layers=5)
    objective = [{"kind": "jensen-shannon", "beta": 0.3, "cross_entropy": 0.5}, {"kind": "hidden", "weight": 0.1}]
    files = [
        distillation_worker.recipe(
            tiny_world, tmp_path / where, layout, teacher=[wider, deeper], objective=objective, **SHORT
        )
        for where, layout in (("one", {}), ("several", MAP["parallel"]))
    ]
    assert distillation_worker.train(files[:1]) == [0] and not moves
    assert distillation_worker.train(files[1:]) == [0]
    assert {device for _, device in moves} == {"cpu:0", "cpu:1", "cpu:2"}  # of which the policy has two
    assert differences(tmp_path / "one", tmp_path / "several") == []


def test_a_head_that_scores_is_where_the_last_norm_is(tiny_world: World, tmp_path: Path, moves: list[Any]) -> None:
    for where, layout in (("one", {}), ("several", MAP)):
        changes = {"stage": "reward", "objective": "bradley-terry", "batch": {"sequences": None, "rows": 4}}
        file = tiny_world.recipe(
            tmp_path / where, model={"config": DEEP}, **changes, **SHORT, data={"eval": 5}, **layout
        )
        assert reward_stage.train([str(file)]) == [0]
    assert moves and differences(tmp_path / "one", tmp_path / "several") == []


def test_the_comparison_sees_another_reference(tiny_world: World, tmp_path: Path) -> None:
    """The negative control of those before."""
    for name in ("frozen", "moving"):
        (tmp_path / name).mkdir()
        file = reference_stage.recipe_file(tiny_world, tmp_path / name, "run", **REFERENCES[name], **SHORT)
        assert reference_stage.train([file]) == [0]
    assert differences(tmp_path / "frozen" / "run", tmp_path / "moving" / "run")


@pytest.fixture
def refused(tiny_world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What is said of a map, and of rows that are broken, which is told once they are read."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("this is no row")

    def refused(by_hand: dict[str, str | int]) -> str:
        capfd.readouterr()
        data = {"train": str(rows), "eval": None}
        layout = {"parallel": {"device_map": by_hand}}
        assert danlu("train", recipe(tiny_world, tmp_path / "run", data=data, evaluation={}, **layout)) in (2, 3)
        return capfd.readouterr().err

    return refused


def test_devices_that_torch_does_not_see_are_told_before_rows_are_read(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = {"embed": "cuda:0", "head": 0, "layers.0": 0, "layers.1": 1}
    monkeypatch.setattr(devices, "visible_devices", lambda device: (Device("cpu", None),))
    where = "parallel.device_map: 'layers.1' is on cuda:1, and torch sees"
    assert f"{where} no GPU. Use cpu, or device_map: auto" in refused(by_hand)
    monkeypatch.setattr(devices, "visible_devices", lambda device: (Device("cuda:0", None),))
    assert f"{where} 1 GPU. Use cuda:0" in refused(by_hand)


def test_maps_that_do_not_fit_the_model_are_told_before_rows_are_read(refused: Callable[..., str]) -> None:
    beyond = refused({"": "cpu", "layers.7": "cpu"})
    assert "parallel.device_map: layers.7, and the model has 2 layers, 0 to 1" in beyond
    assert "parallel.device_map: no device for layer 0" in refused({"embed": "cpu", "layers.1": "cpu", "head": "cpu"})
    fits = refused({"": "cpu"})  # control
    assert "broken JSON" in fits and "device_map" not in fits


def test_devices_are_seen_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that moves with the policy has its split, though the policy has taken memory by then."""
    devices.visible_devices.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    free = iter([100, 50, 10, 40, 7])
    monkeypatch.setattr(devices, "available_bytes", lambda device: next(free))
    seen = (Device("cuda:0", 100), Device("cuda:1", 50))
    assert devices.visible_devices("auto") == devices.visible_devices("auto") == seen
    assert devices.visible_devices("cpu") == (Device("cpu", 10),)
    devices.visible_devices.cache_clear()
    assert devices.visible_devices("auto") != seen  # control
    devices.visible_devices.cache_clear()


def test_a_teacher_has_to_fit_a_map_by_hand(tiny_world: World, tmp_path: Path) -> None:
    deeper = distillation_worker.teacher_folder(tiny_world, "deep-teacher", hidden_size=32, num_hidden_layers=5)
    layout = {"device_map": {"embed": "cpu", "layers.0-1": "cpu", "head": "cpu"}}
    file = distillation_worker.recipe(tiny_world, tmp_path / "run", layout, teacher=deeper, **SHORT)
    with pytest.raises(RecipeError, match=r"teacher\S*: .*deep-teacher: .*no device for layers 2-4"):
        distillation_worker.train([file])
    wider = distillation_worker.teacher_folder(tiny_world)  # control: it has two layers
    file = distillation_worker.recipe(tiny_world, tmp_path / "run", layout, teacher=wider, **SHORT)
    assert distillation_worker.train([file]) == [0]


def test_one_process_has_the_devices() -> None:
    section = Parallel(device_map="auto")
    assert layout_of(section, 1).world == 1
    with pytest.raises(RecipeError, match="several devices, and there are 2 processes. Start danlu without"):
        layout_of(section, 2)
