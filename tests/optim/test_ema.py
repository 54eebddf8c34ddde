from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from danlu.optim import ema as ema_module
from danlu.optim.ema import Ema

DECAY = 0.9


def model() -> dict[str, Parameter]:
    return {"b.weight": Parameter(torch.randn(5, 3)), "a": Parameter(torch.tensor(2.0))}


def move(parameters: dict[str, Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def test_the_average_has_the_documented_weights_and_none_of_the_start() -> None:
    parameters = model()
    ema = Ema(parameters.items(), DECAY)
    history = []
    for step in range(1, 8):
        move(parameters, step)
        ema.update()
        history.append(parameters["b.weight"].detach().double().clone())
        shares = [DECAY ** (step - i) for i in range(1, step + 1)]
        expected = sum(share * seen for share, seen in zip(shares, history, strict=True)) / sum(shares)
        assert torch.allclose(ema.state_tensors()["b.weight"].double(), expected, atol=1e-6)
    assert not torch.allclose(ema.state_tensors()["b.weight"].double(), sum(history) / 7, atol=1e-3)


def test_swapping_shows_the_average_through_views_and_restores_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ema_module, "_CHUNK", 4)  # more than one chunk
    parameters = model()
    ema = Ema(parameters.items(), DECAY)
    move(parameters, 1)
    ema.update()
    move(parameters, 2)
    ema.update()
    view = parameters["b.weight"].detach()[2:]
    own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    average = {name: tensor.clone() for name, tensor in ema.state_tensors().items()}

    def interrupted_evaluation() -> None:
        with ema.swapped():
            assert all(torch.equal(parameters[name], average[name]) for name in parameters)
            assert torch.equal(view, average["b.weight"][2:])
            assert not torch.equal(parameters["b.weight"], own["b.weight"])
            with pytest.raises(AssertionError):
                ema.update()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_evaluation()
    assert all(torch.equal(parameters[name], own[name]) for name in parameters)
    assert all(torch.equal(tensor, average[name]) for name, tensor in ema.state_tensors().items())


def test_resumed_equals_uninterrupted() -> None:
    parameters = model()
    whole = Ema(parameters.items(), DECAY)
    for step in range(1, 4):
        move(parameters, step)
        whole.update()

    def resumed_at(updates: int) -> Ema:
        ema = Ema(parameters.items(), DECAY)
        for name, average in ema.state_tensors().items():
            average.copy_(whole.state_tensors()[name])
        ema.updates = updates
        return ema

    resumed, without_count = resumed_at(whole.updates), resumed_at(0)
    move(parameters, 4)
    for ema in (whole, resumed, without_count):
        ema.update()
    assert torch.equal(whole.state_tensors()["b.weight"], resumed.state_tensors()["b.weight"])
    assert not torch.equal(whole.state_tensors()["b.weight"], without_count.state_tensors()["b.weight"])


def test_before_the_first_update_the_average_is_the_model_and_frozen_weights_are_not_in_it() -> None:
    parameters = model()
    parameters["a"].requires_grad_(False)
    ema = Ema(parameters.items(), DECAY)
    assert list(ema.state_tensors()) == ["b.weight"]
    assert torch.equal(ema.state_tensors()["b.weight"], parameters["b.weight"])
