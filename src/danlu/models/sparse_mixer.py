"""SparseMixer, the router of Phi-3.5-MoE (arXiv:2310.00811, arXiv:2409.12136): two experts, one after the other.

A token's first expert is the one with the highest logit, its second the highest of the others. An expert's weight is a
softmax over the logits that are near the highest one, within a share of it; for the second the first one is left out.

While a model trains, each expert is drawn from its softmax. An expert that is not the likeliest has a third of its
weight in most draws, and the gradient of all of it, which estimates the gradient of the choice (Heun's method).

T tokens · E experts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

CHOICES = 2
"""Experts of a token."""
_THIRD = 0.3333  # as published, and 1 is this and 0.6667
_THIRDS_SHARE = 0.75  # of the draws of an expert that is not the likeliest


class Draws(Protocol):
    """Random numbers of the tokens of a micro-batch, for one router; the slot that holds it is empty outside of
    training steps.
    """

    @property
    def active(self) -> bool:
        """Whether a training step goes on, that experts are drawn in."""
        ...

    def uniform(self, x: Tensor, count: int, purpose: str) -> Tensor:
        """[T, count] float32 between 0 and 1, both excluded, the same in each call; x [T, any]: activations of the
        micro-batch.
        """
        ...


class Noise(NamedTuple):
    """The random numbers of one pass of a router."""

    choice: Tensor  # [T, 2, E] between 0 and 1: which expert is drawn
    share: Tensor  # [T, 2] between 0 and 1: whether it has its whole weight


def noise_of(draws: Draws, x: Tensor, experts: int) -> Noise:
    """The numbers for tokens x [T, D]."""
    choice = draws.uniform(x, CHOICES * experts, "choice").view(-1, CHOICES, experts)
    return Noise(choice, draws.uniform(x, CHOICES, "share"))


@torch.no_grad()
def chosen(logits: Tensor, threshold: float, noise: Noise | None = None) -> Tensor:
    """The experts [T, 2] int64 of logits [T, E]: the likeliest, or drawn by `noise`."""
    experts: list[Tensor] = []
    for number in range(CHOICES):
        near = _near(logits, threshold, experts)
        experts.append(_drawn_by(near, noise, number).argmax(1, keepdim=True))
    return torch.cat(experts, 1)


def _drawn_by(near: Tensor, noise: Noise | None, number: int) -> Tensor:
    """[T, E]: the largest is a draw from the softmax (Gumbel); without noise `near` itself."""
    return near if noise is None else near - torch.log(-torch.log(noise.choice[:, number].to(near.dtype)))


def weights_of(logits: Tensor, experts: Tensor, threshold: float, noise: Noise | None = None) -> Tensor:
    """The weights [T, 2] of experts [T, 2], with gradients by logits [T, E].

    The experts need not be those that `chosen` gives: a recorded one counts as near the highest.
    """
    weights: list[Tensor] = []
    for number, expert in enumerate(experts.split(1, 1)):
        near = _near(logits, threshold, list(experts[:, :number].split(1, 1)))
        near = near.scatter(1, expert, logits.gather(1, expert))
        weight = near.softmax(1).gather(1, expert)  # [T, 1]
        if noise is not None:
            is_whole = (near.detach().argmax(1, keepdim=True) == expert) | (
                noise.share[:, number, None] > _THIRDS_SHARE
            )
            weight = weight - (weight * (1 - _THIRD) * ~is_whole).detach()
        weights.append(weight)
    return torch.cat(weights, 1)


@torch.no_grad()
def margins(logits: Tensor, threshold: float, experts: Tensor, noise: Noise | None = None) -> Iterator[Tensor]:
    """Yields how far choices and weights are from others, in shares of a token's largest logit: [T] or [T, E] each.

    Rounding by more than that would choose another expert, or take another logit for near.
    """
    scale = logits.abs().amax(1).clamp(min=torch.finfo(logits.dtype).tiny)
    for number in range(CHOICES):
        left_out = list(experts[:, :number].split(1, 1))
        near, others = _near(logits, threshold, left_out), _without(logits, left_out)
        for keys in (near, _drawn_by(near, noise, number)):
            first, second = keys.topk(2).values.unbind(1)
            yield (first - second) / scale
        highest = others.amax(1, keepdim=True)
        yield ((highest - logits) / logits.abs().clamp(min=highest) - threshold).abs()[others.isfinite()]


def _near(logits: Tensor, threshold: float, left_out: Sequence[Tensor]) -> Tensor:
    """The logits [T, E] within `threshold` of the highest one, in shares of the larger of the two; others are -inf.

    left_out: experts [T, 1] that do not take part.
    """
    others = _without(logits, left_out)
    with torch.no_grad():
        highest = others.amax(1, keepdim=True)
        far = (highest - logits) / logits.abs().clamp(min=highest) > threshold
    return others.masked_fill(far, -torch.inf)


def _without(logits: Tensor, left_out: Sequence[Tensor]) -> Tensor:
    """The logits [T, E], -inf at experts [T, 1] that do not take part."""
    for expert in left_out:
        logits = logits.scatter(1, expert, -torch.inf)
    return logits


def jittered(x: Tensor, draws: Draws, jitter: float) -> Tensor:
    """x [T, D], each number times two factors that are drawn between 1 - jitter and 1 + jitter.

    transformers' class multiplies once before the router and once in it, both times in place.
    """
    first, second = (
        1 - jitter + 2 * jitter * draws.uniform(x, x.shape[1], purpose) for purpose in ("block input", "router input")
    )
    return x * (first * second).to(x.dtype)
