"""The product of linear layers with low-rank adapters, as one operation: LoRA (arXiv:2106.09685), DoRA (2402.09353).

Several layers over one x share it: A x is one product for all of them, x is kept once, and the gradient of x is one sum
made in place. The frozen weight is not an input of the operation, so autograd neither keeps a copy of it nor asks for
its gradient; a packed one is made dense when it is used, forward and backward, one at a time.

DoRA: y = m / |V| (V x), V = W + s B A, |V| the 2-norm of each row, taken as a constant unless `exact_norm` (the paper's
section 4.3). The norm needs no O x I temporary: |V|^2 = |W|^2 + 2 s sum(B * W A^T) + s^2 diag(B A A^T B^T), and |W|^2
does not change. Where inputs are cut over processes, so are these sums, and they are added up among them.

T tokens · O, I outputs and inputs of a layer · r its rank · R sum of ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.adapters.dropout import Dropout
from danlu.types import LinearLayer, Recomputed, ReduceGroup

_ROWS = 128


@dataclass(frozen=True)
class LowRankFactors:
    """What one layer's adapter brings: s B A, and for DoRA the magnitudes m."""

    a: Tensor  # [r, I]
    b: Tensor  # [O, r]
    scale: float
    magnitude: Tensor | None = None  # [O]
    weight_norm: Tensor | None = None  # [O] float32: |W|^2 by row, with magnitude
    exact_norm: bool = False
    tensor_group: ReduceGroup | None = None  # the processes among which I is cut; |W|^2 is of whole rows all the same


@dataclass(frozen=True)
class Branch:
    """One of the layers, and its adapter if it has one."""

    linear: LinearLayer
    factors: LowRankFactors | None


def products(
    x: Tensor, branches: Sequence[Branch], dropout: Dropout | None = None, recomputed: Recomputed | None = None
) -> tuple[Tensor, ...]:
    """x [T, I] through each layer -> [T, O] of each, in x's dtype.

    dropout: of x on its way into the low-rank paths, one mask for all of them.
    recomputed: how to make x again in the backward pass instead of keeping it.
    """
    call = _Call(tuple(branches), dropout if dropout is not None and dropout.active else None, recomputed)
    if not torch.is_grad_enabled():
        return tuple(one.y for one in _forward(x, call)[1])
    flat: list[Tensor | None] = []
    for branch in branches:
        factors = branch.factors
        flat.append(branch.linear.added_bias)
        flat += (None, None, None) if factors is None else (factors.a, factors.b, factors.magnitude)
    outputs: tuple[Tensor, ...] = _Products.apply(x, call, *flat)
    return outputs


@dataclass(frozen=True)
class _Call:
    branches: tuple[Branch, ...]
    dropout: Dropout | None
    recomputed: Recomputed | None


@dataclass
class _Made:
    """What the forward pass of one branch leaves: the output, and for DoRA what its gradient needs."""

    y: Tensor
    direction: _Direction | None = None


@dataclass
class _Direction:
    gain: Tensor  # [O] float32: m / |V|
    norm: Tensor  # [O] float32: |V|
    wa: Tensor  # [O, r] float32: W A^T, of whole rows with exact_norm
    gram: Tensor  # [r, r] float32: A A^T, of whole rows


def _forward(x: Tensor, call: _Call) -> tuple[Tensor, list[_Made]]:
    """U = A x of all branches [T, R], and what each branch makes."""
    u = (x if call.dropout is None else call.dropout(x)) @ _joined_a(call, x.dtype).t()
    made, start = [], 0
    for branch in call.branches:
        linear, factors = branch.linear, branch.factors
        if factors is None:
            made.append(_Made(linear.base(x)))
            continue
        rank = factors.a.shape[0]
        own = u[:, start : start + rank]
        start += rank
        bias = None if linear.added_bias is None else linear.added_bias.to(x.dtype)
        with linear.weight_in_workspace(x.dtype) as weight:
            direction = None if factors.magnitude is None else _direction(factors, weight)
            through = weight if direction is None else linear.scaled_rows(weight, direction.gain)
            y = F.linear(x, through, bias)
        y.addmm_(own, _scaled(factors.b * factors.scale, direction).to(x.dtype).t())
        made.append(_Made(y, direction))
    return u, made


