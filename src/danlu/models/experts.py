"""Mixtures of experts: the router, tokens sorted by expert, products of groups of rows, and the sum for each token.

A token has a row for each of its experts. Rows of one expert lie together, in the order of their tokens; so every
expert multiplies one block of rows. The work between `dispatch` and `combine` may be on other processes; weights of the
router multiply behind it, so nothing of the router travels.

T packed tokens · k experts of a token · N rows, k T of them · D model width · F inner width of an expert · E experts
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.core.layer_types import ExpertExchange
from danlu.models import layer_spec, ops
from danlu.models.config import ModelConfig
from danlu.models.modules import (
    MLP,
    GroupedLinear,
    Linear,
    RecomputePoints,
    RMSNorm,
    gated_linear,
    grouped_forward_shared,
    row_codes,
)

if TYPE_CHECKING:
    from danlu.models.sparse_mixer import Draws

_LEAST_SUM = 1e-20  # that weights are divided by: sigmoids of very negative logits may all be zero


class Routes(NamedTuple):
    """The experts of each token, with their weights and scores."""

    experts: Tensor  # [T, k] int64, of each token its experts, all different; E in the place of one that is full
    weights: Tensor  # [T, k] float32, what the outputs of these are multiplied by; carries the router's gradient
    scores: Tensor  # [T, E] float32, of all experts: probabilities, or sigmoids; carries gradients too


class Router(nn.Module):
    """x [T, D] -> `Routes`, as `layer_spec.Router` says. Parameters are uninitialised.

    The slot `balancer` counts the rows of each expert, adds losses and drops rows that experts have no room for. The
    slot `replay` takes the chosen experts [T, k] and returns those that are used instead (`router_replay`). The slot
    `draws` has the random numbers of a router that draws experts while the model trains.

    Logits and scores are float32 whatever the type of activations: in bfloat16 two experts in a hundred tokens would
    change places with each other (Switch Transformer, arXiv:2101.03961, section 2.4).
    """

    bias: Tensor | None
    correction: Tensor | None
    scale: Tensor | None
    expert_scales: Tensor | None
    balancer: Callable[[Tensor, Routes], Routes] | None
    replay: Callable[[Tensor], Tensor] | None
    draws: Draws | None

    def __init__(self, config: ModelConfig, spec: layer_spec.Experts) -> None:
        super().__init__()
        self.spec = spec.router
        self.num_experts, self.top_k = spec.num_experts, spec.top_k
        self.weight = nn.Parameter(torch.empty(spec.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(spec.num_experts)) if self.spec.bias else None
        has_correction = self.spec.bias_correction
        self.correction = nn.Parameter(torch.empty(spec.num_experts), requires_grad=False) if has_correction else None
        """Added to the scores that experts are chosen by, never trained by gradients."""
        self.scale = nn.Parameter(torch.empty(config.hidden_size)) if self.spec.input_norm else None
        self.expert_scales = nn.Parameter(torch.empty(spec.num_experts)) if self.spec.expert_scales else None
        self.eps = config.rms_norm_eps
        self.balancer = None
        self.replay = None
        self.draws = None
        self.drops = False
        """Whether experts may be full: set by a balancer with a capacity."""

    def forward(self, x: Tensor) -> Routes:
        if self.scale is None:
            logits = ops.wide_linear(x, self.weight)  # [T, E]
        else:
            logits = ops.wide_linear(ops.rms_norm(x, self.scale, self.eps), self.weight) * x.shape[-1] ** -0.5
        if self.bias is not None:
            logits = logits + self.bias.to(logits.dtype)
        scores = logits.sigmoid() if self.spec.score == "sigmoid" else logits.softmax(-1)
        if self.spec.score == "sparse-mixer":
            experts, weights = self._mixed(x, logits)
        else:
            experts = self._replayed(self.chosen(scores.detach()))
            weights = scores.gather(1, experts)
        if self.spec.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
        if self.expert_scales is not None:
            weights = weights * self.expert_scales.to(weights.dtype)[experts]
        routes = Routes(experts, weights * self.spec.scale if self.spec.scale != 1.0 else weights, scores)
        return routes if self.balancer is None else self.balancer(logits, routes)

    @property
    def active_draws(self) -> Draws | None:
        """`draws`, in a training step; else experts are not drawn."""
        return self.draws if self.draws is not None and self.draws.active else None

    def _mixed(self, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        from danlu.models import sparse_mixer

        draws, threshold = self.active_draws, 2 * self.spec.jitter
        noise = None if draws is None else sparse_mixer.noise_of(draws, x, self.num_experts)
        experts = self._replayed(sparse_mixer.chosen(logits, threshold, noise))
        return experts, sparse_mixer.weights_of(logits, experts, threshold, noise)

    def _replayed(self, experts: Tensor) -> Tensor:
        return experts if self.replay is None else self.replay(experts)

    def chosen(self, scores: Tensor) -> Tensor:
        """The experts [T, k] int64 of tokens with these scores [T, E], the best one first."""
        return self.eligible(scores).topk(self.top_k).indices

    def eligible(self, scores: Tensor) -> Tensor:
        """Returns the scores by which experts are chosen, [T, E], with their corrections; -inf where a group is left
        out.
        """
        spec = self.spec
        if self.correction is not None:
            scores = scores + self.correction.to(scores.dtype)
        if spec.groups > 1:
            by_group = scores.unflatten(-1, (spec.groups, -1))  # [T, groups, E / groups]
            best = self.group_scores(by_group)
            groups = best.topk(spec.top_groups).indices
            left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, groups, value=False)
            # Not zero, as in DeepSeek-V2's own code: corrected scores may lie below it.
            scores = by_group.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores

    def group_scores(self, by_group: Tensor) -> Tensor:
        """Returns the scores by which groups are chosen, [T, groups], from the corrected scores [T, groups, E /
        groups].
        """
        return by_group.amax(-1) if self.spec.group_score == "max" else by_group.topk(2).values.sum(-1)

    def extra_repr(self) -> str:
        return f"top {self.top_k} of {len(self.weight)}, {self.spec}"


class MoE(nn.Module):
    """x [T, D] -> [T, D]: the weighted sum of the outputs of a token's experts, and of a shared network's output.

    Both may have norms before and behind them, apart from each other; the router then reads x itself.
    """

    recompute_points: ClassVar[RecomputePoints] = dict.fromkeys(
        ("elementwise", "selective"),
        (
            *("input_norm.forward", "shared_input_norm.forward"),
            *("rows_by_expert", "experts.gated_activation", "shared.gated_activation"),
        ),
    )

    shared: MLP | None
    shared_gate: Linear | None
    input_norm: RMSNorm | None
    output_norm: RMSNorm | None
    shared_input_norm: RMSNorm | None
    shared_output_norm: RMSNorm | None

    def __init__(self, config: ModelConfig, spec: layer_spec.Experts) -> None:
        super().__init__()
        self.router = Router(config, spec)
        self.experts = Experts(config, spec)
        self.shared = None if spec.shared is None else MLP(config, spec.shared)
        self.shared_gate = Linear(config.hidden_size, 1, bias=False) if spec.shared_gate else None
        for name in layer_spec.BRANCH_NORMS:
            self.register_module(name, RMSNorm(config.hidden_size, config) if spec.branch_norms else None)
        self.tensor_cut = spec.tensor_cut

    def forward(self, x: Tensor) -> Tensor:
        y = self._routed(x)
        if self.shared is None:
            return y
        if self.shared_input_norm is not None:
            assert self.output_norm is not None and self.shared_output_norm is not None, "there are all or none"
            return self.output_norm(y) + self.shared_output_norm(self.shared(self.shared_input_norm(x)))
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)

    def _routed(self, x: Tensor) -> Tensor:
        """Returns the weighted sum of the outputs of a token's experts, [T, D]."""
        if self.router.spec.input_jitter and (draws := self.router.active_draws) is not None:
            from danlu.models.sparse_mixer import jittered

            x = jittered(x, draws, self.router.spec.input_jitter)
        routes = self.router(x)
        x = x if self.input_norm is None else self.input_norm(x)
        order = RowOrder.of(routes.experts, self.experts.num_experts, drops=self.router.drops)
        rows = self.rows_by_expert(x, order)
        arithmetic = self.experts.gate_proj.own_arithmetic
        with nullcontext() if arithmetic is None else arithmetic.rows_of_tokens(order.tokens):
            outputs = self.experts(rows, order.counts)
        return order.weighted_sum(outputs, routes.weights)

    def rows_by_expert(self, x: Tensor, order: RowOrder) -> Tensor:
        """x [T, D] -> [N, D], the row of each of a token's experts."""
        return order.rows_of(x)


