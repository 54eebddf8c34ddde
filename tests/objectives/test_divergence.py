"""Sliced divergences against the formula over whole logits in float64, and against TRL's; alone and cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import log

import pytest
import torch
from builders.thread_group import ThreadGroup
from torch import Tensor

from danlu.core.types import DivergenceKind
from danlu.objectives.divergence import Head, categorical_divergence, divergence

N, D, TEACHER_D, V = 23, 16, 11, 101
KINDS: tuple[DivergenceKind, ...] = ("forward", "reverse", "jensen-shannon")


def heads(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and weight of the policy, which want gradients, and of a narrower teacher."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    return drawn(N, D).requires_grad_(), drawn(V, D).requires_grad_(), drawn(N, TEACHER_D), drawn(V, TEACHER_D)


def logprobs(hidden: Tensor, weight: Tensor, softcap: float | None, temperature: float) -> Tensor:
    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)


def written_out(logp: Tensor, logq: Tensor, kind: DivergenceKind, beta: float) -> Tensor:
    """Sums of q log(q / p) and the like, term by term; p of the policy."""
    p, q = logp.exp(), logq.exp()
    if kind == "forward":
        return (q * (q / p).log()).sum(-1)
    if kind == "reverse":
        return (p * (p / q).log()).sum(-1)
    m = beta * q + (1 - beta) * p
    return beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)


def coefficients() -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("slice_rows", [1, 8, 1000])
@pytest.mark.parametrize(
    ("temperature", "softcaps"), [(1.0, (None, None)), (0.7, (None, 4.0)), (2.0, (5.0, None)), (1.6, (3.0, 6.0))]
)
@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.5), ("reverse", 0.5), ("jensen-shannon", 0.3)])
def test_values_and_gradients_equal_the_formula(
    slice_rows: int,
    temperature: float,
    softcaps: tuple[float | None, float | None],
    kind: DivergenceKind,
    beta: float,
) -> None:
    hidden, weight, *teacher = heads(scale=0.7)
    logp, logq = logprobs(hidden, weight, softcaps[0], temperature), logprobs(*teacher, softcaps[1], temperature)
    want = temperature**2 * written_out(logp, logq, kind, beta)
    got = divergence(
        Head(hidden, weight, softcaps[0]),
        Head(*teacher, softcaps[1]),
        kind=kind,
        beta=beta,
        temperature=temperature,
        slice_rows=slice_rows,
    )
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    wanted = torch.autograd.grad((coefficients() * want).sum(), (hidden, weight))
    gradients = torch.autograd.grad((coefficients() * got).sum(), (hidden, weight))
    torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-11)
    # Negative controls: the comparison sees a beta that is the policy's share, and a factor T^2 that is missing.
    others = [written_out(logp, logq, kind, beta)] if temperature != 1 else []
    others += [written_out(logp, logq, kind, 1 - beta) * temperature**2] if kind == "jensen-shannon" else []
    others += [written_out(logq, logp, kind, beta) * temperature**2]
    for other in others:
        assert not torch.allclose(got, other, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_finite_differences(kind: DivergenceKind) -> None:
    """Of a part of the problem, since each of its numbers is moved on its own: two slices of a small vocabulary."""
    hidden, weight, *teacher = heads()
    of_teacher = Head(teacher[0][:4], teacher[1][:11])

    def of(hidden: Tensor, weight: Tensor) -> Tensor:
        policy = Head(hidden, weight, 4.0)
        return divergence(policy, of_teacher, kind=kind, beta=0.7, temperature=1.3, slice_rows=7)

    assert torch.autograd.gradcheck(of, (hidden[:4, :5].detach().requires_grad_(), weight[:11, :5].detach()))
    assert torch.autograd.gradcheck(of, (hidden[:4, :5].detach(), weight[:11, :5].detach().requires_grad_()))


POLICY_LOGITS = [
    [3.082, -0.587, -4.358, 1.137, -2.169],
    [-2.797, 0.807, 1.676, -1.439, -0.807],
    [-1.193, 0.364, -1.713, 2.201, -2.142],
]
TEACHER_LOGITS = [
    [0.245, -1.133, 0.746, -1.784, -3.018],
    [0.741, 2.913, 1.88, 1.55, 0.384],
    [2.528, -2.581, -1.582, -0.042, -1.437],
]
# What `GKDTrainer.generalized_jsd_loss(policy, teacher, beta=.., temperature=.., reduction="none")` of TRL 1.16 says of
# these, summed over the vocabulary, and its gradient by the first row of the policy's logits.
TRL = [
    (0.0, 1.0, [3.513327039, 0.522129442, 2.937929838],
     [0.526057213, -0.060336462, -0.536696164, 0.078969322, -0.007993909]),
    (0.0, 2.0, [1.034293499, 0.160658962, 0.883747974],
     [0.156431663, -0.026198002, -0.184616632, 0.061477337, -0.007094367]),
    (0.1, 1.0, [0.148455491, 0.045441375, 0.213522836],
     [0.007436844, -0.005848429, -0.00213306, 0.001423674, -0.000879029]),
    (0.1, 2.0, [0.074358405, 0.01432406, 0.07477538],
     [0.009023682, -0.003163571, -0.008471558, 0.003632927, -0.00102148]),
    (0.9, 1.0, [0.083178253, 0.045024338, 0.189400261],
     [0.004150956, -0.004378166, -0.000381941, 0.001378371, -0.00076922]),
    (0.9, 2.0, [0.046903727, 0.014261565, 0.066762443],
     [0.005667557, -0.004031103, -0.002657428, 0.002537387, -0.001516412]),
    (1.0, 1.0, [0.909333349, 0.511694605, 2.335846293],
     [0.044596258, -0.048614949, -0.00394516, 0.016604691, -0.00864084]),
    (1.0, 2.0, [0.511034493, 0.15965614, 0.755258498],
     [0.062743615, -0.045939994, -0.027914435, 0.028584034, -0.017473219]),
]  # fmt: skip


@pytest.mark.parametrize(("beta", "temperature", "values", "gradient"), TRL)
def test_trl_says_the_same_of_equal_logits(
    beta: float, temperature: float, values: list[float], gradient: list[float]
) -> None:
    kind: DivergenceKind = {0.0: "forward", 1.0: "reverse"}.get(beta, "jensen-shannon")  # type: ignore[assignment]
    policy, teacher = (torch.tensor(logits, dtype=torch.float64) for logits in (POLICY_LOGITS, TEACHER_LOGITS))
    policy.requires_grad_()
    one_hot = torch.eye(5, dtype=torch.float64)
    got = divergence(
        Head(policy, one_hot),
        Head(teacher, one_hot),
        kind=kind,
        beta=beta if kind == "jensen-shannon" else 0.5,
        temperature=temperature,
    )
    torch.testing.assert_close(got, temperature**2 * torch.tensor(values, dtype=torch.float64), rtol=0, atol=4e-9)
    (by_policy,) = torch.autograd.grad(got.sum(), policy)
    torch.testing.assert_close(
        by_policy[0], temperature**2 * torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=4e-9
    )


@pytest.mark.parametrize("kind", KINDS)
def test_few_outcomes_follow_the_same_formula(kind: DivergenceKind) -> None:
    logp, logq = (torch.tensor(logits).double().log_softmax(1) for logits in (POLICY_LOGITS, TEACHER_LOGITS))
    got = categorical_divergence(logp, logq, kind=kind, beta=0.3)
    torch.testing.assert_close(got, written_out(logp, logq, kind, 0.3), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(got, written_out(logq, logp, kind, 0.3), rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logits_stay_finite_and_right(kind: DivergenceKind) -> None:
    """One model is sure of one token, the other of another, a thousand nats apart."""
    policy = torch.tensor([[1000.0, 0.0, -1000.0], [0.0, 0.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[-1000.0, 0.0, 500.0], [800.0, 0.0, 0.0]])
    got = divergence(Head(policy, torch.eye(3)), Head(teacher, torch.eye(3)), kind=kind, slice_rows=1)
    want = {
        "forward": [2000.0, log(3)],
        "reverse": [1500.0, 2 / 3 * 800 - log(3)],
        # Of the second row: the teacher has all of one token, the policy thirds, the mixture 2/3, 1/6, 1/6.
        "jensen-shannon": [log(2), 0.5 * log(3 / 2) + 0.5 * (log(1 / 2) + 2 * log(2)) / 3],
    }[kind]
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-6, atol=1e-6)
    got.sum().backward()
    assert policy.grad is not None and policy.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions_have_none_and_push_nothing(kind: DivergenceKind) -> None:
    hidden, weight, *_ = heads(torch.float32)
    got = divergence(Head(hidden, weight), Head(hidden.detach() * 1, weight.detach()), kind=kind)
    assert got.abs().max() < 5e-6
    got.sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().max() < 2e-5


def test_only_the_policy_gets_a_gradient_and_a_frozen_weight_none() -> None:
    hidden, weight, *teacher = heads()
    asked = [tensor.requires_grad_() for tensor in teacher]
    divergence(Head(hidden, weight.detach()), Head(*asked), kind="forward").sum().backward()
    assert hidden.grad is not None and [tensor.grad for tensor in (weight, *asked)] == [None] * 3
    empty = divergence(Head(hidden[:0], weight), Head(asked[0][:0], asked[1]), kind="jensen-shannon")
    empty.sum().backward()
    assert empty.shape == (0,) and weight.grad is not None and not weight.grad.any()


def test_narrow_hidden_states_give_float32() -> None:
    hidden, weight, *teacher = heads(torch.bfloat16, scale=0.5)
    got = divergence(Head(hidden, weight), Head(*teacher), kind="forward")
    want = written_out(
        logprobs(hidden.float(), weight.float(), None, 1.0),
        logprobs(*(t.float() for t in teacher), None, 1.0),
        "forward",
        0.5,
    )
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    got.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == weight.grad.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_what_is_no_temperature_and_no_mixture_is_refused() -> None:
    hidden, weight, *teacher = heads()
    with pytest.raises(ValueError, match=r"temperature 0\.0: .* above 0"):
        divergence(Head(hidden, weight), Head(*teacher), kind="forward", temperature=0.0)
    with pytest.raises(ValueError, match=r"beta 1\.0: .* kind forward or reverse"):
        divergence(Head(hidden, weight), Head(*teacher), kind="jensen-shannon", beta=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_that_is_cut_gives_the_same(kind: DivergenceKind) -> None:
    starts = (0, 40, 77, V)
    group = ThreadGroup(3)

    def shard(index: int) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, *teacher = heads()
        rows = slice(starts[index], starts[index + 1])
        got = divergence(
            Head(hidden, weight[rows], 3.0),
            Head(teacher[0], teacher[1][rows], 5.0),
            kind=kind,
            beta=0.2,
            temperature=0.8,
            slice_rows=9,
            tensor_group=group,
        )
        gradients = torch.autograd.grad((coefficients() * got).sum(), (hidden, weight))
        return got.detach(), gradients[0], gradients[1][rows]

    with ThreadPoolExecutor(3) as threads:
        shards = list(threads.map(shard, range(3)))
    hidden, weight, *teacher = heads()
    want = 0.64 * written_out(logprobs(hidden, weight, 3.0, 0.8), logprobs(*teacher, 5.0, 0.8), kind, 0.2)
    wanted = torch.autograd.grad((coefficients() * want).sum(), (hidden, weight))
    for values, _, _ in shards:
        torch.testing.assert_close(values, want.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(sum(part[1] for part in shards), wanted[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(torch.cat([part[2] for part in shards]), wanted[1], rtol=1e-9, atol=1e-11)
