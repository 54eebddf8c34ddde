"""AWQ (arXiv:2306.00978): inputs that are large get finer steps by factors on the weight's columns, and clipping.

The factors are searched by the error of a module's output, which needs the module: `assembly` does that with
`candidate_factors`. Here are the factors, and the search of each group's largest number by the output of its row over
all tokens of calibration. (AWQ's own code takes the output of the group alone, 512 tokens and ten bounds, and leaves
queries and keys out.)

O, I outputs and inputs · G groups of inputs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from danlu.numerics.format import Format, Scaled, encode, encode_as
from danlu.numerics.quantizers.statistics import Need, Statistics

RATIOS = 20
_LEAST_FACTOR = 1e-4
_LEAST_SHARE = 1e-4
_CLIP_STEPS = 20
_LARGEST_CUT = 0.5
_PASSES = 2


def candidate_factors(magnitude: Tensor, share: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Yields (r, factors [I] float32): ones first, and then magnitude^r / share^(1 - r), over the root of its extremes'
    product, for r = 0, 1/19, .., 1.

    magnitude [I]: the mean of |x|. share [I]: see `weight_share`. The paper has no weights in it (share = 1); AutoAWQ
    and llm-compressor do ("duo scaling").
    """
    magnitude = magnitude.float().clamp_min(_LEAST_FACTOR)
    yield 0.0, torch.ones_like(magnitude)
    for step in range(RATIOS):
        ratio = step / (RATIOS - 1)
        factors = (magnitude.pow(ratio) / (share.pow(1 - ratio) + _LEAST_SHARE)).clamp_min(_LEAST_FACTOR)
        yield ratio, factors / (factors.max() * factors.min()).sqrt()


def weight_share(weights: Sequence[Tensor], form: Format) -> Tensor:
    """Returns the mean over all rows of |w| divided by the largest |w| of its block of the row, [I] float32.

    weights: [O, I], or [E, O, I] of experts.
    """
    total, rows = torch.zeros(weights[0].shape[-1], device=weights[0].device), 0
    for weight in weights:
        size = weight.float().abs().flatten(0, -2)
        wide = form.block_of(*size.shape)[1]
        groups = pad(size, (0, -size.shape[1] % wide)).unflatten(1, (-1, wide))  # [O, G, wide]
        shares = groups / groups.amax(2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        total += shares.flatten(1)[:, : len(total)].sum(0)
        rows += len(size)
    return total / rows


@dataclass(frozen=True)
class Awq:
    """Rounding to the nearest in groups that are clipped where that makes the error of the row's output less.

    Each row's group keeps 100 %, 97.5 %, .., 50 % of its largest magnitude: what loses the least over the inputs of
    calibration, with the row's other groups as they are rounded then. Formats with other blocks than groups of inputs
    are not clipped.
    """

    clip: bool = True

    needs: ClassVar[frozenset[Need]] = frozenset({"hessian"})

    def solve(self, weight: Tensor, statistics: Statistics, form: Format) -> Scaled:
        """See `Quantizer.solve`."""
        weight = weight.float()
        if self.clip and form.block[0] == 1 and form.scale != "e4m3" and statistics.hessian is not None:
            return encode_as(weight, encode(clipped(weight, statistics.hessian, form), form))
        return encode(weight, form)


def clipped(weight: Tensor, hessian: Tensor, form: Format) -> Tensor:
    """Returns weight [O, I] float32 with each group within the bounds of which scales and zeros lose the least.

    hessian [I, I]: the mean of x x^T, with which a row's loss is d^T H d for its change d. Bounds are found group by
    group and `_PASSES` times over, from rounding without any, so that a row's loss never grows: what a group adds to
    the outputs may take away what others do. The change is that of the weight itself, which is rounded with these
    scales and zeros: integers of both signs have one code below the bound.
    """
    hessian = hessian.float()
    columns, wide = weight.shape[1], form.block_of(*weight.shape)[1]
    result, change = weight.clone(), encode(weight, form).decode() - weight
    for _ in range(_PASSES):
        for start in range(0, columns, wide):
            group = slice(start, start + wide)
            own = hessian[group, group]
            others = change @ hessian[:, group] - change[:, group] @ own
            result[:, group], change[:, group] = _clipped_group(weight[:, group], own, others, form)
    return result


def _clipped_group(weight: Tensor, hessian: Tensor, others: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Returns one group of all rows, weight [O, group], within its best bounds, and its change by rounding.

    hessian [group, group]. others [O, group]: the product of the Hessian's columns of the group with the change of the
    rows' other groups.
    """
    largest = weight.abs().amax(1, keepdim=True)
    best_bound, best_change = largest.clone(), torch.zeros_like(weight)
    least = torch.full_like(largest, torch.inf)
    for step in range(_CLIP_STEPS + 1):
        bound = largest * (1 - _LARGEST_CUT * step / _CLIP_STEPS)
        change = encode_as(weight, encode(weight.clamp(-bound, bound), form)).decode() - weight
        error = ((change @ hessian + 2 * others) * change).sum(1, keepdim=True)
        is_better = error < least
        least, best_bound = error.where(is_better, least), bound.where(is_better, best_bound)
        best_change = change.where(is_better, best_change)
    return weight.clamp(-best_bound, best_bound), best_change
