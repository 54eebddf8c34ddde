"""Gradients of whole models, summed in buckets beside the last backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from builders.process_group import run_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from danlu.core.errors import TrainingError
from danlu.parallel import gradient_buckets
from danlu.parallel.comm import Group, PendingSum
from danlu.parallel.gradient_buckets import GradientBuckets
from danlu.parallel.layout import layout_of
from danlu.parallel.ranks import ranks_of
from danlu.recipe.sections import Parallel

WIDTHS = (3, 5, 4, 2)


@dataclass(frozen=True)
class Doubling(Group):
    """A group of two that have the same gradients; each sum is made when it is waited for."""

    sums: list[tuple[torch.dtype, int]] = field(default_factory=list)

    def sum_async(self, x: Tensor) -> PendingSum:
        self.sums.append((x.dtype, x.numel()))
        return PendingSum(x, _Later(x))


@dataclass(frozen=True)
class _Later:
    x: Tensor

    def wait(self) -> None:
        self.x.mul_(2)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, after) for width, after in pairwise(WIDTHS)))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    output: Tensor = model(torch.randn(7, WIDTHS[0], generator=generator))
    return output.square().sum()


def gradients(model: nn.Module) -> list[Tensor]:
    grads = [parameter.grad for parameter in model.parameters()]
    return [grad for grad in grads if grad is not None]


def wanted(seeds: Sequence[int]) -> list[Tensor]:
    model = network()
    for seed in seeds:
        loss_of(model, seed).backward()
    return gradients(model)


def backward(buckets: GradientBuckets, model: nn.Module, seeds: Sequence[int]) -> None:
    for number, seed in enumerate(seeds, 1):
        loss = loss_of(model, seed)
        buckets.prepare_backward(number == len(seeds))
        loss.backward()
    buckets.finish()


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6])
def test_what_is_accumulated_is_summed_once_from_the_last_layer_to_the_first(
    bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", bucket_bytes)
    model, group = network(), Doubling("data", (0, 1))
    buckets = GradientBuckets(list(model.named_parameters()), group)
    for seeds in ((1, 2, 3), (4,)):
        group.sums.clear()
        backward(buckets, model, seeds)
        for grad, whole in zip(gradients(model), wanted(seeds), strict=True):
            assert torch.equal(grad, 2 * whole)
        numbers = {1: [2, 8, 4, 20, 5, 15], 100: [14, 25, 15], 10**6: [54]}[bucket_bytes]
        assert group.sums == [(torch.float32, number) for number in numbers]
        model.zero_grad()


def test_sums_begin_while_the_backward_pass_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 100)
    model, group = network(), Doubling("data", (0, 1))
    begun: list[int] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda _: begun.append(len(group.sums)))
    buckets = GradientBuckets(list(model.named_parameters()), group)
    backward(buckets, model, (1,))
    assert begun == [2]


def test_sums_in_bfloat16_are_rounded_before_and_after() -> None:
    model, group = network(), Doubling("data", (0, 1))
    backward(GradientBuckets(list(model.named_parameters()), group, dtype=torch.bfloat16), model, (1, 2))
    assert group.sums == [(torch.bfloat16, 54)]
    for grad, whole in zip(gradients(model), wanted((1, 2)), strict=True):
        assert grad.dtype == torch.float32 and torch.equal(grad, 2 * whole.bfloat16().float())
        assert not torch.equal(grad, 2 * whole)


def test_gradients_of_several_types_are_summed_in_their_own() -> None:
    """A router and norms in float32 between matrices in bfloat16: each type has buckets of its own."""
    group = Doubling("data", (0, 1))
    types = (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32)
    numbers = torch.tensor([1.0009765625, 3.0])  # the first is 1 in bfloat16
    named = [(f"p{place}", nn.Parameter(torch.ones(2, dtype=dtype))) for place, dtype in enumerate(types)]
    buckets = GradientBuckets(named, group)
    buckets.prepare_backward(True)
    torch.stack([(parameter.float() * numbers).sum() for _, parameter in named]).sum().backward()
    buckets.finish()
    assert group.sums == [(torch.float32, 2), (torch.bfloat16, 4), (torch.float32, 2)]
    for _, parameter in named:
        assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype
        assert torch.equal(parameter.grad, 2 * numbers.to(parameter.dtype))
    assert not torch.equal(numbers, numbers.bfloat16().float())  # so that a sum in another type would show


def test_a_parameter_without_a_gradient_is_named() -> None:
    model, group = network(), Doubling("data", (0, 1))
    buckets = GradientBuckets([*model.named_parameters(), ("unused", nn.Parameter(torch.ones(2)))], group)
    with pytest.raises(TrainingError, match="no gradient came for unused, so gradients cannot be summed"):
        backward(buckets, model, (1,))


def beside_ddp() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Worker: gradients of two micro-batches by buckets, by torch's DDP, and of this process alone."""
    torch.set_num_threads(1)
    ranks = ranks_of(layout_of(Parallel(), 2), "cpu")
    seeds = [10 * ranks.rank + 1, 10 * ranks.rank + 2]
    model, other = network(), network()
    backward(GradientBuckets(list(model.named_parameters()), ranks.data), model, seeds)
    ddp = DistributedDataParallel(other, process_group=ranks.data.handle)
    with ddp.no_sync():
        loss_of(ddp, seeds[0]).backward()
    loss_of(ddp, seeds[1]).backward()
    return gradients(model), [2 * grad for grad in gradients(other)], wanted(seeds)


@pytest.mark.distributed
def test_gradients_are_those_of_ddp_times_the_processes() -> None:
    for ours, theirs, own in run_group(beside_ddp, 2):
        for grad, ddp, alone in zip(ours, theirs, own, strict=True):
            torch.testing.assert_close(grad, ddp, rtol=1e-6, atol=1e-6)
            assert not torch.allclose(grad, alone, rtol=1e-2)
