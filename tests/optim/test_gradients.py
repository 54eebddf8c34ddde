from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

from danlu.optim.gradients import clip_grad_norm, non_finite


def parameters(seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in ((700, 513), (513,), (), (3, 5, 7)):
        parameter = Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape, generator=generator)
        found.append(parameter)
    return [*found, Parameter(torch.zeros(2))]  # the last one has no gradient


def exact_norm(found: list[Parameter]) -> float:
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in found if p.grad is not None))


def test_norm_equals_the_one_in_float64() -> None:
    found = parameters()
    expected = exact_norm(found)
    assert clip_grad_norm(found, None) == pytest.approx(expected, rel=1e-6)
    assert exact_norm(found) == expected  # nothing to clip, nothing to scale: untouched
    assert clip_grad_norm(found[1:], None) != pytest.approx(expected, rel=1e-3)


def test_norm_of_a_large_tensor_is_not_lost_to_float32() -> None:
    parameter = Parameter(torch.zeros(1 << 22, 1))
    parameter.grad = torch.ones(1 << 22, 1)
    assert clip_grad_norm([parameter], None) == pytest.approx(2048.0, rel=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1 / 4096, -0.5])
def test_scale_and_clip_are_one_factor(scale: float) -> None:
    found, untouched = parameters(), parameters()
    norm = clip_grad_norm(found, 0.01, scale=scale)
    assert norm == pytest.approx(abs(scale) * exact_norm(untouched), rel=1e-6)
    assert exact_norm(found) == pytest.approx(0.01, rel=1e-5)
    factor = math.copysign(0.01 / exact_norm(untouched), scale)
    torch.testing.assert_close(found[0].grad, untouched[0].grad * factor, rtol=1e-5, atol=0)


def test_a_norm_within_bounds_is_only_scaled() -> None:
    found, untouched = parameters(), parameters()
    clip_grad_norm(found, 1e9, scale=0.5)
    assert torch.equal(found[0].grad, untouched[0].grad * 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_reported_named_and_left_alone(bad: float) -> None:
    found = parameters()
    found[0].grad[699, 512] = bad
    before = found[1].grad.clone()
    assert not math.isfinite(clip_grad_norm(found, 1.0, scale=0.1))
    assert torch.equal(found[1].grad, before)
    named = [(f"p{i}", parameter.grad) for i, parameter in enumerate(found)]
    assert non_finite(named) == ["p0"]
    assert non_finite(named[1:]) == []


class Elsewhere:
    """A group of processes whose sum is 5² wherever it is made; notes on which devices it was asked for."""

    size = 2

    def __init__(self) -> None:
        self.devices: list[str] = []

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape == () and x.dtype == torch.float64
        self.devices.append(x.device.type)
        return torch.tensor(25.0, dtype=torch.float64)

    def max(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("norms are sums")


def on(*devices: str, size: int = 3) -> list[Parameter]:
    found = []
    for device in devices:
        parameter = Parameter(torch.ones(size, device=device))
        parameter.grad = torch.ones(size, device=device)
        found.append(parameter)
    return found


# The meta device stands for a GPU.
@pytest.mark.parametrize(
    "held",
    [
        pytest.param([], id="no gradient"),
        pytest.param(on("cpu", size=0), id="no element"),
        pytest.param(on("cpu"), id="all offloaded"),
        pytest.param(on("cpu", "meta", "cpu"), id="some offloaded"),
        pytest.param(on("meta"), id="none offloaded"),
    ],
)
def test_norms_of_processes_are_summed_on_the_runs_device_whatever_each_holds(held: list[Parameter]) -> None:
    group = Elsewhere()
    assert clip_grad_norm(held, None, group=group, device=torch.device("meta")) == 5.0
    assert group.devices == ["meta"]
    clip_grad_norm(on("cpu"), None, group=group)  # control: without the run's device, where the gradient is
    assert group.devices == ["meta", "cpu"]


def test_no_gradients_have_norm_zero() -> None:
    assert clip_grad_norm([Parameter(torch.zeros(2))], 1.0) == 0.0
    assert non_finite([("empty", torch.zeros(0)), ("none", None)]) == []
