"""Seconds of collectives, against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from danlu.core.errors import RecipeError
from danlu.parallel.collective_traffic import AXES, CollectiveTraffic, GroupShape, axis_of, axis_of_data_ranks
from danlu.parallel.layout import Layout
from danlu.planning.cards import Card
from danlu.planning.cluster import Cluster, Link
from danlu.planning.collective_seconds import collective_seconds, each_collective_seconds, slowest_link
from danlu.planning.machine_profile import Machine, MachineProfile
from danlu.planning.measured_table import Table
from danlu.planning.traffic import Weight, data_traffic, pipeline_traffic
from danlu.recipe.sections import Parallel

INSIDE, OUTSIDE = Link(8, 400e9, 5e-6), Link(None, 50e9, 20e-6)
CLUSTER = Cluster(Card("C", 80 * 2**30, 2e12, {}), 4, 8, (INSIDE, OUTSIDE))
MIB = 2**20


def traffic(kind: str, size: int, stride: int, sent: int, calls: int = 1, what: str = "") -> CollectiveTraffic:
    return CollectiveTraffic("shard", kind, Fraction(sent), calls, what, GroupShape(size, stride))  # type: ignore[arg-type]


def test_a_ring_waits_for_its_bytes_and_once_a_step_for_its_link() -> None:
    cases = [
        (traffic("all-reduce", 8, 1, 700 * MIB, 3), 700 * MIB / 400e9 + 3 * 14 * 5e-6),
        (traffic("all-gather", 4, 2, 90 * MIB, 5), 90 * MIB / 400e9 + 5 * 3 * 5e-6),
        (traffic("reduce-scatter", 4, 8, 90 * MIB, 5), 90 * MIB / 50e9 + 5 * 3 * 20e-6),
        (traffic("all-to-all", 16, 1, MIB), MIB / 50e9 + 15 * 20e-6),
        # Four ranks in each of two nodes: four rings; three steps inside of each node, and one between them.
        (traffic("all-gather", 8, 2, 90 * MIB), 90 * MIB / 200e9 + 2 * 3 * 5e-6 + 20e-6),
        (traffic("all-reduce", 32, 1, 90 * MIB), 90 * MIB / 400e9 + 2 * (4 * 7 * 5e-6 + 3 * 20e-6)),
        (traffic("point-to-point", 2, 4, MIB, 6), MIB / 400e9 + 6 * 5e-6),
    ]
    for each, seconds in cases:
        assert collective_seconds([each], CLUSTER) == {"shard": pytest.approx(seconds, rel=1e-12)}
    both = collective_seconds([cases[0][0], replace(cases[1][0], axis="tensor"), cases[2][0]], CLUSTER)
    assert both == {
        "shard": pytest.approx(cases[0][1] + cases[2][1]),
        "tensor": pytest.approx(cases[1][1]),
    }


def test_the_slowest_link_of_any_group_is_that_of_the_worst_among_all() -> None:
    """Against all groups of a shape, listed."""
    for links, size, stride in product(
        ((INSIDE, OUTSIDE), (Link(2, 9e9, 1e-6), INSIDE, OUTSIDE)), (2, 4, 8, 16), (1, 2, 4, 8)
    ):
        cluster = replace(CLUSTER, links=links)
        extent = size * stride
        if extent <= cluster.ranks:
            groups = [
                range(first + offset, first + extent, stride)
                for first in range(0, cluster.ranks, extent)
                for offset in range(stride)
            ]
            # Links come from the fastest to the slowest.
            worst = max((cluster.link_between(group) for group in groups), key=links.index)
            assert slowest_link(GroupShape(size, stride), cluster) == worst, (size, stride)
    assert slowest_link(GroupShape(1), CLUSTER).latency_s == 0
    assert slowest_link(GroupShape(3), CLUSTER) == OUTSIDE  # ranks 6, 7 and 8 are in two nodes
    one_node = replace(CLUSTER, nodes=1, links=(INSIDE._replace(ranks=None),))
    assert slowest_link(GroupShape(3, 2), one_node) == one_node.links[0]
    with pytest.raises(RecipeError, match="links between the 32 ranks"):
        slowest_link(GroupShape(2), replace(CLUSTER, links=()))


def test_a_profile_gives_the_seconds_of_each_call() -> None:
    machine = Machine("P", "cpu", 1, 4, "2.13")
    table = Table(((1, 1000, 2000),), (1e-3, 2e-3, 4e-3))
    profile = MachineProfile(machine, {"all_reduce": table, "send": table})
    # Of 1000 bytes each of four ranks sends 1500; twice.
    (each,) = each_collective_seconds([traffic("all-reduce", 4, 1, 3000, 2)], profile)
    assert (each.seconds, each.extrapolated) == (pytest.approx(4e-3), False)
    assert collective_seconds([traffic("point-to-point", 2, 1, 1500)], profile) == {"shard": pytest.approx(3e-3)}
    assert each_collective_seconds([traffic("all-reduce", 2, 1, 1000)], profile)[0].extrapolated
    with pytest.raises(RecipeError, match="no links measured"):
        collective_seconds([traffic("all-gather", 4, 1, 10)], profile)


def test_what_goes_on_meanwhile_hides_all_but_one_call() -> None:
    gathers, norms = each_collective_seconds(
        [
            traffic("all-gather", 8, 1, 400 * MIB, 4, "parameters"),
            traffic("all-reduce", 8, 1, 400 * MIB, 1, "gradients of norms and routers"),
        ],
        CLUSTER,
    )
    assert (gathers.hidden_by, norms.hidden_by) == ("passes", None)
    assert gathers.exposed(0) == gathers.seconds
    assert gathers.exposed(gathers.seconds / 2) == pytest.approx(gathers.seconds / 2)
    assert gathers.exposed(1e9) == gathers.seconds / 4
    # Where the processors that compute send too, computation hides nothing of what it takes longer for it.
    assert replace(gathers, slowed=0.9 * gathers.seconds).exposed(1e9) == 0.9 * gathers.seconds
    assert norms.exposed(1e9) == norms.seconds


def test_fsdp_hides_collectives_where_a_device_has_streams() -> None:
    """A CPU's collectives block; those that danlu starts itself go on meanwhile, and so do a card's."""
    table = Table(((1, 1000, 2000),), (1e-3, 2e-3, 4e-3))
    tables = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), table)
    of_step = [
        traffic("all-gather", 4, 1, 900, 2, "parameters"),
        traffic("reduce-scatter", 4, 1, 900, 1, "gradients"),
        traffic("all-reduce", 4, 1, 900, 1, "shares of gradients"),
        traffic("all-reduce", 4, 1, 900, 1, "gradients"),
    ]
    of_cpu, of_card = (
        [each.hidden_by for each in each_collective_seconds(of_step, MachineProfile(machine, tables))]
        for machine in (Machine("P", "cpu", 1, 4, "2.13"), Machine("P", "cuda", 1, 4, "2.13"))
    )
    assert of_cpu == [None, None, None, "last backward pass"]
    assert of_card == ["passes", "backward passes", "last backward pass", "last backward pass"]


def test_computed_traffic_has_its_groups_and_calls() -> None:
    layout = Layout(pipeline=2, replicate=2, shard=4, context=2, tensor=2)
    weights = [
        Weight((64, 8), layer=0),
        Weight((64, 8), layer=1),
        Weight((8,), sharded=False, layer=1),
        Weight((64, 8)),
    ]
    found = {
        each.what: (each.calls, each.group)
        for each in data_traffic(weights, layout, Parallel(shard="zero3"), micro_batches=3)
    }
    assert found == {
        "parameters": (3 * (2 + 2 + 2), GroupShape(8, 2)),
        "gradients": (3 * 3, GroupShape(8, 2)),
        "shares of gradients": (3, GroupShape(2, 16)),
        "gradients of norms and routers": (1, GroupShape(16, 2)),
    }
    (message,) = pipeline_traffic([[0], [1]], 0, layout, activation_bytes=[10, 10], shared_bytes={})
    assert (message.calls, message.group) == (2, GroupShape(2, 32))


def test_axes_of_data_ranks_are_those_of_their_list() -> None:
    """For every stride, against the coordinates of all ranks; ranks of a large world are not listed."""
    for replicate, shard, context, step in product((1, 2, 3), (1, 2, 4, 6), (1, 2, 3), range(1, 13)):
        layout = Layout(pipeline=2, replicate=replicate, shard=shard, context=context, tensor=2)
        ranks = layout.gradient_ranks(1)
        for start, count in product(range(min(3, len(ranks))), (1, 2, 3, 5)):
            last = start + step * (count - 1)
            if last < len(ranks):
                expected = axis_of([ranks[start + step * index] for index in range(count)], layout)
                assert axis_of_data_ranks(layout, start, step, count) == expected, (layout, start, step, count)
    large = Layout(replicate=2**20, shard=2**20, context=2**10)
    assert axis_of_data_ranks(large, 0, 2**10, 2**40) == "replicate x shard"


def test_ranks_along_axes_are_those_with_the_other_coordinates() -> None:
    layout = Layout(pipeline=2, replicate=3, shard=2, context=2, tensor=2)
    for rank, axes in product((0, 17, 47), (("shard",), ("replicate", "context"), ("tensor", "pipeline"), AXES, ())):
        own = layout.coordinates(rank)
        others = [
            other
            for other in range(layout.world)
            if all(layout.coordinates(other)[axis] == own[axis] for axis in AXES if axis not in axes)
        ]
        assert layout.ranks_along(rank, axes) == others
