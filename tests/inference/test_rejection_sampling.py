"""Rejection sampling against the distribution it must give, with rules that are a little wrong as controls."""

from __future__ import annotations

import pytest
import torch
from builders.chi_square import chi_square_p

from danlu.inference.sampling import ACCEPT, PROPOSE, RESIDUAL, rejection_sample, uniform

V, N = 11, 8000


def numbers(purpose: int) -> torch.Tensor:
    return torch.tensor([[uniform(0, i, 0, 3, purpose)] for i in range(N)], dtype=torch.float64)


def distributions(distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """p, and q that differs from it by so much in its logits; the last two tokens are in one of them alone."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(V, generator=generator)
    others = logits + distance * torch.randn(V, generator=generator)
    if distance:
        logits[-1] = others[-2] = -torch.inf
    return logits.softmax(0), others.softmax(0)


def proposals(q: torch.Tensor) -> torch.Tensor:
    cumulative = q.double().cumsum(0)
    return torch.searchsorted(cumulative, numbers(PROPOSE)[:, 0], right=True).clamp_(max=V - 1)


@pytest.mark.parametrize("distance", [0.0, 0.3, 2.0])
def test_tokens_follow_p_whatever_was_proposed(distance):
    p, q = distributions(distance)
    proposed = proposals(q)
    tokens = rejection_sample(p.expand(N, V), q.expand(N, V), proposed, numbers(ACCEPT), numbers(RESIDUAL))
    counts = torch.bincount(tokens, minlength=V)
    assert chi_square_p(counts, p) > 1e-3
    kept = (tokens == proposed).double().mean().item()
    assert kept == pytest.approx(torch.minimum(p, q).sum().item(), abs=0.02), "as many as can be: 1 - total variation"
    if distance:
        assert chi_square_p(torch.bincount(proposed, minlength=V), q) > 1e-3
        assert chi_square_p(counts, q) < 1e-6, "control: p and q are told apart"


def test_wrong_rules_are_noticed():
    p, q = distributions(0.3)
    p, q = p.clone(), q.clone()
    p[-1] = q[-1] = p[-2] = q[-2] = 0
    p, q = p / p.sum(), q / q.sum()
    proposed, accept, residual = proposals(q), numbers(ACCEPT), numbers(RESIDUAL)
    p_rows, q_rows = p.expand(N, V), q.expand(N, V)
    at_p, at_q = p[proposed], q[proposed]

    def p_value(is_kept: torch.Tensor, instead: torch.Tensor) -> float:
        cumulative = (instead / instead.sum()).double().cumsum(0)
        others = torch.searchsorted(cumulative, residual[:, 0], right=True).clamp_(max=V - 1)
        return chi_square_p(torch.bincount(torch.where(is_kept, proposed, others), minlength=V), p)

    rest = (p - q).clamp(min=0)
    assert p_value(accept[:, 0] * at_q < at_p, rest) > 1e-3, "the right rule, written out"
    assert p_value(torch.ones(N, dtype=torch.bool), rest) < 1e-3, "keeps all"
    assert p_value(accept[:, 0] * at_q < at_p, p) < 1e-3, "draws from p where it should from what is left of it"
    assert p_value(accept[:, 0] < at_p, rest) < 1e-3, "keeps a proposal as if it had been certain"
    tokens = rejection_sample(p_rows, q_rows, proposed, accept, accept)
    assert chi_square_p(torch.bincount(tokens, minlength=V), p) < 1e-3, "one random number for both"
