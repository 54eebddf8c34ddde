"""The experts that the cached tokens of a rollout went to, stored like their keys and values, block by block.

A prompt that is read once for several answers, or found in the prefix cache, has its routes where it has its keys.
Tokens that are read again, after a preemption or with other weights, have the routes of the last time, as they have its
keys.

N blocks · B tokens of a block · L layers with experts · k experts of a token · T tokens of a pass, flat
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.inference.scheduler import Plan


class RouteCache:
    """blocks: [N, B, L, k] int16 on the device. host: the same of the blocks that are swapped out."""

    def __init__(self, blocks: Tensor, host: Tensor | None = None) -> None:
        self._blocks, self._host = blocks, host

    def carry_out(self, plan: Plan) -> None:
        """Moves and copies blocks as the plan has it. New ones are not cleared: places that were not written are not
        read."""
        if plan.swapped_out:
            assert self._host is not None, "blocks are swapped out to the host's pool"
            source, target = torch.tensor(plan.swapped_out).unbind(1)
            self._host[target] = self._blocks[self._here(source)].to("cpu")
        if plan.swapped_in:
            assert self._host is not None, "blocks are swapped in from the host's pool"
            source, target = torch.tensor(plan.swapped_in).unbind(1)
            self._blocks[self._here(target)] = self._here(self._host[source])
        if plan.copies:
            source, target = self._here(torch.tensor(plan.copies)).unbind(1)
            self._blocks.index_copy_(0, target, self._blocks.index_select(0, source))

    def write(self, places: Tensor, routes: Tensor) -> None:
        """Keeps routes [T, L, k] int16 of tokens at `places` [T] int64: block x B + token."""
        self._blocks.flatten(0, 1).index_copy_(0, places, routes)

    def read(self, blocks: Sequence[int], tokens: int) -> np.ndarray:
        """[tokens, L, k] int16: of the first tokens of a sequence that has these blocks."""
        index = self._here(torch.tensor(list(blocks), dtype=torch.int64))
        routes: np.ndarray = self._blocks[index].flatten(0, 1)[:tokens].cpu().numpy()
        return routes

    def _here(self, tensor: Tensor) -> Tensor:
        return copy_to(tensor, self._blocks.device)
