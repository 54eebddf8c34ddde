"""Rings whose layers differ: some have a window of attention, some see everything."""

from __future__ import annotations

import torch
from builders.recorded_exchange import run_ring
from builders.reference_attention import ReferenceAttention
from torch import Tensor

from danlu.core.layer_types import Keys
from danlu.data.context_sharding import shares
from danlu.models.tiled_attention import TileSettings
from danlu.parallel.ring_attention import RankRows, ring_attention

BOUNDARIES, HEADS, WIDTH = (0, 40, 47), 2, 8
WINDOWS = (None, 5, 17, None)
"""Of one layer after the other, all over the same rows: what was planned for one is no plan for the next."""


def test_each_window_of_a_model_has_plans_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BOUNDARIES[-1], HEADS, WIDTH, generator=generator) for _ in range(3))
    runs = [(*share.whole, *share.chunks) for share in shares(BOUNDARIES, 2, token_cost=0)]

    def layers(group: object) -> list[Tensor]:
        ranks = RankRows(group, runs)  # type: ignore[arg-type]
        rows = torch.cat([torch.arange(run.start, run.stop) for run in runs[ranks.group.index]])
        own = q[rows], k[rows], v[rows]
        found = [
            ring_attention(*own, Keys(own[1:]), None, ranks, TileSettings(WIDTH**-0.5, window, None))
            for window in WINDOWS
        ]
        return [rows, *found]

    wanted = [
        ReferenceAttention(BOUNDARIES)(0, q, Keys((k, v)), scale=WIDTH**-0.5, window=window, softcap=None)
        for window in WINDOWS
    ]
    for rows, *found in run_ring(layers, len(runs)):
        for own, whole in zip(found, wanted, strict=True):
            torch.testing.assert_close(own, whole[rows], atol=1e-5, rtol=0)
    assert (wanted[0] - wanted[1]).abs().max() > 1e-2  # the control: windows show
