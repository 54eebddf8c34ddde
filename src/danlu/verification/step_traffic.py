"""The measured traffic of one process in a step, and the traffic that the formulas of `planning` predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from danlu.core.types import Item
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.schedules import placement
from danlu.parallel.traffic_counter import TrafficCounter
from danlu.planning.traffic import pipeline_traffic
from danlu.training.executor import Executor
from danlu.training.learner import MicroStep, StepItems
from danlu.verification.collective_traffic import COUNTED_STEP, data_parallel_traffic, decoder_traffic
from danlu.verification.context_traffic import context_ranks_traffic
from danlu.verification.proxy import MicroBatches, ProxyTraining


@dataclass(frozen=True)
class StepTraffic:
    """The traffic of one process in a step: one entry for each collective, group and purpose."""

    counted: list[CollectiveTraffic]
    predicted: list[CollectiveTraffic]


def measure_step_traffic(training: ProxyTraining, items: Sequence[Item]) -> StepTraffic:
    """Counts one step, like all others of a run.

    Only forward and backward passes and the sums of gradients: the numbers computed may be meaningless (under
    `fake_process_group`), so nothing is clipped or updated.
    """
    learner = training.learner
    numbers = learner.micro_batches(items)  # the last ones are empty where other ranks have more items
    with TrafficCounter(training.ranks.layout) as traffic:
        step_items = StepItems(items, numbers, learner.totals(items), step=COUNTED_STEP)
        Executor(learner, step_items).run(learner.parallel.actions(len(numbers)))
        for _, parameter in training.placed.parameters():
            parameter.grad = None
    micro_batches = [[(number, items[number]) for number in of_one] for of_one in numbers]
    if training.proxy.config is None:
        predicted = data_parallel_traffic(training, micro_batches, gathered=torch.float32)
    else:
        predicted = [
            *decoder_traffic(training, micro_batches),
            *context_ranks_traffic(training, micro_batches),
            *_stages_traffic(training, micro_batches),
        ]
    return StepTraffic(traffic.counted(), predicted)


def _stages_traffic(training: ProxyTraining, micro_batches: MicroBatches) -> list[CollectiveTraffic]:
    """Predicts the traffic of this process to other stages of a pipeline; nothing where there are none."""
    layout, learner, pipeline = training.ranks.layout, training.learner, training.learner.parallel.pipeline
    if pipeline is None:
        return []
    activation_bytes = []
    for micro_batch in micro_batches:
        items = [item for _, item in micro_batch]
        step = MicroStep(learner.collate(items), micro_batch, learner.totals(items), step=1)
        (activation,) = learner.empty_activation(step)  # of the one model of stages that have formulas
        activation_bytes.append(activation.nbytes)
    shared_bytes: Counter[int] = Counter()
    for group, name in learner.parallel.partial_gradients:
        local = learner.parallel.local_parameters[name].local
        if group.name == "pipeline" and local.requires_grad:
            shared_bytes[group.size] += local.nbytes
    chunks_of = placement(pipeline.schedule, pipeline.stages.size, pipeline.chunks_per_rank)
    return list(
        pipeline_traffic(
            chunks_of,
            pipeline.stages.index,
            layout,
            activation_bytes=activation_bytes,
            shared_bytes=shared_bytes,
        )
    )
