"""The cross-entropy of a classifier; its few logits may be held in memory.

N examples · C classes
"""

from __future__ import annotations

from torch import Tensor

from danlu.core.types import TargetLosses


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
