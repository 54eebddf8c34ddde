"""A process that pretends to be one rank of a world: collectives return at once, with whatever is in their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from danlu.parallel.layout import Layout
from danlu.parallel.ranks import Ranks, ranks_of


@contextmanager
def pretended_rank(layout: Layout, rank: int) -> Iterator[Ranks]:
    """The groups of a rank of a layout, for models that are placed and not trained."""
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    try:
        yield ranks_of(layout, "cpu")
    finally:
        dist.destroy_process_group()
