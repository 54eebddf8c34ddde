"""The collectives of a stage's process in a step: their bytes, and the seconds that it waits for them. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.layout import Layout
from danlu.planning.cluster import Cluster
from danlu.planning.collective_seconds import CollectiveSeconds, each_collective_seconds
from danlu.planning.machine_profile import MachineProfile
from danlu.planning.primitives import PassSeconds
from danlu.planning.step_traffic import MicroBatch, RankModel, step_traffic
from danlu.planning.workload import Workload

_AT_END = ("passes", "backward passes", "last backward pass")
"""The work that hides collectives of data ranks; what is left of them is waited for before the update."""


@dataclass(frozen=True)
class StageCollectives:
    """The collectives of one stage in a step."""

    traffic: tuple[CollectiveTraffic, ...] = ()
    by_axis: Mapping[str, float] = field(default_factory=dict)
    """Axis -> seconds, hidden ones included."""
    of_pass: float = 0.0
    """Seconds that a micro-batch waits in both passes of a chunk."""
    of_message: float = 0.0
    """Seconds of a message to the next stage."""
    at_end: float = 0.0
    """Seconds of data ranks' collectives that no computation hides."""
    exposed: float = 0.0
    """Seconds in which the process waits in a step, without messages between stages."""
    extrapolated: bool = False


SILENT = StageCollectives()
"""A process that is alone."""


def stage_collectives(
    workload: Workload,
    layout: Layout,
    stage: int,
    micro: int,
    micro_batches: int,
    seconds: Sequence[PassSeconds] | None,
    links: Cluster | MachineProfile | None,
) -> StageCollectives:
    """The collectives of the first process of a stage, with full packs or mean rows, and as many tokens to each expert.

    seconds: of a micro-batch in each chunk of the stage; None where no speeds are known. links: None where they are
    not known.
    """
    if layout.world == 1:
        return SILENT
    length, context = workload.recipe.data.max_length, layout.context
    batch = MicroBatch.of_full_packs(micro, length, context)
    if (rows := workload.dealt_to(layout.data).row_batches) is not None:
        batch = MicroBatch.of_rows(rows.mean(micro), context)
    model = RankModel.of(workload, layout, stage * layout.world // layout.pipeline)
    traffic = tuple(step_traffic(model, [batch] * micro_batches))
    if seconds is None or links is None:
        return StageCollectives(traffic)
    by_axis: dict[str, float] = defaultdict(float)
    of_pass = of_message = at_end = 0.0
    collectives = each_collective_seconds(traffic, links)
    for each in collectives:
        by_axis[each.axis] += each.seconds
        if each.hidden_by == "other micro-batches":
            of_message = max(of_message, each.seconds / each.calls)
            continue
        exposed = each.exposed(_work(each, seconds, micro_batches))
        if each.hidden_by in _AT_END:
            at_end += exposed
        else:
            of_pass += exposed / (micro_batches * len(seconds))
    return StageCollectives(
        traffic,
        dict(by_axis),
        of_pass,
        of_message,
        at_end,
        exposed=at_end + of_pass * micro_batches * len(seconds),
        extrapolated=any(each.extrapolated for each in collectives),
    )


def _work(collective: CollectiveSeconds, seconds: Sequence[PassSeconds], micro_batches: int) -> float:
    """Seconds of the computation that goes on meanwhile, in a step."""
    match collective.hidden_by:
        case "passes":
            return micro_batches * sum(each.total for each in seconds)
        case "backward passes":
            return micro_batches * sum(each.backward for each in seconds)
        case "last backward pass":
            return sum(each.backward for each in seconds)
        case "attention":
            return micro_batches * sum(each.by_kind.get("attention", 0.0) for each in seconds)
    return 0.0
