"""The gated delta rule and a causal convolution token by token, as they are written down; and inputs for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.core.types import Branch


def paths(boundaries: Sequence[int], trees: Sequence[Branch] = ()) -> list[list[int]]:
    """For each token the tokens of its path, itself last: those of its branch and ancestors, or of its document."""
    branches = trees or [Branch(-1, *each) for each in itertools.pairwise(boundaries)]
    of_branch: list[list[int]] = []
    of_token: list[list[int]] = []
    for parent, start, stop in branches:
        above = of_branch[parent] if parent >= 0 else []
        of_branch.append([*above, *range(start, stop)])
        of_token += [[*above, *range(start, token + 1)] for token in range(start, stop)]
    return of_token


def delta_recurrence(
    q: Tensor,  # [T, J, K]
    k: Tensor,  # [T, J, K]
    v: Tensor,  # [T, H, V]
    g: Tensor,  # [T, H]
    beta: Tensor,  # [T, H]
    of_token: Sequence[Sequence[int]],  # see `paths`
) -> tuple[Tensor, list[Tensor]]:
    """The output [T, H, V], and the state [H, K, V] behind each token; differentiable."""
    shared = v.shape[1] // k.shape[1]
    q, k = ((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(shared, 1) for x in (q, k))
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for token, path in enumerate(of_token):
        state = states[path[-2]] if len(path) > 1 else v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        state = state * g[token].exp()[:, None, None]
        correction = (v[token] - torch.einsum("hkv,hk->hv", state, k[token])) * beta[token][:, None]
        state = state + torch.einsum("hk,hv->hkv", k[token], correction)
        states.append(state)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[token]) / k.shape[2] ** 0.5)
    return torch.stack(outputs), states


def convolution(x: Tensor, weight: Tensor, of_token: Sequence[Sequence[int]]) -> Tensor:
    """silu of the causal convolution of x [T, F] by weight [F, 1, W]; differentiable."""
    width = weight.shape[-1]
    sums = []
    for path in of_token:
        seen = path[-width:]
        taps = weight[:, 0, width - len(seen) :]  # [F, tokens]
        sums.append((x[list(seen)].t() * taps).sum(1))
    return F.silu(torch.stack(sums))


def delta_inputs(
    tokens: int, dtype: torch.dtype, *, key_heads: int = 2, heads: int = 4, key: int = 8, value: int = 6, seed: int = 0
) -> list[Tensor]:
    """q, k, v, g and beta; decays from hardly any to nearly all."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(tokens, key_heads, key), draw(tokens, key_heads, key), draw(tokens, heads, value)
    g, beta = -(draw(tokens, heads) * 2 - 2).exp(), draw(tokens, heads).sigmoid()
    return [x.to(dtype) for x in (q, k, v, g, beta)]
