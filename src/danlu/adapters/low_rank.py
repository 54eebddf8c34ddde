"""The product of linear layers with low-rank adapters, as one operation: LoRA (arXiv:2106.09685), DoRA (2402.09353).

Several layers over one x share the work: A x is one product for all of them, x is saved once, and the gradient of x is
one sum, accumulated in place. The frozen weight is not an input of the operation, so autograd neither saves a copy of
it nor asks for its gradient; a quantized one is dequantized when it is used, forward and backward, one at a time.

DoRA: y = m / |V| (V x), V = W + s B A, |V| the 2-norm of each row, taken as a constant unless `exact_norm` (the paper's
section 4.3). The norm needs no O x I temporary: |V|^2 = |W|^2 + 2 s sum(B * W A^T) + s^2 diag(B A A^T B^T), and |W|^2
does not change. Where tensor parallelism cuts the inputs, each rank has one term of these sums, which are all-reduced.

T tokens · O, I outputs and inputs of a layer · r its rank · R sum of ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.adapters.adapter import saved_inputs
from danlu.adapters.dropout import Dropout
from danlu.core.layer_types import LinearLayer, Recomputed, ReduceGroup
from danlu.core.weight_gradients import Deferral, deferral_of, made_or_deferred

# Rows of a [T, O] product that are reduced at a time, few enough for a CPU's caches.
_ROWS_PER_BLOCK = 128


@dataclass(frozen=True)
class LowRankFactors:
    """The adapter of one layer: s B A, and for DoRA the magnitudes m."""

    a: Tensor  # [r, I]
    b: Tensor  # [O, r]
    scale: float
    magnitude: Tensor | None = None  # [O]
    base_row_squares: Tensor | None = None  # [O] float32: |W|^2 of each row, with magnitude
    exact_norm: bool = False
    tensor_group: ReduceGroup | None = None  # the ranks among which I is cut; |W|^2 is of whole rows all the same


@dataclass(frozen=True)
class Branch:
    """One of the layers that share x, and its adapter if it has one."""

    linear: LinearLayer
    factors: LowRankFactors | None


def low_rank_linears(
    x: Tensor, branches: Sequence[Branch], dropout: Dropout | None = None, recomputed: Recomputed | None = None
) -> tuple[Tensor, ...]:
    """x [T, I] through each layer -> [T, O] of each, in x's dtype.

    dropout: of x on its way into the low-rank paths, one mask for all of them.
    recomputed: how to make x again in the backward pass instead of keeping it.
    """
    call = _Call(tuple(branches), dropout if dropout is not None and dropout.active else None, recomputed)
    if not torch.is_grad_enabled():
        return tuple(y for y, _ in _forward(x, call)[1])
    flat: list[Tensor | None] = []
    for branch in branches:
        factors = branch.factors
        flat.append(branch.linear.added_bias)
        flat += (None, None, None) if factors is None else (factors.a, factors.b, factors.magnitude)
    deferral = deferral_of(*flat[1::4], *flat[2::4])
    if deferral is not None:
        for at, tensor in enumerate(flat):
            if at % 4 in (1, 2) and tensor is not None and tensor.requires_grad:
                flat[at] = deferral.anchor
    outputs: tuple[Tensor, ...] = _LowRankLinears.apply(x, call, deferral, *flat)
    return outputs


@dataclass(frozen=True)
class _Call:
    """The arguments of one call that are no tensors."""

    branches: tuple[Branch, ...]
    dropout: Dropout | None
    recomputed: Recomputed | None


@dataclass
class _Direction:
    """DoRA's V = W + s B A by its norms, and the products that they were computed from."""

    gain: Tensor  # [O] float32: m / |V|
    norm: Tensor  # [O] float32: |V|
    wa: Tensor  # [O, r] float32: W A^T, of whole rows with exact_norm
    gram: Tensor  # [r, r] float32: A A^T, of whole rows


