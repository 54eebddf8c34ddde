"""Mistakes that distributed training is known for, to be put into a verification on purpose: each must be caught.

Each is a change made from outside to the processes of the layout while they run; the product itself has no switch for
any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from danlu.adapters import dropout
from danlu.models.decoder import Decoder
from danlu.optim.build import Optimizers
from danlu.optim.clip import clip_grad_norm
from danlu.parallel.layout import Layout
from danlu.parallel.ranks import Ranks
from danlu.parallel.step_parallel import StepParallel
from danlu.recipe import Recipe
from danlu.train import loop
from danlu.train import step as training
from danlu.train.step import AnyLearner
from danlu.types import Item, Loss, Totals
from danlu.verify import trace
from danlu.verify.proxy import Proxy

Injected = Callable[[Recipe, Ranks], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """One mistake: what it is, where it can be made at all, and how it is."""

    about: str
    possible: Callable[[Recipe, Layout, Proxy], bool]
    injected: Injected
    named: str  # a part of what a verification says of it


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


Factor = Callable[[AnyLearner, Sequence[Item], Any], float]
"""(learner, the items of the step, a micro-batch) -> by what its gradient is multiplied."""


class _Scaled:
    """A learner whose micro-batches' gradients are multiplied by factors; all else is its own."""

    def __init__(self, learner: AnyLearner, items: Sequence[Item], factor: Factor) -> None:
        self._learner, self._items, self._factor = learner, items, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def losses(self, batch: Any, totals: Totals, gradient_scale: float = 1.0) -> Loss:
        factor = self._factor(self._learner, self._items, batch)
        return self._learner.losses(batch, totals, gradient_scale * factor)


@contextmanager
def _scaled(factor: Factor) -> Iterator[None]:
    """Each micro-batch's gradient times a factor."""

    def accumulate(learner: Any, items: Sequence[Item], **options: Any) -> Any:
        return training.accumulate(_Scaled(learner, items, factor), items, **options)

    with _replaced(loop, "accumulate", accumulate):
        yield


def _weight(learner: AnyLearner, items: Sequence[Item]) -> float:
    """What items weigh in a mean: the sum of their targets' weights."""
    weight: float = learner.collate(items).weight
    return weight


def _own_weight(learner: AnyLearner, items: Sequence[Item]) -> float:
    return _weight(learner, [items[number] for number in learner.parallel.local_range(items)])


