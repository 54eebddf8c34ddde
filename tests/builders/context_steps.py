"""Attention over documents that are cut over context ranks, in a group of processes: what each rank says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from builders.flash_stub import stub_kernels
from builders.reference_attention import ReferenceAttention
from danlu.core.layer_types import Keys
from danlu.core.types import Branch, Run, Share
from danlu.data.context_sharding import shares
from danlu.models import tiled_attention
from danlu.models.attention_kernels import Kernels
from danlu.parallel import ring_attention
from danlu.parallel.comm import Group, new_group
from danlu.parallel.context_attention import ContextAttention
from danlu.parallel.context_groups import ContextGroups, Transport
from danlu.parallel.layout import Layout
from danlu.parallel.traffic_counter import TrafficCounter

PACKS = {
    "several": (0, 5, 6, 96, 160, 167, 215),
    "long": (0, 150),
    "short": tuple(range(0, 130, 10)),
    "few tokens": (0, 3),
    "trees": (0, 90, 94, 220),
}
"""Boundaries: long documents with short ones between them, one alone, none that is cut, ranks without tokens, trees."""
TREES = {
    "trees": (
        Branch(-1, 0, 30), Branch(0, 30, 33), Branch(0, 33, 90),
        Branch(-1, 90, 92), Branch(3, 92, 93), Branch(3, 93, 94),
        Branch(-1, 94, 140), Branch(6, 140, 180), Branch(7, 180, 183), Branch(7, 183, 200), Branch(6, 200, 220),
    ),
}  # fmt: skip
"""A pair of a short and a long answer, a pair that is not cut, and a tree of three generations."""


@dataclass(frozen=True)
class Case:
    """Attention, and how it is distributed."""

    transport: Transport = "ring"
    ulysses: int = 1
    pack: str = "several"
    heads: int = 4
    kv_heads: int = 2
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False  # keys and values are made of what is stored, by a matrix that is trained, and of positions
    dtype: torch.dtype = torch.float32
    kernels: str = "default"  # those of the device; "flash": a stand-in for a GPU's; "none": products alone
    fault: str = ""

    @property
    def boundaries(self) -> tuple[int, ...]:
        return PACKS[self.pack]

    @property
    def trees(self) -> tuple[Branch, ...]:
        return TREES.get(self.pack, ())

    def shares(self, ranks: int) -> tuple[Share, ...]:
        return shares(self.boundaries, ranks, trees=self.trees, token_cost=0)


@dataclass(frozen=True)
class Tensors:
    """What attention is asked, of all tokens or of a rank's; with gradients, what they are."""

    q: Tensor  # [T, H, C]
    stored: tuple[Tensor, ...]
    matrix: Tensor | None  # [K * (C + W), L] of what makes keys and values
    sinks: Tensor | None

    @property
    def trained(self) -> list[Tensor]:
        return [x for x in (self.q, *self.stored, self.matrix, self.sinks) if x is not None]


def tensors_of(case: Case) -> Tensors:
    """Of the whole pack, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    tokens = case.boundaries[-1]

    def draw(*shape: int, deviation: float = 1.0) -> Tensor:
        values = deviation * torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(case.dtype).requires_grad_()

    stored = ((1, 12),) if case.latent else ((case.kv_heads, 8), (case.kv_heads, 6))
    return Tensors(
        draw(tokens, case.heads, 8),
        tuple(draw(tokens, *shape) for shape in stored),
        draw(case.heads * 14, 12, deviation=12**-0.5) if case.latent else None,
        draw(case.heads) if case.sinks else None,
    )


def keys_of(tensors: Tensors, own_positions: Tensor) -> Keys:
    matrix = tensors.matrix
    if matrix is None:
        return Keys(tensors.stored)

    def expand(stored: Sequence[Tensor], positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        positions = own_positions if positions is None else positions
        made = (stored[0].squeeze(1) @ matrix.T).unflatten(1, (-1, 14))
        turned = torch.cos(positions.to(made.dtype) / 5)[:, None, None]
        return made[..., :8] * turned, made[..., 8:]

    return Keys(tensors.stored, expand)


def positions_of(case: Case) -> Tensor:
    """[T] int64, those of a branch behind its parent's."""
    roots = [Branch(-1, *ends) for ends in itertools.pairwise(case.boundaries)]
    positions: list[Tensor] = []
    for parent, start, stop in case.trees or roots:
        first = 0 if parent < 0 else int(positions[parent][-1]) + 1
        positions.append(torch.arange(first, first + stop - start))
    return torch.cat(positions)


def grad_of(case: Case) -> Tensor:
    """[T, H, W] of the whole pack's output."""
    width = 6
    generator = torch.Generator().manual_seed(8)
    shape = case.boundaries[-1], case.heads, width
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)


def reference(case: Case) -> list[Tensor]:
    """Output and gradients of q, what is stored, the matrix and the sinks, by one process and a dense mask, float64."""
    case = replace(case, dtype=torch.float64)
    tensors = tensors_of(case)
    out = ReferenceAttention(case.boundaries, case.trees)(
        0, tensors.q, keys_of(tensors, positions_of(case)), scale=0.3,
        window=case.window, softcap=case.softcap, sinks=tensors.sinks,
    )  # fmt: skip
    return [out.detach(), *torch.autograd.grad(out, tensors.trained, grad_of(case))]


