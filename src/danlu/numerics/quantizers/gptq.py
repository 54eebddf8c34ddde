"""GPTQ (arXiv:2210.17323): columns are rounded one by one, and what a column loses is made good by the next ones.

With H the mean of x x^T over the inputs, U the upper Cholesky factor of its inverse: column j is rounded to q_j, and
column k > j changes by -(w_j - q_j) U[j, k] / U[j, j]. Within a block of columns the changes are made at once, behind
it by one product for all columns of the block.

O, I outputs and inputs · B columns of a block
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.numerics.format import Format, Scaled, encode, encode_as
from danlu.numerics.quantizers.statistics import Need, Statistics

BLOCK_COLUMNS = 128
_DAMPING_GROWTH = 10.0
_DAMPING_TRIES = 5
_LEAST_DAMPING = 1e-6
"""The damping that grows where none was asked for."""


@dataclass(frozen=True)
class Gptq:
    """GPTQ's solution for a matrix.

    Inputs that were zero in all of calibration have no part in it: their columns are rounded to the nearest. (GPTQ's
    own code makes them zero; but inputs that calibration did not show may come later.)
    """

    act_order: bool | Literal["group"] = True
    """True: columns in the order of their inputs' mean square, the largest first: few later columns have to bear what
    these lose. Groups stay those of consecutive columns, with the scales of the original weight ("static groups").
    "group": groups in the order of their largest one, and columns in this order within each (group-aware reordering,
    arXiv:2505.14638), so that a group's scale is found when its turn comes."""
    damping: float = 0.01
    """The multiple of the Hessian's mean diagonal that is added to it; ten times as much, up to five times, where it
    still has no Cholesky factor in float64."""

    needs: ClassVar[frozenset[Need]] = frozenset({"hessian"})

    def solve(self, weight: Tensor, statistics: Statistics, form: Format) -> Scaled:
        """See `Quantizer.solve`. The scales of blocks of more than one row, and those of a format with a scale of the
        whole tensor, are the original weight's too; of others a group's are those of its columns as earlier ones have
        changed them, unless `act_order` is True.

        Raises ModelError where the Hessian is not finite, or not positive definite even with the largest damping.
        """
        assert statistics.hessian is not None, "GPTQ needs the Hessian"
        columns = weight.shape[1]
        factor_input = statistics.hessian.to(torch.float64, copy=True)
        columns_of_block = form.block_of(*weight.shape)[1]
        order = None
        if self.act_order:
            wide = columns_of_block if self.act_order == "group" else columns
            order = _descending(factor_input.diagonal(), wide)
            factor_input = factor_input[order][:, order]
        factor = _inverse_factor(factor_input, self.damping).float()
        grows = self.act_order is not True and form.block[0] == 1 and form.scale != "e4m3"
        grid = encode(weight, form)
        own = weight.float().clone() if order is None else weight.float()[:, order]
        rounded = _Columns(grid, order)
        for start in range(0, columns, BLOCK_COLUMNS):
            stop = min(start + BLOCK_COLUMNS, columns)
            errors = torch.zeros(len(own), stop - start, device=own.device)  # [O, B]
            for column in range(start, stop):
                if grows and column and column % columns_of_block == 0:
                    # Columns of this group behind the block have not got the block's changes yet.
                    end = min(column + columns_of_block, columns)
                    group = own[:, column:end].clone()
                    if end > stop:
                        group[:, stop - column :] -= errors[:, : column - start] @ factor[start:column, stop:end]
                    rounded.rescale(column, group)
                value = own[:, column]
                error = (value - rounded.round(column, value)) / factor[column, column]
                own[:, column + 1 : stop] -= error.unsqueeze(1) * factor[column, column + 1 : stop]
                errors[:, column - start] = error
            own[:, stop:] -= errors @ factor[start:stop, stop:]
        return rounded.scaled


def _descending(importance: Tensor, wide: int) -> Tensor:
    """Returns the places of `importance` [I] by groups of `wide` neighbours, the one with the largest number first, and
    within a group from its largest to its least. The earlier one of equal numbers comes first; a shorter group at the
    end stays there."""
    count = len(importance) // wide
    groups = importance[: count * wide].unflatten(0, (count, wide))
    within = groups.argsort(dim=1, descending=True, stable=True)
    first = groups.amax(1).argsort(descending=True, stable=True)
    places = within + wide * torch.arange(count, device=importance.device).unsqueeze(1)
    rest = count * wide + importance[count * wide :].argsort(descending=True, stable=True)
    return torch.cat((places[first].flatten(), rest))


class _Columns:
    """The codes of a matrix, which are found column by column. order: the place in the matrix of each column."""

    def __init__(self, grid: Scaled, order: Tensor | None) -> None:
        self.scaled = replace(grid, codes=grid.codes.clone(), scales=grid.scales.clone())
        if grid.zeros is not None:
            self.scaled = replace(self.scaled, zeros=grid.zeros.clone())
        self._rows = grid.shape[0]
        self._places = range(grid.shape[1]) if order is None else order.tolist()
        high, self._wide = grid.format.block_of(*grid.shape)
        self._row_blocks = torch.arange(self._rows, device=grid.codes.device) // high
        self._column_format = replace(grid.format, block=(1, 1))

    def rescale(self, column: int, group: Tensor) -> None:
        """Gives the group that begins at a column the scales and zeros of `group` [O, columns]."""
        own = encode(group, replace(self.scaled.format, block=(1, 0)))
        number = self._places[column] // self._wide
        self.scaled.scales[:, number : number + 1] = own.scales
        if self.scaled.zeros is not None and own.zeros is not None:
            self.scaled.zeros[:, number : number + 1] = own.zeros

    def round(self, column: int, value: Tensor) -> Tensor:
        """Keeps the codes of the nearest numbers to a column's value [O], and returns these numbers [O] in float32."""
        place = self._places[column]
        block = place // self._wide
        scales = self.scaled.scales[:, block][self._row_blocks].unsqueeze(1)
        zeros = self.scaled.zeros
        zeros = None if zeros is None else zeros[:, block][self._row_blocks].unsqueeze(1)
        grid = Scaled(value, scales, self._column_format, zeros, self.scaled.tensor_scale)
        of_column = encode_as(value.unsqueeze(1), grid)
        self.scaled.codes[:, place] = of_column.codes[:, 0]
        return of_column.decode()[:, 0]


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Returns the upper Cholesky factor of the inverse of a damped Hessian [I, I] float64, which is changed."""
    diagonal = hessian.diagonal()
    if not bool(torch.isfinite(hessian).all()):
        raise ModelError("the inputs of calibration are not finite: use a sound model, or calibrate in float32")
    unit = float(diagonal.mean())
    dead = diagonal == 0
    if unit == 0:
        return torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    original = diagonal.clone()
    for _ in range(_DAMPING_TRIES + 1):
        diagonal.copy_((original + damping * unit).where(~dead, 1.0))
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
        tried, damping = damping, max(damping * _DAMPING_GROWTH, _LEAST_DAMPING)
    raise ModelError(
        f"the Hessian of calibration has no Cholesky factor even with a damping of {tried:g}. "
        "Calibrate with more tokens, or raise the damping"
    )
