"""The gated delta rule (Gated Delta Networks, arXiv:2412.06464): in chunks, forward and backward, and token by token.

Each head has a state S, which reads as a map from keys to values. A token lets it decay, then corrects its value for
the token's key, and reads it with the query:

    S <- exp(g) S        S <- S + k (beta (v - S^T k))^T        out = S^T q / sqrt(K)

with q and k divided by their lengths. Within a chunk the corrections depend on each other by a triangular system (the
UT transform, section 3.3 there): with G the sum of g within the chunk, D_ij = exp(G_i - G_j) for j <= i,
A = 1 + tril(beta (k k^T) D, -1), W = A^-1 (beta exp(G) k) and U = A^-1 (beta v),

    V = U - W S          out = exp(G) q S + ((q k^T) D) V          S' = exp(G_C) S + (exp(G_C - G) k)^T V

so that two products a chunk are all that has to wait for the chunk before. No exponent is above 0.

The backward pass keeps its inputs and the state at the beginning of each chunk, and makes the rest again.

T tokens · N chunks · C tokens of a chunk · h heads at a time · H value heads · J key heads, each of H / J value heads
K width of keys · V width of values
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from danlu.models.kernel_limits import GROUP_ELEMENTS
from danlu.models.recurrent_order import Chunks, RecurrentOrder

EPS = 1e-6
"""Added to the squared length of q and k, as in flash-linear-attention."""


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, order: RecurrentOrder) -> Tensor:
    """Reads each token's state with its query; states begin at zero in each document. Differentiable.

    Args:   q, k [T, J, K]; v [T, H, V] in any floating type, contiguous; g [T, H] float32 or wider, the logarithm of
            the decay, at most 0; beta [T, H] likewise, from 0 to 1. Computed in the type of g.
            order: the order of the T tokens.
    Returns [T, H, V] in v's type.
    """
    if torch.is_grad_enabled():
        out: Tensor = _GatedDeltaRule.apply(q, k, v, g, beta, order.chunks(q.device))
        return out
    return _forward(q, k, v, g, beta, order.chunks(q.device))[0]


def gated_delta_rule_from(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, order: RecurrentOrder, states: Tensor
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` of runs that continue others; without gradients.

    states [runs, H, K, V] in g's type: of each run, before its first token; the runs are documents of `order`.
    Returns the output, and the state behind each run's last token [runs, H, K, V].
    """
    assert not torch.is_grad_enabled(), "states that are given have no gradients"
    chunks = order.chunks(q.device)
    final = torch.empty_like(states)
    out, _ = _forward(q, k, v, g, beta, chunks, states, final)
    return out, final


