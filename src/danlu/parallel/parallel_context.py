"""How one process takes part in a step that several processes share: its items, its micro-batches, and the sums.

On a single process everything here does nothing. Every process makes the same number of micro-batches in a step, for
each of them makes the same collectives; a process that has fewer items than another ends with a micro-batch that has no
targets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from danlu.parallel.comm import Group
from danlu.parallel.local_parameter import LocalParameter
from danlu.parallel.pipeline import Pipeline
from danlu.parallel.ranks import Ranks
from danlu.parallel.schedules import Action, unsplit

T = TypeVar("T")
LARGE_BYTES = 25 * 2**20  # as of a bucket: see `gradient_buckets`


@dataclass(frozen=True)
class ParallelContext:
    """The part of one process, one among `ranks`, in each step."""

    ranks: Ranks = field(default_factory=Ranks)
    local_parameters: Mapping[str, LocalParameter] = field(default_factory=dict)
    """This process's part of each parameter, by name; empty on a single process, which has all of the model."""
    partial_gradients: Sequence[tuple[Group, str]] = ()
    """A group and a parameter's name: after the backward pass its gradient is one term of a sum over the group."""
    prepare_backward: Callable[[bool, int], None] = lambda is_last, chunk: None
    """Called before each backward pass of a step, with whether it is the last pass of its chunk that makes gradients,
    and the chunk's number: whether gradients are reduced in it, and parameters resharded."""
    finish_weight_pass: Callable[[bool, int], None] = lambda is_last, chunk: None
    """Called after each pass that makes the weight gradients which a backward pass has put off, with whether it is the
    last of its chunk that makes any, and the chunk's number: gradients are reduced then."""
    finish_backward: Callable[[], None] = lambda: None
    """Waits for the reductions that the last backward or weight pass has started."""
    reshard: Callable[[], None] = lambda: None
    """Frees parameters that FSDP2 gathered, after their shards have changed outside of a step."""
    release_pages: Callable[[], None] = lambda: None
    """Lets the system take back the memory of parameters that lie in a file, after an update or a checkpoint."""
    pipeline: Pipeline | None = None
    """The part of this process in a pipeline; None where a process has the whole model, in one chunk."""
    elsewhere: Mapping[str, LocalParameter] = field(default_factory=dict)
    """Parameters of other stages, by name: nothing of them is here, except first values that nobody uses."""
    chunk_of: Mapping[str, int] = field(default_factory=dict)
    """The lowest chunk of this process that uses a parameter, by the parameter's name here; empty: one chunk."""

    @property
    def all_parameters(self) -> Mapping[str, LocalParameter]:
        """This process's part of each parameter of the whole model, by name; nothing of parameters of other stages."""
        return {**self.elsewhere, **self.local_parameters}

    @cached_property
    def alone(self) -> bool:
        return self.ranks.alone

    @property
    def chunks(self) -> tuple[int, ...]:
        """The numbers of this process's chunks, rising."""
        return (0,) if self.pipeline is None else self.pipeline.chunks

    @property
    def num_chunks(self) -> int:
        """The number of chunks of the whole model."""
        return 1 if self.pipeline is None else self.pipeline.num_chunks

    @property
    def updates_each_micro_batch(self) -> bool:
        """Whether a step is one micro-batch, with an update of its own while others are in flight (PipeDream)."""
        return self.pipeline is not None and self.pipeline.updates_each_micro_batch

    @property
    def micro_batches_in_flight(self) -> float:
        """The number of micro-batches with activations kept at once by this process."""
        return 1.0 if self.pipeline is None else self.pipeline.micro_batches_in_flight

    def local_range(self, items: Sequence[T]) -> range:
        """The positions of a step's items that this process takes: contiguous, each item on one data rank."""
        data = self.ranks.data
        return range(len(items) * data.index // data.size, len(items) * (data.index + 1) // data.size)

    def num_micro_batches(self, items: int, micro: int) -> int:
        """Micro-batches of `micro` items that every process makes in a step of `items` on all of them together."""
        size = self.ranks.data.size
        largest = max(items * (index + 1) // size - items * index // size for index in range(size))
        return self.fitting(-(-largest // micro))

    def least_micro_batches(self, items: int) -> int:
        """Micro-batches that a step of `items` on all processes is to have on each, where it is left open how many.

        Through stages go two for each of them, if there are as many items: with fewer, most of the time is a bubble.
        """
        return 1 if self.pipeline is None else min(2 * self.pipeline.stages.size, -(-items // self.ranks.data.size))

    def fitting(self, micro_batches: int) -> int:
        """Returns the fewest micro-batches, at least `micro_batches`, for which the schedule is possible; the others
        are empty.
        """
        if (pipeline := self.pipeline) is None:
            return micro_batches
        return next(count for count in itertools.count(micro_batches) if not pipeline.problems(count))

    def actions(self, micro_batches: int) -> tuple[Action, ...]:
        """Returns this process's actions in a step of `micro_batches` micro-batches, in order."""
        if self.pipeline is not None:
            return self.pipeline.actions(micro_batches)
        return unsplit(micro_batches)

    def evaluation_rounds(self, micro_batches: int) -> Iterator[tuple[Sequence[Action], range]]:
        """The forward passes of an evaluation in rounds, each with the numbers of its micro-batches.

        Between rounds, processes may agree on whether to go on.
        """
        if self.pipeline is not None:
            yield from self.pipeline.evaluation_rounds(micro_batches)
            return
        for micro in range(micro_batches):
            yield [Action("forward", 0, micro)], range(micro, micro + 1)

    def from_end_of_pipeline(self, value: T) -> T:
        """The value of the stage that has the last chunk, on all stages, each of which calls this."""
        return value if self.pipeline is None else self.pipeline.from_last(value)

    def all_gather_pipeline(self, value: T) -> list[T]:
        """The values of all stages, on all of them, each of which calls this."""
        return [value] if self.pipeline is None else self.pipeline.all_gather(value)

    def all_reduce_data(self, values: Tensor) -> Tensor:
        """`values` [n], summed in place over data ranks, which take different items, and context ranks, which take
        different tokens of them."""
        return values if self.alone else self.ranks.dense_data.all.sum(values)

    def any_rank(self, fact: bool) -> bool:
        """Returns whether `fact` is true on any process; every process must call it."""
        if self.alone:
            return fact
        return bool(self.ranks.world.max(torch.tensor([float(fact)])).item())

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Completes the gradients after a step's last backward pass: in `local.grad`, summed over all processes.

        FSDP2 or buckets have summed most of them by then; `partial_gradients` are left.
        """
        if self.alone:
            return
        self.finish_backward()
        for parameter in self.local_parameters.values():
            parameter.take_gradient()
        # Gradients of offloaded shards lie on the host, those of parameters that are not sharded on the device.
        by_group: dict[tuple[int, torch.device], tuple[Group, list[Tensor]]] = {}
        for group, name in self.partial_gradients:
            if (grad := self.local_parameters[name].local.grad) is not None:
                by_group.setdefault((id(group), grad.device), (group, []))[1].append(grad)
        for group, grads in by_group.values():
            _all_reduce_flat(group, grads)

    def local_weights(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns this process's parts of tensors of the whole model, live; on a single process the tensors
        themselves.
        """
        if not self.local_parameters:
            return dict(named)
        local = self.local_parameters
        return {name: local[name].local.detach() for name in named if name not in self.elsewhere}

    def norm_weights_without_pipeline(self) -> dict[Tensor, float]:
        """`norm_weights` for the norm of one stage, which sums squares over its tensor ranks alone: data and context
        ranks have the same gradients.
        """
        copies = self.ranks.dense_data.all.size
        return {parameter.local: copies / parameter.box.replicas for parameter in self.local_parameters.values()}

    def norm_weights(self) -> dict[Tensor, float]:
        """The weight of each local parameter's squared gradient in the global norm: 1 / the number of its copies."""
        return {parameter.local: 1 / parameter.box.replicas for parameter in self.local_parameters.values()}


def _is_large(grad: Tensor) -> bool:
    """Whether a copy of a gradient costs more than a collective of its own, as with experts' gradients."""
    return grad.nbytes >= LARGE_BYTES and grad.is_contiguous()


def _all_reduce_flat(group: Group, grads: Sequence[Tensor]) -> None:
    """Sums tensors over `group`, in place: the large ones one by one, all others with one collective."""
    for grad in (grad for grad in grads if _is_large(grad)):
        group.sum(grad)
    grads = [grad for grad in grads if not _is_large(grad)]
    if not grads:
        return
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    group.sum(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))