def _forward(x: Tensor, call: _Call) -> tuple[Tensor, list[tuple[Tensor, _Direction | None]]]:
    """Computes U = A x of all branches, [T, R], and for each branch its output and, with DoRA, the values for its
    gradient.
    """
    u = (x if call.dropout is None else call.dropout(x)) @ _joined_a(call, x.dtype).t()
    results: list[tuple[Tensor, _Direction | None]] = []
    start = 0
    for branch in call.branches:
        linear, factors = branch.linear, branch.factors
        if factors is None:
            results.append((linear.base(x), None))
            continue
        rank = factors.a.shape[0]
        own_u = u[:, start : start + rank]  # [T, r], the columns of this branch
        start += rank
        bias = None if linear.added_bias is None else linear.added_bias.to(x.dtype)
        if factors.magnitude is None and linear.multiplies_codes(x):
            direction, y = None, linear.base(x)
        else:
            with linear.weight_in_workspace(x.dtype) as weight:
                direction = None if factors.magnitude is None else _direction(factors, weight)
                effective = weight if direction is None else linear.scaled_rows(weight, direction.gain)
                y = _base_product(x, effective, bias, linear)
        # In place: y is this operation's own output, and no [T, O] temporary is made.
        y.addmm_(own_u, _scaled(factors.b * factors.scale, direction).to(x.dtype).t())
        results.append((y, direction))
    return u, results


def _base_product(x: Tensor, weight: Tensor, bias: Tensor | None, linear: LinearLayer) -> Tensor:
    """x [T, I] times a layer's weight [O, I] -> [T, O], a new tensor."""
    if linear.own_arithmetic is None:
        return F.linear(x, weight, bias)
    (y,), _ = linear.own_arithmetic.forward(x, (weight,))
    return y if bias is None else y.add_(bias)


def _add_base_gradient(grad_x: Tensor | None, grad: Tensor, weight: Tensor, linear: LinearLayer) -> Tensor:
    """The gradient of x through a layer's weight [O, I], added to that through other layers."""
    if linear.own_arithmetic is None:
        return grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
    own = linear.own_arithmetic.input_gradient(grad, weight)
    return own if grad_x is None else grad_x.add_(own)


def _scaled(rows: Tensor, direction: _Direction | None) -> Tensor:
    """B [O, r], each row times DoRA's gain m / |V|; B itself for LoRA.

    Scaling the rows of W and B, not the outputs [T, O], touches fewer numbers unless there are few tokens.
    """
    return rows if direction is None else rows * direction.gain.to(rows.dtype).unsqueeze(1)


def _joined_a(call: _Call, dtype: torch.dtype) -> Tensor:
    """The A of all branches, one under the other, [R, I]."""
    parts = [branch.factors.a for branch in call.branches if branch.factors is not None]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)


def _direction(factors: LowRankFactors, weight: Tensor) -> _Direction:
    """The norms of DoRA's V by the formula at the top of this file; weight [O, I] in the type of activations."""
    assert factors.magnitude is not None and factors.base_row_squares is not None
    wide = factors.base_row_squares.dtype
    a, b, scale = factors.a.to(wide), factors.b.to(wide), factors.scale
    wa = (weight @ factors.a.to(weight.dtype).t()).to(wide)
    gram = a @ a.t()
    if factors.tensor_group is not None and factors.exact_norm:
        wa, gram = _all_reduce((wa, gram), factors.tensor_group)
    cross = (b * wa).sum(1)
    if factors.tensor_group is not None and not factors.exact_norm:
        cross, gram = _all_reduce((cross, gram), factors.tensor_group)
    # |V|^2 of each row by the three terms above; A A^T is r x r, so no O x I matrix is needed for the last.
    square = factors.base_row_squares + 2 * scale * cross + scale**2 * ((b @ gram) * b).sum(1)
    norm = square.clamp_min_(torch.finfo(wide).tiny).sqrt_()  # a row of zeros has gain 0 / small = 0, not NaN
    return _Direction(factors.magnitude / norm, norm, wa, gram)


def _all_reduce(terms: Sequence[Tensor], tensor_group: ReduceGroup) -> tuple[Tensor, ...]:
    """The sums over the tensor ranks of several tensors, in one collective."""
    flat = tensor_group.sum(torch.cat([term.flatten() for term in terms]))
    sums = flat.split([term.numel() for term in terms])
    return tuple(total.view_as(term) for total, term in zip(sums, terms, strict=True))


