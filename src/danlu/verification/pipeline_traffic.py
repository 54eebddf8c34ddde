"""Traffic between the stages of a decoder in a step of a recipe, by `planning.traffic`."""

from __future__ import annotations

from collections import Counter

from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.schedules import placement
from danlu.planning.traffic import pipeline_traffic
from danlu.training.learner import MicroStep
from danlu.verification.proxy import MicroBatches, ProxyTraining


def stages_traffic(training: ProxyTraining, micro_batches: MicroBatches) -> list[CollectiveTraffic]:
    """The traffic of this process to other stages; nothing where there are none."""
    layout, learner, pipeline = training.ranks.layout, training.learner, training.learner.parallel.pipeline
    if pipeline.alone:
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