@cache
def leave_experts_uncompiled() -> None:
    """Excludes routed products from torch.compile.

    The number of rows of an expert differs in every pack, and inductor makes grouped products of bfloat16 alone.
    """
    MoE._routed = torch.compiler.disable(MoE._routed)  # type: ignore[method-assign]


class Experts(nn.Module):
    """Gated linear units, the parameters of all experts in one tensor each: rows [N, D] by expert -> [N, D].

    The slot `exchange` takes rows to the processes that have their experts, and back.
    """

    exchange: ExpertExchange | None

    def __init__(self, config: ModelConfig, spec: layer_spec.Experts) -> None:
        super().__init__()
        width, inner, self.num_experts = config.hidden_size, spec.intermediate_size, spec.num_experts
        self.gate_proj = GroupedLinear(spec.num_experts, width, inner, bias=spec.bias)
        self.up_proj = GroupedLinear(spec.num_experts, width, inner, bias=spec.bias)
        self.down_proj = GroupedLinear(spec.num_experts, inner, width, bias=spec.bias)
        self.activation = spec.activation
        self.exchange = None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [N, D]; counts [E] int64, rows of each expert -> [N, D]."""
        if self.exchange is None:
            return self.products(rows, counts)
        arrived = self.exchange.dispatch(rows, counts, row_codes(self.gate_proj, self.up_proj))
        # The gradient of a bias is a sum of rows, which are not rounded for it on one process.
        of_gradients = row_codes(self.down_proj) if self.down_proj.bias is None else None
        return self.exchange.combine(self.products(*arrived), of_gradients)

    def products(self, rows: Tensor, counts: Tensor, kept: tuple[Tensor, ...] = ()) -> Tensor:
        """The experts that are here: rows [N, D] of theirs, counts [E here] -> [N, D]. kept: as `DispatchedRows`."""
        gate, up = grouped_forward_shared(rows, counts, self.gate_proj, self.up_proj, kept=kept)  # [N, F]
        if (y := gated_linear(gate, up, self.activation, self.down_proj, counts)) is not None:
            return y
        out: Tensor = self.down_proj(self.gated_activation(gate, up), counts)
        return out

    def gated_activation(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.gated_mlp_activation(gate, up, self.activation)


class RowOrder:
    """How the rows of a micro-batch lie by expert."""

    def __init__(self, order: Tensor, places: Tensor, counts: Tensor) -> None:
        self.order = order  # [N] int64: token * k + which of its experts, of each row
        self.places = places  # [T, k] int64: the row of each token and expert; N for one that has none
        self.counts = counts  # [E] int64: rows of each expert

    @classmethod
    def of(cls, experts: Tensor, num_experts: int, *, drops: bool = False) -> RowOrder:
        """The order for the experts [T, k] of each token. drops: whether some may be `num_experts`, which is none."""
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = torch.bincount(flat, minlength=num_experts)[:num_experts]
        if drops:
            order = order[: int(counts.sum())]
            places = places.clamp_(max=len(order))
        return cls(order, places.view_as(experts), counts)

    @property
    def tokens(self) -> Tensor:
        """[N] int64: the token of each row."""
        return self.order // self.places.shape[1]

    def rows_of(self, x: Tensor) -> Tensor:
        """x [T, D] -> [N, D], the row of each of a token's experts."""
        rows: Tensor = _RowsOf.apply(x, self.order, self.places)
        return rows

    def weighted_sum(self, rows: Tensor, weights: Tensor) -> Tensor:
        """rows [N, D], weights [T, k] -> [T, D] in the type of rows: the sum of each token's rows times their weights.

        A token's terms are added in the order of its experts, whatever other tokens there are.
        """
        total: Tensor = _WeightedSum.apply(rows, weights, self.order, self.places)
        return total


