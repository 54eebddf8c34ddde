"""The language-model head and its cross-entropy as one operation that never holds [N, V] logits.

The vocabulary is gone through in slices, twice: once for the softmax's denominator, once for the gradient, which is
then complete for its slice. Making the logits a second time costs one matrix product in four. Going by rows instead
would make them once, but add a [V, D] gradient to the last one for every few hundred rows and hold a narrow copy of
the head: at V = 128256 that is no faster, and takes 0.3 GB more. A frozen head has no gradient, and mostly is stored in
the type of activations: then going by rows saves the third product and half of the exponentials for nothing.

On a GPU with Triton the passes over a slice of logits are kernels of `softmax_kernels`.

Where the vocabulary is cut over processes (arXiv:1909.08053, section 3), each has the logits of its own rows, and a few
numbers a target are sent: the largest logit, then the denominator and the target's own logit.

N trained targets · D model width · V vocabulary · S rows of the vocabulary in a slice
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from danlu.core.layer_types import ReduceGroup
from danlu.core.types import TargetLosses
from danlu.objectives.loss_memory import block_rows, rows_per_slice, slice_bytes
from danlu.objectives.vocab_slices import (
    HeadGradients,
    VocabSlice,
    VocabSlices,
    argmax_rows,
)


@dataclass(frozen=True)
class _Options:
    softcap: float | None
    label_smoothing: float
    z_loss: float
    gradient_scale: float
    vocab_size: int  # V
    vocab_start: int
    tensor_group: ReduceGroup | None
    by_target: bool

    @property
    def rows_of_largest_shard(self) -> int:
        """The number of rows of the head on the largest shard: the same on all ranks, as their collectives depend on
        it.
        """
        return self.vocab_size if self.tensor_group is None else -(-self.vocab_size // self.tensor_group.size)


def _kernels_for(x: Tensor) -> ModuleType | None:
    """`softmax_kernels`, where they take logits of this type on this device; None where torch's operators do."""
    if x.device.type != "cuda" or x.dtype == torch.float64 or not _has_triton():
        return None
    from danlu.objectives import softmax_kernels

    return softmax_kernels


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def linear_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    gradient_scale: float = 1.0,
    by_target: bool = False,
    slice_rows: int | None = None,
    tensor_group: ReduceGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> TargetLosses:
    """Weighted cross-entropy of `hidden @ head.T` against `targets`.

    The gradient is computed together with the loss, which is possible because the weights are known beforehand; the
    backward pass only hands it out.

    Args:
        hidden: [N, D], the state each target is predicted from.
        head: [V, D], float32 or hidden's dtype; cast to hidden's dtype for the products.
        targets: [N] int64.   weights: [N] float32.
        softcap: logits become softcap x tanh(logits / softcap) (Gemma 2, arXiv:2408.00118).
        label_smoothing: share of the target's probability spread over the vocabulary (arXiv:1512.00567).
        z_loss: weight of log(Z)^2 (PaLM, arXiv:2204.02311, sec. 5).
        gradient_scale: multiplies the gradients but not the loss; applied before they are rounded to half precision.
        by_target: return the negative log-likelihood of each target, too.
        slice_rows: S; by default as many as `slice_bytes` allows.
        tensor_group: the processes among which the vocabulary is cut. Then `head` is the rows from `vocab_start` on of
            its `vocab_size` in all, every sum that is returned is the whole one on each, the head's gradient is that of
            its rows, and the hidden states' is a part: the sum over the processes is the whole.
    """
    assert tensor_group is None or vocab_size is not None, "the size of a vocabulary that is cut must be given"
    slice_rows = slice_rows or rows_per_slice(hidden.shape[0], hidden.device.type)
    vocab_size = head.shape[0] if vocab_size is None else vocab_size
    slices = VocabSlices(hidden, head, targets, softcap, slice_rows, vocab_start)
    options = _Options(
        softcap, label_smoothing, z_loss, gradient_scale, vocab_size, vocab_start, tensor_group, by_target
    )
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    return TargetLosses(*_LinearCrossEntropy.apply(hidden, head, slices, weights, options, wants_gradient))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, slices: VocabSlices, weights: Tensor, options: _Options, gradient: bool
    ) -> tuple[Tensor, ...]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weights = weights.to(wide)
        if gradient and not head.requires_grad and head.dtype == hidden.dtype:
            rows, grad_hidden = _by_rows(slices, weights, options)
            gradients: tuple[Tensor | None, Tensor | None] = (grad_hidden, None)
        else:
            rows = _softmax_statistics(slices, options, wide)
            gradients = (
                _gradients(slices, rows, weights, options, for_head=head.requires_grad) if gradient else (None, None)
            )
        nll = rows.log_z - rows.at_target
        loss = nll
        if options.label_smoothing:
            loss = nll + options.label_smoothing * (rows.at_target - rows.sum / options.vocab_size)
        if options.z_loss:
            loss = loss + options.z_loss * rows.log_z.square()
        # Logits of narrow types are often equal, so a target that is as likely as the likeliest token is not enough.
        correct = ((rows.at_target >= rows.highest) & (rows.ahead == 0)).to(wide)
        # Plain attributes, given away in backward: a saved tensor has a second owner, and autograd would copy [V, D]
        # into the head's `.grad` instead of taking it over.
        ctx.gradients = gradients
        sums = [(weights * value).sum() for value in (loss, nll, correct)]
        # Autograd makes zeros of the gradient of every output in the backward pass, so there are no more than are used.
        outputs = (*sums, nll) if options.by_target else tuple(sums)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        assert ctx.gradients is not None, "the gradient of the cross-entropy was already handed out"
        grad_hidden, grad_head = ctx.gradients
        ctx.gradients = None
        if grad.device.type != "cpu":  # asking for its value would make the host wait for the device
            for gradient in (grad_hidden, grad_head):
                if gradient is not None:
                    gradient.mul_(grad)
        elif grad != 1:  # the usual case is the loss itself: leave [V, D] alone
            grad_hidden = None if grad_hidden is None else grad_hidden * grad
            grad_head = None if grad_head is None else grad_head * grad
        return grad_hidden, grad_head, None, None, None, None


