"""The likeliest tokens and the mass of all others against whole logits in float64, alone and cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from builders.thread_group import ThreadGroup
from torch import Tensor

from danlu.objectives.divergence import Head, categorical_divergence, divergence
from danlu.objectives.top_tokens import logprobs_of_tokens, top_tokens

N, D, V, K = 19, 12, 67, 5


def head(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(rows, D, generator=generator, dtype=torch.float64) for rows in (N, V))
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def whole(hidden: Tensor, weight: Tensor, softcap: float | None, temperature: float) -> Tensor:
    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)


def grouped(logprobs: Tensor, ids: Tensor) -> Tensor:
    """[N, K + 1] by the formula: of each id, then the log of what the others' probabilities come to."""
    others = torch.ones_like(logprobs).scatter(1, ids, 0)
    return torch.cat((logprobs.gather(1, ids), (logprobs.exp() * others).sum(1, keepdim=True).log()), 1)


@pytest.mark.parametrize("slice_rows", [1, 3, 20, 1000])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (2.0, None), (0.7, 4.0)])
def test_the_likeliest_are_found_with_the_mass_of_all_others(
    slice_rows: int, temperature: float, softcap: float | None
) -> None:
    hidden, weight = head()
    got = top_tokens(Head(hidden, weight, softcap), K, temperature=temperature, slice_rows=slice_rows)
    logprobs = whole(hidden, weight, softcap, temperature)
    assert torch.equal(got.ids, logprobs.topk(K, dim=1).indices)
    torch.testing.assert_close(got.logprobs, grouped(logprobs, got.ids).detach(), rtol=1e-11, atol=1e-12)
    assert not got.logprobs.requires_grad
    # Negative control: K probabilities made to sum to 1 are others.
    assert not torch.allclose(got.logprobs[:, :K], got.logprobs[:, :K].log_softmax(1), rtol=1e-3)


@pytest.mark.parametrize("slice_rows", [1, 3, 20, 1000])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (2.0, None), (0.7, 4.0)])
def test_values_and_gradients_of_given_tokens_equal_the_formula(
    slice_rows: int, temperature: float, softcap: float | None
) -> None:
    hidden, weight = head()
    ids = torch.rand(N, V, generator=torch.Generator().manual_seed(3)).topk(K, dim=1).indices
    want = grouped(whole(hidden, weight, softcap, temperature), ids)
    got = logprobs_of_tokens(Head(hidden, weight, softcap), ids, temperature=temperature, slice_rows=slice_rows)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    coefficients = torch.randn(N, K + 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad((coefficients * want).sum(), (hidden, weight))
    gradients = torch.autograd.grad((coefficients * got).sum(), (hidden, weight))
    torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-11)
    coefficients[:, -1] = 0  # negative control: the comparison sees the gradient of the others' mass
    without = torch.autograd.grad(
        (coefficients * grouped(whole(hidden, weight, softcap, temperature), ids)).sum(), weight
    )
    assert not torch.allclose(gradients[1], without[0], rtol=1e-3)


def test_gradients_equal_finite_differences() -> None:
    """Of a vocabulary of 15 tokens, in slices of 7, 7 and 1: each number of the weight is moved twice."""
    ids = torch.tensor([[0, 14, 8], [1, 2, 3]])
    hidden, weight = (one.detach()[:, :5].clone().requires_grad_() for one in head())

    def of(hidden: Tensor, weight: Tensor) -> Tensor:
        return logprobs_of_tokens(Head(hidden[:2], weight[:15], 4.0), ids, temperature=1.3, slice_rows=7)

    assert torch.autograd.gradcheck(of, (hidden[:3].detach().requires_grad_(), weight[:16].detach().requires_grad_()))


def test_all_tokens_but_one_are_the_whole_vocabulary() -> None:
    policy, teacher = head(0), head(1)
    chosen = top_tokens(Head(*teacher), V - 1)
    got = categorical_divergence(logprobs_of_tokens(Head(*policy), chosen.ids), chosen.logprobs, kind="forward")
    want = divergence(Head(*policy), Head(*teacher), kind="forward")
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


