"""Losses of policy gradients against the formulas written out in float64, on padded rows as trainers have them."""

from __future__ import annotations

import pytest
import torch

from danlu.objectives.policy_losses import (
    AdaptiveKl,
    Answers,
    ImportanceBounds,
    cispo,
    clip_shares,
    clipped,
    importance_weights,
    kl_estimate,
    off_policy_mask,
    ratios,
    sapo,
    value_loss,
    vespo,
)

LENGTHS = [3, 1, 5, 2]
SEED = 1


@pytest.fixture
def drawn():
    """Log-probabilities of four answers: of the policy (a leaf), of the one that drew, of the engine; advantages."""
    generator = torch.Generator().manual_seed(SEED)
    count = sum(LENGTHS)
    old = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    logprobs = (old + torch.randn(count, generator=generator, dtype=torch.float64) * 0.4).requires_grad_()
    sampled = old + torch.randn(count, generator=generator, dtype=torch.float64) * 0.5
    index = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    advantages = torch.tensor([1.0, -0.5, -2.0, 0.7], dtype=torch.float64)[index]
    weights = torch.ones(count)
    weights[4] = 0  # a token that is not trained, of the third answer
    return logprobs, old, sampled, advantages, Answers(index, 4, weights)


def rows(values, answers):
    """[M, L]: padded rows of values [N], with zeros where a token does not count."""
    padded = torch.zeros(answers.count, max(LENGTHS), dtype=values.dtype)
    for number, part in enumerate((values * answers.weights).split(LENGTHS)):
        padded[number, : len(part)] = part
    return padded


def gradient(loss, logprobs, answers):
    return torch.autograd.grad((loss * answers.weights).sum(), logprobs, retain_graph=True)[0]


def test_ratios_by_token_and_by_sequence(drawn):
    logprobs, old, _, _, answers = drawn
    torch.testing.assert_close(ratios(logprobs, old, answers), (logprobs - old).exp())
    by_sequence = ratios(logprobs, old, answers, "sequence")
    counts = rows(torch.ones_like(old), answers).sum(1)
    expected = (rows(logprobs - old, answers).sum(1) / counts).exp()
    torch.testing.assert_close(by_sequence, expected[answers.index])
    assert ratios(old + 1000, old, answers).isfinite().all()
    assert (ratios(old, old, answers) == 1).all() and (ratios(old, old, answers, "sequence") == 1).all()


@pytest.mark.parametrize("dual", [None, 1.5])
def test_clipping_is_the_formula_and_stops_gradients_outside(drawn, dual):
    logprobs, old, _, advantages, answers = drawn
    ratio = ratios(logprobs, old, answers)
    loss = clipped(ratio, advantages, low=0.2, high=0.3, dual=dual)
    r = ratio.detach()
    unclipped = r if dual is None else r.clamp(max=dual)
    torch.testing.assert_close(loss.detach(), -torch.minimum(unclipped * advantages, r.clamp(0.8, 1.3) * advantages))
    low, high = clip_shares(r, advantages, low=0.2, high=0.3)
    stopped = low | high
    assert stopped.any() and not stopped.all()
    inside = ~stopped if dual is None else ~stopped & (r < dual)
    by_token = gradient(loss, logprobs, answers)
    counted = answers.weights.bool()
    torch.testing.assert_close(by_token[inside & counted], (-r * advantages)[inside & counted])
    assert (by_token[stopped] == 0).all()


def test_cispo_keeps_the_gradient_of_clipped_tokens(drawn):
    logprobs, old, _, advantages, answers = drawn
    ratio = ratios(logprobs, old, answers)
    by_token = gradient(cispo(ratio, logprobs, advantages, high=1.1), logprobs, answers)
    expected = -ratio.detach().clamp(max=1.1) * advantages * answers.weights
    torch.testing.assert_close(by_token, expected)
    assert (ratio > 1.1).any()


def test_sapo_is_the_plain_gradient_at_the_old_policy_and_less_far_from_it(drawn):
    logprobs, old, _, advantages, answers = drawn
    at_old = old.clone().requires_grad_()
    by_token = gradient(sapo(ratios(at_old, old, answers), advantages), at_old, answers)
    torch.testing.assert_close(by_token, -advantages * answers.weights)
    ratio = ratios(logprobs, old, answers).detach()
    temperature = torch.where(advantages > 0, 1.0, torch.tensor(1.05, dtype=torch.float64))
    expected = -4 / temperature / (1 + (-temperature * (ratio - 1)).exp()) * advantages
    torch.testing.assert_close(sapo(ratio, advantages), expected)


def test_vespo_weighs_whole_answers(drawn):
    logprobs, old, sampled, advantages, answers = drawn
    for correction in (None, old - sampled):
        log_w = rows(logprobs - old, answers).sum(1)
        if correction is not None:
            log_w = log_w + rows(correction, answers).sum(1)
        w = log_w.detach().exp()[answers.index]
        phi = torch.where(advantages >= 0, (3 * (1 - w)).exp() * w**2, (2 * (1 - w)).exp() * w**3)
        by_token = gradient(vespo(logprobs, old, advantages, answers, log_importance=correction), logprobs, answers)
        torch.testing.assert_close(by_token, -phi * advantages * answers.weights)


