"""Steps on the device with everything that is traded for memory, against float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from builders.tiny_run import SyntheticPacks, tiny_model
from builders.trees import pair

from danlu.assembly.frozen_base import adapters_of, quantize_weight
from danlu.core.types import Pack, Totals
from danlu.memory import activation_offload
from danlu.memory.layer_plan import LayerPlan
from danlu.memory.pages import paged_state
from danlu.memory.recompute import wrap
from danlu.objectives.preference import preference_objective
from danlu.optim.build import build
from danlu.recipe import sections
from danlu.stages.learner import DecoderLearner
from danlu.stages.roles import FrozenDecoder
from danlu.training.learner import MicroStep
from danlu.training.step import accumulate

WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
KINDS: dict[str, tuple[Any, Any, Any]] = {  # adapter, quantization, optimizer
    "full": (None, None, sections.AdamW(learning_rate=1e-2)),
    "full, 8-bit Adam": (None, None, sections.AdamW8bit(learning_rate=1e-2)),
    "lora": (sections.Lora(rank=4, dropout=0.3), None, sections.AdamW(learning_rate=1e-2)),
    "dora": (sections.Dora(rank=4), None, sections.AdamW(learning_rate=1e-2)),
    "qlora": (sections.Lora(rank=4), sections.Nf4(), sections.AdamW8bit(learning_rate=1e-2)),
}
RECOMPUTE: dict[str, Any] = {
    "none": [],
    "elementwise": [LayerPlan(layer, "elementwise") for layer in range(4)],
    "selective": [LayerPlan(layer, "selective") for layer in range(4)],
    "full": [LayerPlan(layer, "full") for layer in range(4)],
    "every": [LayerPlan(layer, "full", layer // 2) for layer in range(4)],
}


def learner(kind: str, device: torch.device, dtype: torch.dtype, plan: Any = (), away: Any = None) -> DecoderLearner:
    adapter, quantization, _ = KINDS[kind]
    model = tiny_model(**WIDTHS)
    adapters = None
    if adapter is not None:
        adapters = adapters_of(model)
        adapters.add("default", adapter)
        if quantization is not None:
            for site in adapters.sites:
                if site.group in ("attention", "mlp"):
                    site.module.store(quantize_weight(site.module.weight.data, quantization))
        for parameter in adapters.tensors("default").values():  # B begins at zero
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        adapters.train_only("default")
    model.to(device)
    wrap(model, plan)
    return DecoderLearner(model, model, device, dtype, 2, adapters=adapters, offload=away)


def step(compute: DecoderLearner) -> tuple[float, dict[str, torch.Tensor]]:
    packs = [SyntheticPacks().at(number) for number in range(4)]
    found = accumulate(compute, packs, step=1, clip=None)
    grads = {
        name: one.grad.to_dense().cpu() if one.grad.is_sparse else one.grad.cpu()
        for name, one in compute.model.named_parameters()
        if one.grad is not None
    }
    return found.loss, grads


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative distance of a gradient; infinite where one is not finite."""
    assert found.keys() == wanted.keys() and found
    errors = [float((found[name] - one).norm() / one.norm().clamp_min(1e-6)) for name, one in wanted.items()]
    finite = all(bool(one.isfinite().all()) for one in found.values())
    return max(errors) if finite else float("inf")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_there_is_one_here(device: torch.device, kind: str) -> None:
    loss, grads = step(learner(kind, torch.device("cpu"), torch.float32))
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        there, found = step(learner(kind, device, dtype))
        assert there == pytest.approx(loss, rel=bound)
        assert worst(found, grads) < bound
        doubled = {name: 2 * one for name, one in found.items()}
        assert worst(doubled, grads) > 0.5  # control


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
def test_what_is_recomputed_is_the_same(device: torch.device, kind: str, recompute: str) -> None:
    loss, grads = step(learner(kind, device, torch.float32))
    again, found = step(learner(kind, device, torch.float32, RECOMPUTE[recompute]))
    assert again == pytest.approx(loss, rel=1e-6)
    assert worst(found, grads) < 1e-4  # sums of atomics come in any order


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_offloaded_activations_come_back_the_same(device: torch.device, recompute: str, tmp_path: Any) -> None:
    loss, grads = step(learner("full", device, torch.float32))
    folder = tmp_path if device.type == "cpu" else None
    away = activation_offload.offload_for(device, folder, min_bytes=0)
    assert away is not None
    again, found = step(learner("full", device, torch.float32, RECOMPUTE[recompute], away))
    assert away.offloaded_bytes > 0
    assert again == pytest.approx(loss, rel=1e-6)
    assert worst(found, grads) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offloaded", [False, True])
