"""Pearson's chi-square test of draws."""

from __future__ import annotations

import torch


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The probability of counts [n] at least as far from those expected; 0 where one is of probability 0."""
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    expected = probabilities[possible].double() * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    if freedom == 0:
        return 1.0
    return torch.special.gammaincc(freedom, statistic / 2).item()
