"""Mistakes that distributed training is known for: sums and means over ranks and micro-batches, norms, masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from danlu.adapters import dropout
from danlu.adapters.adapter_set import AdapterSet
from danlu.assembly.parallelize import Placed
from danlu.core.types import Batch, Item, Loss, Pack, Run, Share, Totals
from danlu.models.decoder import Decoder
from danlu.models.modules import RMSNorm
from danlu.objectives.preference import sees_whole_step
from danlu.optim.build import Optimizers
from danlu.optim.gradients import clip_grad_norm, clip_grad_norms
from danlu.parallel import batch_sharding
from danlu.parallel.layout import Layout
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.recipe.reference import resolve_reference
from danlu.recipe.sections import AdapterOff, PreferenceTerm
from danlu.stages import frozen_models
from danlu.stages import learner as learner_module
from danlu.stages.learner import DecoderLearner
from danlu.training import loop
from danlu.training import step as step_module
from danlu.training.executor import AnyLearner
from danlu.training.learner import Activation, MicroStep
from danlu.verification import trace
from danlu.verification.fault import Fault, replaced
from danlu.verification.proxy import Proxy
from danlu.verification.role_proxies import has_frozen_models

_OTHER = 1.5  # what the weights of a model are multiplied by where they are to differ


Factor = Callable[[AnyLearner, Sequence[Item], Any], float]
"""Maps (learner, the items of the step, a micro-batch) to the factor of its gradient."""


class _Scaled:
    """A learner with gradients of micro-batches multiplied by factors; all else is its own."""

    def __init__(self, learner: AnyLearner, items: Sequence[Item], factor: Factor) -> None:
        self._learner, self._items, self._factor = learner, items, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def forward(self, chunk: int, micro_step: MicroStep[Any], x: Activation | None) -> Activation | Loss:
        scale = micro_step.gradient_scale * self._factor(self._learner, self._items, micro_step.batch)
        return self._learner.forward(chunk, replace(micro_step, gradient_scale=scale), x)


def _scaled(factor: Factor) -> AbstractContextManager[None]:
    """Multiplies the gradient of each micro-batch by a factor."""

    def accumulate(learner: Any, items: Sequence[Item], **options: Any) -> Any:
        return step_module.accumulate(_Scaled(learner, items, factor), items, **options)

    return replaced(loop, "accumulate", accumulate)


def _weight(learner: AnyLearner, items: Sequence[Item]) -> float:
    """The sum of the weights of the items' targets."""
    weight: float = learner.collate(items).weight
    return weight


def _own_weight(learner: AnyLearner, items: Sequence[Item]) -> float:
    return _weight(learner, [items[number] for number in _own(learner, items)])


def _own(learner: AnyLearner, items: Sequence[Item]) -> list[int]:
    """The numbers of the items that this process takes."""
    return [number for numbers in learner.micro_batches(items) for number in numbers]


