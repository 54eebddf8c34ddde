"""The measured traffic of one process in a step, and the traffic that the formulas of `planning` predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from danlu.core.types import Item
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.traffic_counter import TrafficCounter
from danlu.training.executor import Executor
from danlu.training.learner import StepItems
from danlu.verification.collective_traffic import COUNTED_STEP, classifier_traffic, decoder_traffic
from danlu.verification.proxy import MicroBatches, ProxyTraining


@dataclass(frozen=True)
class StepTraffic:
    """The traffic of one process in a step: one entry for each collective, group and purpose."""

    counted: list[CollectiveTraffic]
    predicted: list[CollectiveTraffic]


def measure_step_traffic(training: ProxyTraining, items: Sequence[Item]) -> StepTraffic:
    """Counts one step, like all others of a run, and predicts what it sends."""
    counted, micro_batches = count_step_traffic(training, items)
    predict = classifier_traffic if training.proxy.config is None else decoder_traffic
    return StepTraffic(counted, predict(training, micro_batches))


def count_step_traffic(training: ProxyTraining, items: Sequence[Item]) -> tuple[list[CollectiveTraffic], MicroBatches]:
    """Counts what one step sends, and returns its micro-batches too.

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
    return traffic.counted(), [[(number, items[number]) for number in of_one] for of_one in numbers]