def test_kl_estimates_have_the_mean_and_the_gradient_that_is_said():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    p = policy.detach().exp()
    exact = (p * (policy.detach() - reference)).sum()
    for estimator in ("k1", "k3"):
        estimate = kl_estimate(policy.detach(), reference, estimator)
        torch.testing.assert_close((p * estimate).sum(), exact)
    assert (kl_estimate(policy.detach(), reference, "k3") >= 0).all()

    def mean_gradient(loss):
        return torch.autograd.grad((p * loss).sum(), policy, retain_graph=True)[0]

    def through_softmax(by_logprob):
        return by_logprob - p * by_logprob.sum()

    kl_gradient = through_softmax(p * (policy.detach() - reference))
    torch.testing.assert_close(through_softmax(mean_gradient(kl_estimate(policy, reference, "k2"))), kl_gradient)
    ratio = (policy - policy.detach()).exp()
    corrected = through_softmax(mean_gradient(ratio * kl_estimate(policy, reference, "k3")))
    torch.testing.assert_close(corrected, kl_gradient)
    plain = through_softmax(mean_gradient(kl_estimate(policy, reference, "k3")))
    assert not torch.allclose(plain, kl_gradient, rtol=0.05)
    torch.testing.assert_close(
        through_softmax(mean_gradient(ratio * kl_estimate(policy, reference, "k1"))), kl_gradient
    )
    k1_alone = through_softmax(mean_gradient(kl_estimate(policy, reference, "k1")))
    torch.testing.assert_close(k1_alone, torch.zeros_like(k1_alone))  # which the recipe's rules refuse


def test_in_the_reward_k1_alone_has_kls_gradient():
    """Over draws of a softmax the gradient of E[-estimate x log pi] is the policy gradient of an estimate in the reward
    (arXiv:2510.01555); near the reference k3 grows with the square of the distance, and points elsewhere."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200, 9, generator=generator, dtype=torch.float64).requires_grad_()
    policy = scores.log_softmax(-1)
    reference = (scores.detach() + 0.01 * torch.randn(200, 9, generator=generator)).log_softmax(-1)
    p = policy.detach().exp()
    (kl_gradient,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), scores, retain_graph=True)
    cosines = {}
    for estimator in ("k1", "k2", "k3"):
        surrogate = (p * kl_estimate(policy.detach(), reference, estimator) * policy).sum()
        (gradient,) = torch.autograd.grad(surrogate, scores, retain_graph=True)
        cosines[estimator] = float(torch.nn.functional.cosine_similarity(gradient.flatten(), kl_gradient.flatten(), 0))
    assert cosines["k1"] == pytest.approx(1, abs=1e-9)
    assert abs(cosines["k2"]) < 0.2 and abs(cosines["k3"]) < 0.2


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_are_truncated_or_masked(drawn, level):
    _, old, sampled, _, answers = drawn
    w = (old - sampled).exp()
    if level == "sequence":
        w = rows(old - sampled, answers).sum(1).exp()[answers.index]
    truncated = importance_weights(old, sampled, answers, ImportanceBounds(level, high=1.2))
    torch.testing.assert_close(truncated, w.clamp(max=1.2))
    two_sided = importance_weights(old, sampled, answers, ImportanceBounds(level, low=0.8, high=1.2, masks=True))
    torch.testing.assert_close(two_sided, torch.where((w < 0.8) | (w > 1.2), 0.0, w))
    assert (w > 1.2).any() and (w < 0.8).any()
    assert (importance_weights(old, old, answers, ImportanceBounds(level)) == 1).all()


def test_answers_far_from_the_policy_are_left_out_only_if_they_were_bad(drawn):
    logprobs, _, sampled, advantages, answers = drawn
    mask = off_policy_mask(logprobs, sampled, advantages, answers, most=0.05)
    counts = rows(torch.ones_like(sampled), answers).sum(1)
    far = (rows(sampled - logprobs.detach(), answers).sum(1) / counts)[answers.index] > 0.05
    torch.testing.assert_close(mask, (~(far & (advantages < 0))).double())
    assert 0 < mask.sum() < len(mask)


def test_the_critic_is_held_near_what_it_said():
    values, old, returns = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0.9, 1.0, 1.0]), torch.tensor([1.0, 0.0, 2.0])
    assert value_loss(values, old, returns, clip=None).tolist() == [0, 0, 0.5]
    near = old + (values - old).clamp(-0.2, 0.2)
    expected = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    torch.testing.assert_close(value_loss(values, old, returns), expected)
    assert expected[1] > 0  # right by itself, but it moved too far at once


def test_the_kl_coefficient_follows_the_target():
    control = AdaptiveKl(0.1, target=6.0, horizon=100)
    control.update(60.0, 10)
    assert control.coefficient == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    control.update(6.0, 10)
    assert control.coefficient == pytest.approx(0.102)
    control.update(5.4, 10)
    assert control.coefficient == pytest.approx(0.102 * (1 - 0.1 * 10 / 100))
