"""The fused, sliced head against the written-out formula in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.objectives import loss_memory
from danlu.objectives.linear_cross_entropy import linear_cross_entropy

N, D, V = 37, 16, 101


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    weights = torch.rand(N, generator=generator, dtype=torch.float64)
    return hidden, head, targets, weights


def plain(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, *, softcap: float | None, smoothing: float, z: float
) -> Tensor:
    logits = hidden @ head.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    return (weights * (loss + z * logits.logsumexp(-1).square())).sum()


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen head goes by rows: several times here, with a rest."""
    monkeypatch.setattr(loss_memory, "FEWEST_ROWS", 8)
    monkeypatch.setattr(loss_memory, "KEPT_BYTES", 1)


@pytest.mark.parametrize("slice_rows", [1, 8, 101, 1000])
@pytest.mark.parametrize(
    ("softcap", "smoothing", "z"), [(None, 0.0, 0.0), (5.0, 0.0, 0.0), (None, 0.1, 0.0), (3.0, 0.2, 1e-2)]
)
def test_loss_and_gradients_equal_the_plain_formula(
    slice_rows: int, softcap: float | None, smoothing: float, z: float
) -> None:
    hidden, head, targets, weights = problem()
    want = plain(hidden, head, targets, weights, softcap=softcap, smoothing=smoothing, z=z)
    want_hidden, want_head = torch.autograd.grad(want, (hidden, head))
    got = linear_cross_entropy(
        hidden, head, targets, weights, softcap=softcap, label_smoothing=smoothing, z_loss=z, slice_rows=slice_rows
    )
    got_hidden, got_head = torch.autograd.grad(got.total, (hidden, head))
    torch.testing.assert_close(got.total, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_hidden, want_hidden, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(got_head, want_head, rtol=1e-11, atol=1e-12)
    by_rows = linear_cross_entropy(  # a frozen head
        hidden, head.detach(), targets, weights, softcap=softcap, label_smoothing=smoothing, z_loss=z
    )
    torch.testing.assert_close(by_rows.total, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(by_rows.total, hidden)[0], want_hidden, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close((by_rows.nll, by_rows.correct), (got.nll, got.correct), rtol=1e-12, atol=1e-12)
    # Negative control: the comparison sees one target that differs.
    wrong = targets.clone()
    wrong[5] = (wrong[5] + 1) % V
    other = linear_cross_entropy(hidden, head, wrong, weights, softcap=softcap, label_smoothing=smoothing, z_loss=z)
    assert not torch.allclose(other.total, want, rtol=1e-6)


def test_counts_and_likelihood_leave_the_extras_out() -> None:
    hidden, head, targets, weights = problem()
    logits = (hidden @ head.t()).detach()
    targets[:10] = logits[:10].argmax(-1)
    got = linear_cross_entropy(hidden, head, targets, weights, label_smoothing=0.3, z_loss=0.1)
    nll = (weights * F.cross_entropy(logits, targets, reduction="none")).sum()
    torch.testing.assert_close(got.nll, nll, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.correct, (weights * (logits.argmax(-1) == targets)).sum())
    assert not torch.allclose(got.total, got.nll)


@pytest.mark.parametrize("slice_rows", [1, 8, 101])
@pytest.mark.parametrize("softcap", [None, 0.25])
@pytest.mark.parametrize("frozen", [False, True])
def test_of_equal_logits_only_the_first_counts_as_the_likeliest(
    slice_rows: int, softcap: float | None, frozen: bool
) -> None:
    hidden, head, targets, weights = problem()
    # Few values, so that many logits are equal: what narrow types do to a real vocabulary.
    hidden, head = hidden.detach().sign(), head.detach().sign().requires_grad_(not frozen)
    hidden[:5] = 0  # every logit is equal
    logits = hidden @ head.detach().t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    likeliest = logits.argmax(-1)
    last = (logits == logits.amax(-1, keepdim=True)).long().cumsum(-1).argmax(-1)
    assert (likeliest != last).sum() > 5, "there must be something to get wrong"
    for wanted, label in ((likeliest, "first"), (last, "last"), (targets, "any")):
        got = linear_cross_entropy(hidden, head, wanted, weights, softcap=softcap, slice_rows=slice_rows)
        want = (weights * (wanted == likeliest)).sum()
        torch.testing.assert_close(got.correct, want, rtol=1e-12, atol=0, msg=lambda text, label=label: label + text)


def test_a_row_without_information_is_right_for_one_word_only() -> None:
    _, head, _, _ = problem(torch.bfloat16)
    found = linear_cross_entropy(torch.zeros(V, D, dtype=torch.bfloat16), head, torch.arange(V), torch.ones(V))
    assert found.correct.item() == 1


def test_upstream_gradient_and_gradient_scale_multiply_the_gradient_only() -> None:
    hidden, head, targets, weights = problem()
    base = torch.autograd.grad(linear_cross_entropy(hidden, head, targets, weights).total, hidden)[0]
    scaled = linear_cross_entropy(hidden, head, targets, weights, gradient_scale=4.0)
    torch.testing.assert_close(scaled.total, linear_cross_entropy(hidden, head, targets, weights).total)
    torch.testing.assert_close(torch.autograd.grad(scaled.total * 0.5, hidden)[0], base * 2)


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}], ids=["plain", "cap", "smooth", "z"]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_scale_reaches_every_gradient(frozen: bool, options: dict[str, float]) -> None:
    """fp16 divides by it afterwards: a gradient that it did not reach would be 1 / scale of what it should be."""
    hidden, head, targets, weights = problem()
    wanted = (hidden,) if frozen else (hidden, head)
    one, scaled = (
        linear_cross_entropy(
            hidden, head.detach() if frozen else head, targets, weights, gradient_scale=scale, **options
        ).total
        for scale in (1.0, 8.0)
    )
    assert torch.equal(one, scaled)
    for plain_, grown in zip(torch.autograd.grad(one, wanted), torch.autograd.grad(scaled, wanted), strict=True):
        assert plain_.abs().max() > 0
        torch.testing.assert_close(grown, 8 * plain_, rtol=1e-12, atol=0)


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, head, targets, weights = problem()
    frozen = linear_cross_entropy(hidden, head.detach(), targets, weights).total
    torch.testing.assert_close(
        torch.autograd.grad(frozen, hidden)[0],
        torch.autograd.grad(linear_cross_entropy(hidden, head, targets, weights).total, hidden)[0],
    )
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, head, targets, weights).total.requires_grad