class _RowStatistics(NamedTuple):
    """Statistics of each row of logits over the whole vocabulary, [N] each."""

    highest: Tensor  # the largest logit
    log_z: Tensor  # log of the sum of exp(logits)
    at_target: Tensor  # the target's logit
    sum: Tensor  # of all logits; 0 where label smoothing does not need it
    ahead: Tensor  # 0 where no token before the target has the largest logit


def _softmax_statistics(slices: VocabSlices, options: _Options, wide: torch.dtype) -> _RowStatistics:
    """One pass over the logits with a running maximum (arXiv:1805.02867)."""
    if (kernels := _kernels_for(slices.hidden)) is not None:
        running = kernels.RunningStatistics.of_nothing(slices.hidden.shape[0], slices.hidden.device)
        for part in slices:
            logits = slices.hidden @ part.head.t()
            _take_in(kernels, running, logits, slices.columns_from(part.start), part.start, options)
        return _whole_statistics(running, slices.targets, options)
    count = slices.hidden.shape[0]
    highest = slices.hidden.new_full((count,), float("-inf"), dtype=wide)
    mass, at_target, total = (torch.zeros_like(highest) for _ in range(3))
    likeliest = torch.zeros_like(slices.targets)
    for part in slices:
        y = slices.logits(part, wide)
        at_target += y.gather(1, part.columns).squeeze(1).masked_fill_(~part.inside, 0)
        if options.label_smoothing:
            total += y.sum(1)
        largest, column = argmax_rows(y)
        likeliest = torch.where(largest > highest, column + part.start, likeliest)
        raised = torch.maximum(highest, largest)
        mass.mul_((highest - raised).exp_()).add_(y.sub_(raised.unsqueeze(1)).exp_().sum(1))
        highest = raised
        del y  # or it would be there together with the logits of the next slice
    ahead = _ahead(likeliest, slices.targets, options, wide)
    return _over_group(highest, mass, at_target, total, ahead, options)


def _take_in(kernels: ModuleType, running: Any, logits: Tensor, columns: Tensor, start: int, options: _Options) -> None:
    """Adds a slice of logits [N, S] to the running statistics of their rows."""
    wants_total = options.label_smoothing != 0
    kernels.update_statistics(running, logits, columns, start, softcap=options.softcap, wants_total=wants_total)


def _whole_statistics(running: Any, targets: Tensor, options: _Options) -> _RowStatistics:
    """Returns the statistics of rows over the whole vocabulary, from the running ones of all local slices."""
    ahead = _ahead(running.likeliest, targets, options, torch.float32)
    return _over_group(running.highest, running.mass, running.at_target, running.total, ahead, options)


