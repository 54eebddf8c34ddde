"""Log-probabilities of targets and entropies of their distributions, without ever holding [N, V] logits.

The head is gone through in the same slices of the vocabulary as in `linear_cross_entropy`. There the gradient is made
with the loss, because every target's weight is known beforehand; here the gradient of each log-probability is known in
the backward pass only, so logits are computed once more there: one matrix product in four.

N targets · D model width · V vocabulary · S rows of the vocabulary in a slice
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from danlu.core.layer_types import ReduceGroup
from danlu.core.types import TokenLogprobs
from danlu.objectives.loss_memory import rows_per_slice
from danlu.objectives.vocab_slices import HeadGradients, VocabSlice, VocabSlices, columns_in_slice

OUTSIDE = -1e30
"""The z of a token without probability: finite, so that a slice without any of the support has no infinity less
another.
"""


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    support: Tensor | None = None,
    entropy: bool = False,
    collision: bool = False,
    softcap: float | None = None,
    slice_rows: int | None = None,
    tensor_group: ReduceGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> TokenLogprobs:
    """Computes log softmax(logits / temperature) at each target, and the distribution's other values if asked for, in
    nats.

    With z = softcap(hidden @ head.T) / temperature and p = softmax(z): logprobs[n] = z[n, targets[n]] - logsumexp(z[n])
    and entropy[n] = logsumexp(z[n]) - sum_v p[n, v] z[n, v]. Both are differentiable by hidden and head:
    d logprob / dz = onehot - p;  d entropy / dz = -p (log p + entropy). collision[n] = log sum_v p[n, v]^2 has no
    gradient.

    Args:
        hidden: [N, D], the state each target is predicted from.
        head: [V, D], float32 or hidden's dtype; cast to hidden's dtype for the products.
        targets: [N] int64.
        temperature: the divisor of logits, after the soft cap; above 0.
        support: [N, K] int64, ids of the tokens (anywhere in the vocabulary, -1 for none) that p is confined to and
            normalised over, as sampling with top-k or top-p does. The target is among them in any case. A row without
            any id is not confined: its results have the bits that they have without a support.
        entropy, collision: whether they are computed; None in the result where they are not.
        softcap: logits become softcap x tanh(logits / softcap) (Gemma 2, arXiv:2408.00118).
        slice_rows: S; by default as many as the caches (or a GPU) like, which depends on N. With `EXACT_SLICE_ROWS` a
            target's result does not.
        tensor_group, vocab_start, vocab_size: where ranks cut the vocabulary, as in `linear_cross_entropy`:
            results are those of the whole vocabulary on each, the head's gradient is that of its rows, the hidden
            states' is a term of a sum over the group.

    Returns float32 (float64 for float64 hidden states).
    Raises ValueError for a temperature that is not above 0.
    """
    _check_temperature(temperature)
    assert tensor_group is None or vocab_size is not None, "the size of a vocabulary that is cut must be given"
    slice_rows = slice_rows or rows_per_slice(hidden.shape[0], hidden.device.type)
    slices = VocabSlices(hidden, head, targets, softcap, slice_rows, vocab_start)
    scores = _Scores(slices, temperature, support)
    return TokenLogprobs(*_TokenLogprobs.apply(hidden, head, scores, entropy, collision, tensor_group))


def logprobs_of_logits(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, support: Tensor | None = None, slice_rows: int
) -> Tensor:
    """Computes `token_logprobs` from existing logits: [N], the same bits where slices are the same.

    A sampler records these with `numerics: exact`: softmax over a whole row adds up in another order.

    Args:
        logits: [N, V] float32, after the soft cap, as `vocab_slices.logits_in_slices` gives them.
        targets: [N] int64.
        temperature, support, slice_rows: as in `token_logprobs`.

    Raises ValueError for a temperature that is not above 0.
    """
    _check_temperature(temperature)
    sums = _RunningSums.begin(logits, entropy=False, collision=False)
    for start in range(0, logits.shape[1], slice_rows):
        capped = logits[:, start : start + slice_rows]
        columns, inside = columns_in_slice(targets, start, capped.shape[1])
        sums.add(_scores(capped, columns, inside, start, temperature, support), columns, inside)
    return sums.at_target - sums.log_z


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: logits are divided by it, so it must be above 0")


@dataclass(frozen=True)
class _Scores:
    """z in slices of the vocabulary: logits over the temperature, `OUTSIDE` where the support is."""

    slices: VocabSlices
    temperature: float
    support: Tensor | None  # [N, K] int64

    def __call__(self, capped: Tensor, part: VocabSlice, out: Tensor | None = None) -> Tensor:
        """z [N, S] of one slice, given its logits; into `out`, which may be the logits themselves."""
        first = self.slices.vocab_start + part.start
        return _scores(capped, part.columns, part.inside, first, self.temperature, self.support, out)


def _scores(
    capped: Tensor,  # [N, S] logits of the tokens from `first` on
    columns: Tensor,  # [N, 1] of the targets
    inside: Tensor,  # [N] bool: whether a target is among these tokens
    first: int,
    temperature: float,
    support: Tensor | None,  # [N, K]
    out: Tensor | None = None,
) -> Tensor:
    z = torch.div(capped, temperature, out=out)
    if support is None:
        return z
    rows = z.shape[1]
    kept = support - first  # [N, K]
    kept = kept.masked_fill((kept < 0) | (kept >= rows), rows)
    in_support = (support < 0).all(1, keepdim=True).repeat(1, rows + 1).scatter_(1, kept, True)
    of_target = columns.masked_fill(~inside.unsqueeze(1), rows)
    return z.masked_fill_(~in_support.scatter_(1, of_target, True)[:, :rows], OUTSIDE)


@dataclass
class _RunningSums:
    """Sums over the vocabulary relative to the largest z so far, in one pass over its slices (arXiv:1805.02867)."""

    highest: Tensor  # [N] float32 or wider, like all
    at_target: Tensor  # z of the target
    mass: Tensor  # sum of exp(z)
    moment: Tensor | None  # of exp(z) z
    squares: Tensor | None  # of exp(z)^2

    @classmethod
    def begin(cls, rows: Tensor, *, entropy: bool, collision: bool) -> _RunningSums:
        """Sums of nothing; rows [N, any] for device and type."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        highest = rows.new_full((rows.shape[0],), float("-inf"), dtype=wide)
        wanted = (True, True, entropy, collision)
        at_target, mass, moment, squares = (torch.zeros_like(highest) if each else None for each in wanted)
        assert at_target is not None and mass is not None
        return cls(highest, at_target, mass, moment, squares)

    def add(self, z: Tensor, columns: Tensor, inside: Tensor) -> None:
        """A slice z [N, S], with the columns [N, 1] of the targets and whether they are inside [N]."""
        self.at_target += z.gather(1, columns).squeeze(1).masked_fill_(~inside, 0)
        raised = torch.maximum(self.highest, z.amax(1))
        exp = (z - raised.unsqueeze(1)).exp_()
        shrink = (self.highest - raised).exp_()
        self.mass.mul_(shrink).add_(exp.sum(1))
        if self.squares is not None:
            self.squares.mul_(shrink.square()).add_(exp.square().sum(1))
        if self.moment is not None:
            self.moment.mul_(shrink).add_(exp.mul_(z).sum(1))
        self.highest = raised

    def all_reduce(self, group: ReduceGroup) -> None:
        """Makes sums over the slices of one process those over the whole vocabulary."""
        local, self.highest = self.highest, group.max(self.highest.clone())
        shrink = (local - self.highest).exp_()
        rows = [self.at_target, self.mass * shrink]
        rows += [] if self.moment is None else [self.moment * shrink]
        rows += [] if self.squares is None else [self.squares * shrink.square()]
        self.at_target, self.mass, *rest = group.sum(torch.stack(rows))
        self.moment = None if self.moment is None else rest.pop(0)
        self.squares = None if self.squares is None else rest.pop(0)

    @property
    def log_z(self) -> Tensor:
        """[N] logsumexp(z)."""
        return self.highest + self.mass.log()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        scores: _Scores,
        wants_entropy: bool,
        wants_collision: bool,
        group: ReduceGroup | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = _RunningSums.begin(hidden, entropy=wants_entropy, collision=wants_collision)
        slices = scores.slices
        for part in slices:
            logits = slices.logits(part, wide)
            sums.add(scores(logits, part, out=logits), part.columns, part.inside)
        if group is not None and hidden.shape[0]:
            sums.all_reduce(group)
        log_z, mass = sums.log_z, sums.mass
        entropy = None if sums.moment is None else log_z - sums.moment / mass
        collision = None if sums.squares is None else sums.squares.log() - 2 * mass.log()
        if collision is not None:
            ctx.mark_non_differentiable(collision)
        ctx.scores = scores
        ctx.save_for_backward(hidden, head, log_z, entropy)
        ctx.set_materialize_grads(False)  # no gradient arrives at an entropy that is only shown
        return sums.at_target - log_z, entropy, collision

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        *_, log_z, entropy = ctx.saved_tensors
        by_logprob = torch.zeros_like(log_z) if by_logprob is None else by_logprob
        scores: _Scores = ctx.scores
        slices, temperature = scores.slices, scores.temperature
        gradients = HeadGradients(slices, log_z.dtype, for_head=ctx.needs_input_grad[1])
        for part in slices:
            capped = slices.logits(part, log_z.dtype)  # [N, S]
            logp = scores(capped, part).sub_(log_z.unsqueeze(1))
            grad = logp.exp()
            # p x (-d logprob - d entropy x (log p + entropy)), and d logprob on the target's own column
            factor = by_logprob.unsqueeze(1)
            if entropy is not None and by_entropy is not None:
                factor = logp.add_(entropy.unsqueeze(1)).mul_(by_entropy.unsqueeze(1)).add_(factor)
            grad.mul_(factor.neg())
            on_target = by_logprob.unsqueeze(1).masked_fill(~part.inside.unsqueeze(1), 0)
            grad.scatter_add_(1, part.columns, on_target)
            gradients.add(part, grad.div_(temperature), capped)
        return gradients.hidden, gradients.head, None, None, None, None
