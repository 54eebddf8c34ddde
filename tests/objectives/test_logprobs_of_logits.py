"""What a sampler records against what a trainer computes of the same hidden states, to the last bit."""

from __future__ import annotations

import pytest
import torch
from builders.covering import fast_pairs
from torch import Tensor

from danlu.numerics.batch_invariant import batch_invariant
from danlu.objectives.token_logprobs import logprobs_of_logits, token_logprobs
from danlu.objectives.vocab_slices import EXACT_SLICE_ROWS, logits_in_slices

N, D, V = 70, 96, 2 * EXACT_SLICE_ROWS + 333


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [N, D], head [V, D] float32, targets [N] and a support [N, 40]: some places, every fifth row are empty."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator).to(dtype)
    head = torch.randn(V, D, generator=generator) / 20
    targets = torch.randint(0, V, (N,), generator=generator)
    support = torch.randint(0, V, (N, 40), generator=generator)
    support.masked_fill_(torch.rand(N, 40, generator=generator) < 0.3, -1)[::5] = -1
    return hidden, head, targets, support


def one_by_one(
    hidden: Tensor, head: Tensor, targets: Tensor, support: Tensor | None, softcap: float | None, temperature: float
) -> Tensor:
    """Log-probabilities [N] as decoding computes them: some tokens alone, the others in pairs."""
    parts = [slice(row, row + 1) for row in range(10)] + [slice(row, row + 2) for row in range(10, N, 2)]
    return torch.cat(
        [
            logprobs_of_logits(
                logits_in_slices(hidden[rows], head, softcap=softcap, slice_rows=EXACT_SLICE_ROWS),
                targets[rows],
                temperature=temperature,
                support=None if support is None else support[rows],
                slice_rows=EXACT_SLICE_ROWS,
            )
            for rows in parts
        ]
    )


@pytest.mark.parametrize(
    ("dtype", "softcap", "temperature", "confined"),
    fast_pairs([torch.float32, torch.bfloat16], [None, 5.0], [1.0, 0.7], [False, True]),
)
def test_they_are_equal(dtype: torch.dtype, softcap: float | None, temperature: float, confined: bool) -> None:
    hidden, head, targets, support = problem(dtype)
    options = {"temperature": temperature, "support": support if confined else None, "softcap": softcap}
    with batch_invariant():
        trainer = token_logprobs(hidden, head, targets, slice_rows=EXACT_SLICE_ROWS, **options).logprobs  # type: ignore[arg-type]
        assert torch.equal(one_by_one(hidden, head, targets, **options), trainer)  # type: ignore[arg-type]
    assert trainer.isfinite().all()
    if confined:  # what was drawn without filters is recorded without a support
        with batch_invariant():
            free = one_by_one(hidden, head, targets, None, softcap, temperature)
        assert torch.equal(free[::5], trainer[::5]) and not torch.isclose(free[1::5], trainer[1::5]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_softmax_or_slices_that_follow_the_number_of_targets_are_not(dtype: torch.dtype) -> None:
    hidden, head, targets, _ = problem(dtype)
    with batch_invariant():
        sampler = one_by_one(hidden, head, targets, None, None, 0.7)
        logits = logits_in_slices(hidden, head, softcap=None, slice_rows=EXACT_SLICE_ROWS)
        whole = (logits / 0.7).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        sliced = token_logprobs(hidden, head, targets, temperature=0.7, slice_rows=1000).logprobs
    for other in (whole, sliced):
        assert not torch.equal(sampler, other)
        torch.testing.assert_close(sampler, other, rtol=0, atol=1e-4)


def test_a_temperature_of_zero_is_refused() -> None:
    logits = torch.zeros(1, 3)
    with pytest.raises(ValueError, match=r"temperature 0\.0"):
        logprobs_of_logits(logits, torch.tensor([0]), temperature=0.0, slice_rows=EXACT_SLICE_ROWS)