def gated_delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of T sequences, by the recurrence as it is written down.

    Arguments as for `gated_delta_rule_from`; states [T, H, K, V]. Returns the output [T, H, V], and the new states.
    """
    q, k, v_wide = _unit(q.to(g.dtype)), _unit(k.to(g.dtype)), v.to(g.dtype)
    shared = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(shared, dim=1) if shared > 1 else x for x in (q, k))  # [T, H, K]
    states = states * g.exp()[..., None, None]
    said = torch.matmul(k.unsqueeze(-2), states).squeeze(-2)  # [T, H, V]
    states = torch.addcmul(states, k.unsqueeze(-1), ((v_wide - said) * beta.unsqueeze(-1)).unsqueeze(-2))
    out = torch.matmul(q.unsqueeze(-2), states).squeeze(-2) * k.shape[-1] ** -0.5
    return out.to(v.dtype), states


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
        out, states = _forward(q, k, v, g, beta, chunks)
        ctx.save_for_backward(q, k, v, g, beta, states)
        ctx.chunks = chunks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, g, beta, states = ctx.saved_tensors
        return (*_backward(q, k, v, g, beta, states, grad, ctx.chunks), None)


class _Inner(NamedTuple):
    """Results of a group of heads within its chunks, without a state; b = N * h of each."""

    q: Tensor  # [b, C, K] of length 1 / sqrt(K)
    k: Tensor  # [b, C, K] of length 1
    v: Tensor  # [b, C, V]
    beta: Tensor  # [b, C, 1]
    log_decay: Tensor  # [b, C]: G
    decay: Tensor  # [b, C, 1]: exp(G)
    decay_after: Tensor  # [b, C, 1]: exp(G_C - G)
    pairwise: Tensor  # [b, C, C]: D
    keys: Tensor  # [b, C, C]: k k^T
    system: Tensor  # [b, C, C]: A below its diagonal, on which it is 1; above it is anything
    scores: Tensor  # [b, C, C]: (q k^T) D
    read: Tensor  # [b, C, K]: W


class _HeadGroups:
    """Groups of heads, and their tokens as chunks."""

    def __init__(self, q: Tensor, v: Tensor, chunks: Chunks, dtype: torch.dtype) -> None:
        self.chunks, self.dtype = chunks, dtype
        self.key_heads, self.heads = q.shape[1], v.shape[1]
        self.shared = self.heads // self.key_heads
        at_once = GROUP_ELEMENTS // (chunks.count * chunks.size * q.shape[2] * self.shared)
        self.at_once = min(self.key_heads, max(1, at_once))  # key heads

    def __iter__(self) -> Iterator[slice]:
        for first in range(0, self.key_heads, self.at_once):
            yield slice(first, min(first + self.at_once, self.key_heads))

    def value_heads(self, group: slice) -> slice:
        return slice(group.start * self.shared, group.stop * self.shared)

    def cut(self, x: Tensor, heads: slice, repeat: int = 1) -> Tensor:
        """x [T, heads, F] -> [N * h, C, F] of these heads, each repeated `repeat` times; zeros where a chunk is
        full.
        """
        chunks, of_all = self.chunks, x.shape[1]
        numbers = torch.arange(heads.start, heads.stop, device=x.device).repeat_interleave(repeat)
        rows = (chunks.rows * of_all).unsqueeze(1) + numbers.view(1, -1, 1)  # [N, h, C]
        cut = x.reshape(-1, x.shape[-1]).index_select(0, rows.reshape(-1)).to(self.dtype)
        cut = cut.view(chunks.count, len(numbers), chunks.size, -1)
        if chunks.fill is not None:
            cut.masked_fill_(chunks.fill[:, None, :, None], 0)
        return cut.flatten(0, 1)

    def put(self, into: Tensor, heads: slice, cut: Tensor, repeat: int = 1) -> None:
        """Writes chunked values back into [T, heads, F]; several repetitions of a head are summed."""
        chunks = self.chunks
        cut = cut.view(chunks.count, -1, chunks.size, cut.shape[-1])
        if repeat > 1:
            cut = cut.unflatten(1, (-1, repeat)).sum(2)
        count = cut.shape[1]
        chunk = torch.div(chunks.places, chunks.size, rounding_mode="floor")
        rows = (chunk * (count * chunks.size) + chunks.places % chunks.size).unsqueeze(1)  # [T, 1]
        rows = rows + torch.arange(count, device=rows.device) * chunks.size  # [T, h]
        into[:, heads] = cut.reshape(-1, cut.shape[-1]).index_select(0, rows.reshape(-1)).view(-1, count, cut.shape[-1])


def _inner(groups: _HeadGroups, group: slice, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Inner:
    heads = groups.value_heads(group)
    q_unit = _unit(groups.cut(q, group, groups.shared)).mul_(q.shape[-1] ** -0.5)
    k_unit = _unit(groups.cut(k, group, groups.shared))
    betas = groups.cut(beta.unsqueeze(-1), heads)
    log_decay = groups.cut(g.unsqueeze(-1), heads).squeeze(-1).cumsum(-1)
    size = log_decay.shape[-1]
    above = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    pairwise = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).masked_fill_(above, float("-inf")).exp_()
    keys = torch.bmm(k_unit, k_unit.mT)
    system = (keys * pairwise).mul_(betas)
    scores = torch.bmm(q_unit, k_unit.mT).mul_(pairwise)
    decay = log_decay.exp().unsqueeze(-1)
    decay_after = (log_decay[:, -1:] - log_decay).exp_().unsqueeze(-1)
    read = _solved(system, k_unit * (betas * decay))
    values = groups.cut(v, heads)
    return _Inner(q_unit, k_unit, values, betas, log_decay, decay, decay_after, pairwise, keys, system, scores, read)


def _solved(system: Tensor, x: Tensor) -> Tensor:
    """A^-1 x."""
    return torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: Chunks,
    first: Tensor | None = None,
    final: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output, and the states at the beginnings of chunks [N, H, K, V].

    first [runs, H, K, V]: before each run; final: likewise, written with those behind each run.
    """
    groups = _HeadGroups(q, v, chunks, g.dtype)
    width = v.shape[-1]
    out = v.new_empty(v.shape)
    states = g.new_empty(chunks.count, groups.heads, q.shape[-1], width)
    for group in groups:
        heads = groups.value_heads(group)
        inner = _inner(groups, group, q, k, v, g, beta)
        begin = None if first is None else first[:, heads].index_select(0, chunks.roots)
        values = _solved(inner.system, inner.v * inner.beta)  # U, and V when the states are there
        own = states[:, heads]
        k_after = inner.k * inner.decay_after
        past = inner.log_decay[:, -1:].exp().unsqueeze(-1)  # [b, 1, 1]
        count = heads.stop - heads.start
        state = g.new_zeros(chunks.levels[0].stop, count, q.shape[-1], width) if begin is None else begin
        for level in chunks.levels:
            if level.first:
                after = state
                state = after[: level.stop - level.first] if level.sources is None else after[level.sources]
            own[level.first : level.stop] = state
            rows = slice(level.first * count, level.stop * count)
            state = state.flatten(0, 1)
            new = values[rows].baddbmm_(inner.read[rows], state, alpha=-1)
            state = torch.baddbmm(state * past[rows], k_after[rows].mT, new).unflatten(0, (-1, count))
            if final is not None:
                ended = state if level.last is None else state[level.last]
                final[level.last_runs, heads] = ended
        answers = torch.bmm(inner.scores, values)
        answers.baddbmm_(inner.q * inner.decay, own.reshape(-1, q.shape[-1], width))
        groups.put(out, heads, answers)
    return out, states


