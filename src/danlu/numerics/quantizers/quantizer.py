"""The protocol of quantizers of a matrix, and the one that looks at no data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.numerics.format import Format, Scaled, encode
from danlu.numerics.quantizers.statistics import Need, Statistics


class Quantizer(Protocol):
    """Finds the codes of a linear layer's weight."""

    @property
    def needs(self) -> frozenset[Need]:
        """The statistics that `solve` reads."""
        ...

    def solve(self, weight: Tensor, statistics: Statistics, form: Format) -> Scaled:
        """Quantizes weight [O, I] of any float dtype, for inputs with these statistics.

        Raises ModelError for statistics that no codes can be found with.
        """
        ...


@dataclass(frozen=True)
class Nearest:
    """Rounds each number to the nearest one, whatever the inputs are."""

    needs: ClassVar[frozenset[Need]] = frozenset()

    def solve(self, weight: Tensor, statistics: Statistics, form: Format) -> Scaled:
        """See `Quantizer.solve`."""
        return encode(weight, form)


def check_finite(weight: Tensor, where: str) -> None:
    """Raises ModelError for a weight with NaN or infinity."""
    if not bool(torch.isfinite(weight).all()):
        raise ModelError(f"{where}: holds NaN or infinite values, which no format has. Use a sound model")
