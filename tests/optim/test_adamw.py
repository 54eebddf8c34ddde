from __future__ import annotations

import pytest
import torch
from builders.torch_process import TorchProcess
from torch import Tensor
from torch.nn import Parameter

from danlu.optim.adamw import AdamW


def take_steps(optimizer: torch.optim.Optimizer | AdamW, parameters: list[Parameter], seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for step in range(5):
        for number, parameter in enumerate(parameters):
            late = number == 1 and step < 2
            parameter.grad = None if late else torch.randn(parameter.shape, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        optimizer.step()


def make(device: str = "cpu") -> tuple[list[Parameter], list[dict[str, object]]]:
    generator = torch.Generator().manual_seed(1)
    parameters = [Parameter(torch.randn(shape, generator=generator).to(device)) for shape in ((40, 7), (7,), (3, 3, 2))]
    return parameters, [
        {"params": parameters[:2], "weight_decay": 0.1},
        {"params": parameters[2:], "weight_decay": 0.0},
    ]


def test_the_bits_are_those_of_torch() -> None:
    ours, groups = make()
    optimizer = AdamW(groups, 1e-2, (0.9, 0.95), 1e-8)
    take_steps(optimizer, ours)
    theirs, groups = make()
    oracle = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    take_steps(oracle, theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert optimizer.state[one].keys() == oracle.state[other].keys()
        for name, tensor in optimizer.state[one].items():
            expected = oracle.state[other][name]
            assert tensor.dtype == expected.dtype and tensor.shape == expected.shape
            assert torch.equal(tensor, expected)
    different, groups = make()
    take_steps(AdamW(groups, 1e-2, (0.9, 0.96), 1e-8), different)
    assert not any(torch.equal(one, other) for one, other in zip(different, theirs, strict=True))


def test_nothing_to_step() -> None:
    parameters, groups = make()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = AdamW(groups, 1e-2, (0.9, 0.95), 1e-8)
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(parameters, before, strict=True))
    assert not optimizer.state


def test_it_does_not_bring_the_compiler(torch_process: TorchProcess) -> None:
    program = (
        "import sys, torch; from danlu.optim.build import build; from danlu.recipe.sections import AdamW\n"
        "w = torch.nn.Parameter(torch.ones(2, 2)); w.grad = torch.ones(2, 2)\n"
        "o = build([('w', w)], AdamW()); o.step(free_gradients=True); assert w[0, 0] != 1\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert torch_process.run(program).endswith("False\n")


@pytest.mark.gpu
def test_on_a_gpu_it_is_within_rounding_of_the_cpu() -> None:
    results: list[list[Tensor]] = []
    for device in ("cpu", "cuda"):
        parameters, groups = make(device)
        optimizer = AdamW(groups, 1e-2, (0.9, 0.95), 1e-8)
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            optimizer.step()
        assert all(state["step"].device.type == device for state in optimizer.state.values())
        results.append([parameter.detach().cpu() for parameter in parameters])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
