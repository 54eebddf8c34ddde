"""What a CUDA device changes: kernels, not results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders.generation import generate
from builders.reference_attention import ReferenceAttention
from builders.tiny_run import SyntheticPacks, tiny_model, tiny_run

from danlu.core.layer_types import Keys
from danlu.inference.request import SamplingOptions
from danlu.models.attend import PackedAttention
from danlu.numerics.loss_scaling import LossScaler
from danlu.objectives.linear_cross_entropy import linear_cross_entropy
from danlu.training.loop import fit, save, take_step
from danlu.training.metrics import read_metrics
from danlu.training.state import Run, restore

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def trained(folder: Path, **options: object) -> Run:
    run = tiny_run(folder, **options)  # type: ignore[arg-type]
    fit(run)
    return run


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in run.learner.model.named_parameters()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_training_there_equals_training_here(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    for device in ("cpu", "cuda"):
        trained(tmp_path / device, device=device, dtype=dtype)
    trained(tmp_path / "other", source=SyntheticPacks(seed=1), dtype=dtype)
    here, there, other = (torch.tensor(losses(tmp_path / name)) for name in ("cpu", "cuda", "other"))
    torch.testing.assert_close(there, here, rtol=tolerance, atol=tolerance)
    assert not torch.allclose(other, here, rtol=tolerance, atol=tolerance)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", device="cuda", dtype=torch.bfloat16, ema=True)
    first = tiny_run(tmp_path / "parts", device="cuda", dtype=torch.bfloat16, ema=True)
    for _ in range(4):
        take_step(first)
    save(first)
    second = tiny_run(tmp_path / "parts", device="cuda", dtype=torch.bfloat16, ema=True)
    latest = first.store.latest()
    assert latest is not None
    restore(second, latest.path)
    fit(second)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(second)[name]), name


def test_an_overflow_in_half_precision_is_survived(tmp_path: Path) -> None:
    run = trained(tmp_path, device="cuda", dtype=torch.float16, steps=30, scaler=LossScaler(scale=2.0**24))
    events = [line["event"] for line in read_metrics(tmp_path / "metrics.jsonl") if "event" in line]
    assert "overflow" in events
    assert all(tensor.isfinite().all() for tensor in weights(run).values())
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


def test_compiled_packs_of_all_lengths_recompile_nothing(tmp_path: Path) -> None:
    torch._dynamo.reset()
    run = tiny_run(tmp_path / "compiled", device="cuda", compiled=True, steps=12)
    for _ in range(4):
        take_step(run)
    with torch._dynamo.config.patch(error_on_recompile=True):
        fit(run)
    trained(tmp_path / "eager", device="cuda", steps=12)
    here, there = (torch.tensor(losses(tmp_path / name)) for name in ("eager", "compiled"))
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocabulary", [64, 50_000])
def test_the_fused_head_equals_the_plain_one_in_float64(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(600, 32, generator=generator)
    head = torch.randn(vocabulary, 32, generator=generator) * 0.1
    targets = torch.randint(0, vocabulary, (600,), generator=generator)
    weight = torch.rand(600, generator=generator)
    exact = [tensor.double().requires_grad_() for tensor in (hidden, head)]
    plain = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), targets, reduction="none") @ weight.double()
    plain.backward()
    there = [tensor.cuda().requires_grad_() for tensor in (hidden, head)]
    fused = linear_cross_entropy(there[0], there[1], targets.cuda(), weight.cuda(), slice_rows=2000)
    fused.total.backward()
    torch.testing.assert_close(fused.total.detach().cpu().double(), plain.detach(), rtol=1e-5, atol=0)
    for ours, theirs in zip(there, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu().double(), theirs.grad, rtol=1e-3, atol=1e-5)
        assert not torch.allclose(ours.grad.cpu().double(), 2 * theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("lengths", [(7, 1, 56), (900, 200, 1), (300,)])
def test_packed_attention_equals_one_dense_mask_in_float32(lengths: tuple[int, ...]) -> None:
    boundaries = tuple(torch.tensor((0, *lengths)).cumsum(0).tolist())
    shapes = ((8, 64), (2, 64), (2, 64))
    q, k, v = (torch.randn(boundaries[-1], *shape, device="cuda") for shape in shapes)
    settings = {"scale": 0.125, "window": None, "softcap": None}
    packed = PackedAttention(boundaries)(0, q, Keys((k, v)), **settings)  # type: ignore[arg-type]
    dense = ReferenceAttention(boundaries)(0, q, Keys((k, v)), **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(packed, dense, rtol=1e-4, atol=1e-4)


def test_greedy_decoding_writes_the_same_tokens() -> None:
    prompts = [[5, 6, 7], [40, 41], [9]]
    answers = [
        generate(tiny_model().to(device), prompts, SamplingOptions(temperature=0.0), 12, [])
        for device in ("cpu", "cuda")
    ]
    assert [one.tokens for one in answers[0]] == [one.tokens for one in answers[1]]
