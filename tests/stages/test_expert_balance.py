"""Runs of models with experts: what balances them is the same however a step is cut, and is part of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from builders.small_experts import DEEPSEEK_V3, MIXTRAL
from builders.tiny_adapters import adapter_set
from builders.tiny_run import SyntheticPacks, tiny_run
from torch import Tensor

from danlu.assembly.frozen_base import quantize_stack, quantize_weight
from danlu.assembly.parallelize import Placed, Subject
from danlu.core.errors import RecipeError
from danlu.core.layer_types import TRAINED
from danlu.data.batch import EMPTY_PACK, pad_to_bucket
from danlu.models.decoder import Decoder
from danlu.models.layer_spec import Experts
from danlu.models.load_balancing import Balancing
from danlu.models.modules import GroupedLinear, Linear
from danlu.objectives.cross_entropy import CrossEntropy
from danlu.parallel.parallel_context import ParallelContext
from danlu.recipe import Recipe, sections
from danlu.recipe.sections import Lora, Watch
from danlu.stages.builder import check_router
from danlu.stages.placed import PlacedDecoder
from danlu.training.loop import fit, train_step
from danlu.training.state import Run, restore
from danlu.training.step import StepObserver

BALANCINGS = {
    "bias": (DEEPSEEK_V3, Balancing("bias", rate=0.05, sequence=0.01, z=0.01)),
    "sequence": (MIXTRAL, Balancing("sequence", sequence=0.5)),
    "step": (MIXTRAL, Balancing("step", rate=0.5, z=0.01)),
    "capacity": (MIXTRAL, Balancing("none", capacity=1.0)),
}


def gradients(run: Run) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Of the third step, as the optimizer gets them, and what is logged of it."""
    seen: dict[str, Tensor] = {}
    for _ in range(2):
        train_step(run)

    def look() -> None:
        named = run.learner.model.named_parameters()
        seen.update({name: each.grad.clone() for name, each in named if each.grad is not None})

    result = train_step(run, StepObserver(after_clipping=look))
    assert result is not None
    return seen, {name: value for name, value in result.metrics.items() if name.startswith("router")}


@pytest.mark.parametrize("kind", BALANCINGS)
def test_micro_batches_do_not_change_what_is_balanced(tmp_path: Path, kind: str) -> None:
    experts, balancing = BALANCINGS[kind]
    options = {"experts": experts, "balancing": balancing}
    together, metrics = gradients(tiny_run(tmp_path / "a", micro=3, **options))  # type: ignore[arg-type]
    apart, others = gradients(tiny_run(tmp_path / "b", micro=1, **options))  # type: ignore[arg-type]
    assert others == pytest.approx(metrics, rel=1e-5)
    names = {name.rpartition("/")[2] for name in metrics}
    added = {"bias": {"balance", "z"}, "sequence": {"balance"}, "step": {"balance", "z"}, "capacity": {"dropped"}}
    assert names == {"load", "entropy"} | added[kind]
    for name, gradient in together.items():
        torch.testing.assert_close(apart[name], gradient, rtol=2e-4, atol=1e-6)
    without, _ = gradients(tiny_run(tmp_path / "c", micro=1, experts=experts))
    router = "layers.1.mlp.router.weight"
    assert (without[router] - together[router]).abs().max() > 1e-5


@pytest.mark.parametrize("kind", ["bias", "step"])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, kind: str) -> None:
    experts, balancing = BALANCINGS[kind]
    options = {"experts": experts, "balancing": balancing, "steps": 6}
    whole = tiny_run(tmp_path / "whole", **options)  # type: ignore[arg-type]
    fit(whole)
    first = tiny_run(tmp_path / "cut", **options)  # type: ignore[arg-type]
    for _ in range(4):
        train_step(first)
    resumed = tiny_run(tmp_path / "resumed", **options)  # type: ignore[arg-type]
    restore(resumed, next(info.path for info in whole.store.checkpoints() if info.step == 4))
    for name, tensor in first.learner.weights().items():
        assert torch.equal(resumed.learner.weights()[name], tensor), name
    fit(resumed)
    own = "layers.0.mlp.router.correction" if kind == "bias" else "router.load.0"
    untouched = tiny_run(tmp_path / "new", **options).learner.weights()[own]  # type: ignore[arg-type]
    assert not torch.equal(resumed.learner.weights()[own], untouched)
    for name, tensor in whole.learner.weights().items():
        assert torch.equal(resumed.learner.weights()[name], tensor), name


def test_an_update_that_is_skipped_moves_no_bias(tmp_path: Path) -> None:
    experts, balancing = BALANCINGS["bias"]
    watch = Watch(policy="skip", gradient_norm=1e-9)
    run = tiny_run(tmp_path, experts=experts, balancing=balancing, watch=watch)
    train_step(run)
    correction = run.learner.weights()["layers.0.mlp.router.correction"]
    assert not correction.any()
    run = tiny_run(tmp_path / "b", experts=experts, balancing=balancing)
    train_step(run)
    moved = run.learner.weights()["layers.0.mlp.router.correction"]
    assert moved.any() and all(abs(value) in (0, pytest.approx(0.05)) for value in moved.tolist())


