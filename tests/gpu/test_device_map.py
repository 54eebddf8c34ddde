"""Layers on several devices of one process: the host and a GPU, or all GPUs that there are.

With DANLU_GPU_TESTS=cpu the devices are the CPU by two names.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_run import SyntheticPacks, tiny_config, tiny_model, tiny_run
from torch import Tensor

from danlu.assembly.parallelize import Subject, place, subject_of
from danlu.memory import recompute
from danlu.models.chunks import DeviceMap
from danlu.models.saving import save
from danlu.parallel.device_map import move_activations, move_parameters
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe, sections
from danlu.stages.learner import DecoderLearner
from danlu.training.loop import fit, take_step
from danlu.training.loop import save as save_run
from danlu.training.metrics import read_metrics
from danlu.training.state import Run, restore

LAYERS = 4
PACKS = [SyntheticPacks().at(number) for number in range(4)]


@pytest.fixture(params=["the loss on the GPU", "the loss on the host", "all GPUs"])
def device_map(request: pytest.FixtureRequest, device: torch.device) -> DeviceMap:
    host, other = ("cpu:0", "cpu:1") if device.type == "cpu" else ("cpu", "cuda:0")
    if request.param == "the loss on the GPU":
        return DeviceMap(host, (host, other, host, other), other)
    if request.param == "the loss on the host":
        return DeviceMap(host, (host, other, other, host), host)
    if device.type == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    names = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return DeviceMap(names[0], tuple(names[layer * len(names) // LAYERS] for layer in range(LAYERS)), names[-1])


def step(learner: DecoderLearner) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradients by name) of a micro-batch, on the host."""
    batch, totals = learner.collate(PACKS), learner.totals(PACKS)
    loss = learner.losses(batch, totals).total
    loss.backward()
    named = {name: each.grad for name, each in learner.model.named_parameters() if each.grad is not None}
    return loss.detach().cpu(), {name: gradient.to_dense().cpu() for name, gradient in named.items()}


@pytest.mark.parametrize("recomputed", ["none", "full", "every"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_several_devices_compute_what_one_does(
    device_map: DeviceMap, dtype: torch.dtype, tolerance: float, recomputed: Any
) -> None:
    def learner(mapped: DeviceMap | None, seed: int = 0) -> DecoderLearner:
        model = tiny_model(seed, num_hidden_layers=LAYERS)
        if mapped is None:
            return DecoderLearner(model, model, torch.device("cpu"), dtype, 4)
        recompute.wrap(model, recompute.plan_of(sections.Recompute(kind=recomputed), model))
        move_parameters(model, None, mapped)
        move_activations(model, mapped)
        return DecoderLearner(model, model, torch.device(mapped.head), dtype, 4)

    loss, gradients = step(learner(None))
    own = learner(device_map)
    for name, parameter in own.model.named_parameters():
        assert parameter.device.type == torch.device(device_map.of_parameter(name)).type, name
    mapped_loss, mapped_gradients = step(own)
    torch.testing.assert_close(mapped_loss, loss, rtol=tolerance, atol=tolerance)
    assert gradients.keys() == mapped_gradients.keys()

    def worst(others: dict[str, Tensor]) -> float:
        return max(float((others[name] - gradient).norm() / gradient.norm()) for name, gradient in gradients.items())

    assert worst(mapped_gradients) < tolerance
    assert worst(step(learner(device_map, seed=1))[1]) > 0.1  # control


def mapped_run(folder: Path, device_map: DeviceMap) -> Run:
    """A run whose optimizer has parameters on several devices; they are moved before it has any state."""
    run = tiny_run(folder, num_hidden_layers=LAYERS)
    learner = run.learner
    assert isinstance(learner, DecoderLearner)
    move_parameters(learner.model, None, device_map)
    move_activations(learner.model, device_map)
    run.learner = replace(learner, device=torch.device(device_map.head))
    return run


def test_a_run_steps_clips_saves_and_goes_on(device_map: DeviceMap, tmp_path: Path) -> None:
    def losses(folder: Path) -> Tensor:
        return torch.tensor([line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line])

    fit(tiny_run(tmp_path / "one", num_hidden_layers=LAYERS))
    whole = mapped_run(tmp_path / "whole", device_map)
    fit(whole)
    torch.testing.assert_close(losses(tmp_path / "whole"), losses(tmp_path / "one"), rtol=1e-4, atol=1e-4)
    first = mapped_run(tmp_path / "parts", device_map)
    for _ in range(4):
        take_step(first)
    save_run(first)
    second = mapped_run(tmp_path / "parts", device_map)
    latest = first.store.latest()
    assert latest is not None
    restore(second, latest.path)
    fit(second)
    resumed = dict(second.learner.model.named_parameters())
    for name, parameter in whole.learner.model.named_parameters():
        torch.testing.assert_close(resumed[name], parameter, rtol=1e-6, atol=1e-6)


BY_HAND: dict[str, str | int] = {"embed": "cpu", "layers.0-1": "cpu", "layers.2-3": 0, "head": 0}


@pytest.mark.parametrize("adapter", [None, sections.Lora(rank=4)], ids=["whole", "nf4 with lora"])
def test_weights_are_read_onto_the_devices_of_a_recipe(device: torch.device, tmp_path: Path, adapter: Any) -> None:
    """Of the host and one GPU, by hand; with a frozen base layer by layer."""
    if device.type == "cpu":
        pytest.skip("by hand a recipe names the CPU once")
    save(tiny_model(num_hidden_layers=LAYERS), tmp_path / "base")
    recipe = Recipe(
        stage="pretrain",
        model=sections.Model(path=str(tmp_path / "base")),
        data=sections.Data(train=[sections.Source(path="a.jsonl")]),
        adapter=adapter,
        quantization=None if adapter is None else sections.Nf4(),
        precision="fp32",
        parallel=sections.Parallel(device_map=BY_HAND),
        output="runs/x",
    )
    config, head = tiny_config(num_hidden_layers=LAYERS), torch.device("cuda:0")

    def learner(recipe: Recipe, device: torch.device) -> DecoderLearner:
        subject: Subject = subject_of(recipe, config, device, ranks=Ranks())
        placed = place(subject, recipe, Ranks(), device)
        model = placed.subject.model
        if placed.device_map is not None:
            for name, each in (*model.named_parameters(), *model.named_buffers()):
                assert each.device == torch.device(placed.device_map.of_parameter(name)), name
        return DecoderLearner(model, model, device, torch.float32, 4, adapters=placed.subject.adapters)

    loss, _ = step(learner(recipe, head))
    alone, _ = step(learner(recipe.model_copy(update={"parallel": sections.Parallel()}), head))
    torch.testing.assert_close(loss, alone, rtol=1e-4, atol=1e-4)
