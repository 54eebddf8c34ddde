"""Gradients of rows: the same training as with whole ones, bit for bit where that can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from danlu.optim.adamw import AdamW
from danlu.optim.build import Optimizers, build
from danlu.optim.gradients import (
    clip_grad_norm,
    coalesce_gradients,
    densify_gradient,
    has_sparse_gradient,
    non_finite,
    stored_values,
)
from danlu.recipe import sections

V, D = 64, 16
Words = list[int]


def make() -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed_tokens.weight": Parameter(torch.randn(V, D, generator=generator)),
        "layers.0.mlp.up_proj.weight": Parameter(torch.randn(D, D, generator=generator)),
    }


def backward(parameters: dict[str, Parameter], words: Words, *, rows: bool) -> None:
    table, matrix = parameters.values()
    x = torch.nn.functional.embedding(torch.tensor(words), table, sparse=rows)
    (x @ matrix).square().sum().backward()


def train(rows: bool, steps: list[list[Words]], section: sections.Optimizer | None = None) -> tuple[dict, Optimizers]:
    parameters = make()
    optimizer = build(parameters.items(), section or sections.AdamW(learning_rate=1e-2))
    for number, micro_batches in enumerate(steps):
        for words in micro_batches:
            backward(parameters, words, rows=rows)
            coalesce_gradients(parameters.values())
        clip_grad_norm(parameters.values(), 1.0, scale=0.5)
        optimizer.set_learning_rate(1 / (number + 1))
        optimizer.step(free_gradients=True)
        optimizer.zero_grad()
    return parameters, optimizer


FEW = [[[1, 2, 3]], [[3, 5], [5, 9, 1]], [[60]], [[2, 2, 2, 7]]]
MANY = [*FEW, [list(range(0, V, 2))], [[3, 4]]]


@pytest.mark.parametrize("steps", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize(
    "section",
    [
        sections.AdamW(learning_rate=1e-2),
        sections.AdamW(learning_rate=1e-2, decay="all"),
        sections.Lion(learning_rate=1e-2),
        sections.SGD(),
        sections.Muon(),
    ],
    ids=lambda section: f"{section.kind}-{section.decay}",
)
def test_training_with_rows_equals_training_with_whole_gradients(
    steps: list[list[Words]], section: sections.Optimizer
) -> None:
    with_rows, one = train(True, steps, section)
    whole, other = train(False, steps, section)
    for name in whole:
        torch.testing.assert_close(with_rows[name], whole[name], rtol=1e-5, atol=1e-6)
    for name, tensor in other.state_tensors().items():
        torch.testing.assert_close(one.state_tensors()[name], tensor, rtol=1e-5, atol=1e-7)
    different, _ = train(True, [*steps[:-1], [[11]]], section)
    assert not torch.allclose(different["embed_tokens.weight"], whole["embed_tokens.weight"], rtol=1e-5, atol=1e-6)


def test_words_that_never_occurred_are_left_alone() -> None:
    parameters, optimizer = train(True, FEW)
    seen = torch.zeros(V, dtype=torch.bool)
    seen[[1, 2, 3, 5, 9, 60, 7]] = True
    changed = (parameters["embed_tokens.weight"] != make()["embed_tokens.weight"]).any(1)
    assert torch.equal(changed, seen)
    assert torch.equal((optimizer.state_tensors()["exp_avg.embed_tokens.weight"] != 0).any(1), seen)


def test_a_word_seen_once_keeps_moving_by_its_momentum() -> None:
    once, _ = train(True, [[[1]]])
    later, _ = train(True, [[[1]], [[2]]])
    row = "embed_tokens.weight", 1
    assert not torch.equal(once[row[0]][row[1]], later[row[0]][row[1]])


def test_state_that_was_loaded_says_which_words_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    by_rows: list[bool] = []
    step_rows = AdamW.step_rows

    def noted(*arguments: Any) -> bool:
        by_rows.append(step_rows(*arguments))
        return by_rows[-1]

    monkeypatch.setattr(AdamW, "step_rows", noted)
    whole, _ = train(True, FEW)
    parameters, optimizer = train(True, FEW[:2])
    again = build(parameters.items(), sections.AdamW(learning_rate=1e-2))
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    again.load_state(saved, optimizer.state_scalars())
    for number, micro_batches in list(enumerate(FEW))[2:]:
        for words in micro_batches:
            backward(parameters, words, rows=True)
        coalesce_gradients(parameters.values())
        clip_grad_norm(parameters.values(), 1.0, scale=0.5)
        again.set_learning_rate(1 / (number + 1))
        again.step(free_gradients=True)
    assert all(by_rows) and len(by_rows) == 2 * len(FEW), "after loading too the other rows are left alone"
    for name in whole:
        assert torch.equal(parameters[name], whole[name])


def gradient(words: Words) -> Parameter:
    parameters = make()
    backward(parameters, words, rows=True)
    return parameters["embed_tokens.weight"]


def test_compact_sums_repeated_rows_and_makes_a_well_filled_gradient_whole() -> None:
    parameter = gradient([4, 4, 9])
    expected = parameter.grad.to_dense() if parameter.grad is not None else None
    coalesce_gradients([parameter])
    assert parameter.grad is not None and has_sparse_gradient(parameter) and parameter.grad._nnz() == 2
    assert torch.equal(parameter.grad.to_dense(), expected)
    densify_gradient(parameter)
    assert torch.equal(parameter.grad, expected)
    filled = gradient(list(range(V // 2)))
    coalesce_gradients([filled])
    assert not has_sparse_gradient(filled)


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x * np.inf], ids=["finite", "infinite"])
def test_norm_and_search_look_at_the_stored_rows(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    parameter = gradient([4, 4, 9])
    coalesce_gradients([parameter])
    assert parameter.grad is not None
    stored_values(parameter.grad)[1].copy_(change(stored_values(parameter.grad)[1]))
    norm = clip_grad_norm([parameter], None, scale=1.0)
    assert norm == pytest.approx(parameter.grad.to_dense().norm().item(), rel=1e-6)
    assert non_finite([("table", parameter.grad)]) == ([] if np.isfinite(norm) else ["table"])
