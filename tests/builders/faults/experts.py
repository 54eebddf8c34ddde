"""Mistakes that mixtures of experts are known for: gradients, norms and counts of experts that not every rank has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.adapters.adapter_config import open_adapter, resolve_adapter
from danlu.adapters.peft_folder import section_of
from danlu.adapters.targets import choose
from danlu.assembly.frozen_base import adapters_of
from danlu.core.dtensor import local_tensor
from danlu.models import load_balancing, router_replay
from danlu.models.decoder import Decoder
from danlu.models.experts import Router
from danlu.models.load_balancing import Balancer, Balancing, BatchTokens
from danlu.models.loading import meta_decoder
from danlu.optim.build import Optimizers
from danlu.parallel import parallel_context
from danlu.parallel.comm import Group
from danlu.parallel.layout import Layout
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe, sections
from danlu.recipe.routing_replay import replays_routes
from danlu.verification.fault import Fault, replaced
from danlu.verification.proxy import Proxy
from danlu.verification.routes import balanced_alone, is_of_experts


def _expert_gradients_times_expert(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Gradients of experts are as many times too large as there are ranks with other experts."""
    original = ParallelContext.reduce_gradients

    def reduce_gradients(self: ParallelContext) -> None:
        original(self)
        for name, parameter in self.local_parameters.items():
            if is_of_experts(name) and parameter.local.grad is not None:
                parameter.local.grad.mul_(ranks.expert.size)

    return replaced(ParallelContext, "reduce_gradients", reduce_gradients)


