"""Statistics that calibration keeps of the inputs of a linear layer.

I inputs of the layer · T tokens of a pack
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Need = Literal["hessian", "magnitude", "largest"]


@dataclass(frozen=True)
class Statistics:
    """Statistics of inputs x [I] over the tokens of calibration, float32; None where they were not asked for."""

    tokens: int
    hessian: Tensor | None = None
    """[I, I]: the mean of x x^T. Half the Hessian of a row's squared output error, which all rows share."""
    magnitude: Tensor | None = None
    """[I]: the mean of |x|."""
    largest: Tensor | None = None
    """[I]: the greatest |x|."""


class StatisticsSum:
    """Adds up `Statistics` pack by pack."""

    def __init__(self, inputs: int, needs: Collection[Need]) -> None:
        self._tokens = 0
        self._hessian = torch.zeros(inputs, inputs) if "hessian" in needs else None
        self._magnitude = torch.zeros(inputs) if "magnitude" in needs else None
        self._largest = torch.zeros(inputs) if "largest" in needs else None

    def add(self, x: Tensor) -> None:
        """Adds inputs x [T, I] of any float dtype."""
        if not len(x):
            return
        x = x.detach().float()
        self._tokens += len(x)
        if self._hessian is not None:
            self._hessian = self._hessian.to(x.device).addmm_(x.T, x)
        if self._magnitude is not None:
            self._magnitude = self._magnitude.to(x.device) + x.abs().sum(0)
        if self._largest is not None:
            self._largest = torch.maximum(self._largest.to(x.device), x.abs().amax(0))

    def statistics(self) -> Statistics | None:
        """Returns the statistics; None where no token has come."""
        if not self._tokens:
            return None
        return Statistics(
            self._tokens,
            None if self._hessian is None else self._hessian / self._tokens,
            None if self._magnitude is None else self._magnitude / self._tokens,
            self._largest,
        )
