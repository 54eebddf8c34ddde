"""How far the policy's distribution over the vocabulary is from a teacher's, without ever holding [N, V] logits.

Both heads are gone through in the same slices of the vocabulary; the models may differ in width and soft cap. As in
`token_logprobs`, the gradient of each value is known in the backward pass only, so logits are computed once more there.
The teacher is not trained: it gets no gradient.

With p of the policy and q of the teacher (softmax of logits / temperature), and z the policy's logits / temperature:

    forward          KL(q || p)                                d / dz = p - q
    reverse          KL(p || q)                                d / dz = p (log p - log q - KL(p || q))
    jensen-shannon   beta KL(q || m) + (1 - beta) KL(p || m)   d / dz = (1 - beta) p (log(p / m) - KL(p || m))
                     m = beta q + (1 - beta) p  (GKD, arXiv:2306.13649, equation 1)

`beta` is the teacher's share of the mixture, as in the paper and in TRL. At its ends the third is 0 everywhere, where
TRL computes the first (beta 0) and the second (beta 1) instead: they have names of their own here.

N targets · D policy's width · D' teacher's width · V vocabulary · S rows of the vocabulary in a slice
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log, log1p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from danlu.core.layer_types import ReduceGroup
from danlu.core.types import DivergenceKind
from danlu.objectives.loss_memory import rows_per_slice
from danlu.objectives.vocab_slices import HeadGradients, VocabSlice, VocabSlices


class Head(NamedTuple):
    """The factors of a model's logits: softcap(hidden @ weight.T)."""

    hidden: Tensor  # [N, D], the state each target is predicted from
    weight: Tensor  # [V, D], float32 or hidden's dtype; cast to hidden's dtype for the products
    softcap: float | None = None  # logits become softcap x tanh(logits / softcap) (Gemma 2, arXiv:2408.00118)

    def slices(self, slice_rows: int) -> VocabSlices:
        """Returns the head in slices of `slice_rows` rows, without any targets to be found in them."""
        nowhere = torch.empty(0, dtype=torch.int64, device=self.hidden.device)
        return VocabSlices(self.hidden, self.weight, nowhere, self.softcap, slice_rows)


