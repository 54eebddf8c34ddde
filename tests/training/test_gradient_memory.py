"""Gradients lie in pages of their own between micro-batches, and have the bits that they would have anyway."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from builders.tiny_run import SyntheticPacks, tiny_model
from torch import Tensor
from torch.nn import Parameter

from danlu.models.decoder import Decoder
from danlu.stages.learner import DecoderLearner
from danlu.training import gradient_memory, step
from danlu.training.gradient_memory import move_out_of_the_heap


def gradients_of_micro_batches(count: int, model: Decoder | None = None) -> tuple[Decoder, dict[str, Tensor]]:
    model = model or tiny_model()
    packs = [SyntheticPacks().at(number) for number in range(4)]
    learner = DecoderLearner(model, model, torch.device("cpu"), torch.float32, 4 // count)
    step.accumulate(learner, packs, step=1, clip=None)
    return model, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_step_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    moved_at: list[int] = []

    def watched(parameters: Iterable[Parameter]) -> None:
        parameters = list(parameters)
        moved_at.append(len(parameters))
        move_out_of_the_heap(parameters)

    monkeypatch.setattr(gradient_memory, "move_out_of_the_heap", watched)
    model, moved = gradients_of_micro_batches(2)
    assert moved_at == [len(list(model.parameters()))]
    gradients_of_micro_batches(1)
    assert len(moved_at) == 1, "one micro-batch has no next one that gradients are in the way of"
    monkeypatch.setattr(gradient_memory, "move_out_of_the_heap", lambda parameters: None)
    _, left = gradients_of_micro_batches(2)
    assert moved.keys() == left.keys() and all(torch.equal(moved[name], left[name]) for name in moved)

    def doubled(parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad *= 2

    monkeypatch.setattr(gradient_memory, "move_out_of_the_heap", doubled)
    _, wrong = gradients_of_micro_batches(2)
    assert not all(torch.equal(wrong[name], left[name]) for name in left), "the comparison sees nothing"


def test_what_is_moved_and_what_is_not() -> None:
    weight, narrow, unused, sparse, empty = (Parameter(torch.zeros(5, 3)) for _ in range(5))
    made = {weight: torch.randn(5, 3), narrow: torch.randn(5, 3)}
    narrow.data, made[narrow] = narrow.data.bfloat16(), made[narrow].bfloat16()
    empty.data = torch.zeros(0, 3)
    weight.grad, narrow.grad, empty.grad = made[weight].clone(), made[narrow].clone(), torch.zeros(0, 3)
    sparse.grad = torch.ones(5, 3).to_sparse()
    before = {parameter: parameter.grad.data_ptr() for parameter in made if parameter.grad is not None}
    move_out_of_the_heap([weight, narrow, unused, sparse, empty])
    for parameter, gradient in made.items():
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
        assert parameter.grad.data_ptr() != before[parameter] and parameter.grad.data_ptr() % 64 == 0
        parameter.grad += 1  # as the next micro-batch does
        assert torch.equal(parameter.grad, gradient + 1)
    assert unused.grad is None, "what has no gradient is not updated, nor decayed"
    assert sparse.grad is not None and sparse.grad.is_sparse
    assert empty.grad is not None and empty.grad.shape == (0, 3)
    move_out_of_the_heap([unused])
