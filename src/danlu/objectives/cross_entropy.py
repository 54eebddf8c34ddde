"""The objective of pretraining, supervised fine-tuning and classification: the likelihood of the targets.

N targets, or examples of a classifier · K sources (files, or parts of a mixture) that the rows of a run are from · C
classes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from danlu.core.types import Loss, Metric, MicroBatch, Outputs, Role, TargetLosses, Totals


@dataclass(frozen=True)
class CrossEntropy:
    """Sum over targets of weight x cross-entropy, with the extras that a recipe's `loss` section asks for.

    The metrics are `accuracy` (the share of targets that are the likeliest token), `nll` (the loss without the extras)
    where it is asked for, and `loss/NAME` for each source where the rows come from several.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"cross_entropy"})

    label_smoothing: float = 0.0
    """Share of the target's probability that is spread over the vocabulary (arXiv:1512.00567, section 7)."""
    z_loss: float = 0.0
    """Weight of log(Z)^2 (PaLM, arXiv:2204.02311, section 5)."""
    reports_nll: bool = False
    """Whether the negative log-likelihood is reported in addition to the loss, as by an evaluation and a loss with
    extras.
    """

    def __call__(self, outputs: Mapping[Role, Outputs], batch: MicroBatch, totals: Totals) -> Loss:
        """The loss of the policy's outputs for `batch`; `totals` are not needed, for every target is a term."""
        losses = outputs["policy"].cross_entropy(
            label_smoothing=self.label_smoothing, z_loss=self.z_loss, by_target=batch.target_sources is not None
        )
        metrics = {"accuracy": Metric(losses.correct, batch.weight)}
        if self.reports_nll:
            metrics["nll"] = Metric(losses.nll, batch.weight)
        return Loss(losses.total, {**metrics, **losses_by_source(losses.by_target, batch)})


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
    sums = torch.zeros(len(sources.names) + 1, dtype=by_target.dtype, device=by_target.device)
    count = len(sources.indices)
    sums.index_add_(0, sources.indices, by_target[:count] * batch.weights[:count])  # [K + 1]
    return {f"loss/{name}": Metric(sums[index], sources.weights[index]) for index, name in enumerate(sources.names)}


def logits_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> TargetLosses:
    """Sums over examples of weight x loss, never means: the same terms as those of a language model.

    Args:
        logits: [N, C] float32.   labels: [N] int64.   weights: [N] float32.
        label_smoothing: share of the probability that is spread over all classes.   z_loss: weight of log(Z)^2.
    """
    log_z = logits.logsumexp(-1)  # [N]
    nll = log_z - logits.gather(-1, labels[:, None]).squeeze(-1)
    loss = nll if label_smoothing == 0 else (1 - label_smoothing) * nll + label_smoothing * (log_z - logits.mean(-1))
    if z_loss != 0:
        loss = loss + z_loss * log_z.square()
    correct = (logits.detach().argmax(-1) == labels).float()
    total, by_target = (weights * loss).sum(), nll.detach()
    return TargetLosses(total, (weights * by_target).sum(), (weights * correct).sum(), by_target)