def _mean_of_means(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Each data rank divides by its own weight, and the ranks are averaged."""

    def factor(learner: AnyLearner, items: Sequence[Item], batch: Any) -> float:
        own_weight = _own_weight(learner, items)
        return _weight(learner, items) / (ranks.data.size * own_weight) if own_weight else 1.0

    return _scaled(factor)


def _mean_over_context_ranks(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Each context rank divides by the weight of the targets of its own tokens, and the ranks are averaged."""

    def factor(learner: AnyLearner, items: Sequence[Item], batch: Any) -> float:
        own = _own(learner, items)
        own_weight = _weight(learner, [items[number] for number in own])  # of the tokens that are here
        whole = sum(items[number].weight for number in own)
        return whole / (ranks.ring.size * ranks.ulysses.size * own_weight) if own_weight else 1.0

    return _scaled(factor)


def _mean_of_micro_batches(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Each micro-batch is divided by its own weight, and the micro-batches are averaged."""

    def factor(learner: AnyLearner, items: Sequence[Item], batch: Any) -> float:
        micro_batches = sum(bool(numbers) for numbers in learner.micro_batches(items))
        return _own_weight(learner, items) / (micro_batches * batch.weight) if batch.weight else 1.0

    return _scaled(factor)


def _doubled(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Gradients are as many times too large as an axis has ranks, as after a second all-reduce."""
    original, every = ParallelContext.reduce_gradients, ranks.dense_data.all
    size = next(size for size in (every.size, ranks.tensor.size, ranks.pipeline.size) if size > 1)

    def reduce_gradients(self: ParallelContext) -> None:
        original(self)
        for parameter in self.local_parameters.values():
            if parameter.local.grad is not None:
                parameter.local.grad.mul_(size)

    return replaced(ParallelContext, "reduce_gradients", reduce_gradients)


def _without_sum_of_norms(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Norms' gradients, which each rank has a part of, are not all-reduced over one axis."""
    original = ParallelContext.reduce_gradients
    axis = "tensor" if recipe.parallel.sequence else ranks.dense_data.all.name

    def reduce_gradients(self: ParallelContext) -> None:
        kept = [(group, name) for group, name in self.partial_gradients if group.name != axis]
        original(replace(self, partial_gradients=kept))

    return replaced(ParallelContext, "reduce_gradients", reduce_gradients)


@contextmanager
def _local_clip(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    """The norm that decides on clipping is not summed over processes."""

    def local(parameters: Any, max_norm: Any, **options: Any) -> float:
        return clip_grad_norm(parameters, max_norm, **{**options, "group": None})

    def local_of_roles(parameters: Any, max_norm: Any, **options: Any) -> dict[str, float]:
        return clip_grad_norms(parameters, max_norm, **{**options, "group": None})

    with replaced(step_module, "clip_grad_norms", local_of_roles), replaced(trace, "clip_grad_norm", local):
        yield


def _untied(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The head's gradient stops before the embedding that it shares its weight with."""

    def head_weight(self: Decoder) -> Tensor:
        return self.embed_tokens.weight.detach()

    return replaced(Decoder, "head_weight", property(head_weight))


@contextmanager
def _same_masks(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    """Dropout masks depend on the number of a row on its rank and of a feature in its shard, not in the whole."""
    original_begin, original_call = dropout.DropoutState.begin, dropout.Dropout.__call__

    def begin(
        self: dropout.DropoutState, number: int, packs: Sequence[tuple[int, int]], rows: Tensor | None = None
    ) -> None:
        first = min((pack for pack, _ in packs), default=0)
        original_begin(self, number, [(pack - first, tokens) for pack, tokens in packs], rows)

    def call(self: dropout.Dropout, *args: Any, **options: Any) -> Tensor:
        first_feature, self.first_feature = self.first_feature, 0
        try:
            return original_call(self, *args, **options)
        finally:
            self.first_feature = first_feature

    with replaced(dropout.DropoutState, "begin", begin), replaced(dropout.Dropout, "__call__", call):
        yield


def _stale(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """FSDP keeps the gathered parameters after the backward pass, and the update does not reach them."""
    original = FSDPModule.set_reshard_after_backward

    def never(self: Any, reshard_after_backward: bool, **options: Any) -> None:
        original(self, False, **options)

    return replaced(FSDPModule, "set_reshard_after_backward", never)


def _repeated_rows(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Each data rank gets equally many rows, which a sampler reaches by giving some rows to two ranks.

    Where rows are dealt by tokens: the first row of the first rank is given to the last one too.
    """
    if recipe.batch.rows is not None:

        def shard_by_tokens(
            tokens: Sequence[int], data_rank: int, data_ranks: int, capacity: int, *, least: int = 1
        ) -> list[list[int]]:
            dealt, first = (
                batch_sharding.shard_by_tokens(tokens, rank, data_ranks, capacity, least=least)
                for rank in (data_rank, 0)
            )
            if data_rank == data_ranks - 1:
                dealt[0].append(first[0][0])
            return dealt

        return replaced(learner_module, "shard_by_tokens", shard_by_tokens)

    def local_range(self: ParallelContext, packs: Sequence[Any]) -> range:
        data, per_rank = self.ranks.data, -(-len(packs) // self.ranks.data.size)
        first = min(data.index * per_rank, len(packs) - per_rank)
        return range(first, first + per_rank)

    return replaced(ParallelContext, "local_range", local_range)


def _visible_siblings(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """A branch of a tree sees the branches that lie before it, as in one text."""

    def with_all_before(run: Run) -> Run:
        root = run.ancestors[0] if run.ancestors else run.document
        return run._replace(ancestors=tuple(range(root, run.document)))

    attend = DecoderLearner._attend

    def with_visible_siblings(learner: DecoderLearner, batch: Batch) -> Any:
        shares = tuple(Share(*(tuple(map(with_all_before, runs)) for runs in share)) for share in batch.shares)
        return attend(learner, replace(batch, trees=(), shares=shares))

    return replaced(DecoderLearner, "_attend", with_visible_siblings)


def _divisors_per_rank(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Each data rank divides by its own number of pairs, and the ranks are averaged."""

    def accumulate(learner: AnyLearner, items: Sequence[Item], *, totals: Totals, **options: Any) -> Any:
        own = learner.totals([items[number] for number in _own(learner, items)]).divisors
        divisors = {name: ranks.data.size * own[name] or 1.0 for name in totals.divisors}
        return step_module.accumulate(learner, items, totals=replace(totals, divisors=divisors), **options)

    return replaced(loop, "accumulate", accumulate)


def _statistics_per_micro_batch(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """A loss that has to see the whole step (a sort, a mean over it) is shown a micro-batch of one process."""
    original = DecoderLearner.prepare

    def prepare(
        self: DecoderLearner, items: Sequence[Pack], micro_batches: Sequence[Sequence[int]], step: int | None
    ) -> Sequence[Pack]:
        alone, prepared = replace(self, parallel=ParallelContext()), list(items)
        for numbers in micro_batches:
            own = [items[number] for number in numbers]
            # A process without items takes part in what the others' models exchange.
            shown = original(alone, own or [self.empty], [range(len(own) or 1)], step)
            for number, item in zip(numbers, shown, strict=False):
                prepared[number] = item
        return prepared

    return replaced(DecoderLearner, "prepare", prepare)


def _adapter_in_reference(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The policy is its own reference, with its adapter and its dropout."""

    def without(self: AdapterSet, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    return replaced(AdapterSet, "without", without)


def _frozen_models_differ(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The last process has other weights of the frozen models than the rest."""

    original = frozen_models.place_frozen

    def place_frozen(*args: Any, **options: Any) -> Placed:
        placed = original(*args, **options)
        if ranks.world.index == ranks.world.size - 1:
            for parameter in placed.parallel.local_parameters.values():
                if parameter.local.is_floating_point():  # packed numbers of quantized weights stay
                    parameter.local.detach().mul_(_OTHER)
        return placed

    return replaced(frozen_models, "place_frozen", place_frozen)


def _local_norm_statistics(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """A norm over all queries or keys has the mean square of those that are on one tensor rank."""
    original = RMSNorm.forward

    def forward(self: RMSNorm, x: Tensor) -> Tensor:
        shard, self.shard = self.shard, None
        try:
            return original(self, x)
        finally:
            self.shard = shard

    return replaced(RMSNorm, "forward", forward)


def _state_of_another_shard(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Each rank loads the next rank's optimizer state, where all have the same shapes."""
    original = Optimizers.load_state
    group = ranks.tensor if ranks.dense_data.shard.alone else ranks.dense_data.shard

    def load_state(self: Optimizers, tensors: Any, scalars: Any) -> None:
        for tensor in tensors.values():
            if tensor.ndim and len(set(group.all_gather_objects(tuple(tensor.shape)))) == 1:
                by_rank = group.all_gather(tensor.detach().clone().unsqueeze(0))
                tensor.copy_(by_rank[(group.index + 1) % group.size])
        original(self, tensors, scalars)

    return replaced(Optimizers, "load_state", load_state)


def _never_filled(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """A weight of the last rank is NaN at the second step, as memory may be that nothing was written to."""

    def accumulate(learner: AnyLearner, items: Sequence[Item], *, step: int, **options: Any) -> Any:
        if step == 2 and ranks.world.index == ranks.world.size - 1:
            shards = (parameter.local for parameter in learner.parallel.local_parameters.values())
            next(shard for shard in shards if shard.requires_grad and shard.numel()).detach().fill_(math.nan)
        return step_module.accumulate(learner, items, step=step, **options)

    return replaced(loop, "accumulate", accumulate)


def _always(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return True


def _has_data_ranks(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.data > 1


def _has_context_ranks(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.context > 1


def _is_sharded(recipe: Recipe, layout: Layout) -> bool:
    return recipe.parallel.shard != "none" and layout.shard * layout.context > 1


def _has_partial_norm_gradients(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return (
        proxy.config is not None
        and recipe.adapter is None
        and (recipe.parallel.sequence or _is_sharded(recipe, layout))
    )


def _is_cut(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return _is_sharded(recipe, layout) or layout.tensor > 1


def _has_dropout(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return recipe.drops_out and bool(getattr(recipe.adapter, "dropout", 0.0))


def _is_its_own_reference(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return isinstance(resolve_reference(recipe), AdapterOff)


def _has_frozen_models(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return has_frozen_models(recipe)


def _has_siblings(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return recipe.row_type == "preference" or recipe.stage == "rl"


def _has_divisors(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return (recipe.row_type is not None or recipe.stage == "rl") and layout.data > 1


def _sees_whole_step(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    if layout.pipeline > 1:  # a process has no model to be shown a micro-batch with
        return False
    return any(sees_whole_step(term) for term in recipe.answer_terms if isinstance(term, PreferenceTerm))


def _keeps_gathered_parameters(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return _is_sharded(recipe, layout) and recipe.parallel.shard in ("zero1", "zero2")


def _cuts_norms(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.tensor > 1 and proxy.norms_all_heads


def _has_tied_head(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return recipe.adapter is None and proxy.has_tied_head


FAULTS: dict[str, Fault] = {
    "adapter-in-reference": Fault(_is_its_own_reference, _adapter_in_reference),
    "divisors-per-rank": Fault(_has_divisors, _divisors_per_rank),
    "doubled": Fault(_always, _doubled),
    "frozen-models-differ": Fault(_has_frozen_models, _frozen_models_differ),
    "local-clip": Fault(_is_cut, _local_clip),
    "local-norm-statistics": Fault(_cuts_norms, _local_norm_statistics),
    "mean-of-means": Fault(_has_data_ranks, _mean_of_means),
    "mean-of-micro-batches": Fault(_always, _mean_of_micro_batches),
    "mean-over-context-ranks": Fault(_has_context_ranks, _mean_over_context_ranks),
    "missing-norm-sum": Fault(_has_partial_norm_gradients, _without_sum_of_norms),
    "never-filled": Fault(_always, _never_filled),
    "repeated-rows": Fault(_has_data_ranks, _repeated_rows),
    "same-masks": Fault(_has_dropout, _same_masks),
    "stale": Fault(_keeps_gathered_parameters, _stale),
    "state-of-another-shard": Fault(_is_cut, _state_of_another_shard),
    "statistics-per-micro-batch": Fault(_sees_whole_step, _statistics_per_micro_batch),
    "untied": Fault(_has_tied_head, _untied),
    "visible-siblings": Fault(_has_siblings, _visible_siblings),
}
"""The faults by name, sorted."""