def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, grad: Tensor, chunks: Chunks
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g and beta. Names: `grad_x` is the gradient of x."""
    groups = _HeadGroups(q, v, chunks, g.dtype)
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta))
    for group in groups:
        heads = groups.value_heads(group)
        inner = _inner(groups, group, q, k, v, g, beta)
        own = states[:, heads].flatten(0, 1)
        grad_out = groups.cut(grad, heads)
        grad_values, grad_after = _scan_back(inner, grad_out, chunks, own)
        parts = _inner_gradients(inner, own, grad_out, grad_values, grad_after)
        grad_q, grad_k, grad_v, grad_log_decay, grad_beta = parts
        for into, unit, x in ((grads[0], grad_q, q), (grads[1], grad_k, k)):
            raw = groups.cut(x, group, groups.shared)
            groups.put(into, group, _unit_gradient(raw, unit), groups.shared)
        groups.put(grads[2], heads, grad_v)
        # Each g is in the sums of its chunk from its own place on.
        grad_g = grad_log_decay.flip(-1).cumsum(-1).flip(-1)
        groups.put(grads[3].unsqueeze(-1), heads, grad_g.to(g.dtype).unsqueeze(-1))
        groups.put(grads[4].unsqueeze(-1), heads, grad_beta)
    return grads  # type: ignore[return-value]


def _scan_back(inner: _Inner, grad_out: Tensor, chunks: Chunks, own: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of V [b, C, V], and of the states behind chunks [b, K, V]."""
    count = len(own) // chunks.count
    grad_values = torch.bmm(inner.scores.mT, grad_out)
    grad_states = torch.bmm((inner.q * inner.decay).mT, grad_out)  # what reads them; the rest is added below
    grad_after = torch.zeros_like(own)
    k_after = inner.k * inner.decay_after
    past = inner.log_decay[:, -1:].exp().unsqueeze(-1)
    for place in range(len(chunks.levels) - 1, -1, -1):
        level = chunks.levels[place]
        rows = slice(level.first * count, level.stop * count)
        behind = grad_after[rows]
        new = grad_values[rows].baddbmm_(k_after[rows], behind)
        state = grad_states[rows].addcmul_(behind, past[rows]).baddbmm_(inner.read[rows].mT, new, alpha=-1)
        if place:
            before = chunks.levels[place - 1]
            target = grad_after[before.first * count : before.stop * count]
            if level.sources is None:
                target[: len(state)] = state
            else:
                target.unflatten(0, (-1, count)).index_add_(0, level.sources, state.unflatten(0, (-1, count)))
    return grad_values, grad_after