def _experts_not_in_norm(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The norm that decides on clipping leaves experts out, as one does that sums over the mesh of dense parameters."""
    original = ParallelContext.norm_weights

    def norm_weights(self: ParallelContext) -> dict[Tensor, float]:
        weights = original(self)
        return weights | {
            parameter.local: 0.0 for name, parameter in self.local_parameters.items() if is_of_experts(name)
        }

    return replaced(ParallelContext, "norm_weights", norm_weights)


def _large_gradients_not_summed(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Gradients that have a collective of their own are left as each process has them."""
    original, is_large = parallel_context._all_reduce_flat, parallel_context._is_large

    def all_reduce_flat(group: Group, grads: list[Tensor]) -> None:
        original(group, [grad for grad in grads if not is_large(grad)])

    return replaced(parallel_context, "_all_reduce_flat", all_reduce_flat)


def _router_by_balance_alone(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The weighted products give the router no gradient: the balancing loss alone trains it."""
    return balanced_alone()


def _balance_on_each_tensor_rank(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Each tensor rank adds the whole gradient of the balancing loss, and they are summed."""

    def balancer(model: Decoder, balancing: Balancing, *, adds_gradient: bool) -> Balancer:
        return Balancer(model, balancing)

    return replaced(load_balancing, "Balancer", balancer)


def _counts_of_one_rank(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Rows of experts are not summed over data ranks."""
    original = Balancer.end_step

    def end_step(self: Balancer, sum_over_data: Callable[[Tensor], Tensor]) -> dict[str, float]:
        return original(self, lambda counts: counts)

    return replaced(Balancer, "end_step", end_step)


def _counts_of_recomputed_rows(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Rows are counted once more where layers are recomputed."""
    return replaced(load_balancing, "is_recomputing", lambda: False)


def _counted_filler(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Tokens that fill a batch up count as any others."""
    original = BatchTokens.of

    def of(real: Tensor, *others: Any) -> BatchTokens:
        return original(torch.ones_like(real), *others)

    return replaced(BatchTokens, "of", of)


def _routes_not_replayed(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Routers choose the experts of tokens that have recorded ones from their rollout."""

    def replaying(model: Decoder, routes: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    return replaced(router_replay, "replaying", replaying)


def _idle_expert() -> AbstractContextManager[None]:
    """The first expert of each layer is never chosen."""
    original = Router.eligible

    def eligible(self: Router, scores: Tensor) -> Tensor:
        eligible_scores = original(self, scores).clone()
        eligible_scores[:, 0] = -torch.inf
        return eligible_scores

    return replaced(Router, "eligible", eligible)


def _idle_expert_without_gradient(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """An expert that no token went to has no gradient: neither its moments nor its weight decay go on.

    The matrices of a layer's experts, or the factors that LoRA has for them, are without tokens together: A alone has
    gradients of zero wherever B still is zero.
    """
    original = Optimizers.step

    def step(self: Optimizers, *args: Any, **options: Any) -> None:
        stacks: dict[str, list[Parameter]] = {}  # the parameters [E, ..] of each layer's experts
        for name, parameter in self.parameters.items():
            if is_of_experts(name) and parameter.grad is not None and local_tensor(parameter).numel():
                stacks.setdefault(name.partition(".experts.")[0], []).append(parameter)
        kept = []  # (experts [E, ..], which of them have no gradient, their values)
        for parameters in stacks.values():
            gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
            idle = torch.stack([(gradient == 0).flatten(1).all(1) for gradient in gradients]).all(0)
            for parameter in parameters:
                experts = local_tensor(parameter.detach())
                kept.append((experts, idle, experts[idle]))
        original(self, *args, **options)
        for experts, idle, values in kept:
            experts[idle] = values

    return replaced(Optimizers, "step", step)


def trains_experts(recipe: Recipe, proxy: Proxy) -> bool:
    """Whether experts have trained parameters: their own, or those of an adapter that sits on them."""
    if recipe.adapter is None or proxy.config is None:
        return proxy.has_experts
    adapters = adapters_of(meta_decoder(proxy.config))
    section: Any = recipe.adapter
    if isinstance(section, sections.Continue):
        section = section_of(adapters, open_adapter(resolve_adapter(recipe.model.adapters[-1])))
    return any(site.experts is not None for site in choose(adapters.sites, section, check_ranks=False))


def _distributes_experts(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.expert > 1 and trains_experts(recipe, proxy)


def _sums_experts_apart(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    """Whether experts' gradients are summed over ranks that are fewer than those of the buckets."""
    copies = layout.data * layout.context // layout.expert
    return layout.expert > 1 and copies > 1 and recipe.parallel.shard == "none" and trains_experts(recipe, proxy)


def _has_experts(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return proxy.has_experts


def _trains_experts(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return trains_experts(recipe, proxy)


def _decays_experts(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return trains_experts(recipe, proxy) and getattr(recipe.optimizer, "weight_decay", 0.0) > 0


def _has_balance_loss(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    router = recipe.router
    has_loss = router is not None and bool(router.z or router.sequence or router.balance == "step")
    return proxy.has_experts and recipe.adapter is None and has_loss


def _has_balance_loss_on_tensor_ranks(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.tensor > 1 and _has_balance_loss(recipe, layout, proxy)


def _counts_on_data_ranks(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.data > 1 and proxy.has_experts


def _recomputes_experts(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return recipe.memory.recompute.kind in ("full", "every") and proxy.has_experts


def _replays_routes(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return recipe.stage == "rl" and proxy.has_experts and replays_routes(recipe)


FAULTS: dict[str, Fault] = {
    "balance-on-each-tensor-rank": Fault(_has_balance_loss_on_tensor_ranks, _balance_on_each_tensor_rank),
    "counted-filler": Fault(_has_experts, _counted_filler),
    "counts-of-one-rank": Fault(_counts_on_data_ranks, _counts_of_one_rank),
    "counts-of-recomputed-rows": Fault(_recomputes_experts, _counts_of_recomputed_rows),
    "expert-gradients-times-expert": Fault(_distributes_experts, _expert_gradients_times_expert),
    "experts-not-in-norm": Fault(_trains_experts, _experts_not_in_norm),
    "idle-expert-without-gradient": Fault(_decays_experts, _idle_expert_without_gradient, _idle_expert),
    "large-gradients-not-summed": Fault(_sums_experts_apart, _large_gradients_not_summed),
    "router-by-balance-alone": Fault(_has_balance_loss, _router_by_balance_alone),
    "routes-not-replayed": Fault(_replays_routes, _routes_not_replayed),
}
"""The faults by name, sorted."""
