from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from danlu.optim import lion
from danlu.optim.lion import Lion


def run(monkeypatch: pytest.MonkeyPatch, piece: int, transposed: bool = False) -> Parameter:
    monkeypatch.setattr(lion, "_CHUNK_CPU", piece)
    generator = torch.Generator().manual_seed(0)
    parameter = Parameter(torch.randn(33, 7, generator=generator))
    optimizer = Lion([parameter], lr=0.01, weight_decay=0.1)
    for _ in range(4):
        grad = torch.randn(33, 7, generator=generator)
        parameter.grad = grad.T.contiguous().T if transposed else grad
        optimizer.step()
    return parameter


def test_pieces_and_strides_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(monkeypatch, piece=1 << 20)
    assert torch.equal(whole, run(monkeypatch, piece=16))
    assert torch.equal(whole, run(monkeypatch, piece=16, transposed=True))


def test_two_steps_by_hand() -> None:
    """The update goes by beta1, the momentum that is kept by beta2: in the second step they tell signs apart."""
    parameter = Parameter(torch.tensor([1.0]))
    optimizer = Lion([parameter], lr=0.1, betas=(0.5, 0.9), weight_decay=0.2)
    parameter.grad = torch.tensor([1.0])
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].item() == pytest.approx(0.1)
    assert parameter.item() == pytest.approx(1 - 0.1 * (1 + 0.2))
    parameter.grad = torch.tensor([-0.2])  # 0.5 * 0.1 - 0.5 * 0.2 < 0; with a momentum of 0.5 it were above
    optimizer.step()
    assert parameter.item() == pytest.approx(0.88 * (1 - 0.1 * 0.2) + 0.1)
    assert optimizer.state[parameter]["exp_avg"].item() == pytest.approx(0.9 * 0.1 - 0.1 * 0.2)


def test_scalars_and_empty_tensors_are_stepped() -> None:
    parameters = [Parameter(torch.tensor(1.0)), Parameter(torch.zeros(0, 3))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    Lion(parameters, lr=0.25).step()
    assert parameters[0].item() == 0.75