class _RowsOf(torch.autograd.Function):
    """A gather with a gradient that is a gather too: indexing's own adds up rows of one token in any order, or
    slowly.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, order // places.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return _sum_of_rows(grad, places, None), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order)
        return _sum_of_rows(rows, places, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        rows, weights, order = ctx.saved_tensors
        of_rows = grad.index_select(0, order // weights.shape[1])  # [N, D]
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[1]:
            products = torch.linalg.vecdot(of_rows.to(weights.dtype), rows.to(weights.dtype))  # [N]
            grad_weights = products.new_zeros(weights.numel()).scatter_(0, order, products).view_as(weights)
        if ctx.needs_input_grad[0]:
            grad_rows = of_rows * weights.flatten().index_select(0, order).to(of_rows.dtype).unsqueeze(1)
        return grad_rows, grad_weights, None, None


def _sum_of_rows(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """rows [N, D], of each token those at `places` [T, k], times `weights` [T, k] -> [T, D] in the type of rows.

    A place may be N, which adds nothing. Half precision is added up in float32.
    """
    if len(rows) < places.numel():
        rows = F.pad(rows, (0, 0, 0, 1))
    wide = torch.float32 if rows.dtype in (torch.bfloat16, torch.float16) else rows.dtype
    total = rows.new_zeros((len(places), rows.shape[1]), dtype=wide)
    for number, of_tokens in enumerate(places.unbind(1)):
        part = rows.index_select(0, of_tokens)
        if weights is None:
            total.add_(part)
        else:
            total.addcmul_(part.to(wide), weights[:, number : number + 1].to(wide))
    return total.to(rows.dtype)
