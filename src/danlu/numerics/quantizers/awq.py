"""AWQ (arXiv:2306.00978): inputs that are large get finer steps by factors on the weight's columns, and clipping.

The factors are searched by the error of a module's output, which needs the module: `assembly` does that with
`candidate_factors`. Here are the factors, and the search of each group's largest number by the group's own output.

O, I outputs and inputs · G groups of inputs · N tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from danlu.numerics.format import Format, Scaled, encode
from danlu.numerics.quantizers.statistics import Need, Statistics

RATIOS = 20
_LEAST_FACTOR = 1e-4
_CLIP_STEPS = 20
_LARGEST_CUT = 0.5
_TILE_ELEMENTS = 1 << 24
"""The most products of a tile of rows in the search for clips: 64 MiB in float32."""


def candidate_factors(magnitude: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Yields (r, magnitude^r over the root of its extremes' product), [I] float32, for r = 0, 1/20, .., 19/20.

    magnitude [I]: the mean of |x|. For r = 0 all factors are 1.
    """
    for step in range(RATIOS):
        ratio = step / RATIOS
        factors = magnitude.float().clamp_min(_LEAST_FACTOR).pow(ratio).clamp_min(_LEAST_FACTOR)
        yield ratio, factors / (factors.max() * factors.min()).sqrt()


@dataclass(frozen=True)
class Awq:
    """Rounding to the nearest in groups that are clipped where that makes the group's output error less.

    Each row's group keeps 100 %, 97.5 %, .., 52.5 % of its largest magnitude: what loses the least over the sample of
    inputs. Formats with other blocks than groups of inputs are not clipped.
    """

    clip: bool = True

    needs: ClassVar[frozenset[Need]] = frozenset({"sample", "magnitude"})

    def solve(self, weight: Tensor, statistics: Statistics, form: Format) -> Scaled:
        """See `Quantizer.solve`."""
        weight = weight.float()
        if self.clip and form.block[0] == 1 and form.scale != "e4m3" and statistics.sample is not None:
            weight = clipped(weight, statistics.sample, form)
        return encode(weight, form)


def clipped(weight: Tensor, sample: Tensor, form: Format) -> Tensor:
    """Returns weight [O, I] float32 with each group within the bounds that lose the least over inputs [N, I]."""
    columns = weight.shape[1]
    wide = form.block_of(*weight.shape)[1]
    result = weight.clone()
    step = max(1, _TILE_ELEMENTS // max(1, len(sample)))
    for start in range(0, columns, wide):
        x = sample[:, start : start + wide].float()  # [N, group]
        for row in range(0, len(weight), step):
            part = result[row : row + step, start : start + wide]
            part.copy_(_clipped_group(part, x, form))
    return result


def _clipped_group(weight: Tensor, x: Tensor, form: Format) -> Tensor:
    """Returns one group of all rows, weight [O, group], within its best bounds for inputs x [N, group]."""
    wanted = weight @ x.T  # [O, N]
    largest = weight.abs().amax(1, keepdim=True)
    best_bound = largest.clone()
    least = torch.full_like(largest, torch.inf)
    for cut in range(int(_LARGEST_CUT * _CLIP_STEPS)):
        bound = largest * (1 - cut / _CLIP_STEPS)
        rounded = encode(weight.clamp(-bound, bound), form).decode()
        error = (rounded @ x.T - wanted).square().mean(1, keepdim=True)
        is_better = error < least
        least, best_bound = error.where(is_better, least), bound.where(is_better, best_bound)
    return weight.clamp(-best_bound, best_bound)
