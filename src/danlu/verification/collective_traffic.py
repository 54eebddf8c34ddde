"""The traffic that `planning.step_traffic` predicts for a step of a recipe on real micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from danlu.adapters.token_rows import TokenRows
from danlu.assembly.policy_tensors import policy_tensors_of
from danlu.core.layer_types import TRAINED
from danlu.data.batch import pad_to_bucket
from danlu.models.experts import Experts
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.expert import Exchange, mixtures_of
from danlu.planning.model_tensors import FileAdapter
from danlu.planning.step_traffic import MicroBatch, RankModel, Rows, step_traffic
from danlu.planning.traffic import Weight, data_traffic
from danlu.recipe import sections
from danlu.recipe.value import VALUE
from danlu.stages.learner import DecoderLearner
from danlu.stages.placed import PlacedDecoder
from danlu.training.executor import Executor
from danlu.training.learner import StepItems
from danlu.verification.proxy import MicroBatches, ProxyTraining

COUNTED_STEP = 1
"""The step that traffic is counted in, and predicted for."""


def _forward(learner: DecoderLearner, micro_batches: MicroBatches) -> None:
    """The forward passes of micro-batches as an evaluation makes them, with the dropout and the draws of the step that
    is counted.
    """
    numbered = dict(pair for micro_batch in micro_batches for pair in micro_batch)
    items: list[Any] = [
        numbered.get(number) for number in range(max(numbered, default=-1) + 1)
    ]  # those of others are not asked
    own = [[number for number, _ in micro_batch] for micro_batch in micro_batches]
    step_items = StepItems(items, own, learner.totals([*numbered.values()]))
    learner = learner.judged_by(learner.evaluation, COUNTED_STEP)
    for actions, _ in learner.parallel.evaluation_rounds(len(micro_batches)):
        Executor(learner, step_items).run(actions)


def classifier_traffic(training: ProxyTraining, micro_batches: MicroBatches) -> list[CollectiveTraffic]:
    """Predicts the traffic of data ranks of a classifier, of which no config gives the shapes, from its modules."""
    ranks = training.ranks
    weights = [
        Weight(
            tuple(parameter.shape), trained=parameter.requires_grad, sharded=isinstance(parameter, DTensor), gathers=1
        )
        for _, parameter in training.learner.model.named_parameters()
    ]
    section = training.recipe.parallel
    return list(data_traffic(weights, ranks.layout, section, micro_batches=len(micro_batches), rank=ranks.rank))


def decoder_traffic(training: ProxyTraining, micro_batches: MicroBatches) -> list[CollectiveTraffic]:
    """Predicts the traffic of a decoder's rank, which sends rows of its own tokens to ranks with other experts."""
    learner = training.learner
    assert isinstance(learner, DecoderLearner), "that of a decoder"
    rows = None if training.ranks.layout.expert == 1 else _exchanged_rows(learner, micro_batches)
    return step_traffic(rank_model(training), batch_shapes(learner, micro_batches), rows)


def rank_model(training: ProxyTraining) -> RankModel:
    """This process's part of the policy, told from its config, its recipe and its adapters' sections alone."""
    config, placed, ranks = training.proxy.config, training.placed, training.ranks
    assert config is not None and isinstance(placed, PlacedDecoder), "that of a decoder"
    files = file_adapters(placed, training.recipe.adapter)
    return RankModel(
        training.recipe,
        config,
        policy_tensors_of(training.recipe, config, files),
        ranks.layout,
        ranks.rank,
        placed.model.chunks,
        placed.placed.plan,
        {name: file.section for name, file in files.items()},
    )


def file_adapters(placed: PlacedDecoder, section: sections.AdapterSection | None) -> Mapping[str, FileAdapter]:
    """The adapters of a decoder that are described by files, by name."""
    adapters = {}
    for name, added in placed.adapters.added.items() if placed.adapters is not None else ():
        if name not in (TRAINED, VALUE) or (name == TRAINED and isinstance(section, sections.Continue)):
            rows = [module.token_ids.tolist() for module in added.modules.values() if isinstance(module, TokenRows)]
            adapters[name] = FileAdapter(added.section, rows[0] if rows else ())
    return adapters


def batch_shapes(learner: DecoderLearner, micro_batches: MicroBatches) -> list[MicroBatch]:
    """The shapes of micro-batches as this process has them."""
    shapes = []
    for micro_batch in micro_batches:
        batch = learner.collate([item for _, item in micro_batch])
        padded = pad_to_bucket(batch, learner.token_multiple)
        documents = (run.document for share in batch.shares for run in share.runs)
        shapes.append(
            MicroBatch(
                tokens=len(padded.tokens),
                targets=len(padded.targets),
                cut_rows=tuple(sum(run.tokens for run in share.chunks) for share in batch.shares),
                documents=max(documents, default=-1) + 2,  # and one that fills each share up
            )
        )
    return shapes


def _exchanged_rows(learner: DecoderLearner, micro_batches: MicroBatches) -> dict[int, Rows]:
    """Counts the rows that this rank exchanges in each layer with experts, by a forward pass; all ranks make it."""
    counts: Counter[tuple[int, str]] = Counter()

    def count(layer: int, experts: Experts) -> None:
        exchange = experts.exchange
        assert isinstance(exchange, Exchange), "where experts are distributed"
        here = exchange.group.index
        counts[layer, "sent"] += sum(exchange.sends) - exchange.sends[here]
        counts[layer, "received"] += sum(exchange.receives) - exchange.receives[here]

    mixtures = {int(name): moe for name, layer in learner.model.layers.items() for moe in mixtures_of(layer)}
    with ExitStack() as hooks, torch.no_grad():
        for layer, moe in mixtures.items():
            handle = moe.experts.register_forward_hook(lambda experts, *_, layer=layer: count(layer, experts))
            hooks.callback(handle.remove)
        _forward(learner, micro_batches)
    learner.parallel.reshard()
    return {layer: Rows(counts[layer, "sent"], counts[layer, "received"]) for layer in mixtures}
