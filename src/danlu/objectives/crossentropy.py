"""The language-model head and its cross-entropy as one operation that never holds [N, V] logits.

The vocabulary is gone through in slices, twice: once for the softmax's denominator, once for the gradient, which is
then complete for its slice. Making the logits a second time costs one matrix product in four. Going by rows instead
would make them once, but add a [V, D] gradient to the last one for every few hundred rows and hold a narrow copy of
the head: at V = 128256 that is no faster, and takes 0.3 GB more. A frozen head has no gradient, and mostly is stored in
the type of activations: then going by rows saves the third product and half of the exponentials for nothing.

Where the vocabulary is cut over processes (arXiv:1909.08053, section 3), each has the logits of its own rows, and a few
numbers a target are sent: the largest logit, then the denominator and the target's own logit.

N trained targets · D model width · V vocabulary · S rows of the vocabulary in a slice
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from danlu.types import ReduceGroup

# Bytes of one slice's float32 logits. On CPU they stay in the cores' caches; a GPU wants large products.
SLICE_BYTES_CPU = 4 * 2**20
SLICE_BYTES_CUDA = 128 * 2**20
NARROWEST_SLICE = 256
FLOAT32 = 4
# Logits of a frozen head that are kept for the gradient, in the type of activations; a product over very few rows would
# be spent on reading the head.
KEPT_BYTES = 16 * 2**20
FEWEST_ROWS = 64
# Columns of logits whose largest value is found before the place where it stands: see `_argmax`.
ARGMAX_COLUMNS = 64


@dataclass(frozen=True)
class CrossEntropy:
    """What `linear_cross_entropy` returns; every number is a sum over targets, none a mean."""

    total: Tensor  # scalar: sum of weight x (loss + label smoothing + z-loss); carries the gradient
    nll: Tensor  # scalar: sum of weight x negative log-likelihood, without the two extras
    correct: Tensor  # scalar: sum of weight over targets that are the argmax of their logits: of equal ones the first


@dataclass(frozen=True)
class _Options:
    softcap: float | None
    label_smoothing: float
    z_loss: float
    gradient_scale: float
    slice_rows: int
    vocab_size: int  # V
    vocab_start: int
    tensor_group: ReduceGroup | None

    @property
    def most_words(self) -> int:
        """Rows of the head that the largest part has: the same number on all, whose collectives go by it."""
        return self.vocab_size if self.tensor_group is None else -(-self.vocab_size // self.tensor_group.size)


def slice_bytes(device_type: str) -> int:
    """Memory that the logits take while this works, float32 and narrow copy together, in bytes."""
    return 2 * (SLICE_BYTES_CPU if device_type == "cpu" else SLICE_BYTES_CUDA)


def workspace_bytes(
    targets: int, width: int, vocab_size: int, *, element_bytes: int, device_type: str, frozen: bool
) -> int:
    """What `linear_cross_entropy` holds at its peak beside its inputs and the head's gradient, in bytes.

    targets, width, vocab_size: N, D, V. element_bytes: of activations. frozen: the head needs no gradient and is stored
    in the type of activations.
    """
    room = slice_bytes(device_type) // 2
    gradient = targets * width * element_bytes
    if frozen:
        rows = min(targets, _rows_kept(vocab_size, element_bytes))
        few = min(rows, max(1, room // (4 * vocab_size)))
        return rows * vocab_size * element_bytes + 2 * few * vocab_size * FLOAT32 + gradient
    part = min(vocab_size, max(NARROWEST_SLICE, room // (4 * max(1, targets))))
    return part * (targets * (FLOAT32 + element_bytes) + width * element_bytes) + targets * width * FLOAT32 + gradient


def _rows_kept(vocab_size: int, element_bytes: int) -> int:
    return max(FEWEST_ROWS, KEPT_BYTES // (element_bytes * vocab_size))


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
    slice_rows: int | None = None,
    tensor_group: ReduceGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> CrossEntropy:
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
        slice_rows: S; by default as many as `slice_bytes` allows.
        tensor_group: the processes among which the vocabulary is cut. Then `head` is the rows from `vocab_start` on of
            its `vocab_size` in all, every sum that is returned is the whole one on each, the head's gradient is that of
            its rows, and the hidden states' is a part: the sum over the processes is the whole.
    """
    assert tensor_group is None or vocab_size is not None, "the size of a vocabulary that is cut must be told"
    if slice_rows is None:
        room = slice_bytes(hidden.device.type) // 2
        slice_rows = max(NARROWEST_SLICE, room // (4 * max(1, hidden.shape[0])))
    vocab_size = head.shape[0] if vocab_size is None else vocab_size
    options = _Options(
        softcap, label_smoothing, z_loss, gradient_scale, slice_rows, vocab_size, vocab_start, tensor_group
    )
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    total, nll, correct = _LinearCrossEntropy.apply(hidden, head, targets, weights, options, wants_gradient)
    return CrossEntropy(total, nll, correct)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, options: _Options, gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weights = weights.to(wide)
        slices = _Slices(hidden, head, targets, options)
        if gradient and not head.requires_grad and head.dtype == hidden.dtype:
            rows, grad_hidden = _by_rows(slices, weights)
            gradients: tuple[Tensor | None, Tensor | None] = (grad_hidden, None)
        else:
            rows = _softmax_statistics(slices, wide)
            gradients = _gradients(slices, rows, weights, head.requires_grad) if gradient else (None, None)
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
        ctx.mark_non_differentiable(*sums[1:])
        return sums[0], sums[1], sums[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        assert ctx.gradients is not None, "the gradient of the cross-entropy was already handed out"
        grad_hidden, grad_head = ctx.gradients
        ctx.gradients = None
        if grad.device.type != "cpu":  # asking for its value would make the host wait for the device
            for one in (grad_hidden, grad_head):
                if one is not None:
                    one.mul_(grad)
        elif grad != 1:  # the usual case is the loss itself: leave [V, D] alone
            grad_hidden = None if grad_hidden is None else grad_hidden * grad
            grad_head = None if grad_head is None else grad_head * grad
        return grad_hidden, grad_head, None, None, None, None


@dataclass(frozen=True)
class _Slices:
    """The head in slices of its vocabulary, and the logits that each gives."""

    hidden: Tensor
    head: Tensor
    targets: Tensor
    options: _Options

    def __iter__(self) -> Iterator[_Slice]:
        for start in range(0, self.head.shape[0], self.options.slice_rows):
            head = self.head[start : start + self.options.slice_rows].to(self.hidden.dtype)  # [S, D]
            place = self.targets - (self.options.vocab_start + start)
            inside = (place >= 0) & (place < head.shape[0])
            yield _Slice(start, head, place.clamp_(0, head.shape[0] - 1).unsqueeze(1), inside)

    def logits(self, part: _Slice, wide: torch.dtype) -> Tensor:
        """[N, S]; the same bits each time."""
        y = (self.hidden @ part.head.t()).to(wide)
        cap = self.options.softcap
        return y if cap is None else y.div_(cap).tanh_().mul_(cap)


@dataclass(frozen=True)
class _Slice:
    start: int
    head: Tensor  # [S, D] in hidden's dtype
    place: Tensor  # [N, 1] int64: of each target in this slice; anywhere if it is in another one
    inside: Tensor  # [N] bool


@dataclass(frozen=True)
class _Rows:
    """What each row of logits comes to, [N] each."""

    highest: Tensor
    log_z: Tensor
    at_target: Tensor
    sum: Tensor
    ahead: Tensor  # 0 where no token before the target has the largest logit


def _softmax_statistics(slices: _Slices, wide: torch.dtype) -> _Rows:
    """One pass over the logits with a running maximum (arXiv:1805.02867)."""
    count = slices.hidden.shape[0]
    highest = slices.hidden.new_full((count,), float("-inf"), dtype=wide)
    mass, at_target, total = (torch.zeros_like(highest) for _ in range(3))
    likeliest = torch.zeros_like(slices.targets)
    for part in slices:
        y = slices.logits(part, wide)
        at_target += y.gather(1, part.place).squeeze(1).masked_fill_(~part.inside, 0)
        if slices.options.label_smoothing:
            total += y.sum(1)
        largest, place = _argmax(y)
        likeliest = torch.where(largest > highest, place + part.start, likeliest)
        raised = torch.maximum(highest, largest)
        mass.mul_((highest - raised).exp_()).add_(y.sub_(raised.unsqueeze(1)).exp_().sum(1))
        highest = raised
    ahead = _ahead(likeliest, slices.targets, slices.options, wide)
    return _joined(highest, mass, at_target, total, ahead, slices.options)


def _argmax(y: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row of y [N, S], and the first column where it stands: [N] each.

    torch's own argmax takes 20 times as long as its maximum on CPU (1024 x 1024 in float32: 1.0 ms against 0.06), so it
    looks only through the columns where the largest value is known to be.
    """
    whole = y.shape[1] // ARGMAX_COLUMNS * ARGMAX_COLUMNS
    if whole == 0:
        found = y.max(1)
        return found.values, found.indices
    blocks = y[:, :whole].unflatten(1, (-1, ARGMAX_COLUMNS))  # [N, blocks, columns]
    largest, block = blocks.amax(2).max(1)
    columns = blocks[torch.arange(len(y), device=y.device), block].argmax(1) + block * ARGMAX_COLUMNS
    if whole == y.shape[1]:
        return largest, columns
    last, place = y[:, whole:].max(1)
    return torch.maximum(largest, last), torch.where(last > largest, place + whole, columns)


def _ahead(likeliest: Tensor, targets: Tensor, options: _Options, wide: torch.dtype) -> Tensor:
    """[N]: 1 where the likeliest token, counted from the first that is here, comes before the target; else 0."""
    return (likeliest + options.vocab_start < targets).to(wide)


def _joined(highest: Tensor, mass: Tensor, at_target: Tensor, total: Tensor, ahead: Tensor, options: _Options) -> _Rows:
    """What rows [N] come to over the whole vocabulary, from what they come to here; `mass` is relative to `highest`."""
    if options.tensor_group is not None and len(highest):
        here, highest = highest, options.tensor_group.max(highest.clone())
        mass = mass * (here - highest).exp_()
        ahead = ahead * (here == highest)
        mass, at_target, total, ahead = options.tensor_group.sum(torch.stack((mass, at_target, total, ahead)))
    return _Rows(highest, highest + mass.log(), at_target, total, ahead)


def _gradients(slices: _Slices, rows: _Rows, weights: Tensor, for_head: bool) -> tuple[Tensor, Tensor | None]:
    """By hidden [N, D] and head [V, D], for an upstream gradient of one."""
    hidden, head = slices.hidden, slices.head
    grad_hidden = torch.zeros_like(hidden, dtype=weights.dtype)
    grad_head = torch.empty_like(head) if for_head else None
    for part in slices:
        y = slices.logits(part, weights.dtype)
        grad = _by_logits(y, rows.log_z, weights, part, slices.options).to(hidden.dtype)  # [N, S]
        grad_hidden += grad @ part.head
        if grad_head is not None:
            grad_head[part.start : part.start + part.head.shape[0]] = grad.t() @ hidden
    return grad_hidden.to(hidden.dtype), grad_head


def _by_rows(slices: _Slices, weights: Tensor) -> tuple[_Rows, Tensor]:
    """Statistics and the gradient by hidden [N, D] for a head that needs none.

    The logits of some rows are made once, in one product; a few rows at a time, which caches hold, they are replaced by
    their gradient; and a second product takes that back to the hidden states.
    """
    hidden, head, options = slices.hidden, slices.head, slices.options
    found: list[_Rows] = []
    grad_hidden = torch.empty_like(hidden)
    for many in _cut(hidden.shape[0], _rows_kept(options.most_words, hidden.element_size())):
        logits = hidden[many] @ head.t()
        parts = _cut(logits.shape[0], max(1, slice_bytes(hidden.device.type) // (8 * head.shape[0])))
        own = [_own_words(slices, many, few) for few in parts]
        if options.tensor_group is None:
            for few, part in zip(parts, own, strict=True):
                found.append(_into_gradient(logits[few], part, slices.targets[many][few], weights[many][few], options))
        else:  # the gradient waits until all processes have said what the rows come to
            rows = _statistics(logits, parts, own, slices.targets[many], weights.dtype, options)
            for few, part in zip(parts, own, strict=True):
                y = _capped(logits[few].to(weights.dtype), options)
                logits[few].copy_(_by_logits(y, rows.log_z[few], weights[many][few], part, options))
            found.append(rows)
        torch.mm(logits, head, out=grad_hidden[many])
    return _end_to_end(found), grad_hidden


def _end_to_end(found: list[_Rows]) -> _Rows:
    columns = zip(*((one.highest, one.log_z, one.at_target, one.sum, one.ahead) for one in found), strict=True)
    return _Rows(*(torch.cat(column) for column in columns))


def _own_words(slices: _Slices, many: slice, few: slice) -> _Slice:
    """The whole head that is here, as one slice, for a few rows."""
    place = slices.targets[many][few] - slices.options.vocab_start
    if slices.options.tensor_group is None:
        return _Slice(0, slices.head, place.unsqueeze(1), torch.ones_like(place, dtype=torch.bool))
    inside = (place >= 0) & (place < slices.head.shape[0])
    return _Slice(0, slices.head, place.clamp(0, slices.head.shape[0] - 1).unsqueeze(1), inside)


def _capped(y: Tensor, options: _Options) -> Tensor:
    return y if options.softcap is None else options.softcap * torch.tanh(y / options.softcap)


def _statistics(
    logits: Tensor, parts: list[slice], own: list[_Slice], targets: Tensor, wide: torch.dtype, options: _Options
) -> _Rows:
    """What rows of logits [n, V] come to over the whole vocabulary, of which these are the tokens that are here."""
    found: list[tuple[Tensor, ...]] = []
    for few, part in zip(parts, own, strict=True):
        y = _capped(logits[few].to(wide), options)
        highest, likeliest = _argmax(y)
        ahead = _ahead(likeliest, targets[few], options, wide)
        at_target = y.gather(1, part.place).squeeze(1).masked_fill_(~part.inside, 0)
        total = y.sum(1) if options.label_smoothing else torch.zeros_like(highest)
        found.append((highest, (y - highest.unsqueeze(1)).exp_().sum(1), at_target, total, ahead))
    highest, mass, at_target, total, ahead = (torch.cat(column) for column in zip(*found, strict=True))
    return _joined(highest, mass, at_target, total, ahead, options)


def _cut(count: int, size: int) -> list[slice]:
    """At least one, so that there are statistics of nothing too."""
    return [slice(start, start + size) for start in range(0, max(1, count), size)]


def _into_gradient(logits: Tensor, part: _Slice, targets: Tensor, weights: Tensor, options: _Options) -> _Rows:
    """Puts the gradient of the loss in the place of logits [n, V], and gives what rows come to.

    targets, weights: [n].
    """
    y = _capped(logits.to(weights.dtype), options)
    (highest, likeliest), at_target = _argmax(y), y.gather(1, part.place).squeeze(1)
    ahead = _ahead(likeliest, targets, options, weights.dtype)
    if options.softcap is not None or options.label_smoothing or options.z_loss:
        total, log_z = y.sum(1), y.logsumexp(1)
        gradient = _by_logits(y, log_z, weights, part, options)
    else:
        gradient = torch.softmax(y, 1)
        # The largest probability is 1 / V at least, so nothing is lost here where others are too small for float32.
        total, log_z = torch.zeros_like(highest), highest - gradient.amax(1).log()
        gradient.mul_(weights.unsqueeze(1) * options.gradient_scale)
        gradient.scatter_add_(1, part.place, weights.unsqueeze(1) * -options.gradient_scale)
    logits.copy_(gradient)
    return _Rows(highest, log_z, at_target, total, ahead)


def _by_logits(y: Tensor, log_z: Tensor, weights: Tensor, part: _Slice, options: _Options) -> Tensor:
    """The gradient of the loss by logits y [N, S], in their place.

    d loss / d y = (1 + 2 z log Z) p - (1 - s) onehot - s / V, times each row's weight
    """
    scaled = weights * options.gradient_scale
    slope = None if options.softcap is None else 1 - (y / options.softcap).square_()
    y.sub_(log_z.unsqueeze(1)).exp_().mul_((scaled * (1 + 2 * options.z_loss * log_z)).unsqueeze(1))
    if options.label_smoothing:
        y.sub_((scaled * (options.label_smoothing / options.vocab_size)).unsqueeze(1))
    on_target = (scaled * (options.label_smoothing - 1)).unsqueeze(1)
    y.scatter_add_(1, part.place, on_target.masked_fill(~part.inside.unsqueeze(1), 0))
    return y if slope is None else y.mul_(slope)