def test_no_targets_is_a_zero_with_zero_gradient() -> None:
    hidden, head, targets, weights = problem()
    nothing = linear_cross_entropy(hidden[:0], head, targets[:0], weights[:0])
    assert nothing.total.item() == 0
    assert torch.autograd.grad(nothing.total, head)[0].abs().sum() == 0
    nothing = linear_cross_entropy(hidden[:0], head.detach(), targets[:0], weights[:0])
    assert nothing.total.item() == 0
    assert torch.autograd.grad(nothing.total, hidden)[0].abs().sum() == 0


def test_bfloat16_states_with_a_float32_head_are_as_close_as_the_rounding_allows() -> None:
    hidden, head, targets, weights = problem()
    exact = torch.autograd.grad(linear_cross_entropy(hidden, head, targets, weights).total, (hidden, head))
    narrow_hidden = hidden.detach().bfloat16().requires_grad_()
    master = head.detach().float().requires_grad_()
    got = torch.autograd.grad(
        linear_cross_entropy(narrow_hidden, master, targets, weights.float()).total, (narrow_hidden, master)
    )
    assert got[0].dtype == torch.bfloat16
    assert got[1].dtype == torch.float32
    for one, want in zip(got, exact, strict=True):
        assert (one.double() - want).norm() / want.norm() < 0.02
