"""Seconds of the collectives of a step: by the links of a cluster, or as a machine's profile measured them. No torch.

A ring of N ranks takes N - 1 steps to gather, to scatter or to exchange, twice as many to sum; each waits once for its
link's latency. Bytes go through the slowest link that any group along the axis needs: with 8 cards a node, groups of 8
neighbours stay inside of a node, those of 16 do not, nor do two ranks that are 8 apart.

Gathers, scatters and sums of ranks in several nodes go in as many rings at a time as a node has ranks of the group, and
each ring leaves a node through the network of another rank. Two nodes of 8 H100s with 25 GB/s for each card reach
339 GB/s so (nccl-tests' bus bandwidth in lessizzmore/create-a3mega-ztan-fork ztan-NCCL-test-result@02dd8f45); of 34
published runs on 16 to 128 A100s the median error is 2.9 %, and 8.8 % with one ring (benchmarks/planner.py). In an
exchange each rank sends its own bytes through its own network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from danlu.parallel.collective_traffic import CollectiveTraffic, GroupShape, Kind
from danlu.planning.cluster import NO_LINK, Cluster, Link
from danlu.planning.machine_profile import Collective, MachineProfile

Work = Literal["passes", "backward passes", "last backward pass", "attention", "other micro-batches"]
"""The work of a rank that goes on while bytes travel."""
_HIDDEN_BY: Mapping[tuple[Kind, str], Work] = {
    ("all-reduce", "gradients"): "last backward pass",  # in buckets
    ("point-to-point", "keys"): "attention",  # a ring computes with the keys that it has
    ("point-to-point", "activations and their gradients"): "other micro-batches",
}
_HIDDEN_BY_STREAMS: Mapping[tuple[Kind, str], Work] = {
    # FSDP2 gathers the next layers while one computes, and scatters gradients while the backward pass goes on.
    ("all-gather", "parameters"): "passes",
    ("reduce-scatter", "gradients"): "backward passes",
    ("all-reduce", "shares of gradients"): "last backward pass",
}
"""Collectives of FSDP2, which waits for them where a device has no streams: on a CPU."""
_MEASURED: Mapping[Kind, Collective] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "point-to-point": "send",
}


@dataclass(frozen=True)
class CollectiveSeconds:
    """The seconds that one kind of collective takes in a step along an axis."""

    axis: str
    kind: Kind
    what: str
    calls: int
    seconds: float
    hidden_by: Work | None
    """The work that goes on meanwhile; None: the rank waits."""
    extrapolated: bool = False
    """Whether a size or number of ranks lies outside of those that were measured."""
    slowed: float = 0.0
    """Seconds that the work which goes on meanwhile takes longer for it."""

    def exposed(self, work_seconds: float) -> float:
        """Seconds by which the step is longer for it. work_seconds: of `hidden_by` in the step.

        One call always stays: nothing is computed before the first layer is gathered, nor after the last gradient.
        """
        if self.hidden_by is None:
            return self.seconds
        least = 0.0 if self.hidden_by in ("attention", "other micro-batches") else self.seconds / self.calls
        return max(least, self.slowed, self.seconds - work_seconds)


def each_collective_seconds(
    traffic: Iterable[CollectiveTraffic], links: Cluster | MachineProfile
) -> tuple[CollectiveSeconds, ...]:
    """The seconds of each entry of a rank's computed traffic in a step.

    Raises RecipeError where the links are not known or were not measured.
    """
    return tuple(_seconds(each, links) for each in traffic)


def collective_seconds(traffic: Iterable[CollectiveTraffic], links: Cluster | MachineProfile) -> Mapping[str, float]:
    """Axis -> seconds of its collectives in a step, hidden ones included. Raises as `each_collective_seconds`."""
    seconds: dict[str, float] = defaultdict(float)
    for each in each_collective_seconds(traffic, links):
        seconds[each.axis] += each.seconds
    return dict(seconds)


def slowest_link(group: GroupShape, cluster: Cluster) -> Link:
    """The slowest link that any group of this shape needs in a cluster full of them.

    Raises RecipeError where the links are not known.
    """
    if group.size == 1:
        return NO_LINK
    extent = group.size * group.stride  # groups like these fill it; the next one begins behind it
    if extent > cluster.ranks:  # a pair of neighbours among several
        extent = cluster.ranks
    for link in cluster.links:
        if link.ranks is not None and link.ranks % extent == 0 and link.ranks < cluster.ranks:
            return link
    return cluster.link_across(0, cluster.ranks - 1)


def _seconds(traffic: CollectiveTraffic, links: Cluster | MachineProfile) -> CollectiveSeconds:
    group, calls = traffic.group, max(1, traffic.calls)
    assert group is not None, f"{traffic.what or traffic.kind}: the seconds of computed traffic, which has its group"
    extrapolated, slowed = False, 0.0
    if isinstance(links, MachineProfile):
        count = float(traffic.bytes / _sent_share(traffic.kind, group.size) / calls)
        measured = links.collective_seconds(_MEASURED[traffic.kind], count, group.size)
        seconds, extrapolated = calls * float(measured), measured.extrapolated
        slowed = seconds * links.slowed_share(count)
    else:
        rate, latency = _ring(traffic.kind, group, links)
        seconds = float(traffic.bytes) / rate + calls * latency
    hidden_by = _HIDDEN_BY.get((traffic.kind, traffic.what))
    if not (isinstance(links, MachineProfile) and links.machine.device == "cpu"):
        hidden_by = hidden_by or _HIDDEN_BY_STREAMS.get((traffic.kind, traffic.what))
    return CollectiveSeconds(traffic.axis, traffic.kind, traffic.what, calls, seconds, hidden_by, extrapolated, slowed)


def _ring(kind: Kind, group: GroupShape, cluster: Cluster) -> tuple[float, float]:
    """(bytes that a rank sends in a second, seconds of latency) of one call. Raises RecipeError as `slowest_link`."""
    link, steps = slowest_link(group, cluster), _steps(kind, group.size)
    place = cluster.links.index(link) if link in cluster.links else 0
    if place == 0 or kind in ("all-to-all", "point-to-point"):
        return link.bytes_per_s, steps * link.latency_s
    faster = cluster.links[place - 1]
    assert faster.ranks is not None, "the last link alone connects all ranks"
    inside = max(1, min(group.size, faster.ranks // group.stride))
    if inside == 1:
        return link.bytes_per_s, steps * link.latency_s
    of_inside, latency = _ring(kind, GroupShape(inside, group.stride), cluster)
    nodes = -(-group.size // inside)
    return min(of_inside, link.bytes_per_s * inside), nodes * latency + _steps(kind, nodes) * link.latency_s


def _steps(kind: Kind, size: int) -> int:
    """Steps of a ring, one behind the other."""
    if kind == "point-to-point":
        return 1
    return (2 if kind == "all-reduce" else 1) * (size - 1)


def _sent_share(kind: Kind, size: int) -> float:
    """The bytes that a rank sends over those of the tensor by which a profile lists its seconds."""
    return 1.0 if kind == "point-to-point" else _steps(kind, size) / size
