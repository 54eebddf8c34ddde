"""LoRA and DoRA on one layer: what they do to a weight, and what a start does that is switched off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders.tiny_adapters import DOCUMENTS, adapter_set, logits, perturb
from builders.tiny_run import tiny_model
from torch import Tensor

from danlu.adapters.adapter import DenseLinear
from danlu.adapters.dropout import Dropout, DropoutState
from danlu.adapters.lora import LowRank
from danlu.recipe import sections

OUTPUTS, INPUTS, RANK, SCALE = 9, 7, 3, 0.7


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(weight: Tensor, exact: bool) -> list[Tensor]:
    """Of A, B and m, through what DoRA makes of a weight as a whole: the way the head goes, with its loss."""
    one = LowRank(
        (OUTPUTS, INPUTS), RANK, SCALE, Dropout(0.0, "head", DropoutState(0)), magnitude=True, exact_norm=exact
    )
    one.double()
    trained = [one.lora_A, one.lora_B, one.lora_magnitude_vector]
    for seed, parameter in enumerate(trained):
        parameter.data.copy_(drawn(*parameter.shape, seed=seed))
    loss = (one.merged_into(DenseLinear(weight, None)).weight * drawn(OUTPUTS, INPUTS, seed=9)).sum()
    return list(torch.autograd.grad(loss, trained))


def written_out(weight: Tensor, exact: bool) -> list[Tensor]:
    """The same by autograd over the formula m V / |V|, V = W + s B A, with |V| a constant unless exact."""
    a, b, m = (
        drawn(*shape, seed=seed).requires_grad_()
        for seed, shape in enumerate(((RANK, INPUTS), (OUTPUTS, RANK), (OUTPUTS,)))
    )
    v = weight + SCALE * b @ a
    norm = v.square().sum(1).sqrt()
    loss = ((m / (norm if exact else norm.detach())).unsqueeze(1) * v * drawn(OUTPUTS, INPUTS, seed=9)).sum()
    return list(torch.autograd.grad(loss, [a, b, m]))


@pytest.mark.parametrize("exact", [False, True])
def test_dora_applied_to_a_weight_has_the_gradients_of_its_definition(exact: bool) -> None:
    weight = drawn(OUTPUTS, INPUTS, seed=5)
    for one, other, control in zip(
        gradients(weight, exact), written_out(weight, exact), written_out(weight, not exact), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        if one.ndim == 2:  # m's does not go through the norm
            assert not torch.allclose(other, control, rtol=1e-2)  # the negative control


@pytest.mark.parametrize("section", [sections.Pissa(dropout=0.5), sections.Olora(dropout=0.5, targets=["q_proj"])])
def test_dropout_leaves_a_start_that_is_switched_off_alone(section: Any) -> None:
    """Without its start the base is no model: what dropout took of it would be missing from the reference's logits."""
    dropout_state = DropoutState(0)
    model = tiny_model()
    plain = logits(model)
    adapters = adapter_set(model, dropout_state=dropout_state)
    adapters.add("one", section)
    adapters.train_only("one")
    perturb(adapters, "one", size=0.05)
    still = logits(model)
    dropout_state.begin(3, [(0, DOCUMENTS[-1])])
    assert (logits(model) - still).abs().max() > 1e-2  # the negative control: switched on it acts
    dropout_state.begin(3, [(0, DOCUMENTS[-1])])
    with adapters.disabled():
        torch.testing.assert_close(logits(model), plain, rtol=1e-5, atol=1e-5)


def test_a_start_that_is_switched_off_takes_no_dropout_from_a_neighbour() -> None:
    """q's start sleeps, k's adapter beside it is active: they have the same share, and one of them uses it."""
    dropout_state = DropoutState(0)
    model = tiny_model()
    adapters = adapter_set(model, dropout_state=dropout_state)
    adapters.add("starts", sections.Pissa(dropout=0.5, targets=["q_proj"]))
    adapters.add("two", sections.Lora(dropout=0.5, targets=["k_proj"]))
    adapters.train_only("two")
    perturb(adapters, "two")
    adapters.activate("two")
    still = logits(model)
    dropout_state.begin(3, [(0, DOCUMENTS[-1])])
    assert (logits(model) - still).abs().max() > 1e-2
