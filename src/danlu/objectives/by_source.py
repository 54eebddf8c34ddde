"""The loss of each source of rows (a file, or a part of a mixture) beside the loss of all."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from danlu.types import Metric, MicroBatch

# N targets · K sources of the run


@torch.no_grad()
def losses_by_source(by_target: Tensor | None, batch: MicroBatch) -> Mapping[str, Metric]:
    """`loss/NAME` for each source: the weighted sum of the losses of its targets, and their weight in `batch`.

    Every process reports every source of the run, also those that its micro-batch has no target of, for metrics are
    added up by name. A run with one source has nothing to tell apart: the result is then empty and nothing is computed.

    Args:
        by_target: [N] float32, the unweighted loss of each target; there may be more entries than targets in `batch`
            (those that fill a batch up to its size), and they are left out. None where there is one source.
    """
    sources = batch.target_sources
    if sources is None or by_target is None:
        return {}
    sums = torch.zeros(len(sources.names), dtype=by_target.dtype, device=by_target.device)
    count = len(sources.indices)
    sums.index_add_(0, sources.indices, by_target[:count] * batch.weights[:count])  # [K]
    return {f"loss/{name}": Metric(sums[index], sources.weights[index]) for index, name in enumerate(sources.names)}
