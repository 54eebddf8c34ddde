"""Gradients lie where memory was taken before the first forward pass, and have the bits that they would have anyway."""

from __future__ import annotations

import pytest
import torch
from builders.tiny_run import SyntheticPacks, tiny_model
from torch import Tensor
from torch.nn import Parameter

from danlu.language.learner import DecoderLearner
from danlu.models.decoder import Decoder
from danlu.train.gradient_memory import GradientMemory
from danlu.train.step import accumulate


def gradients_of_micro_batches(count: int, model: Decoder | None = None) -> tuple[Decoder, dict[str, Tensor]]:
    model = model or tiny_model()
    packs = [SyntheticPacks().at(number) for number in range(4)]
    learner = DecoderLearner(model, model, torch.device("cpu"), torch.float32, 4 // count)
    accumulate(learner, packs, step=1, clip=None)
    return model, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_step_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take_up = GradientMemory.take_up

    def watched(memory: GradientMemory) -> None:
        taken.append(len(memory._places))
        take_up(memory)

    monkeypatch.setattr(GradientMemory, "take_up", watched)
    model, moved = gradients_of_micro_batches(2)
    assert taken == [len(list(model.parameters()))]
    gradients_of_micro_batches(1)
    assert len(taken) == 1, "one micro-batch has no next one that gradients are in the way of"
    monkeypatch.setattr(GradientMemory, "take_up", lambda memory: None)
    _, left = gradients_of_micro_batches(2)
    assert moved.keys() == left.keys() and all(torch.equal(moved[name], left[name]) for name in moved)

    def doubled(memory: GradientMemory) -> None:
        take_up(memory)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 2

    model = tiny_model()
    monkeypatch.setattr(GradientMemory, "take_up", doubled)
    _, wrong = gradients_of_micro_batches(2, model)
    assert not all(torch.equal(wrong[name], left[name]) for name in left), "the comparison sees nothing"


def test_what_is_moved_and_what_is_not() -> None:
    weight, unused, frozen, before, sparse = (Parameter(torch.zeros(2, 3)) for _ in range(5))
    frozen.requires_grad_(False)
    before.grad = own = torch.ones(2, 3)
    memory = GradientMemory([weight, unused, frozen, before, sparse])
    weight.grad = made = torch.randn(2, 3)
    sparse.grad = torch.ones(2, 3).to_sparse()
    memory.take_up()
    assert weight.grad is not None and weight.grad.data_ptr() != made.data_ptr() and torch.equal(weight.grad, made)
    assert unused.grad is None and frozen.grad is None, "what has no gradient is not updated, nor decayed"
    assert before.grad is own, "what was accumulated before lies where it lies"
    assert sparse.grad is not None and sparse.grad.is_sparse
