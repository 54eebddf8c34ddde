"""Task arithmetic, TIES and DARE: the changes that several adapters make to one weight, combined into one change.

N adapters, each with its change ("task vector") of the same weight. The results equal those of PEFT's functions of
these names, except for DARE's random choice, which here depends on a seed and the name of the weight alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Method = Literal["linear", "cat", "ties", "dare-linear", "dare-ties"]
METHODS: tuple[Method, ...] = get_args(Method)
Majority = Literal["total", "frequency"]
MAJORITIES: tuple[Majority, ...] = get_args(Majority)


@dataclass(frozen=True)
class Combination:
    """How the changes of several adapters are combined."""

    weights: tuple[float, ...]
    """The factor of each adapter's change."""
    method: Method = "linear"
    density: float = 1.0
    """Fraction of each change's numbers that ties and dare keep."""
    majority: Majority = "total"
    """How ties elects a sign: by the sum of the changes, or by how many have it."""
    seed: int = 0
    """The seed of dare's random choice."""

    def __post_init__(self) -> None:
        assert self.method in METHODS and self.majority in MAJORITIES, f"{self.method}, {self.majority}"
        assert all(math.isfinite(weight) for weight in self.weights), f"weights are {self.weights}"
        assert 0 < self.density <= 1, f"density is {self.density}"

    def of(
        self, changes: Sequence[Tensor], draw: Callable[[int], torch.Generator], *, experts: int | None = None
    ) -> Tensor:
        """The combined change, of changes of one shape.

        draw: n -> the CPU generator of dare's choice for adapter n. experts: of stacked matrices [E, O, I], or of P of
        them one behind the other [P E, O, I], the number E: those of each expert are trimmed by themselves.
        """
        if self.method in ("dare-linear", "dare-ties"):
            changes = [drop_and_rescale(change, self.density, draw(n)) for n, change in enumerate(changes)]
        elif self.method == "ties":
            changes = [
                trim(change, self.density) if experts is None else trim_by_expert(change, self.density, experts)
                for change in changes
            ]
        if self.method in ("ties", "dare-ties"):
            return elect_signs(changes, self.weights, self.majority)
        return weighted_sum(changes, self.weights)


def weighted_sum(changes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum of w_n D_n: task arithmetic (arXiv:2212.04089)."""
    total = torch.zeros_like(changes[0])
    for change, weight in zip(changes, weights, strict=True):
        total.add_(change, alpha=weight)
    return total


def trim(change: Tensor, density: float) -> Tensor:
    """The fraction `density` of largest magnitude, others 0: the first step of TIES (arXiv:2306.01708, section 4)."""
    kept = int(density * change.numel())
    if kept == 0:
        return torch.zeros_like(change)
    magnitudes = change.abs().flatten()
    threshold = magnitudes.kthvalue(magnitudes.numel() - kept + 1).values
    return change.where(change.abs() >= threshold, 0)


def trim_by_expert(change: Tensor, density: float, experts: int) -> Tensor:
    """`trim` of each expert's own matrices alone, of change [P E, O, I] with P stacks of E experts: as many numbers of
    an expert with small changes are kept as of one with large changes, as where each expert is a module of its own."""
    by_expert = change.unflatten(0, (-1, experts)).unbind(1)  # [P, O, I] of each
    return torch.stack([trim(matrices, density) for matrices in by_expert], 1).flatten(0, 1)


def drop_and_rescale(change: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Each number kept with probability `density`, else 0, and divided by it: DARE (arXiv:2311.03099, section 3.1)."""
    if density == 1:
        return change
    kept = torch.rand(change.shape, generator=generator) < density
    return change.where(kept.to(change.device), 0).div_(density)


def elect_signs(changes: Sequence[Tensor], weights: Sequence[float], majority: Majority = "total") -> Tensor:
    """Steps two and three of TIES (arXiv:2306.01708, section 4): elects the sign of each number, and averages the
    weighted changes that have it.

    majority: total elects the sign of the sum; frequency the sign that more changes have. A tie counts as positive.
    """
    ballot = torch.zeros_like(changes[0])
    for change in changes:
        ballot += change if majority == "total" else change.sign()
    elected = torch.where(ballot >= 0, 1.0, -1.0).to(ballot.dtype)
    total, count = torch.zeros_like(ballot), torch.zeros_like(ballot)
    for change, weight in zip(changes, weights, strict=True):
        agrees = change.sign() == elected
        total.add_(change.where(agrees, 0), alpha=weight)
        count += agrees
    return total.div_(count.clamp_(min=1))