def _scaled(rows: Tensor, direction: _Direction | None) -> Tensor:
    """B [O, r] with each row times DoRA's gain. So is W: fewer numbers than outputs, unless there are few tokens."""
    return rows if direction is None else rows * direction.gain.to(rows.dtype).unsqueeze(1)


def _joined_a(call: _Call, dtype: torch.dtype) -> Tensor:
    """All A one under the other, [R, I]."""
    parts = [branch.factors.a for branch in call.branches if branch.factors is not None]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)


def _direction(factors: LowRankFactors, weight: Tensor) -> _Direction:
    assert factors.magnitude is not None and factors.weight_norm is not None
    wide = factors.weight_norm.dtype
    a, b, scale = factors.a.to(wide), factors.b.to(wide), factors.scale
    wa = (weight @ factors.a.to(weight.dtype).t()).to(wide)
    gram = a @ a.t()
    if factors.tensor_group is not None and factors.exact_norm:
        wa, gram = _whole((wa, gram), factors.tensor_group)
    cross = (b * wa).sum(1)
    if factors.tensor_group is not None and not factors.exact_norm:
        cross, gram = _whole((cross, gram), factors.tensor_group)
    square = factors.weight_norm + 2 * scale * cross + scale**2 * ((b @ gram) * b).sum(1)
    norm = square.clamp_min_(torch.finfo(wide).tiny).sqrt_()  # a row of zeros has gain 0 / small = 0, not NaN
    return _Direction(factors.magnitude / norm, norm, wa, gram)


def _whole(parts: Sequence[Tensor], tensor_group: ReduceGroup) -> tuple[Tensor, ...]:
    """Sums over processes of what each has a part of, in one go."""
    flat = tensor_group.sum(torch.cat([part.flatten() for part in parts]))
    pieces = flat.split([part.numel() for part in parts])
    return tuple(piece.view_as(part) for piece, part in zip(pieces, parts, strict=True))


