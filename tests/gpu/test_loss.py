"""The kernels of the cross-entropy, against the written-out formula in float64 and against torch's operators."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.objectives import linear_cross_entropy as crossentropy
from danlu.objectives import loss_memory
from danlu.objectives.linear_cross_entropy import linear_cross_entropy

N, D, V = 67, 32, 5003
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "smoothing": {"label_smoothing": 0.1},
    "all": {"softcap": 3.0, "label_smoothing": 0.2, "z_loss": 1e-2},
}


@pytest.fixture(autouse=True)
def kernels_anywhere(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU Triton's interpreter carries the kernels out."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton")
    monkeypatch.setattr(loss_memory, "FEWEST_ROWS", 32)  # a frozen head goes by rows: several times here
    if device.type == "cpu":
        if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
            pytest.skip("Triton's interpreter does not know this version of numpy")
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
        from danlu.objectives import softmax_kernels

        monkeypatch.setattr(crossentropy, "_kernels_for", lambda x: softmax_kernels)
    monkeypatch.setattr(loss_memory, "KEPT_BYTES", 1)
    monkeypatch.setattr(loss_memory, "KEPT_BYTES_CUDA", 1)


def inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator).to(device, dtype).requires_grad_()
    head = torch.randn(V, D, generator=generator).to(device, dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[:10] = (hidden.detach().double() @ head.detach().double().t()).argmax(1)[:10].cpu()
    return hidden, head, targets.to(device), torch.rand(N, generator=generator).to(device)


def formula(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, **extras: Any) -> Tensor:
    """The loss of rounded logits in float64: what is asked of the kernels begins with those."""
    logits = hidden.double() @ head.double().t()
    if hidden.dtype != torch.float32:  # the product's rounding, with its gradient left as it is
        logits = logits + (logits.to(hidden.dtype).double() - logits).detach()
    if (cap := extras.get("softcap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    loss = F.cross_entropy(logits, targets, reduction="none", label_smoothing=extras.get("label_smoothing", 0.0))
    return (weights * (loss + extras.get("z_loss", 0.0) * logits.logsumexp(-1).square())).sum()


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("slice_rows", [700, 6000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extras", EXTRAS)
def test_kernels_have_the_loss_and_gradients_of_the_formula(
    device: torch.device, dtype: torch.dtype, slice_rows: int, extras: str
) -> None:
    hidden, head, targets, weights = inputs(device, dtype)
    settings = EXTRAS[extras]
    wanted = formula(hidden, head, targets, weights, **settings)
    wanted_hidden, wanted_head = torch.autograd.grad(wanted, (hidden, head))
    got = linear_cross_entropy(hidden, head, targets, weights, slice_rows=slice_rows, **settings)
    got_hidden, got_head = torch.autograd.grad(got.total, (hidden, head))
    frozen = linear_cross_entropy(hidden, head.detach(), targets, weights, by_target=True, **settings)
    by_rows = torch.autograd.grad(frozen.total, hidden)[0]
    # A product of bfloat16 may be rounded up here and down there.
    loss_bound, bound = (1e-5, 2e-5) if dtype == torch.float32 else (1e-3, 1e-2)
    for total in (got.total, frozen.total):
        assert float(total.detach()) == pytest.approx(float(wanted.detach()), rel=loss_bound)
    assert distance(got_hidden, wanted_hidden) < bound and distance(got_head, wanted_head) < bound
    assert distance(by_rows, wanted_hidden) < bound
    assert distance(2 * got_head, wanted_head) > 0.5  # control
    other = linear_cross_entropy(hidden, head, (targets + 1) % V, weights, slice_rows=slice_rows, **settings)
    assert float(other.total.detach()) != pytest.approx(float(wanted.detach()), rel=10 * loss_bound)  # control


def test_kernels_count_as_torch_does(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with their own two largest logits alike: the first one is the likeliest token."""
    hidden, head, targets, weights = inputs(device, torch.float32)
    with torch.no_grad():
        head[4000:4040] = head[:40]
    targets[:20] = torch.arange(4000, 4020, device=device)
    hidden = head.detach()[targets] * 3
    counts = [linear_cross_entropy(hidden, head, targets, weights, slice_rows=700).correct]
    monkeypatch.setattr(crossentropy, "_kernels_for", lambda x: None)
    counts.append(linear_cross_entropy(hidden, head, targets, weights, slice_rows=700).correct)
    torch.testing.assert_close(*counts)
    assert 0 < float(counts[0]) < float(weights[20:].sum()) + 1e-3  # none of the rows whose token comes second


@pytest.mark.parametrize("start", [0, 2000, 4000])
def test_a_part_of_the_vocabulary_has_its_own_targets(device: torch.device, start: int) -> None:
    """What one process of a tensor group makes of its rows, without the group's sums."""
    hidden, head, targets, weights = inputs(device, torch.float32)
    part = head.detach()[start : start + 1003]
    got = linear_cross_entropy(
        hidden, part, targets, weights, by_target=True, vocab_start=start, vocab_size=V, slice_rows=300
    ).by_target
    logits = hidden.detach().double() @ part.double().t()
    inside = (targets >= start) & (targets < start + 1003)
    at_target = logits.gather(1, (targets - start).clamp(0, 1002).unsqueeze(1)).squeeze(1)
    wanted = logits.logsumexp(1) - torch.where(inside, at_target, 0.0)
    assert got is not None
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