class _LowRankLinears(torch.autograd.Function):
    """Inputs: x [T, I], the call, then bias, A, B and m of each branch, or None. Outputs: y [T, O] of each branch.

    With a deferral its anchor stands for each A and B that is trained, and the queue computes their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, call: _Call, deferral: Deferral | None, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        u, results = _forward(x, call)
        flat = _with_factors(inputs, call)
        ctx.set_materialize_grads(False)
        # Without the tensors: recomputation and offload can only free what `save_for_backward` was given.
        ctx.call = replace(call, recomputed=None if call.recomputed is None else call.recomputed._replace(inputs=()))
        # By the time of the backward pass the dropout state may be that of another micro-batch.
        ctx.token_keys = None if call.dropout is None else call.dropout.token_keys(x)
        ctx.directions = [direction for _, direction in results]
        ctx.deferral = deferral
        trains_a = any(a is not None and a.requires_grad for a in flat[1::4])
        saved_x = saved_inputs(x, call.recomputed) if trains_a else ()
        ctx.saved_x_count = len(saved_x)
        # V x, for the gradient of DoRA's magnitudes, is computed from y; mostly the next operation saves y anyway.
        outputs = [None if direction is None else y for y, direction in results]
        ctx.save_for_backward(*saved_x, u, *outputs, *flat)
        return tuple(y for y, _ in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        call: _Call = ctx.call
        saved, count = ctx.saved_tensors, ctx.saved_x_count
        saved_x, u = saved[:count], saved[count]
        outputs = saved[count + 1 : count + 1 + len(grads)]
        flat = saved[count + 1 + len(grads) :]
        wants_x, _, _, *wanted = ctx.needs_input_grad
        grad_x: Tensor | None = None
        grad_u = torch.zeros_like(u)  # [T, R]; zero for branches with an output that got no gradient
        results: list[Any] = [None] * len(flat)
        by_norm: list[Tensor | None] = [None] * len(flat)  # gradients of A and B through DoRA's norms
        trained_a: dict[int, tuple[Tensor, slice]] = {}  # by its place, and its rows among those of all
        start = 0
        for index, (branch, grad, y, direction) in enumerate(
            zip(call.branches, grads, outputs, ctx.directions, strict=True)
        ):
            bias_at, a_at, b_at, m_at = range(4 * index, 4 * index + 4)
            bias, a, b, m = flat[bias_at : m_at + 1]
            factors = branch.factors
            columns = slice(start, start + (0 if a is None else a.shape[0]))  # of U, this branch's
            start = columns.stop
            if factors is not None and wanted[a_at]:
                trained_a[a_at] = factors.a, columns
            if grad is None:
                continue
            if wanted[bias_at]:
                results[bias_at] = grad.sum(0).to(bias.dtype)
            if direction is not None:
                by_gain = _by_gain(grad, y, bias, direction)
                results[m_at] = (by_gain / direction.norm).to(m.dtype) if wanted[m_at] else None
            through_norm = factors if direction is not None and factors is not None and factors.exact_norm else None
            if wants_x or through_norm is not None:
                with branch.linear.weight_in_workspace(grad.dtype) as weight:
                    if through_norm is not None:
                        by_norm[a_at], by_norm[b_at] = _through_norm(through_norm, by_gain, direction, weight)
                    if wants_x:
                        # `scaled_rows` may overwrite the weight in the workspace, so it comes after its last other use.
                        effective = weight if direction is None else branch.linear.scaled_rows(weight, direction.gain)
                        grad_x = _add_base_gradient(grad_x, grad, effective, branch.linear)
            if factors is not None:
                # The gradient of A x of this branch; those of A and x follow below, for all branches at once.
                grad_u[:, columns] = grad @ _scaled(b * factors.scale, direction).to(grad.dtype)
                if wanted[b_at]:
                    make_b = partial(_gradient_of_b, b.dtype, factors.scale, direction, by_norm[b_at])
                    deferral = None if ctx.deferral is None else ctx.deferral.only(factors.b)
                    (results[b_at],) = made_or_deferred(deferral, make_b, grad, u[:, columns])
        if saved_x:
            x = saved_x[0] if call.recomputed is None else call.recomputed.function(*saved_x)
            parts = [_RowsOfA(rows, a.dtype, by_norm[at]) for at, (a, rows) in trained_a.items()]
            make_a = partial(_gradients_of_a, parts, call.dropout, ctx.token_keys)
            deferral = None if ctx.deferral is None else ctx.deferral.only(*(a for a, _ in trained_a.values()))
            for at, grad_a in zip(trained_a, made_or_deferred(deferral, make_a, grad_u, x), strict=True):
                results[at] = grad_a
        if wants_x:
            grad_x = _add_low_rank(grad_x, grad_u, _joined_a(call, grad_u.dtype), call.dropout, ctx.token_keys)
        return grad_x, None, None, *results


def _with_factors(flat: Sequence[Tensor | None], call: _Call) -> list[Tensor | None]:
    """The tensor inputs of `_LowRankLinears` with A and B themselves where an anchor stood for them."""
    tensors = list(flat)
    for index, branch in enumerate(call.branches):
        if branch.factors is not None:
            tensors[4 * index + 1 : 4 * index + 3] = branch.factors.a, branch.factors.b
    return tensors


def _gradient_of_b(
    dtype: torch.dtype, scale: float, direction: _Direction | None, by_norm: Tensor | None, grad: Tensor, u: Tensor
) -> tuple[Tensor]:
    """grad [T, O] and u = A x [T, r] -> [O, r], with B's gradient through DoRA's norm added."""
    grad_b = (grad.t() @ u).to(dtype).mul_(scale)
    return (_added(_scaled(grad_b, direction), by_norm),)


class _RowsOfA(NamedTuple):
    """The A of one branch among those of all, [R, I]."""

    rows: slice
    dtype: torch.dtype
    by_norm: Tensor | None  # [r, I], what it gets through DoRA's norm


def _gradients_of_a(
    parts: Sequence[_RowsOfA], dropout: Dropout | None, token_keys: Tensor | None, grad_u: Tensor, x: Tensor
) -> list[Tensor]:
    """grad_u [T, R] and x [T, I] -> [r, I] of each part."""
    grad_joined_a = grad_u.t() @ (x if dropout is None else dropout(x, token_keys))  # [R, I]
    return [_added(grad_joined_a[part.rows].to(part.dtype), part.by_norm) for part in parts]


def _by_gain(grad: Tensor, y: Tensor, bias: Tensor | None, direction: _Direction) -> Tensor:
    """[O] gradient of DoRA's gain m / |V|: the sum over tokens of grad * V x, with V x = (y - bias) / gain."""
    total = torch.zeros_like(direction.gain)
    for grad_block, y_block in zip(grad.split(_ROWS_PER_BLOCK), y.split(_ROWS_PER_BLOCK), strict=True):
        if bias is not None:
            y_block = y_block - bias.to(y.dtype)
        total += (grad_block * y_block).sum(0, dtype=total.dtype)
    # A row of zeros in W has gain 0, and V x = 0 there.
    return torch.where(direction.gain == 0, 0.0, total / direction.gain)


