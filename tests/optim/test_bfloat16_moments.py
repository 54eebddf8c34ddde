"""bfloat16 moments against a step of AdamW in float64 from the same stored moments, and where they are rounded to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.optim import bfloat16_moments
from danlu.optim.adamw import AdamW, Float32Moments, Moments
from danlu.optim.bfloat16_moments import Bfloat16Moments
from danlu.recipe import sections
from danlu.recipe.rules.training import MOST_BFLOAT16_BETA, optimizer_is_consistent

BETAS, RATE, DECAY, EPS = (0.9, 0.95), 1e-2, 0.1, 1e-8
NAMES = ("exp_avg", "exp_avg_sq")
HALF_STEP = 2.0**-8
"""The most that rounding to nearest moves a number in bfloat16, relative to the power of two below it, in halves."""


def gradient(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(67, 131, generator=generator) * torch.randn(67, 131, generator=generator).mul(3).exp()


def trained(steps: int, moments: Moments) -> tuple[Parameter, AdamW]:
    parameter = Parameter(torch.randn(67, 131, generator=torch.Generator().manual_seed(100)))
    optimizer = AdamW([{"params": [parameter], "weight_decay": DECAY}], RATE, BETAS, EPS, moments=moments)
    for step in range(steps):
        parameter.grad = gradient(step)
        optimizer.step()
    return parameter, optimizer


def defined(weight: Tensor, state: dict[str, Tensor], step: int) -> tuple[Tensor, list[Tensor]]:
    """Returns a weight and its moments after one step of AdamW in float64, from stored moments."""
    grad = gradient(step).double()
    first = BETAS[0] * state["exp_avg"].double() + (1 - BETAS[0]) * grad
    second = BETAS[1] * state["exp_avg_sq"].double() + (1 - BETAS[1]) * grad * grad
    bias = [1 - beta ** (step + 1) for beta in BETAS]
    update = (first / bias[0]) / ((second / bias[1]).sqrt() + EPS)
    return weight.double() * (1 - RATE * DECAY) - RATE * update, [first, second]


def from_nearest(stored: Tensor, exact: Tensor) -> float:
    """Returns the largest distance of stored numbers from exact ones, in units of half a step of bfloat16."""
    _, exponent = torch.frexp(exact)
    return float(
        ((stored.double() - exact).abs() / torch.ldexp(torch.ones_like(exact), exponent - 1) / HALF_STEP).max()
    )


@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_is_that_of_float64_from_stored_moments_and_rounds_to_nearest(steps: int) -> None:
    before, optimizer = trained(steps, Bfloat16Moments())
    stored = optimizer.state[before] or {name: torch.zeros(67, 131) for name in NAMES}
    weight, exact = defined(before.detach(), {name: stored[name].clone() for name in NAMES}, steps)
    after, optimizer = trained(steps + 1, Bfloat16Moments())
    assert (after.double() - weight).abs().max() < 1e-6
    for name, moment in zip(NAMES, exact, strict=True):
        kept = optimizer.state[after][name]
        assert kept.dtype == torch.bfloat16
        assert from_nearest(kept, moment) < 1 + 2e-4  # float32 rounds before
        truncated = moment.float().view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32)
        assert from_nearest(truncated, moment) > 1.9  # control: rounding towards zero
    if steps:  # control: moments that were not rounded between steps
        assert (trained(steps + 1, Float32Moments())[0].double() - weight).abs().max() > 1e-5


def test_chunks_and_layouts_of_gradients_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, optimizer = trained(3, Bfloat16Moments())
    monkeypatch.setattr(bfloat16_moments, "_CHUNK_CPU", 1000)
    parts, other = trained(3, Bfloat16Moments())
    assert torch.equal(whole, parts)
    assert all(torch.equal(tensor, other.state[parts][name]) for name, tensor in optimizer.state[whole].items())
    assert int(other.state[parts]["step"]) == 3


@pytest.mark.parametrize("moments", [Bfloat16Moments, Float32Moments])
def test_rows_of_an_embedding(moments: Any) -> None:
    def train(by_row: bool) -> Parameter:
        table = Parameter(torch.ones(64, 64))
        optimizer = AdamW([{"params": [table], "weight_decay": 0.0}], RATE, BETAS, EPS, moments=moments())
        for step, words in enumerate(([1, 5], [5, 60], [7])):
            values = gradient(step)[: len(words), :64].clone(memory_format=torch.contiguous_format)
            grad = torch.sparse_coo_tensor(
                torch.tensor([words]), values, table.shape, is_coalesced=True, check_invariants=True
            )
            table.grad = grad if by_row else grad.to_dense()
            assert not by_row or optimizer.step_rows(optimizer.param_groups[0], table)
            if not by_row:
                optimizer.step()
        return table

    assert torch.equal(train(True), train(False))


def test_betas_with_moments_that_would_never_shrink_are_refused() -> None:
    for beta, sticks in ((MOST_BFLOAT16_BETA, False), (0.999, True)):
        section = sections.AdamW(moments="bf16", betas=(0.9, beta))
        assert bool(list(optimizer_is_consistent(section, None))) == sticks
        moments = torch.linspace(1, 2, 129)[:-1].bfloat16()
        assert bool(((moments.float() * beta).bfloat16() == moments).any()) == sticks
    assert not list(optimizer_is_consistent(sections.AdamW(betas=(0.9, 0.999)), None))
