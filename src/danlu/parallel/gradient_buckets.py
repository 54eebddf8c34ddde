"""Sums of gradients that every process of a group has whole, in buckets that overlap with a step's last backward pass.

As in DistributedDataParallel (Li et al., arXiv:2006.15704, section 3.2): parameters fill buckets in the reverse of
their order in the model, which is about that in which their gradients come, and a bucket is all-reduced as soon as all
of its gradients are there, while the backward pass goes on. Torch's module decides in the forward pass whether the
backward pass that follows reduces, which only holds where the two follow each other; here each backward pass gets a
flag. Buckets are the same from the first step to the last, so a run that resumes rounds sums as an uninterrupted one
does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.core.errors import TrainingError
from danlu.parallel.collective_traffic import BUCKET_BYTES
from danlu.parallel.comm import Group, PendingSum

NamedParameters = Sequence[tuple[str, Parameter]]


class GradientBuckets:
    """All-reduces the gradients of parameters to their sums over `group`, where DDP's own reduction takes the mean.

    parameters: those that are trained, with their names, in the order of the forward pass; the same on every process.
    dtype: in which sums are made; None: in that of the gradients, which they keep.
    """

    def __init__(self, parameters: NamedParameters, group: Group, *, dtype: torch.dtype | None = None) -> None:
        self._buckets = [_Bucket(members, group, dtype) for members in _filled(parameters)]
        self._started: int | None = None  # buckets that are being summed; None where nothing is to be
        for bucket in self._buckets:
            for _, parameter in bucket.members:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))

    def prepare_backward(self, is_last: bool) -> None:
        """Called before each backward pass of a step: gradients are summed in the last one."""
        self._started = 0 if is_last else None
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)

    def finish_weight_pass(self, is_last: bool) -> None:
        """Starts the sums after the last pass that computes put-off weight gradients; called after each of them.

        Hooks of this pass cannot say which gradients came: the others came in its input pass, which was not marked as
        the last.
        """
        if not is_last:
            return
        self._started = 0
        for bucket in self._buckets:
            bucket.missing = sum(parameter.grad is None for _, parameter in bucket.members)
        self._start_complete()

    def finish(self) -> None:
        """Waits for the sums, which are in `.grad` then; called after the last backward or weight pass.

        Raises TrainingError for a parameter that the pass brought no gradient for: other processes would wait for it.
        """
        assert self._started is not None, "the last backward pass of a step has not been announced"
        if self._started < len(self._buckets):
            raise TrainingError(
                f"no gradient came for {self._buckets[self._started].first_missing()}, so gradients cannot be summed "
                "over processes: the loss must depend on every trained parameter in each micro-batch"
            )
        for bucket in self._buckets:
            bucket.finish()
        self._started = None

    def _arrived(self, bucket: _Bucket, _: Tensor) -> None:
        """The hook of each parameter: its gradient of this backward pass is in `.grad`."""
        if self._started is None:
            return
        bucket.missing -= 1
        self._start_complete()

    def _start_complete(self) -> None:
        """Starts the sums of buckets that have all of their gradients, up to the first that has not."""
        assert self._started is not None, "the last pass of a step has been announced"
        # In one order on all processes, whatever order gradients come in.
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self._buckets[self._started].start()
            self._started += 1


class _Bucket:
    """Parameters of one dtype and device; one collective sums their gradients."""

    def __init__(self, members: NamedParameters, group: Group, dtype: torch.dtype | None) -> None:
        self.members = members
        self.missing = len(members)  # gradients that the present backward pass has not brought yet
        self._group, self._dtype = group, dtype
        self._sum: PendingSum | None = None

    def start(self) -> None:
        """Starts the sum, of one tensor: the only gradient itself, or all of them end to end."""
        grads = [_grad_of(parameter) for _, parameter in self.members]
        dtype = self._dtype or grads[0].dtype
        is_narrowed = dtype != grads[0].dtype
        if len(grads) == 1 and grads[0].is_contiguous() and not is_narrowed:
            self._sum = self._group.sum_async(grads[0])
            return
        flat = torch.cat([grad.reshape(-1).to(dtype) for grad in grads])
        if not is_narrowed:  # gradients become views of it, so that none is there twice
            for (_, parameter), part in zip(self.members, flat.split([grad.numel() for grad in grads]), strict=True):
                parameter.grad = part.view(parameter.shape)
        self._sum = self._group.sum_async(flat)

    def finish(self) -> None:
        """Waits for the sum."""
        assert self._sum is not None, "it was started"
        flat, self._sum = self._sum.wait(), None
        grads = [_grad_of(parameter) for _, parameter in self.members]
        if flat.dtype != grads[0].dtype:
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view(grad.shape))

    def first_missing(self) -> str:
        """The name of a parameter without a gradient, or of all where none stands out, for messages."""
        names = [name for name, parameter in self.members if parameter.grad is None]
        return names[0] if names else f"one of {', '.join(name for name, _ in self.members)}"


def _filled(parameters: NamedParameters) -> Iterator[NamedParameters]:
    """Parameters from the last to the first, cut where a bucket would be larger than `BUCKET_BYTES`."""
    members: list[tuple[str, Parameter]] = []
    for name, parameter in reversed(parameters):
        size = sum(member.nbytes for _, member in members) + parameter.nbytes
        kind = parameter.dtype, parameter.device
        if members and (size > BUCKET_BYTES or kind != (members[0][1].dtype, members[0][1].device)):
            yield members
            members = []
        members.append((name, parameter))
    if members:
        yield members


def _grad_of(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None, "a bucket is summed when all of its gradients are there"
    return parameter.grad
