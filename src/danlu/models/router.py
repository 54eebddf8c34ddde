"""The choice of each token's experts in a mixture, and their weights.

T packed tokens · D model width · E experts · k experts of a token
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from danlu.models import ops
from danlu.models.config import ModelConfig
from danlu.models.experts_spec import Experts

_LEAST_SUM = 1e-20  # that weights are divided by: sigmoids of very negative logits may all be zero


class Routes(NamedTuple):
    """The experts of each token, with their weights and scores."""

    experts: Tensor  # [T, k] int64, of each token its experts, all different; E in the place of one that is full
    weights: Tensor  # [T, k] float32, what the outputs of these are multiplied by; carries the router's gradient
    scores: Tensor  # [T, E] float32, of all experts: probabilities, or sigmoids; carries gradients too


class Router(nn.Module):
    """x [T, D] -> `Routes`, as `experts_spec.Router` says. Parameters are uninitialised.

    The slot `balancer` counts the rows of each expert, adds losses and drops rows that experts have no room for. The
    slot `replay` takes the chosen experts [T, k] and returns those that are used instead (`router_replay`).

    Logits and scores are float32 whatever the type of activations: in bfloat16 two experts in a hundred tokens would
    change places with each other (Switch Transformer, arXiv:2101.03961, section 2.4).
    """

    bias: Tensor | None
    correction: Tensor | None
    balancer: Callable[[Tensor, Routes], Routes] | None
    replay: Callable[[Tensor], Tensor] | None

    def __init__(self, config: ModelConfig, spec: Experts) -> None:
        super().__init__()
        self.spec = spec.router
        self.num_experts, self.top_k = spec.num_experts, spec.top_k
        self.weight = nn.Parameter(torch.empty(spec.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(spec.num_experts)) if self.spec.bias else None
        has_correction = self.spec.bias_correction
        self.correction = nn.Parameter(torch.empty(spec.num_experts), requires_grad=False) if has_correction else None
        """Added to the scores that experts are chosen by, never trained by gradients."""
        self.balancer = None
        self.replay = None
        self.drops = False
        """Whether experts may be full: set by a balancer with a capacity."""

    def forward(self, x: Tensor) -> Routes:
        logits = ops.wide_linear(x, self.weight)  # [T, E]
        if self.bias is not None:
            logits = logits + self.bias.to(logits.dtype)
        scores = logits.softmax(-1) if self.spec.score == "softmax" else logits.sigmoid()
        experts = self.chosen(scores.detach())
        if self.replay is not None:
            experts = self.replay(experts)
        weights = scores.gather(1, experts)
        if self.spec.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
        routes = Routes(experts, weights * self.spec.scale if self.spec.scale != 1.0 else weights, scores)
        return routes if self.balancer is None else self.balancer(logits, routes)

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