def test_optimizers_learn_with_state_here_or_on_the_host(device: torch.device, kind: str, offloaded: bool) -> None:
    compute = learner(kind, device, torch.bfloat16)
    section = KINDS[kind][2]
    optimizer = build(compute.model.named_parameters(), section, offload=offloaded, paged_state=paged_state)
    packs = [SyntheticPacks().at(number) for number in range(4)]
    losses = []
    for number in range(8):
        losses.append(accumulate(compute, packs, step=number + 1, clip=1.0).loss)
        optimizer.step(free_gradients=True)
        optimizer.zero_grad()
    assert losses[-1] < 0.97 * losses[0]
    assert all(bool(one.isfinite().all()) for one in compute.model.parameters() if one.is_floating_point())


@contextmanager
def syncs_are_errors(device: torch.device) -> Iterator[None]:
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
def test_the_host_never_waits_within_a_micro_batch(device: torch.device, kind: str) -> None:
    if device.type == "cpu":
        pytest.skip("only a GPU is waited for")
    compute = learner(kind, device, torch.bfloat16)
    packs = [SyntheticPacks().at(number) for number in range(2)]
    totals = Totals.of(packs)
    for last in (False, True):  # the first makes whatever is kept from then on
        batch = compute.collate(packs)
        with compute.at(MicroStep(batch, list(enumerate(packs)), totals, 1)):
            if not last:
                compute.losses(batch, totals).total.backward()
                continue
            with syncs_are_errors(device):
                compute.losses(batch, totals).total.backward()
                with pytest.raises(RuntimeError, match="synchroniz"):  # control
                    batch.tokens.sum().item()


def test_the_host_never_waits_within_a_micro_batch_of_pairs(device: torch.device) -> None:
    """Answers are found by facts that stay on the host, so no index waits for the device."""
    if device.type == "cpu":
        pytest.skip("only a GPU is waited for")
    policy, reference = tiny_model(**WIDTHS).to(device), tiny_model(**WIDTHS, seed=1).to(device).requires_grad_(False)
    objective = preference_objective([sections.Sigmoid(), sections.Hinge(ld_alpha=0.5, wpo=True)], True)
    role = FrozenDecoder(reference, reference, torch.bfloat16)
    compute = DecoderLearner(
        policy, policy, device, torch.bfloat16, 2, objective, objective, roles={"reference": role}, sequence_tokens=64
    )
    packs = [Pack((pair(number, 8, 4, 6),)) for number in range(4)]
    totals = compute.totals(packs)
    for last in (False, True):
        batch = compute.collate(packs)
        if not last:
            compute.losses(batch, totals).total.backward()
            continue
        with syncs_are_errors(device):
            compute.losses(batch, totals).total.backward()
            with pytest.raises(RuntimeError, match="synchroniz"):  # control
                batch.tokens.sum().item()


def test_a_step_of_pairs_learns_what_one_on_the_cpu_does(device: torch.device) -> None:
    def gradients(on: torch.device, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
        policy, reference = tiny_model(**WIDTHS).to(on), tiny_model(**WIDTHS, seed=1).to(on).requires_grad_(False)
        objective = preference_objective([sections.Sigmoid(), sections.Aot()], True)
        roles = {"reference": FrozenDecoder(reference, reference, dtype)}
        compute = DecoderLearner(policy, policy, on, dtype, 2, objective, objective, roles=roles, sequence_tokens=32)
        packs = [Pack((pair(number, 8, 4, 6),)) for number in range(6)]
        loss = accumulate(compute, packs, step=1, clip=None).loss
        named = policy.named_parameters()
        dense = {
            name: one.grad.to_dense() if one.grad.is_sparse else one.grad for name, one in named if one.grad is not None
        }
        return loss, {name: tensor.cpu() for name, tensor in dense.items()}

    loss, wanted = gradients(torch.device("cpu"), torch.float32)
    on_device, got = gradients(device, torch.float32)
    assert on_device == pytest.approx(loss, rel=1e-4) and got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=2e-3, atol=2e-3 * float(gradient.abs().max()))
    assert not torch.allclose(2 * got["norm.weight"], wanted["norm.weight"], rtol=2e-3)  # control
