"""Mistakes that distributed training is known for, to be put into a verification on purpose: each must be caught.

Each is a change made from outside to the processes of the layout while they run; the product itself has no switch for
any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from danlu.adapters import dropout
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.optim.build import Optimizers
from danlu.optim.clip import clip_grad_norm
from danlu.parallel.layout import Layout
from danlu.parallel.ranks import Ranks
from danlu.parallel.spread import Spread
from danlu.recipe import Recipe
from danlu.train import step
from danlu.types import Pack
from danlu.verify import observing

Injected = Callable[[Recipe, Ranks], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """One mistake: what it is, where it can be made at all, and how it is."""

    about: str
    possible: Callable[[Recipe, Layout, ModelConfig], bool]
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


@contextmanager
def _scaled(factor: Callable[[Any, Any], float]) -> Iterator[None]:
    """Each micro-batch's gradient times a factor of (compute, batch)."""
    real = step.cross_entropy

    def scaled(compute: Any, batch: Any, loss: Any, gradient_scale: float = 1.0) -> Any:
        factored = factor(compute, batch) if torch.is_grad_enabled() else 1.0
        return real(compute, batch, loss, gradient_scale * factored)

    with _replaced(step, "cross_entropy", scaled):
        yield


class _Step:
    """The packs of the step that is being taken, as `accumulate` is given them."""

    def __init__(self) -> None:
        self.packs: Sequence[Pack] = ()

    @contextmanager
    def watched(self) -> Iterator[None]:
        def accumulate(compute: Any, packs: Sequence[Pack], **options: Any) -> Any:
            self.packs = packs
            return step.accumulate(compute, packs, **options)

        with _replaced(observing, "accumulate", accumulate):
            yield


def weight_of(packs: Sequence[Pack]) -> float:
    """What packs weigh in a mean: the sum of their targets' weights."""
    return sum(float(sample.weights.sum()) for pack in packs for sample in pack.samples)


