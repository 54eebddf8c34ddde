"""Counts the bytes that this process sends, by axis and collective, in all calls: our groups, FSDP2 or DTensor.

All of torch's collectives pass its dispatcher as operators of `c10d` or `_c10d_functional`; a dispatch mode sees them
there, forward and backward, on any backend. With the `fake` backend a single process can stand for one of 512.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from danlu.parallel.collective_traffic import CollectiveTraffic, Kind, axis_of, ring_bytes
from danlu.parallel.layout import Layout


@dataclass(frozen=True)
class _Collective:
    """How to count an operator."""

    kind: Kind
    full: str  # name of the argument that is (or makes up) the full tensor of `ring_bytes`
    is_share: bool = False  # whether that argument is one process's share of the full tensor


_COLLECTIVES: Mapping[str, _Collective] = {
    "c10d::_allgather_base_": _Collective("all-gather", "output_tensor"),
    "c10d::_reduce_scatter_base_": _Collective("reduce-scatter", "input_tensor"),
    "c10d::allgather_": _Collective("all-gather", "output_tensors"),
    "c10d::allgather_coalesced_": _Collective("all-gather", "output_lists"),
    "c10d::allgather_into_tensor_coalesced_": _Collective("all-gather", "outputs"),
    "c10d::allreduce_": _Collective("all-reduce", "tensors"),
    "c10d::allreduce_coalesced_": _Collective("all-reduce", "tensors"),
    "c10d::alltoall_": _Collective("all-to-all", "input_tensors"),
    "c10d::alltoall_base_": _Collective("all-to-all", "input"),
    "c10d::broadcast_": _Collective("broadcast", "tensors"),
    "c10d::gather_": _Collective("gather", "input_tensors"),
    "c10d::reduce_": _Collective("reduce", "tensors"),
    "c10d::reduce_scatter_": _Collective("reduce-scatter", "input_tensors"),
    "c10d::reduce_scatter_tensor_coalesced_": _Collective("reduce-scatter", "inputs"),
    "c10d::scatter_": _Collective("scatter", "output_tensors"),
    "c10d::send": _Collective("point-to-point", "tensors"),
    "_c10d_functional::all_gather_into_tensor": _Collective("all-gather", "input", is_share=True),
    "_c10d_functional::all_gather_into_tensor_coalesced": _Collective("all-gather", "inputs", is_share=True),
    "_c10d_functional::all_gather_into_tensor_out": _Collective("all-gather", "input", is_share=True),
    "_c10d_functional::all_reduce": _Collective("all-reduce", "input"),
    "_c10d_functional::all_reduce_": _Collective("all-reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": _Collective("all-reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": _Collective("all-reduce", "inputs"),
    "_c10d_functional::all_to_all_single": _Collective("all-to-all", "input"),
    "_c10d_functional::broadcast": _Collective("broadcast", "input"),
    "_c10d_functional::broadcast_": _Collective("broadcast", "input"),
    "_c10d_functional::isend": _Collective("point-to-point", "tensor"),
    "_c10d_functional::reduce_scatter_tensor": _Collective("reduce-scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": _Collective("reduce-scatter", "inputs"),
    "_c10d_functional::reduce_scatter_tensor_out": _Collective("reduce-scatter", "input"),
}
_SEND_NOTHING = frozenset(
    {
        "c10d::barrier",
        "c10d::check_for_nan",
        "c10d::monitored_barrier_",
        "c10d::recv_",
        "c10d::recv_any_source_",
        "_c10d_functional::irecv",
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
    }
)
_SPACES = ("c10d", "_c10d_functional")


class TrafficCounter(TorchDispatchMode):
    """`with TrafficCounter(layout) as traffic: step()`, then `traffic.counted()`.

    Counts the collectives that the thread starts inside the block, and those of its backward passes; a checkpoint that
    is written in another thread is left out. Compiled functions run uncompiled meanwhile. Bytes are those of a ring,
    whatever the backend does, and each message is counted when it is started, whether or not anyone waits for it.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout
        self._counts: dict[tuple[str, Kind], tuple[Fraction, int]] = {}

    def counted(self) -> list[CollectiveTraffic]:
        """Returns the bytes sent since the block was entered, by axis and kind."""
        return [CollectiveTraffic(axis, kind, count, calls) for (axis, kind), (count, calls) in self._counts.items()]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A DTensor first becomes operations on local tensors, which come here in their turn.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in _SPACES:
            self._count(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func._schema.name
        if name in _SEND_NOTHING:
            return
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        ranks = _ranks(given["process_group"] if "process_group" in given else given["group_name"])
        if name == "_c10d_functional::batch_p2p_ops":
            sends = [x for what, x in zip(given["op_list"], given["tensors"], strict=True) if "send" in what]
            self._add(ranks, "point-to-point", sum(map(_bytes, sends)))
            return
        collective = _COLLECTIVES.get(name)
        assert collective is not None, f"{name} is not known to send so and so much: add it to _COLLECTIVES"
        full_bytes = _bytes(given[collective.full]) * (len(ranks) if collective.is_share else 1)
        stays = _own_rows(given, ranks) if collective.kind == "all-to-all" else None
        self._add(ranks, collective.kind, full_bytes, stays)

    def _add(self, ranks: tuple[int, ...], kind: Kind, full_bytes: int, stays: Fraction | None = None) -> None:
        """Counts one call. stays: the share of the full tensor that stays here, where it need not be 1 / processes."""
        sent_bytes = ring_bytes(kind, len(ranks), full_bytes) if stays is None else (1 - stays) * full_bytes
        key = _axis(ranks, self._layout), kind
        total_bytes, calls = self._counts.get(key, (Fraction(0), 0))
        self._counts[key] = total_bytes + sent_bytes, calls + 1


def _ranks(group: Any) -> tuple[int, ...]:
    """The members of a process group that is an operator's argument: a wrapped object, or a name."""
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type,attr-defined]
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


@cache
def _axis(ranks: tuple[int, ...], layout: Layout) -> str:
    return axis_of(ranks, layout)


def _bytes(what: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(what, Tensor):
        return what.numel() * what.element_size()
    return sum(map(_bytes, what))


def _own_rows(given: Mapping[str, Any], ranks: tuple[int, ...]) -> Fraction | None:
    """The share of an all-to-all's input that stays with this process; None where all shares are alike."""
    index = ranks.index(dist.get_rank())
    if "input_tensors" in given:
        whole = _bytes(given["input_tensors"])
        return Fraction(_bytes(given["input_tensors"][index]), whole) if whole else None
    rows = given["input_split_sizes"]
    return Fraction(rows[index], sum(rows)) if sum(rows) else None


@contextmanager
def fake_process_group(world: int, rank: int = 0) -> Iterator[None]:
    """torch.distributed as rank `rank` of `world` processes that do not exist: collectives return and move nothing.

    Their results are not initialised, so only shapes and counts of the code inside mean anything.
    """
    assert not dist.is_initialized(), "this process belongs to a world already"
    # Importing it registers the backend, which nothing but counting needs.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()
