"""Sliced log-probabilities and entropies against the formula over whole logits in float64, alone and cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from builders.thread_group import ThreadGroup
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from danlu.objectives.linear_cross_entropy import linear_cross_entropy
from danlu.objectives.token_logprobs import token_logprobs

N, D, V = 23, 16, 101


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, head, torch.randint(0, V, (N,), generator=generator)


@dataclass(frozen=True)
class Everything:
    logprobs: Tensor
    entropy: Tensor
    collision: Tensor


def everything(*inputs: Tensor, **options: Any) -> Everything:
    got = token_logprobs(*inputs, entropy=True, collision=True, **options)
    assert got.entropy is not None and got.collision is not None and not got.collision.requires_grad
    return Everything(got.logprobs, got.entropy, got.collision)


def written_out(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logits = hidden @ head.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(1)


def coefficients() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, generator=generator, dtype=torch.float64), torch.randn(
        N, generator=generator, dtype=torch.float64
    )


@pytest.mark.parametrize("slice_rows", [1, 8, 101, 1000])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (1.0, 5.0), (1.6, 3.0)])
def test_values_and_gradients_equal_the_formula(slice_rows: int, temperature: float, softcap: float | None) -> None:
    hidden, head, targets = problem()
    want = written_out(hidden, head, targets, temperature, softcap)
    got = everything(hidden, head, targets, temperature=temperature, softcap=softcap, slice_rows=slice_rows)
    torch.testing.assert_close(got.logprobs, want[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.entropy, want[1], rtol=1e-12, atol=1e-12)
    a, b = coefficients()
    wanted = torch.autograd.grad((a * want[0] + b * want[1]).sum(), (hidden, head))
    gradients = torch.autograd.grad((a * got.logprobs + b * got.entropy).sum(), (hidden, head))
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-12)
    # Negative control: the comparison sees the entropy's gradient.
    without = torch.autograd.grad(
        (a * written_out(hidden, head, targets, temperature, softcap)[0]).sum(), (hidden, head)
    )
    assert not torch.allclose(gradients[0], without[0], rtol=1e-3)


def confined(hidden: Tensor, head: Tensor, targets: Tensor, support: Tensor, temperature: float) -> Tensor:
    """log softmax [N, V] over the support and the target of each row, -inf elsewhere; over all without a support."""
    outside = (support >= 0).any(1, keepdim=True).repeat(1, V + 1)
    outside.scatter_(1, torch.where(support < 0, V, support), False).scatter_(1, targets[:, None], False)
    return (hidden @ head.t() / temperature).masked_fill(outside[:, :V], float("-inf")).log_softmax(-1)


def supports() -> Tensor:
    """Up to 6 ids a row: the first row has none, the second all of one slice, the third one that may be the target."""
    generator = torch.Generator().manual_seed(2)
    support = torch.randint(0, V, (N, 6), generator=generator)
    support = support.masked_fill(torch.rand(N, 6, generator=generator) < 0.3, -1)
    support[0], support[1] = -1, torch.tensor([96, 97, 98, 99, 100, -1])
    support[2], support[2, 3] = -1, problem()[2][2]
    return support


@pytest.mark.parametrize("slice_rows", [1, 8, 1000])
def test_within_a_support_it_is_normalised_over_it(slice_rows: int) -> None:
    hidden, head, targets = problem()
    support = supports()
    want = confined(hidden, head, targets, support, 0.7)
    got = everything(hidden, head, targets, support=support, temperature=0.7, slice_rows=slice_rows)
    of_targets = want.gather(1, targets[:, None]).squeeze(1)
    entropy = -(want.exp() * want.masked_fill(want.isinf(), 0)).sum(1)
    torch.testing.assert_close(got.logprobs, of_targets, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.entropy, entropy, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.collision, (2 * want.detach()).logsumexp(1), rtol=1e-12, atol=1e-12)
    assert got.logprobs[2] == 0  # nothing but the target
    a, b = coefficients()
    wanted = torch.autograd.grad((a * of_targets + b * entropy).sum(), (hidden, head), retain_graph=True)
    gradients = torch.autograd.grad((a * got.logprobs + b * got.entropy).sum(), (hidden, head))
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-12)
    # Negative control: over the whole vocabulary both differ.
    whole = token_logprobs(hidden, head, targets, temperature=0.7)
    assert not torch.allclose(whole.logprobs, of_targets, rtol=1e-3) and whole.entropy is None
    torch.testing.assert_close(whole.logprobs[0], got.logprobs[0])  # what no filter has looked at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_support_have_the_bits_that_all_have_without_one(dtype: torch.dtype) -> None:
    hidden, head, targets = problem(dtype)
    support = supports().masked_fill_(torch.arange(N).unsqueeze(1) % 2 == 0, -1)
    free = (support < 0).all(1)
    assert free[::2].all() and not free[1::2].any()
    want, got = everything(hidden, head, targets), everything(hidden, head, targets, support=support)
    for name in ("logprobs", "entropy", "collision"):
        assert torch.equal(getattr(got, name)[free], getattr(want, name)[free])
        assert not torch.isclose(getattr(got, name)[~free], getattr(want, name)[~free], rtol=1e-3).any()  # control
    gradients = [torch.autograd.grad((each.logprobs + each.entropy).sum(), hidden)[0] for each in (want, got)]
    assert torch.equal(gradients[0][free], gradients[1][free])
    assert not torch.allclose(gradients[0][~free], gradients[1][~free], rtol=1e-2)
    # Nor do they change what the others have, whose bits are those of a batch where every row has ids.
    full = torch.where(free.unsqueeze(1), torch.arange(6), support)
    beside = everything(hidden, head, targets, support=full)
    assert torch.equal(beside.logprobs[~free], got.logprobs[~free])
    assert not torch.isclose(beside.logprobs[free], got.logprobs[free]).any()
    # A support without any room is that of rows without ids.
    nothing = everything(hidden, head, targets, support=supports()[:, :0])
    assert torch.equal(nothing.logprobs, want.logprobs)


class OperationCount(TorchDispatchMode):
    """How many operations are carried out within it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_an_entropy_that_is_only_shown_costs_the_backward_pass_nothing() -> None:
    hidden, head, targets = problem(torch.float32)

    def operations(entropy: bool, share: float = 0.0) -> int:
        got = token_logprobs(hidden, head, targets, entropy=entropy, slice_rows=8)
        total = got.logprobs.sum()
        total = total + share * got.entropy.sum() if share and got.entropy is not None else total
        with OperationCount() as counted:
            total.backward()
        return counted.count

    operations(False)  # makes the tensors of gradients
    slices = -(-V // 8)
    assert operations(True) - operations(False) < slices < operations(True, share=0.1) - operations(False)
    want = torch.autograd.grad(written_out(hidden, head, targets, 1.0, None)[1].sum(), hidden)[0]
    entropy = token_logprobs(hidden, head, targets, entropy=True).entropy
    assert entropy is not None
    torch.testing.assert_close(torch.autograd.grad(entropy.sum(), hidden)[0], want, rtol=1e-3, atol=1e-4)  # alone


@pytest.mark.parametrize("slice_rows", [1, 8, 1000])
def test_the_collision_probability_is_that_of_the_formula(slice_rows: int) -> None:
    hidden, head, targets = problem()
    got = everything(hidden, head, targets, temperature=0.7, slice_rows=slice_rows)
    want = (hidden @ head.t() / 0.7).log_softmax(-1).exp().square().sum(1).log()
    torch.testing.assert_close(got.collision, want.detach(), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(got.collision, -got.entropy, rtol=1e-2)  # control: order 2 is not order 1


def test_what_else_is_asked_for_does_not_change_the_log_probabilities() -> None:
    hidden, head, targets = problem(torch.float32)
    alone, beside = token_logprobs(hidden, head, targets), everything(hidden, head, targets)
    assert torch.equal(alone.logprobs, beside.logprobs) and alone.entropy is alone.collision is None
    gradients = [torch.autograd.grad(each.logprobs.square().sum(), (hidden, head)) for each in (alone, beside)]
    assert all(map(torch.equal, *gradients))


def test_gradients_equal_finite_differences() -> None:
    """Of a part of the problem, since each of its numbers is moved on its own: two slices of a small vocabulary."""
    hidden, head, targets = problem()
    small = hidden[:5, :4].detach().requires_grad_(), head[:11, :4].detach().requires_grad_()
    targets = targets[:5] % 11
    support = torch.tensor([[-1, -1, -1], [0, 3, 9], [10, -1, -1], [7, 8, 2], [-1, 4, -1]])

    def both(hidden: Tensor, head: Tensor, support: Tensor | None = None) -> tuple[Tensor, Tensor]:
        got = everything(hidden, head, targets, support=support, temperature=1.3, softcap=4.0, slice_rows=7)
        return got.logprobs, got.entropy

    assert torch.autograd.gradcheck(both, small)
    assert torch.autograd.gradcheck(partial(both, support=support), small)
    assert not torch.equal(both(*small)[0], both(*small, support)[0])  # control: the support is looked at


def test_a_frozen_head_gets_no_gradient_and_no_targets_are_no_trouble() -> None:
    hidden, head, targets = problem()
    frozen = token_logprobs(hidden, head.detach(), targets)
    frozen.logprobs.sum().backward()
    assert hidden.grad is not None and head.grad is None
    empty = everything(hidden[:0], head, targets[:0])
    empty.logprobs.sum().backward()
    assert empty.logprobs.shape == empty.entropy.shape == (0,) and head.grad is not None and not head.grad.any()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_their_sum_is_the_cross_entropy_of_the_fused_operation(softcap: float | None) -> None:
    hidden, head, targets = problem(torch.float32)
    weights = torch.linspace(0.5, 2.0, N)
    losses = linear_cross_entropy(hidden, head, targets, weights, softcap=softcap, by_target=True)
    logprobs = token_logprobs(hidden, head, targets, softcap=softcap).logprobs
    torch.testing.assert_close(-(weights * logprobs).sum(), losses.total)
    torch.testing.assert_close(-logprobs, losses.by_target)


def test_narrow_hidden_states_give_float32() -> None:
    hidden, head, targets = problem(torch.bfloat16)
    got = everything(hidden, head, targets)
    want, _ = written_out(hidden.float(), head.float(), targets, 1.0, None)
    assert got.logprobs.dtype == got.entropy.dtype == torch.float32
    torch.testing.assert_close(got.logprobs, want, rtol=0.02, atol=0.1)
    got.logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_a_temperature_of_zero_is_refused() -> None:
    hidden, head, targets = problem()
    with pytest.raises(ValueError, match=r"temperature 0\.0: .* above 0"):
        token_logprobs(hidden, head, targets, temperature=0.0)


def test_a_vocabulary_that_is_cut_has_the_same_support() -> None:
    starts, group = (0, 40, 77, V), ThreadGroup(3)
    support, (a, _) = supports(), coefficients()

    def shard(index: int) -> tuple[Tensor, Tensor, Tensor]:
        hidden, head, targets = problem()
        head = head[starts[index] : starts[index + 1]]
        cut: dict[str, Any] = {"tensor_group": group, "vocab_start": starts[index], "vocab_size": V, "slice_rows": 9}
        got = everything(hidden, head, targets, support=support, **cut)
        (gradient,) = torch.autograd.grad((a * got.logprobs).sum(), hidden)
        return got.logprobs.detach(), got.collision, gradient

    with ThreadPoolExecutor(3) as threads:
        shards = list(threads.map(shard, range(3)))
    hidden, head, targets = problem()
    want = everything(hidden, head, targets, support=support)
    (wanted,) = torch.autograd.grad((a * want.logprobs).sum(), hidden)
    for logprobs, collision, _ in shards:
        torch.testing.assert_close(logprobs, want.logprobs.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(collision, want.collision, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(part[2] for part in shards), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_vocabulary_that_is_cut_gives_the_same(softcap: float | None) -> None:
    starts = (0, 40, 77, V)
    group = ThreadGroup(3)
    a, b = coefficients()

    def shard(index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden, head, targets = problem()
        rows = slice(starts[index], starts[index + 1])
        got = everything(
            hidden,
            head[rows],
            targets,
            temperature=0.8,
            softcap=softcap,
            slice_rows=9,
            tensor_group=group,
            vocab_start=starts[index],
            vocab_size=V,
        )
        gradients = torch.autograd.grad((a * got.logprobs + b * got.entropy).sum(), (hidden, head))
        return got.logprobs.detach(), got.entropy.detach(), gradients[0], gradients[1][rows]

    with ThreadPoolExecutor(3) as threads:
        shards = list(threads.map(shard, range(3)))
    hidden, head, targets = problem()
    want = written_out(hidden, head, targets, 0.8, softcap)
    wanted = torch.autograd.grad((a * want[0] + b * want[1]).sum(), (hidden, head))
    for logprobs, entropy, _, _ in shards:
        torch.testing.assert_close((logprobs, entropy), (want[0].detach(), want[1].detach()), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(part[2] for part in shards), wanted[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[3] for part in shards]), wanted[1], rtol=1e-10, atol=1e-12)
