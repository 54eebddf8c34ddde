"""Log-probabilities of targets and entropies of their distributions, without ever holding [N, V] logits.

The head is gone through in the same slices of the vocabulary as in `linear_cross_entropy`. There the gradient is made
with the loss, because every target's weight is known beforehand; here what arrives at each log-probability is known in
the backward pass only, so logits are computed once more there: one matrix product in four.

N targets · D model width · V vocabulary · S rows of the vocabulary in a slice
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from danlu.objectives.vocab_slices import VocabSlices, rows_per_slice
from danlu.types import ReduceGroup, TokenLogprobs


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    slice_rows: int | None = None,
    tensor_group: ReduceGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> TokenLogprobs:
    """log softmax(logits / temperature) at each target, and the entropy of that distribution, in nats.

    With z = softcap(hidden @ head.T) / temperature and p = softmax(z): logprobs[n] = z[n, targets[n]] - logsumexp(z[n])
    and entropy[n] = logsumexp(z[n]) - sum_v p[n, v] z[n, v]. Both are differentiable by hidden and head:
    d logprob / dz = onehot - p;  d entropy / dz = -p (log p + entropy).

    Args:
        hidden: [N, D], the state each target is predicted from.
        head: [V, D], float32 or hidden's dtype; cast to hidden's dtype for the products.
        targets: [N] int64.
        temperature: what logits are divided by, after the soft cap; above 0.
        softcap: logits become softcap x tanh(logits / softcap) (Gemma 2, arXiv:2408.00118).
        slice_rows: S; by default as many as the caches (or a GPU) like.
        tensor_group, vocab_start, vocab_size: where ranks cut the vocabulary, as in `linear_cross_entropy`:
            results are those of the whole vocabulary on each, the head's gradient is that of its rows, the hidden
            states' is a term of a sum over the group.

    Returns float32 (float64 for float64 hidden states).
    Raises ValueError for a temperature that is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: logits are divided by it, so it must be above 0")
    assert tensor_group is None or vocab_size is not None, "the size of a vocabulary that is cut must be given"
    slice_rows = slice_rows or rows_per_slice(hidden.shape[0], hidden.device.type)
    slices = VocabSlices(hidden, head, targets, softcap, slice_rows, vocab_start)
    logprobs, entropy = _TokenLogprobs.apply(hidden, head, slices, temperature, tensor_group)
    return TokenLogprobs(logprobs, entropy)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, slices: VocabSlices, temperature: float, group: ReduceGroup | None
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        # One pass with a running maximum (arXiv:1805.02867): `mass` and `moment` are relative to `highest`.
        highest = hidden.new_full((hidden.shape[0],), float("-inf"), dtype=wide)
        mass, moment, at_target = (torch.zeros_like(highest) for _ in range(3))
        for part in slices:
            z = slices.logits(part, wide).div_(temperature)  # [N, S]
            at_target += z.gather(1, part.columns).squeeze(1).masked_fill_(~part.inside, 0)
            raised = torch.maximum(highest, z.amax(1))
            exp = (z - raised.unsqueeze(1)).exp_()
            shrink = (highest - raised).exp_()
            mass.mul_(shrink).add_(exp.sum(1))
            moment.mul_(shrink).add_(exp.mul_(z).sum(1))
            highest = raised
        if group is not None and len(highest):
            local, highest = highest, group.max(highest.clone())
            shrink = (local - highest).exp_()
            mass, moment, at_target = group.sum(torch.stack((mass * shrink, moment * shrink, at_target)))
        log_z = highest + mass.log()
        entropy = log_z - moment / mass
        ctx.slices, ctx.temperature = slices, temperature
        ctx.save_for_backward(hidden, head, log_z, entropy)
        return at_target - log_z, entropy

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:  # type: ignore[override]
        hidden, head, log_z, entropy = ctx.saved_tensors
        slices, temperature = ctx.slices, ctx.temperature
        grad_hidden = torch.zeros_like(hidden, dtype=log_z.dtype)
        grad_head = torch.empty_like(head) if ctx.needs_input_grad[1] else None
        for part in slices:
            capped = slices.logits(part, log_z.dtype)  # [N, S]
            logp = (capped / temperature).sub_(log_z.unsqueeze(1))
            grad = logp.exp()
            # p x (-d logprob - d entropy x (log p + entropy)), and d logprob on the target's own column
            factor = logp.add_(entropy.unsqueeze(1)).mul_(by_entropy.unsqueeze(1)).add_(by_logprob.unsqueeze(1))
            grad.mul_(factor.neg_())
            on_target = by_logprob.unsqueeze(1).masked_fill(~part.inside.unsqueeze(1), 0)
            grad.scatter_add_(1, part.columns, on_target)
            grad.div_(temperature)
            if slices.softcap is not None:
                grad.mul_(1 - (capped / slices.softcap).square_())
            narrow = grad.to(hidden.dtype)
            grad_hidden += narrow @ part.head
            if grad_head is not None:
                grad_head[part.start : part.start + part.head.shape[0]] = narrow.t() @ hidden
        return grad_hidden.to(hidden.dtype), grad_head, None, None, None