def attended(cases: Sequence[Case], ulysses_degrees: Sequence[int] = (1, 2, 4)) -> list[list[Tensor]]:
    """Of each case the tokens of this rank, its output, and its gradients in the order of `reference`."""
    groups = {degree: _groups(degree) for degree in ulysses_degrees if dist.get_world_size() % degree == 0}
    return [_attended(case, replace(groups[case.ulysses], transport=case.transport)) for case in cases]


def traffic(cases: Sequence[Case]) -> list[dict[str, int]]:
    """The bytes that this rank sends in each case, by kind of collective, of forward and backward pass together."""
    counts = []
    for case in cases:
        groups = replace(_groups(case.ulysses), transport=case.transport)
        with TrafficCounter(Layout(context=dist.get_world_size())) as counter:
            _attended(case, groups)
        counts.append({part.kind: int(part.bytes) for part in counter.counted()})
    return counts


def _groups(ulysses: int) -> ContextGroups:
    world, rank = dist.get_world_size(), dist.get_rank()
    grid = [list(range(first, first + ulysses)) for first in range(0, world, ulysses)]

    def own(name: str, members: Sequence[Sequence[int]]) -> Group:
        made = [new_group(name, ranks) for ranks in members]
        return next(group for group in made if rank in group.ranks)

    return ContextGroups(own("ring", list(zip(*grid, strict=True))), own("ulysses", grid))


def _attended(case: Case, groups: ContextGroups) -> list[Tensor]:
    tensors = tensors_of(case)
    dealt = case.shares(groups.size)
    rows = torch.cat([torch.arange(0), *(torch.arange(run.start, run.stop) for run in dealt[groups.index].runs)])
    local = replace(tensors, q=_rows(tensors.q, rows), stored=tuple(_rows(x, rows) for x in tensors.stored))
    keys = keys_of(local, positions_of(case)[rows])
    with mock.patch.multiple(tiled_attention, QUERY_ROWS=12, KEY_ROWS=16), _fault(case.fault):
        attend = ContextAttention(dealt, groups, kernels=_kernels(case))
        out = attend(
            0, local.q, keys, scale=0.3, window=case.window, softcap=case.softcap, sinks=local.sinks
        )  # fmt: skip
        gradients = torch.autograd.grad(out, local.trained, grad_of(case)[rows], materialize_grads=True)
    return [rows, out.detach(), *gradients]


def _kernels(case: Case) -> Kernels | None:
    return {"default": lambda: None, "flash": lambda: stub_kernels()[1], "none": Kernels}[case.kernels]()


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.detach()[rows].requires_grad_()


@contextmanager
def _fault(name: str) -> Iterator[None]:
    """Within it attention makes a mistake that a ring may make."""
    patched: AbstractContextManager[object]
    tiles_between, as_rows = tiled_attention.tiles_between, ring_attention.as_rows
    if name == "window off by one at a border":

        def wrong_tiles(queries: Sequence[Run], keys: Sequence[Run], window: int | None) -> object:
            same = list(queries) == list(keys)
            return tiles_between(queries, keys, window if same or window is None else window - 1)

        patched = mock.patch.object(ring_attention, "tiles_between", wrong_tiles)
    elif name == "documents leak":

        def together(runs: Sequence[Run]) -> object:
            return tuple(run._replace(document=0, position=run.start) for run in as_rows(runs))

        patched = mock.patch.object(ring_attention, "as_rows", together)
    elif name == "siblings":

        def of_root(runs: Sequence[Run]) -> object:
            return tuple(run._replace(ancestors=tuple(range(run.document))) for run in as_rows(runs))

        patched = mock.patch.object(ring_attention, "as_rows", of_root)
    elif name == "parents are not seen":

        def childless(runs: Sequence[Run]) -> object:
            return tuple(run._replace(ancestors=()) for run in as_rows(runs))

        patched = mock.patch.object(ring_attention, "as_rows", childless)
    elif name == "positions begin anew":

        def anew(runs: Sequence[Run]) -> object:
            return tuple(run._replace(position=0) for run in as_rows(runs))

        patched = mock.patch.object(ring_attention, "as_rows", anew)
    elif name == "sinks once per rank":
        finished = tiled_attention.finished
        size = dist.get_world_size()

        def repeatedly(total: object, sinks: Tensor | None) -> object:
            for _ in range(size):
                total = finished(total, sinks)  # type: ignore[arg-type]
            return total

        patched = mock.patch.object(ring_attention, "finished", repeatedly)
    elif name == "gradients of keys stay":

        def nothing_added(*args: object) -> object:
            rows, gradients = add_gradients(*args)
            return [torch.zeros_like(x) for x in rows], gradients

        add_gradients = ring_attention._Passes.add_gradients
        patched = mock.patch.object(ring_attention._Passes, "add_gradients", nothing_added)
    else:
        assert not name, name
        patched = nullcontext()
    with patched:
        yield