def _put_gradient(
    kernels: ModuleType, logits: Tensor, columns: Tensor, log_z: Tensor, weights: Tensor, options: _Options
) -> None:
    """Puts the gradient of the loss in the place of logits [N, S]; the other arguments belong to its rows, [N]."""
    kernels.gradient_in_place(
        logits,
        columns,
        log_z,
        weights * options.gradient_scale,
        softcap=options.softcap,
        label_smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        vocab_size=options.vocab_size,
    )


def _ahead(likeliest: Tensor, targets: Tensor, options: _Options, wide: torch.dtype) -> Tensor:
    """[N]: 1 where the likeliest token, counted from the first that is here, comes before the target; else 0."""
    return (likeliest + options.vocab_start < targets).to(wide)


def _over_group(
    highest: Tensor, mass: Tensor, at_target: Tensor, total: Tensor, ahead: Tensor, options: _Options
) -> _RowStatistics:
    """Returns the statistics of rows [N] over the whole vocabulary, from the local ones; `mass` is relative to
    `highest`.
    """
    if options.tensor_group is not None and len(highest):
        local, highest = highest, options.tensor_group.max(highest.clone())
        mass = mass * (local - highest).exp_()
        ahead = ahead * (local == highest)
        mass, at_target, total, ahead = options.tensor_group.sum(torch.stack((mass, at_target, total, ahead)))
    return _RowStatistics(highest, highest + mass.log(), at_target, total, ahead)


