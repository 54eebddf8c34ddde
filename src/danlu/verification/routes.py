"""Margins of routes: the difference between the scores of the last chosen expert and the next one.

Where two experts have almost the same score, rounding decides which of them a token goes to, and two right layouts
compute different things. So a verification takes weights and data with which that does not happen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from danlu.models import sparse_mixer
from danlu.models.experts import Router, RowOrder
from danlu.models.sparse_mixer import Noise
from danlu.verification.fault import replaced
from danlu.verification.proxy import ProxyTraining

LEAST_MARGIN = 1e-4
"""Relative. Rounding changes scores by about 1e-6, and `workers.PERTURBATION` by no more."""


class RoutingMargin:
    """The least relative difference between the score of a chosen expert and the next one's, over all watched
    routes."""

    def __init__(self) -> None:
        self.least = math.inf

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context in which every router of this process is watched."""
        original, mixed = Router.chosen, sparse_mixer.chosen

        def chosen(router: Router, scores: Tensor) -> Tensor:
            self._watch(router, scores)
            return original(router, scores)

        def chosen_by_mixer(logits: Tensor, threshold: float, noise: Noise | None = None) -> Tensor:
            experts = mixed(logits, threshold, noise)
            for value in sparse_mixer.margins(logits, threshold, experts, noise):
                self.least = min(self.least, float(value.min()) if value.numel() else math.inf)
            return experts

        with replaced(Router, "chosen", chosen), replaced(sparse_mixer, "chosen", chosen_by_mixer):
            yield

    def _watch(self, router: Router, scores: Tensor) -> None:
        spec = router.spec
        corrected = scores if router.correction is None else scores + router.correction
        if spec.top_groups < spec.groups:
            groups = router.group_scores(corrected.unflatten(-1, (spec.groups, -1)))
            self._take(groups, spec.top_groups)
        if router.top_k < router.num_experts:
            self._take(router.eligible(scores), router.top_k)

    def _take(self, scores: Tensor, count: int) -> None:
        """Measures the margins of scores [T, n] with the best `count` chosen."""
        if scores.shape[1] > count and len(scores):
            last, following = scores.topk(count + 1).values[:, -2:].unbind(1)
            margins = (last - following) / last.abs().clamp(min=torch.finfo(scores.dtype).tiny)
            self.least = min(self.least, float(margins.min()))


def balanced_alone() -> AbstractContextManager[None]:
    """A context in which the weighted products give routers no gradient: they have that of the balancing loss alone."""
    original = RowOrder.weighted_sum

    def weighted_sum(order: RowOrder, rows: Tensor, weights: Tensor) -> Tensor:
        return original(order, rows, weights.detach() + 0 * weights)

    return replaced(RowOrder, "weighted_sum", weighted_sum)


def expert_counts(training: ProxyTraining) -> dict[str, Tensor]:
    """[E] rows that each expert was meant to have in the last step, on all processes, by name of the layer's router."""
    balancer = getattr(training.learner, "balancer", None)
    if balancer is None:
        return {}
    own = {f"layers.{name}.mlp.router": layer.counts.cpu().clone() for name, layer in balancer.layers.items()}
    of_stages = training.learner.parallel.all_gather_pipeline(own)
    return {name: counts for of_stage in of_stages for name, counts in of_stage.items()}


def is_of_experts(name: str) -> bool:
    """Whether a parameter is of experts that tokens are routed to."""
    return ".mlp.experts." in name


def is_of_router(name: str) -> bool:
    """Whether a parameter decides where tokens are routed to."""
    return ".mlp.router." in name