def test_the_mass_of_the_others_has_all_digits_where_nearly_none_is_left() -> None:
    """One token has all but 1e-30 of the mass: the rest of 1 is 0 in float32, and its logarithm nothing."""
    logits = torch.tensor([[0.0, -69.0, -70.0, -71.0]], requires_grad=True)
    rest = torch.tensor([-69.0, -70.0, -71.0], dtype=torch.float64).logsumexp(0).float()
    one = torch.zeros(1, 1, dtype=torch.int64)
    got = top_tokens(Head(logits, torch.eye(4)), 1, slice_rows=2)
    torch.testing.assert_close(got.logprobs[0, 1], rest, rtol=1e-6, atol=0)
    own = logprobs_of_tokens(Head(logits, torch.eye(4)), one, slice_rows=2)
    torch.testing.assert_close(own[0, 1], rest, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(own[0, 1], logits)
    want = torch.tensor([-69.0, -70.0, -71.0]).softmax(0)
    torch.testing.assert_close(gradient[0], torch.cat((torch.tensor([-1.0]), want)), rtol=1e-5, atol=1e-6)
    # Negative control: what is left of 1 is not.
    assert torch.log1p(-got.logprobs[:, :1].exp().sum(1)).item() == float("-inf")


def test_a_renormalised_teacher_teaches_something_else() -> None:
    """Under the true one a policy that is the teacher has no loss; under K tokens that sum to 1 it would be moved."""
    hidden, weight = head(dtype=torch.float32)
    chosen = top_tokens(Head(hidden, weight), K)
    own = logprobs_of_tokens(Head(hidden, weight), chosen.ids)
    assert categorical_divergence(own, chosen.logprobs, kind="forward").abs().max() < 1e-5
    renormalised = chosen.logprobs[:, :K].log_softmax(1)
    assert categorical_divergence(own[:, :K], renormalised, kind="forward").mean() > 0.1


def test_no_targets_and_a_frozen_weight_are_no_trouble() -> None:
    hidden, weight = head()
    ids = top_tokens(Head(hidden, weight), K).ids
    logprobs_of_tokens(Head(hidden, weight.detach()), ids).sum().backward()
    assert hidden.grad is not None and weight.grad is None
    empty = top_tokens(Head(hidden[:0], weight), K)
    logprobs_of_tokens(Head(hidden[:0], weight), empty.ids).sum().backward()
    assert empty.logprobs.shape == (0, K + 1) and weight.grad is not None and not weight.grad.any()


def test_a_vocabulary_that_is_cut_gives_the_same() -> None:
    starts = (0, 3, 40, V)  # the first has fewer rows than K
    group = ThreadGroup(3)
    coefficients = torch.randn(N, K + 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def shard(index: int) -> tuple[Tensor, ...]:
        (hidden, weight), teacher = head(0), head(1)
        rows = slice(starts[index], starts[index + 1])
        cut = {"temperature": 1.5, "slice_rows": 6, "tensor_group": group, "vocab_start": starts[index]}
        chosen = top_tokens(Head(teacher[0], teacher[1][rows], 6.0), K, **cut)  # type: ignore[arg-type]
        own = logprobs_of_tokens(Head(hidden, weight[rows], 4.0), chosen.ids, **cut)  # type: ignore[arg-type]
        gradients = torch.autograd.grad((coefficients * own).sum(), (hidden, weight))
        return chosen.ids, chosen.logprobs, own.detach(), gradients[0], gradients[1][rows]

    with ThreadPoolExecutor(3) as threads:
        shards = list(threads.map(shard, range(3)))
    (hidden, weight), teacher = head(0), head(1)
    of_teacher = whole(*teacher, 6.0, 1.5).detach()
    ids = of_teacher.topk(K, dim=1).indices
    want = grouped(whole(hidden, weight, 4.0, 1.5), ids)
    wanted = torch.autograd.grad((coefficients * want).sum(), (hidden, weight))
    for got_ids, logprobs, own, _, _ in shards:
        assert torch.equal(got_ids, ids)
        torch.testing.assert_close(logprobs, grouped(of_teacher, ids), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(own, want.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(sum(part[3] for part in shards), wanted[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(torch.cat([part[4] for part in shards]), wanted[1], rtol=1e-9, atol=1e-11)