def _inner_gradients(
    inner: _Inner, states: Tensor, grad_out: Tensor, grad_values: Tensor, grad_after: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes gradients of unit q and k, v, G [b, C] and beta [b, C, 1], from those of V and of the states behind
    chunks.

    That of G is in float64. A term of D_ij or of exp(G_C - G_j) is in the gradient of one G with its sign and in that
    of another without, so that of the sums over G, which are gradients of g, only the part between the two is left. In
    float64 the rest cancels; in float32 it leaves the rounding errors of large terms in small sums.
    """
    # V = A^-1 R with R = beta (v - exp(G) k S).
    said = torch.bmm(inner.k, states).mul_(inner.decay)  # [b, C, V]
    values = _solved(inner.system, (inner.v - said).mul_(inner.beta))
    grad_right = torch.linalg.solve_triangular(inner.system.mT, grad_values, upper=True, unitriangular=True)  # of R
    grad_beta = (grad_right * (inner.v - said)).sum(-1, keepdim=True)
    grad_v = grad_right * inner.beta
    grad_log_decay = -(grad_v * said).sum(-1, dtype=torch.float64)
    grad_k = torch.bmm((grad_v * inner.decay).neg_(), states.mT)
    # A
    grad_system = torch.bmm(grad_right, values.mT).tril_(-1).neg_()
    weighted = grad_system * inner.pairwise
    grad_beta += (weighted * inner.keys).sum(-1, keepdim=True)
    by_log_decay = grad_system.mul_(inner.system.tril(-1))
    weighted.mul_(inner.beta)
    grad_k.baddbmm_(weighted, inner.k).baddbmm_(weighted.mT, inner.k)
    # Scores of queries.
    grad_scores = torch.bmm(grad_out, values.mT).tril_()
    weighted = grad_scores * inner.pairwise
    by_log_decay += grad_scores.mul_(inner.scores)
    grad_q = torch.bmm(weighted, inner.k)
    grad_k.baddbmm_(weighted.mT, inner.q)
    grad_log_decay += by_log_decay.sum(-1, dtype=torch.float64)
    grad_log_decay -= by_log_decay.sum(-2, dtype=torch.float64)
    # exp(G) q S
    grad_read = torch.bmm(grad_out, states.mT).mul_(inner.decay)
    grad_log_decay += (grad_read * inner.q).sum(-1, dtype=torch.float64)
    grad_q += grad_read
    # S' = exp(G_C) S + (exp(G_C - G) k)^T V
    grad_write = torch.bmm(values, grad_after.mT).mul_(inner.decay_after)
    written = (grad_write * inner.k).sum(-1, dtype=torch.float64)  # [b, C]
    grad_k += grad_write
    grad_log_decay -= written
    last = inner.log_decay[:, -1].exp() * (states * grad_after).sum((-2, -1), dtype=torch.float64)
    grad_log_decay[:, -1] += written.sum(-1) + last
    grad_q.mul_(inner.k.shape[-1] ** -0.5)  # `inner.q` is divided by the root of K
    return grad_q, grad_k, grad_v, grad_log_decay, grad_beta


def _unit_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x from that of x / sqrt(sum(x^2) + eps)."""
    inverse = torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
    unit = x * inverse
    return (grad - unit * (unit * grad).sum(-1, keepdim=True)).mul_(inverse)