class _Products(torch.autograd.Function):
    """Inputs: x, the call, then bias, A, B and m of each branch (None where there is none)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, *flat: Tensor | None) -> tuple[Tensor, ...]:
        u, made = _forward(x, call)
        ctx.set_materialize_grads(False)
        # Without the tensors: what is kept outside of `save_for_backward`, recomputation and offload cannot let go of.
        ctx.call = replace(call, recomputed=None if call.recomputed is None else call.recomputed._replace(inputs=()))
        ctx.rows = None if call.dropout is None else call.dropout.state.token_keys(x)
        ctx.directions = [one.direction for one in made]
        kept: tuple[Tensor, ...] = ()
        if any(a is not None and a.requires_grad for a in flat[1::4]):
            kept = (x,) if call.recomputed is None else call.recomputed.inputs
        ctx.kept = len(kept)
        # DoRA's outputs lead back to V x; mostly what comes next keeps them anyway.
        outputs = [one.y if one.direction is not None else None for one in made]
        ctx.save_for_backward(*kept, u, *outputs, *flat)
        return tuple(one.y for one in made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        call: _Call = ctx.call
        saved = ctx.saved_tensors
        kept, u = saved[: ctx.kept], saved[ctx.kept]
        outputs = saved[ctx.kept + 1 : ctx.kept + 1 + len(grads)]
        flat = saved[ctx.kept + 1 + len(grads) :]
        wants_x, _, *wanted = ctx.needs_input_grad
        grad_x: Tensor | None = None
        grad_u = torch.zeros_like(u)
        results: list[Any] = [None] * len(flat)
        start = 0
        for index, (branch, grad, y, direction) in enumerate(
            zip(call.branches, grads, outputs, ctx.directions, strict=True)
        ):
            bias_at, a_at, b_at, m_at = range(4 * index, 4 * index + 4)
            bias, a, b, m = flat[bias_at : m_at + 1]
            factors = branch.factors
            own = slice(start, start + (0 if a is None else a.shape[0]))  # its columns of U
            start = own.stop
            if grad is None:
                continue
            if wanted[bias_at]:
                results[bias_at] = grad.sum(0).to(bias.dtype)
            if direction is not None:
                by_gain = _by_gain(grad, y, bias, direction)
                results[m_at] = (by_gain / direction.norm).to(m.dtype) if wanted[m_at] else None
            exact = factors if direction is not None and factors is not None and factors.exact_norm else None
            if wants_x or exact is not None:
                with branch.linear.weight_in_workspace(grad.dtype) as weight:
                    if exact is not None:
                        results[a_at], results[b_at] = _through_norm(exact, by_gain, direction, weight)
                    if wants_x:
                        through = weight if direction is None else branch.linear.scaled_rows(weight, direction.gain)
                        grad_x = grad @ through if grad_x is None else grad_x.addmm_(grad, through)
            if factors is not None:
                grad_u[:, own] = grad @ _scaled(b * factors.scale, direction).to(grad.dtype)
                if wanted[b_at]:
                    grad_b = (grad.t() @ u[:, own]).to(b.dtype).mul_(factors.scale)
                    results[b_at] = _sum(_scaled(grad_b, direction), results[b_at])
        if kept:
            x = kept[0] if call.recomputed is None else call.recomputed.function(*kept)
            x = x if call.dropout is None else call.dropout(x, ctx.rows)
            joined = grad_u.t() @ x  # [R, I]
            start = 0
            for a_at in range(1, len(flat), 4):
                if (a := flat[a_at]) is not None:
                    part = joined[start : start + a.shape[0]]
                    start += a.shape[0]
                    results[a_at] = _sum(part.to(a.dtype), results[a_at]) if wanted[a_at] else None
        if wants_x:
            grad_x = _add_low_rank(grad_x, grad_u, _joined_a(call, grad_u.dtype), call.dropout, ctx.rows)
        return grad_x, None, *results


def _by_gain(grad: Tensor, y: Tensor, bias: Tensor | None, direction: _Direction) -> Tensor:
    """[O] gradient of DoRA's gain m / |V|: the sum over tokens of grad * V x, with V x = (y - bias) / gain."""
    total = torch.zeros_like(direction.gain)
    for some_grad, some_y in zip(grad.split(_ROWS), y.split(_ROWS), strict=True):  # a few rows, which caches hold
        if bias is not None:
            some_y = some_y - bias.to(y.dtype)
        total += (some_grad * some_y).sum(0, dtype=total.dtype)
    # A row of zeros in W has gain 0, and V x = 0 there.
    return torch.where(direction.gain == 0, 0.0, total / direction.gain)


def _through_norm(
    factors: LowRankFactors, by_gain: Tensor, direction: _Direction, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """What DoRA's A and B get through |V|, with gain = m / |V| and |V|^2 as at the top of this file.

    Where inputs are cut, each process has a part of `by_gain`. B is whole on each and gets its gradient in parts, of
    which this is one; columns of A are on one alone, and get all of theirs there.
    """
    a, b, scale = factors.a, factors.b, factors.scale
    share = (-by_gain * direction.gain / direction.norm.square()).to(a.dtype).unsqueeze(1)  # d|V|^2 / 2 of each row
    grad_b = share * (scale * direction.wa.to(a.dtype) + scale**2 * (b @ direction.gram.to(a.dtype)))
    shared = (share if factors.tensor_group is None else factors.tensor_group.sum(share.clone())) * b  # [O, r]
    grad_a = scale * (shared.t() @ weight.to(a.dtype)) + scale**2 * (shared.t() @ b @ a)
    return grad_a, grad_b


def _sum(one: Tensor, other: Tensor | None) -> Tensor:
    return one if other is None else other.add_(one)


def _add_low_rank(
    grad_x: Tensor | None, grad_u: Tensor, joined_a: Tensor, dropout: Dropout | None, rows: Tensor | None
) -> Tensor:
    if dropout is not None:
        through = dropout(grad_u @ joined_a, rows)
        return through if grad_x is None else grad_x.add_(through)
    return grad_u @ joined_a if grad_x is None else grad_x.addmm_(grad_u, joined_a)
