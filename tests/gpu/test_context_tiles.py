"""Attention over documents that are cut over context ranks, in half precision on the device, against float64.

The ranks of a ring run one after the other in this process, and receive what the others have sent in the round before.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from builders.recorded_exchange import run_ring
from builders.reference_attention import ReferenceAttention
from torch import Tensor

from danlu.core.layer_types import Keys
from danlu.core.types import Run
from danlu.data.context_sharding import shares
from danlu.models.tiled_attention import TiledAttention, TileSettings, plan_tiles, tile_kernel_for, tiles_between
from danlu.parallel.ring_attention import RankRows, as_rows, ring_attention

HEADS, WIDTH = 8, 64
LENGTHS = {(5, 3): 2, (300, 1, 211): 2, (1000, 24, 3072): 4, (4096,): 4}
"""Of documents, and over how many ranks the long ones are cut; chunks of (5, 3) have one token or two."""
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups of one": {"kv_heads": 8},
    "window": {"window": 64},
    "window over chunks": {"window": 700},
    "window of one": {"window": 1},
    "sinks": {"sinks": True},
    "narrower values": {"value_width": 40},
    "softcap": {"softcap": 20.0},
}


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative, infinite for what is not finite."""
    return float((found - wanted).norm() / wanted.norm()) if bool(found.isfinite().all()) else float("inf")


def gradients_of(out: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Output and gradients in float64."""
    gradients = torch.autograd.grad(out, inputs, grad.to(out.dtype))
    return [x.detach().double() for x in (out, *gradients)]


class Pack:
    """Documents whose tokens are dealt to ranks, and what attention over them is asked."""

    def __init__(self, device: torch.device, lengths: tuple[int, ...], ranks: int, variant: dict[str, Any]) -> None:
        self.device, self.boundaries = device, (0, *itertools.accumulate(lengths))
        dealt = shares(self.boundaries, ranks, token_cost=0)
        self.runs: list[tuple[Run, ...]] = [(*share.whole, *share.chunks) for share in dealt]
        self.settings = TileSettings(WIDTH**-0.5, variant.get("window"), variant.get("softcap"))
        kv_heads, width = variant.get("kv_heads", 2), variant.get("value_width", WIDTH)
        generator = torch.Generator().manual_seed(sum(lengths))

        def draw(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) * 1.5).to(device, torch.bfloat16)

        total = sum(lengths)
        self.tensors = [draw(total, HEADS, WIDTH), draw(total, kv_heads, WIDTH), draw(total, kv_heads, width)]
        self.tensors += [draw(HEADS)] if variant.get("sinks") else []
        self.grad = draw(total, HEADS, width)

    def rows(self, rank: int) -> Tensor:
        """The tokens of a rank."""
        ranges = [torch.arange(run.start, run.stop) for run in self.runs[rank]]
        return torch.cat([torch.arange(0), *ranges]).to(self.device)

    def exact(self, window: int | None) -> list[Tensor]:
        """By a dense mask in float64."""
        leaves = [x.double().requires_grad_() for x in self.tensors]
        out = ReferenceAttention(self.boundaries)(
            0, leaves[0], Keys((leaves[1], leaves[2])), scale=self.settings.scale, window=window,
            softcap=self.settings.softcap, sinks=leaves[3] if len(leaves) > 3 else None,
        )  # fmt: skip
        return gradients_of(out, leaves, self.grad)

    def by_ring(self) -> list[Tensor]:
        """By `ring_attention` of each rank."""

        def rank(group: Any) -> list[Tensor]:
            ranks, rows = RankRows(group, self.runs), self.rows(group.index)
            q, k, v, *sinks = leaves = self._leaves(rows)
            keys = Keys((k, v))
            out = ring_attention(q, k, v, keys, sinks[0] if sinks else None, ranks, self.settings)
            return [rows, *gradients_of(out, leaves, self.grad[rows])]

        return self._in_order(run_ring(rank, len(self.runs)))

    def by_gathered_keys(self) -> list[Tensor]:
        """By the tiles of all ranks' rows as if they were one rank's, which lie in the order of the ranks."""
        rows = torch.cat([self.rows(rank) for rank in range(len(self.runs))])
        runs = as_rows([run for own in self.runs for run in own])
        q, k, v, *sinks = leaves = self._leaves(rows)
        kernel = tile_kernel_for(q, v, self.settings.softcap)
        plan = plan_tiles(tiles_between(runs, runs, self.settings.window), self.settings.window, kernel, q.dtype)
        if self.device.type == "cuda":
            assert bool(plan.calls) == (self.settings.softcap is None), "done by the kernel"
        out = TiledAttention.apply(q, k, v, sinks[0] if sinks else None, plan, self.settings)
        return self._in_order([[rows, *gradients_of(out, leaves, self.grad[rows])]])

    def _leaves(self, rows: Tensor) -> list[Tensor]:
        """What a rank has of the tensors; all of the sinks."""
        return [x[rows].requires_grad_() for x in self.tensors[:3]] + [
            x.clone().requires_grad_() for x in self.tensors[3:]
        ]

    def _in_order(self, by_rank: list[list[Tensor]]) -> list[Tensor]:
        """Rows in the order of the tokens; of sinks the sum over ranks."""
        order = torch.cat([tensors[0] for tensors in by_rank]).argsort()
        parts = list(zip(*(tensors[1:] for tensors in by_rank), strict=True))
        return [torch.cat(part)[order] for part in parts[:4]] + [torch.stack(part).sum(0) for part in parts[4:]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tiles_are_as_near_to_float64_as_half_precision_allows(
    device: torch.device, lengths: tuple[int, ...], variant: str
) -> None:
    if device.type == "cpu" and sum(lengths) > 1024:
        pytest.skip("a size for a GPU")
    pack = Pack(device, lengths, LENGTHS[lengths], VARIANTS[variant])
    wanted = pack.exact(pack.settings.window)
    for method in (pack.by_ring, pack.by_gathered_keys):
        for name, got, exact in zip(("out", "q", "k", "v", "sinks"), method(), wanted, strict=False):
            if float(exact.norm()) < 1e-9:  # a window of one: nothing depends on q and k
                assert float(got.norm()) < 1e-2, name
                continue
            assert distance(got, exact) < 0.02, (method.__name__, name, distance(got, exact))
    # Control: a query sees half as many keys, or with a window of one two.
    most = min(pack.settings.window or max(lengths), max(lengths))
    assert distance(pack.by_gathered_keys()[0], pack.exact(max(most // 2, 2 if most == 1 else 1))[0]) > 0.02
