"""Everything that torch sends is seen, with its size and its axis."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from builders.process_group import run_group
from builders.traffic_worker import HAS_LISTS, along_axes, one_of_each

from danlu.parallel import traffic_counter
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.layout import Layout
from danlu.parallel.traffic_counter import TrafficCounter, fake_process_group

FULL = 60 * 4  # bytes of what `one_of_each` sends around


@pytest.fixture(scope="module")
def counted() -> list[dict[str, list[CollectiveTraffic]]]:
    return run_group(one_of_each, 3)


@pytest.mark.distributed
def test_each_collective_is_counted_as_a_ring_sends_it(counted: list[dict[str, list[CollectiveTraffic]]]) -> None:
    third = Fraction(1, 3)
    expected = {
        "all_reduce": ("all-reduce", 4 * third * FULL),
        "all_reduce bf16": ("all-reduce", 4 * third * FULL / 2),
        "all_gather": ("all-gather", 2 * third * FULL),
        "all_gather_into_tensor": ("all-gather", 2 * third * FULL),
        "reduce_scatter": ("reduce-scatter", 2 * third * FULL),
        "reduce_scatter_tensor": ("reduce-scatter", 2 * third * FULL),
        "all_to_all_single": ("all-to-all", 2 * third * FULL),
        "all_to_all": ("all-to-all", 2 * third * FULL),
        "broadcast": ("broadcast", 2 * third * FULL),
        "reduce": ("reduce", 2 * third * FULL),
        "gather": ("gather", 2 * third * FULL / 3),
        "scatter": ("scatter", 2 * third * FULL / 3),
        "send": ("point-to-point", Fraction(FULL)),
        "functional all_reduce": ("all-reduce", 4 * third * FULL),
        "functional all_gather": ("all-gather", 2 * third * FULL),
        "functional reduce_scatter": ("reduce-scatter", 2 * third * FULL),
        "functional all_to_all": ("all-to-all", 2 * third * FULL),
        "DTensor, sum": ("all-reduce", 4 * third * FULL),
        "DTensor, whole": ("all-gather", 2 * third * FULL),
        "in a backward pass": ("all-reduce", 4 * third * FULL),
    }
    if not HAS_LISTS:
        del expected["all_to_all"]
    for rank, found in enumerate(counted):
        stays = (10, 0, 30)[rank]
        uneven = {"all_to_all_single uneven": ("all-to-all", Fraction(FULL) - 4 * stays)}
        for name, (kind, sent) in (expected | uneven).items():
            assert found[name] == [CollectiveTraffic("shard", kind, sent, calls=1)], name  # type: ignore[arg-type]
        assert found["barrier"] == found["nothing"] == []
        assert found.keys() == {*expected, *uneven, "barrier", "nothing"}


def test_every_operator_of_torch_is_known() -> None:
    with fake_process_group(2):  # which loads all of them
        found = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    found = {name for name in found if name.partition("::")[0] in traffic_counter._SPACES}
    known = {*traffic_counter._COLLECTIVES, *traffic_counter._SEND_NOTHING, "_c10d_functional::batch_p2p_ops"}
    assert len(found) > 30
    assert found - known == set()


def test_an_operator_that_is_not_known_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_counter, "_COLLECTIVES", {})
    with (
        fake_process_group(2),
        TrafficCounter(Layout(shard=2)),
        pytest.raises(AssertionError, match="c10d::allreduce_ is not known to send"),
    ):
        dist.all_reduce(torch.ones(2))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        (
            Layout(replicate=2, shard=2),
            {
                "world": ("replicate x shard", 4),
                "data": ("replicate x shard", 4),
                "replicate": ("replicate", 2),
                "shard": ("shard", 2),
                "a pair": ("shard", 2),
            },
        ),
        (
            Layout(shard=2, tensor=2),
            {
                "world": ("shard x tensor", 4),
                "data": ("shard", 2),
                "shard": ("shard", 2),
                "tensor": ("tensor", 2),
                "a pair": ("tensor", 2),
            },
        ),
        (
            Layout(tensor=4),
            {"world": ("tensor", 4), "tensor": ("tensor", 4), "a pair": ("tensor", 2)},
        ),
    ],
    ids=str,
)
def test_groups_are_axes(layout: Layout, axes: dict[str, tuple[str, int]]) -> None:
    for found in run_group(along_axes, 4, layout):
        sent = {name: [(one.axis, one.bytes) for one in counts] for name, counts in found.items() if counts}
        assert sent == {name: [(axis, Fraction(2 * (n - 1), n) * FULL)] for name, (axis, n) in axes.items()}


def test_of_many_processes_one_is_enough_to_count() -> None:
    layout = Layout(shard=64, tensor=8)
    with fake_process_group(512, rank=9):
        mesh = dist.device_mesh.init_device_mesh("cpu", (64, 8), mesh_dim_names=("shard", "tensor"))
        with TrafficCounter(layout) as counting:
            dist.all_reduce(torch.ones(16), group=mesh.get_group("shard"))
            dist.all_reduce(torch.ones(16), group=mesh.get_group("tensor"))
            dist.all_reduce(torch.ones(16), group=mesh.get_group("tensor"))
        with pytest.raises(AssertionError, match="belongs to a world already"), fake_process_group(4):
            pass
    assert not dist.is_initialized()
    assert {one.axis: (one.bytes, one.calls) for one in counting.counted()} == {
        "shard": (Fraction(126), 1),
        "tensor": (Fraction(224), 2),
    }
