"""The cross-entropy of a classifier equals torch's; it is a sum, and scales its gradient alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.objectives.cross_entropy import logits_cross_entropy
from danlu.objectives.gradient_scale import scale_gradient, unscale_gradient

LABELS = torch.tensor([0, 3, 2, 3])
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 0.0])


def logits() -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_it_equals_torch(smoothing: float, z_loss: float) -> None:
    ours, theirs = logits(), logits()
    found = logits_cross_entropy(ours, LABELS, WEIGHTS, label_smoothing=smoothing, z_loss=z_loss)
    each = F.cross_entropy(theirs, LABELS, reduction="none", label_smoothing=smoothing)
    each = each + z_loss * theirs.logsumexp(-1).square()
    wanted = (WEIGHTS * each).sum()
    torch.testing.assert_close(found.total, wanted)
    torch.testing.assert_close(found.nll, (WEIGHTS * F.cross_entropy(theirs, LABELS, reduction="none")).sum())
    assert not found.nll.requires_grad
    found.total.backward()
    wanted.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.total, each.mean())


def test_what_is_right_is_counted_by_weight() -> None:
    table = torch.eye(5)[torch.tensor([0, 3, 1, 3])]
    assert logits_cross_entropy(table, LABELS, WEIGHTS).correct.item() == 1.5


def test_the_whole_is_the_sum_of_its_parts() -> None:
    whole = logits_cross_entropy(logits(), LABELS, WEIGHTS)
    parts = [logits_cross_entropy(logits()[rows], LABELS[rows], WEIGHTS[rows]) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(whole.total, parts[0].total + parts[1].total)
    nothing = logits()
    empty = logits_cross_entropy(nothing[:0], LABELS[:0], WEIGHTS[:0])
    empty.total.backward()
    assert empty.total.item() == empty.nll.item() == empty.correct.item() == 0
    assert nothing.grad is not None and not nothing.grad.any()


@pytest.mark.parametrize("scale", [1024.0, 3.7])
def test_the_scale_is_of_the_gradient_alone(scale: float) -> None:
    plain, scaled = logits(), logits()
    unscaled_loss = logits_cross_entropy(plain, LABELS, WEIGHTS).total
    loss = scale_gradient(logits_cross_entropy(scaled, LABELS, WEIGHTS).total, scale)
    assert torch.equal(unscaled_loss, loss)
    unscaled_loss.backward()
    loss.backward()
    torch.testing.assert_close(scaled.grad, scale * plain.grad)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(scaled.grad, plain.grad)


@pytest.mark.parametrize("scale", [1024.0, 3.7])
def test_what_is_scaled_already_gets_a_gradient_of_one(scale: float) -> None:
    x = torch.ones((), requires_grad=True)
    scale_gradient(unscale_gradient(x, scale), scale).backward()
    assert x.grad is not None and x.grad.item() == 1


def test_a_scale_of_one_adds_no_operation() -> None:
    x = torch.ones((), requires_grad=True)
    assert scale_gradient(x, 1.0) is x and unscale_gradient(x, 1.0) is x