@contextmanager
def _mean_of_means(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    now = _Step()

    def factor(compute: Any, batch: Any) -> float:
        own = weight_of([now.packs[number] for number in compute.spread.own(now.packs)])
        return weight_of(now.packs) / (ranks.data.size * own) if own else 1.0

    with now.watched(), _scaled(factor):
        yield


@contextmanager
def _mean_of_micro_batches(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    now = _Step()

    def factor(compute: Any, batch: Any) -> float:
        own = compute.spread.own(now.packs)
        rounds = -(-len(own) // compute.micro)
        mine = weight_of([now.packs[number] for number in own])
        return mine / (rounds * batch.weight) if batch.weight else 1.0

    with now.watched(), _scaled(factor):
        yield


@contextmanager
def _doubled(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    real, size = Spread.finish, ranks.data.size if ranks.data.size > 1 else ranks.tensor.size

    def finish(self: Spread) -> None:
        real(self)
        for one in self.held.values():
            if one.local.grad is not None:
                one.local.grad.mul_(size)

    with _replaced(Spread, "finish", finish):
        yield


@contextmanager
def _without_sum_of_norms(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    real = Spread.finish
    axis = "tensor" if recipe.parallel.sequence else ranks.data.name

    def finish(self: Spread) -> None:
        left = replace(self, sums=[(group, name) for group, name in self.sums if group.name != axis])
        real(left)

    with _replaced(Spread, "finish", finish):
        yield


@contextmanager
def _local_clip(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    def local(parameters: Any, max_norm: Any, **options: Any) -> float:
        return clip_grad_norm(parameters, max_norm, **{**options, "across": None})

    with _replaced(step, "clip_grad_norm", local), _replaced(observing, "clip_grad_norm", local):
        yield


@contextmanager
def _untied(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    copies: dict[int, Tensor] = {}

    def head_weight(self: Decoder) -> Tensor:
        if id(self) not in copies:
            copies[id(self)] = self.embed_tokens.weight.detach().clone()
        return copies[id(self)]

    with _replaced(Decoder, "head_weight", property(head_weight)):
        yield


@contextmanager
def _same_masks(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    real_begin, real_call = dropout.Noise.begin, dropout.Dropout.__call__

    def begin(self: dropout.Noise, number: int, packs: Sequence[tuple[int, int]]) -> None:
        first = min((pack for pack, _ in packs), default=0)
        real_begin(self, number, [(pack - first, tokens) for pack, tokens in packs])

    def call(self: dropout.Dropout, *args: Any, **options: Any) -> Tensor:
        there, self.first_feature = self.first_feature, 0
        try:
            return real_call(self, *args, **options)
        finally:
            self.first_feature = there

    with _replaced(dropout.Noise, "begin", begin), _replaced(dropout.Dropout, "__call__", call):
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
    def own(self: Spread, packs: Sequence[Any]) -> range:
        """As many for each, which a sampler reaches by giving some rows to two processes."""
        data, each = self.ranks.data, -(-len(packs) // self.ranks.data.size)
        first = min(data.index * each, len(packs) - each)
        return range(first, first + each)

    with _replaced(Spread, "own", own):
        yield


@contextmanager
def _state_of_another_shard(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    real = Optimizers.load_state
    group = ranks.shard if ranks.shard.size > 1 else ranks.tensor

    def load_state(self: Optimizers, tensors: Any, scalars: Any) -> None:
        for tensor in tensors.values():
            if tensor.ndim and len(set(group.objects(tuple(tensor.shape)))) == 1:
                everyones = group.gather(tensor.detach().clone().unsqueeze(0))
                tensor.copy_(everyones[(group.index + 1) % group.size])
        real(self, tensors, scalars)

    with _replaced(Optimizers, "load_state", load_state):
        yield


def _several(recipe: Recipe, layout: Layout, config: ModelConfig) -> bool:
    return layout.data > 1


def _sharded(recipe: Recipe, layout: Layout) -> bool:
    return recipe.parallel.shard != "none" and layout.shard > 1


def _norms_in_parts(recipe: Recipe, layout: Layout, config: ModelConfig) -> bool:
    return recipe.adapter is None and (recipe.parallel.sequence or _sharded(recipe, layout))


def _cut(recipe: Recipe, layout: Layout, config: ModelConfig) -> bool:
    return _sharded(recipe, layout) or layout.tensor > 1


def _has_dropout(recipe: Recipe, layout: Layout, config: ModelConfig) -> bool:
    return bool(getattr(recipe.adapter, "dropout", 0.0))


def _gathered_once(recipe: Recipe, layout: Layout, config: ModelConfig) -> bool:
    return _sharded(recipe, layout) and recipe.parallel.shard in ("zero1", "zero2")


def _tied(recipe: Recipe, layout: Layout, config: ModelConfig) -> bool:
    return recipe.adapter is None and config.tie_word_embeddings


FAULTS: dict[str, Fault] = {
    "doubled": Fault(
        "gradients are summed twice along an axis",
        lambda recipe, layout, config: layout.world > 1,
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
        lambda recipe, layout, config: True,
        _mean_of_micro_batches,
        "each micro-batch counts alike",
    ),
    "missing-norm-sum": Fault(
        "gradients of norm weights are not summed over the ranks that share tokens or rows",
        _norms_in_parts,
        _without_sum_of_norms,
        "was left out",
    ),
    "repeated-rows": Fault("a sampler that gives some rows to two ranks", _several, _repeated_rows, "more than once"),
    "same-masks": Fault("the same dropout mask on every rank", _has_dropout, _same_masks, "dropout"),
    "stale": Fault(
        "the parameters of an earlier all-gather are used after the step", _gathered_once, _stale, "out of date"
    ),
    "state-of-another-shard": Fault(
        "optimizer state is loaded for the shard of another rank", _cut, _state_of_another_shard, "optimizer's state"
    ),
    "untied": Fault("a tied head that became a weight of its own", _tied, _untied, "tie"),
}
"""By name, sorted."""