def divergence(
    policy: Head,
    teacher: Head,
    *,
    kind: DivergenceKind,
    beta: float = 0.5,
    temperature: float = 1.0,
    slice_rows: int | None = None,
    tensor_group: ReduceGroup | None = None,
) -> Tensor:
    """Computes the divergence at each target, times temperature^2: [N] float32 (float64 for float64 hidden states), in
    nats.

    The factor keeps the size of gradients, which a temperature divides by its square (arXiv:1503.02531, section 2.1).
    Differentiable by the policy's hidden states and weight; a frozen weight's gradient is not computed.

    Args:
        policy, teacher: [N, D] and [N, D'], [V, D] and [V, D']: row v of both weights stands for the same token.
        kind, beta: see above; `beta` is only read by jensen-shannon.
        temperature: the divisor of both logits, after their soft caps; above 0.
        slice_rows: S; by default as many as the caches (or a GPU) like.
        tensor_group: the processes among which the vocabulary is cut, for both in the same way. Then the weights are
            the
            rows that are here, the result is that of the whole vocabulary on each process, the weight's gradient is
            that of its rows, and the hidden states' is a term of a sum over the group.

    Raises ValueError for a temperature that is not above 0, and a beta that is not between 0 and 1.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: logits are divided by it, so it must be above 0")
    if not 0 < beta < 1:
        raise ValueError(f"beta {beta}: it must be between 0 and 1; at the ends, take kind forward or reverse")
    rows, teacher_rows = policy.weight.shape[0], teacher.weight.shape[0]
    assert rows == teacher_rows, f"{rows} rows of the policy's vocabulary, {teacher_rows} of the teacher's"
    slice_rows = slice_rows or rows_per_slice(policy.hidden.shape[0], policy.hidden.device.type)
    pair = _Pair(policy.slices(slice_rows), teacher.slices(slice_rows), kind, beta, temperature, tensor_group)
    values: Tensor = _Divergence.apply(policy.hidden, policy.weight, pair)
    return values


def categorical_divergence(policy: Tensor, teacher: Tensor, *, kind: DivergenceKind, beta: float = 0.5) -> Tensor:
    """The same over few outcomes: log-probabilities [N, K] of both, none of them -inf -> [N], differentiable."""
    if kind == "forward":
        return (teacher.exp() * (teacher - policy)).sum(1)
    if kind == "reverse":
        return (policy.exp() * (policy - teacher)).sum(1)
    mixture = _mixture(policy, teacher, beta)
    return beta * (teacher.exp() * (teacher - mixture)).sum(1) + (1 - beta) * (policy.exp() * (policy - mixture)).sum(1)


def _mixture(policy: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """log(beta q + (1 - beta) p), given log p and log q."""
    return torch.logaddexp(teacher + log(beta), policy + log1p(-beta))


@dataclass(frozen=True)
class _Pair:
    """Policy and teacher in the same slices, and the settings of their divergence."""

    policy: VocabSlices
    teacher: VocabSlices
    kind: DivergenceKind
    beta: float
    temperature: float
    group: ReduceGroup | None

    def logits(self, dtype: torch.dtype) -> Iterator[tuple[VocabSlice, Tensor, Tensor]]:
        """Slice by slice, the policy's and the teacher's logits [N, S] after the soft cap; the same bits each time."""
        for part, teacher_part in zip(self.policy, self.teacher, strict=True):
            yield part, self.policy.logits(part, dtype), self.teacher.logits(teacher_part, dtype)

    def normalizers(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """(log Z of the policy, log Z of the teacher, KL): [N] each, of logits / temperature, in one pass.

        KL: KL(q || p) for kind forward, else KL(p || q). With w the distribution that comes first and o the other, it
        is E_w[z_w - z_o] - log Z_w + log Z_o. Everything is kept relative to the largest logits so far: logits may be
        large, and their differences small.
        """
        count, first = len(self.policy.hidden), int(self.kind == "forward")
        highest = self.policy.hidden.new_full((2, count), torch.finfo(dtype).min, dtype=dtype)  # policy, teacher
        mass, moment = torch.zeros_like(highest), torch.zeros_like(highest[0])

        def shift() -> Tensor:
            return highest[first] - highest[1 - first]

        for _, policy, teacher in self.logits(dtype):
            z = (policy.div_(self.temperature), teacher.div_(self.temperature))
            lower, lower_shift = highest, shift()
            highest = torch.maximum(highest, torch.stack([logits.amax(1) for logits in z]))
            mass.mul_((lower - highest).exp_())
            moment.mul_((lower - highest)[first].exp_()).add_(mass[first] * (lower_shift - shift()))
            for logits, top in zip(z, highest, strict=True):
                logits.sub_(top.unsqueeze(1))
            exp = [logits.exp() for logits in z]
            mass += torch.stack([values.sum(1) for values in exp])
            moment += exp[first].mul_(z[first].sub_(z[1 - first])).sum(1)
        if self.group is not None and count:
            lower, lower_shift, highest = highest, shift(), self.group.max(highest.clone())
            mass = mass * (lower - highest).exp_()
            moment = moment * (lower - highest)[first].exp_() + mass[first] * (lower_shift - shift())
            sums = self.group.sum(torch.cat((mass, moment.unsqueeze(0))))
            mass, moment = sums[:2], sums[2]
        log_mass = mass.log()
        log_z = highest + log_mass
        return log_z[0], log_z[1], moment / mass[first] - log_mass[first] + log_mass[1 - first]

    def to_mixture(self, policy_log_z: Tensor, teacher_log_z: Tensor) -> tuple[Tensor, Tensor]:
        """(KL(p || m), KL(q || m)): [N] each."""
        sums = torch.zeros(2, *policy_log_z.shape, dtype=policy_log_z.dtype, device=policy_log_z.device)
        for _, policy, teacher in self.logits(policy_log_z.dtype):
            logp = policy.div_(self.temperature).sub_(policy_log_z.unsqueeze(1))
            logq = teacher.div_(self.temperature).sub_(teacher_log_z.unsqueeze(1))
            mixture = _mixture(logp, logq, self.beta)
            for total, values in zip(sums, (logp, logq), strict=True):
                total += values.exp().mul_(values.sub_(mixture)).sum(1)
        if self.group is not None and sums.numel():
            sums = self.group.sum(sums)
        return sums[0], sums[1]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, pair: _Pair) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        policy_log_z, teacher_log_z, values = pair.normalizers(wide)
        subtracted = values
        if pair.kind == "jensen-shannon":
            subtracted, of_teacher = pair.to_mixture(policy_log_z, teacher_log_z)
            values = (1 - pair.beta) * subtracted + pair.beta * of_teacher
        ctx.pair = pair
        ctx.save_for_backward(hidden, weight, policy_log_z, teacher_log_z, subtracted)
        return values * pair.temperature**2

    @staticmethod
    def backward(ctx: Any, by_value: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        *_, policy_log_z, teacher_log_z, subtracted = ctx.saved_tensors
        pair: _Pair = ctx.pair
        gradients = HeadGradients(pair.policy, policy_log_z.dtype, for_head=ctx.needs_input_grad[1])
        factor = (by_value * pair.temperature).unsqueeze(1)  # of T^2 and of d z / d logits = 1 / T
        for part, capped, teacher in pair.logits(policy_log_z.dtype):
            logp = (capped / pair.temperature).sub_(policy_log_z.unsqueeze(1))  # [N, S]
            logq = teacher.div_(pair.temperature).sub_(teacher_log_z.unsqueeze(1))
            gradients.add(part, _by_logits(pair, logp, logq, subtracted.unsqueeze(1)).mul_(factor), capped)
        return gradients.hidden, gradients.head, None


def _by_logits(pair: _Pair, logp: Tensor, logq: Tensor, subtracted: Tensor) -> Tensor:
    """Computes the gradient by z [N, S] of one slice; it may overwrite its arguments. subtracted: [N, 1]."""
    if pair.kind == "forward":
        return logp.exp_().sub_(logq.exp_())
    if pair.kind == "reverse":
        return logp.exp().mul_(logp.sub_(logq).sub_(subtracted))
    mixture = _mixture(logp, logq, pair.beta)
    return logp.exp().mul_(logp.sub_(mixture).sub_(subtracted)).mul_(1 - pair.beta)