@contextmanager
def _mean_of_means(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    def factor(learner: AnyLearner, items: Sequence[Item], batch: Any) -> float:
        own = _own_weight(learner, items)
        return _weight(learner, items) / (ranks.data.size * own) if own else 1.0

    with _scaled(factor):
        yield


@contextmanager
def _mean_of_micro_batches(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    def factor(learner: AnyLearner, items: Sequence[Item], batch: Any) -> float:
        rounds = -(-len(learner.parallel.local_range(items)) // learner.micro)
        return _own_weight(learner, items) / (rounds * batch.weight) if batch.weight else 1.0

    with _scaled(factor):
        yield


@contextmanager
def _doubled(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    real, size = StepParallel.reduce_gradients, ranks.data.size if ranks.data.size > 1 else ranks.tensor.size

    def reduce_gradients(self: StepParallel) -> None:
        real(self)
        for one in self.local_parameters.values():
            if one.local.grad is not None:
                one.local.grad.mul_(size)

    with _replaced(StepParallel, "reduce_gradients", reduce_gradients):
        yield


@contextmanager
def _without_sum_of_norms(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    real = StepParallel.reduce_gradients
    axis = "tensor" if recipe.parallel.sequence else ranks.data.name

    def reduce_gradients(self: StepParallel) -> None:
        left = replace(
            self, partial_gradients=[(group, name) for group, name in self.partial_gradients if group.name != axis]
        )
        real(left)

    with _replaced(StepParallel, "reduce_gradients", reduce_gradients):
        yield


@contextmanager
def _local_clip(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    def local(parameters: Any, max_norm: Any, **options: Any) -> float:
        return clip_grad_norm(parameters, max_norm, **{**options, "group": None})

    with _replaced(training, "clip_grad_norm", local), _replaced(trace, "clip_grad_norm", local):
        yield


@contextmanager
def _untied(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    def head_weight(self: Decoder) -> Tensor:
        return self.embed_tokens.weight.detach()

    with _replaced(Decoder, "head_weight", property(head_weight)):
        yield


@contextmanager
def _same_masks(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    real_begin, real_call = dropout.DropoutState.begin, dropout.Dropout.__call__

    def begin(self: dropout.DropoutState, number: int, packs: Sequence[tuple[int, int]]) -> None:
        first = min((pack for pack, _ in packs), default=0)
        real_begin(self, number, [(pack - first, tokens) for pack, tokens in packs])

    def call(self: dropout.Dropout, *args: Any, **options: Any) -> Tensor:
        there, self.first_feature = self.first_feature, 0
        try:
            return real_call(self, *args, **options)
        finally:
            self.first_feature = there

    with _replaced(dropout.DropoutState, "begin", begin), _replaced(dropout.Dropout, "__call__", call):
        yield


@contextmanager
def _stale(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    real = FSDPModule.set_reshard_after_backward

    def never(self: Any, reshard_after_backward: bool, **options: Any) -> None:
        real(self, False, **options)

    with _replaced(FSDPModule, "set_reshard_after_backward", never):
        yield


@contextmanager
def _repeated_rows(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    def local_range(self: StepParallel, packs: Sequence[Any]) -> range:
        """As many for each, which a sampler reaches by giving some rows to two processes."""
        data, each = self.ranks.data, -(-len(packs) // self.ranks.data.size)
        first = min(data.index * each, len(packs) - each)
        return range(first, first + each)

    with _replaced(StepParallel, "local_range", local_range):
        yield


@contextmanager
def _state_of_another_shard(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    real = Optimizers.load_state
    group = ranks.shard if ranks.shard.size > 1 else ranks.tensor

    def load_state(self: Optimizers, tensors: Any, scalars: Any) -> None:
        for tensor in tensors.values():
            if tensor.ndim and len(set(group.all_gather_objects(tuple(tensor.shape)))) == 1:
                everyones = group.all_gather(tensor.detach().clone().unsqueeze(0))
                tensor.copy_(everyones[(group.index + 1) % group.size])
        real(self, tensors, scalars)

    with _replaced(Optimizers, "load_state", load_state):
        yield


@contextmanager
def _never_filled(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    def accumulate(learner: AnyLearner, items: Sequence[Item], *, step: int, **options: Any) -> Any:
        if step == 2 and ranks.world.index == ranks.world.size - 1:
            trained = (one.local for one in learner.parallel.local_parameters.values() if one.local.requires_grad)
            next(one for one in trained if one.numel()).detach().fill_(math.nan)
        return training.accumulate(learner, items, step=step, **options)

    with _replaced(loop, "accumulate", accumulate):
        yield


def _several(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.data > 1


def _sharded(recipe: Recipe, layout: Layout) -> bool:
    return recipe.parallel.shard != "none" and layout.shard > 1


def _norms_in_parts(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return proxy.norms and recipe.adapter is None and (recipe.parallel.sequence or _sharded(recipe, layout))


def _cut(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return _sharded(recipe, layout) or layout.tensor > 1


def _has_dropout(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return bool(getattr(recipe.adapter, "dropout", 0.0))


def _gathered_once(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return _sharded(recipe, layout) and recipe.parallel.shard in ("zero1", "zero2")


def _tied(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return recipe.adapter is None and proxy.tied


FAULTS: dict[str, Fault] = {
    "doubled": Fault(
        "gradients are summed twice along an axis",
        lambda recipe, layout, proxy: layout.world > 1,
        _doubled,
        "too large by a constant",
    ),
    "local-clip": Fault(
        "each process clips by the norm of what it holds", _cut, _local_clip, "the norm of what it holds"
    ),
    "mean-of-means": Fault(
        "a mean over ranks of uneven means", _several, _mean_of_means, "mean over data ranks of their own means"
    ),
    "mean-of-micro-batches": Fault(
        "a loss scale that is wrong when gradients accumulate",
        lambda recipe, layout, proxy: True,
        _mean_of_micro_batches,
        "each micro-batch counts alike",
    ),
    "missing-norm-sum": Fault(
        "gradients of norm weights are not summed over the ranks that share tokens or rows",
        _norms_in_parts,
        _without_sum_of_norms,
        "is missing",
    ),
    "never-filled": Fault(
        "a process trains on memory that nothing was written to",
        lambda recipe, layout, proxy: layout.world > 1,
        _never_filled,
        "never filled",
    ),
    "repeated-rows": Fault("a sampler that gives some rows to two ranks", _several, _repeated_rows, "more than once"),
    "same-masks": Fault("the same dropout mask on every rank", _has_dropout, _same_masks, "dropout"),
    "stale": Fault(
        "the parameters of an earlier all-gather are used after the step", _gathered_once, _stale, "out of date"
    ),
    "state-of-another-shard": Fault(
        "optimizer state is loaded for the shard of another rank", _cut, _state_of_another_shard, "optimizer's state"
    ),
    "untied": Fault("a tied head whose gradient does not come to the embedding", _tied, _untied, "tie"),
}
"""By name, sorted."""