def _gradients(
    slices: VocabSlices, rows: _RowStatistics, weights: Tensor, options: _Options, *, for_head: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss's gradient by hidden [N, D], and by head [V, D] where that is wanted, for an upstream gradient of 1."""
    hidden, gradients = slices.hidden, HeadGradients(slices, weights.dtype, for_head=for_head)
    kernels = _kernels_for(hidden)
    for part in slices:
        if kernels is not None:
            grad = hidden @ part.head.t()  # [N, S] logits, and the gradient in their place
            _put_gradient(kernels, grad, slices.columns_from(part.start), rows.log_z, weights, options)
        else:
            logits = slices.logits(part, weights.dtype)
            grad = _by_logits(logits, rows.log_z, weights, part, options).to(hidden.dtype)
            del logits
        gradients.add_products(part, grad)
        del grad  # or it would be there together with the logits of the next slice
    return gradients.hidden, gradients.head


def _by_rows(slices: VocabSlices, weights: Tensor, options: _Options) -> tuple[_RowStatistics, Tensor]:
    """Statistics, and the gradient by hidden [N, D], for a head that needs none.

    The logits of a block of rows are computed once, in one product; a chunk of them at a time, which caches hold, is
    replaced by its gradient; and a second product takes the block back to the hidden states.
    """
    hidden, head = slices.hidden, slices.head
    statistics: list[_RowStatistics] = []
    grad_hidden = torch.empty_like(hidden)
    kernels = _kernels_for(hidden)
    rows_kept = block_rows(options.rows_of_largest_shard, hidden.element_size(), hidden.device.type)
    # One block's logits after the other's in the same memory: new memory for each would cost a tenth of the time.
    memory = hidden.new_empty(min(rows_kept, hidden.shape[0]), head.shape[0])
    for block in _ranges(hidden.shape[0], rows_kept):
        rows_of_block = hidden[block]
        logits = memory[: len(rows_of_block)]
        torch.mm(rows_of_block, head.t(), out=logits)
        if kernels is not None:
            columns = slices.columns_from(0)[block]
            running = kernels.RunningStatistics.of_nothing(len(logits), logits.device)
            _take_in(kernels, running, logits, columns, 0, options)
            rows = _whole_statistics(running, slices.targets[block], options)
            _put_gradient(kernels, logits, columns, rows.log_z, weights[block], options)
            statistics.append(rows)
            torch.mm(logits, head, out=grad_hidden[block])
            continue
        chunks = _ranges(logits.shape[0], max(1, slice_bytes(hidden.device.type) // (8 * head.shape[0])))
        parts = [_whole_head(slices, slices.targets[block][chunk], options) for chunk in chunks]
        if options.tensor_group is None:
            for chunk, part in zip(chunks, parts, strict=True):
                chunk_targets, chunk_weights = slices.targets[block][chunk], weights[block][chunk]
                statistics.append(_into_gradient(logits[chunk], part, chunk_targets, chunk_weights, options))
        else:  # the gradient waits until all processes have said what the rows come to
            rows = _block_statistics(logits, chunks, parts, slices.targets[block], weights.dtype, options)
            for chunk, part in zip(chunks, parts, strict=True):
                y = _capped(logits[chunk].to(weights.dtype), options)
                logits[chunk].copy_(_by_logits(y, rows.log_z[chunk], weights[block][chunk], part, options))
            statistics.append(rows)
        torch.mm(logits, head, out=grad_hidden[block])
    return _RowStatistics(*map(torch.cat, zip(*statistics, strict=True))), grad_hidden


def _whole_head(slices: VocabSlices, targets: Tensor, options: _Options) -> VocabSlice:
    """All rows of the head that this process has, as one slice, for some targets."""
    columns = targets - slices.vocab_start
    if options.tensor_group is None:
        return VocabSlice(0, slices.head, columns.unsqueeze(1), torch.ones_like(columns, dtype=torch.bool))
    inside = (columns >= 0) & (columns < slices.head.shape[0])
    return VocabSlice(0, slices.head, columns.clamp(0, slices.head.shape[0] - 1).unsqueeze(1), inside)


def _capped(y: Tensor, options: _Options) -> Tensor:
    return y if options.softcap is None else options.softcap * torch.tanh(y / options.softcap)


def _block_statistics(
    logits: Tensor, chunks: list[slice], parts: list[VocabSlice], targets: Tensor, wide: torch.dtype, options: _Options
) -> _RowStatistics:
    """Returns the statistics over the whole vocabulary of rows of logits [n, V] with the local tokens."""
    statistics: list[tuple[Tensor, ...]] = []
    for chunk, part in zip(chunks, parts, strict=True):
        y = _capped(logits[chunk].to(wide), options)
        highest, likeliest = argmax_rows(y)
        ahead = _ahead(likeliest, targets[chunk], options, wide)
        at_target = y.gather(1, part.columns).squeeze(1).masked_fill_(~part.inside, 0)
        total = y.sum(1) if options.label_smoothing else torch.zeros_like(highest)
        statistics.append((highest, (y - highest.unsqueeze(1)).exp_().sum(1), at_target, total, ahead))
    highest, mass, at_target, total, ahead = (torch.cat(column) for column in zip(*statistics, strict=True))
    return _over_group(highest, mass, at_target, total, ahead, options)


def _ranges(count: int, size: int) -> list[slice]:
    """Slices of `size` that cover `count` rows; at least one, so that there are statistics of nothing too."""
    return [slice(start, start + size) for start in range(0, max(1, count), size)]


def _into_gradient(
    logits: Tensor, part: VocabSlice, targets: Tensor, weights: Tensor, options: _Options
) -> _RowStatistics:
    """Puts the gradient of the loss in the place of logits [n, V], and returns the rows' statistics.

    targets, weights: [n].
    """
    y = _capped(logits.to(weights.dtype), options)
    (highest, likeliest), at_target = argmax_rows(y), y.gather(1, part.columns).squeeze(1)
    ahead = _ahead(likeliest, targets, options, weights.dtype)
    if options.softcap is not None or options.label_smoothing or options.z_loss:
        total, log_z = y.sum(1), y.logsumexp(1)
        gradient = _by_logits(y, log_z, weights, part, options)
    else:
        gradient = torch.softmax(y, 1)
        # The largest probability is 1 / V at least, so nothing is lost here where others are too small for float32.
        total, log_z = torch.zeros_like(highest), highest - gradient.amax(1).log()
        gradient.mul_(weights.unsqueeze(1) * options.gradient_scale)
        gradient.scatter_add_(1, part.columns, weights.unsqueeze(1) * -options.gradient_scale)
    logits.copy_(gradient)
    return _RowStatistics(highest, log_z, at_target, total, ahead)


def _by_logits(y: Tensor, log_z: Tensor, weights: Tensor, part: VocabSlice, options: _Options) -> Tensor:
    """The gradient of the loss by logits y [N, S], in their place.

    d loss / d y = (1 + 2 z log Z) p - (1 - s) onehot - s / V, times each row's weight
    """
    scaled = weights * options.gradient_scale
    slope = None if options.softcap is None else 1 - (y / options.softcap).square_()
    y.sub_(log_z.unsqueeze(1)).exp_().mul_((scaled * (1 + 2 * options.z_loss * log_z)).unsqueeze(1))
    if options.label_smoothing:
        y.sub_((scaled * (options.label_smoothing / options.vocab_size)).unsqueeze(1))
    on_target = (scaled * (options.label_smoothing - 1)).unsqueeze(1)
    y.scatter_add_(1, part.columns, on_target.masked_fill(~part.inside.unsqueeze(1), 0))
    return y if slope is None else y.mul_(slope)