def test_evaluation_counts_nothing(tmp_path: Path) -> None:
    """What is counted in a step is k rows of each of its tokens."""
    experts, balancing = BALANCINGS["sequence"]
    run = tiny_run(tmp_path, experts=experts, balancing=balancing, micro=1)
    learner = run.learner
    balancer = learner.balancer  # type: ignore[attr-defined]
    items = [SyntheticPacks(seed=4).at(n) for n in range(2)]
    learner.assess(learner.collate(items), learner.totals(items))
    assert not balancer.layers["0"].sums.any()
    train_step(run)
    assert balancer.layers["0"].counts.sum() == experts.top_k * run.state.tokens


def test_the_load_is_logged_without_being_asked_for(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, experts=MIXTRAL, steps=2)
    fit(run)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert all(1 <= line[f"router/{layer}/load"] <= 8 for line in steps for layer in range(2))
    assert "router/balance" not in steps[0] and "router/0/dropped" not in steps[0]


def test_only_tokens_of_rows_are_real(tmp_path: Path) -> None:
    learner = tiny_run(tmp_path).learner
    batch = learner.collate([SyntheticPacks().at(0), SyntheticPacks().at(1)])
    sizes = [SyntheticPacks().at(n).tokens for n in range(2)]
    assert batch.real.all() and batch.packs == (0, sizes[0], sum(sizes))
    filled = pad_to_bucket(batch, 64)
    assert filled.real.tolist() == [True] * sum(sizes) + [False] * (64 - sum(sizes) % 64)
    assert filled.packs == (*batch.packs, len(filled.tokens))
    empty = learner.collate([EMPTY_PACK])
    assert not empty.real.any() and empty.packs == (0, 2)


def recipe(balance: str, **more: object) -> Recipe:
    values = {"stage": "pretrain", "model": {"path": "m"}, "data": {"train": [{"path": "a.txt"}]}, "output": "o"}
    return Recipe.model_validate({**values, "router": {"balance": balance}, **more})


@pytest.mark.parametrize("experts", [None, MIXTRAL], ids=["dense", "experts"])
def test_that_experts_are_not_quantized_is_told(tmp_path: Path, experts: Experts | None) -> None:
    model, cpu = tiny_run(tmp_path, experts=experts).learner.model, torch.device("cpu")
    assert isinstance(model, Decoder)
    placed, objective = Placed(Subject(model), ParallelContext()), CrossEntropy()
    (tmp_path / "config.json").write_text("{}")
    decoder = PlacedDecoder(recipe("step", model={"path": str(tmp_path)}), placed, cpu, objective, objective)
    assert not decoder.notes
    section = sections.Int8()
    for module in list(model.modules()):
        if isinstance(module, Linear) and module.weight is not None:
            module.store(quantize_weight(module.weight.data, section))
    assert any("but not the matrices of experts" in note for note in decoder.notes) == (experts is not None)
    for grouped in [module for module in model.modules() if isinstance(module, GroupedLinear)]:
        assert grouped.weight is not None
        grouped.store(quantize_stack(grouped.weight.data, section))
    assert not decoder.notes


@pytest.mark.parametrize("targets", [["all-linear"], ["all-linear", "experts"]], ids=" ".join)
def test_that_experts_have_no_adapter_is_told(tmp_path: Path, targets: list[str]) -> None:
    model = tiny_run(tmp_path, experts=MIXTRAL).learner.model
    assert isinstance(model, Decoder)
    adapters = adapter_set(model)
    adapters.add(TRAINED, Lora(targets=targets))
    placed, objective = Placed(Subject(model, adapters), ParallelContext()), CrossEntropy()
    (tmp_path / "config.json").write_text("{}")
    asked = recipe("step", model={"path": str(tmp_path)}, adapter={"kind": "lora", "targets": targets})
    notes = PlacedDecoder(asked, placed, torch.device("cpu"), objective, objective).notes
    assert any("no adapter sits on the experts" in note for note in notes) == ("experts" not in targets)


def test_a_router_of_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    dense = tiny_run(tmp_path).learner.model.config

    def config(experts: Experts):  # type: ignore[no-untyped-def]
        return tiny_run(tmp_path, experts=experts).learner.model.config

    with pytest.raises(RecipeError, match="rollout.routing_replay: llama as it is here has no experts. Leave it out"):
        check_router(recipe("step").router, dense, replays=True)
    with pytest.raises(RecipeError, match="router: llama as it is here has no experts to balance. Leave it out"):
        check_router(recipe("step").router, dense)
    with pytest.raises(RecipeError, match="router.balance: bias, but a folder of llama has no place for the biases"):
        check_router(recipe("bias").router, config(MIXTRAL))
    check_router(recipe("step").router, config(MIXTRAL))
    check_router(recipe("bias").router, config(DEEPSEEK_V3))