def _through_norm(
    factors: LowRankFactors, by_gain: Tensor, direction: _Direction, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of DoRA's A and B through |V|, with gain = m / |V| and |V|^2 as at the top of this file.

    Where tensor parallelism cuts the inputs, each rank has one term of `by_gain`. B is whole on every rank, and this is
    one term of its gradient; each column of A is on one rank alone, which needs the whole sum.
    """
    a, b, scale = factors.a, factors.b, factors.scale
    by_square = (-by_gain * direction.gain / direction.norm.square()).to(a.dtype).unsqueeze(1)  # by |V|^2 / 2, [O, 1]
    grad_b = by_square * (scale * direction.wa.to(a.dtype) + scale**2 * (b @ direction.gram.to(a.dtype)))
    whole = by_square if factors.tensor_group is None else factors.tensor_group.sum(by_square.clone())
    rows = whole * b  # [O, r]
    grad_a = scale * (rows.t() @ weight.to(a.dtype)) + scale**2 * (rows.t() @ b @ a)
    return grad_a, grad_b


def _added(term: Tensor, total: Tensor | None) -> Tensor:
    """`total` plus `term`, in place; `term` where there is no total yet."""
    return term if total is None else total.add_(term)


def _add_low_rank(
    grad_x: Tensor | None, grad_u: Tensor, joined_a: Tensor, dropout: Dropout | None, token_keys: Tensor | None
) -> Tensor:
    """The gradient of x through the low-rank paths, added to that through the base: grad_u [T, R], joined_a [R, I]."""
    if dropout is not None:
        low_rank_grad = dropout(grad_u @ joined_a, token_keys)
        return low_rank_grad if grad_x is None else grad_x.add_(low_rank_grad)
    return grad_u @ joined_a if grad_x is None else grad_x.addmm_(grad_u, joined_a)
