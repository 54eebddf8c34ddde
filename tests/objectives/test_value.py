"""PPO's objective: the policy's loss and that of the values, by the formulas and through a decoder with a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from builders.policy_samples import random_items
from builders.policy_steps import COUNT, objective_of, one_step
from builders.preference_samples import preference_learner
from builders.preference_steps import scaled_model
from builders.tiny_run import VOCABULARY
from torch import Tensor, nn

from danlu.core.types import Batch, CountingObjective, HeadObjective, Loss, Pack, TokenLogprobs, Totals
from danlu.data.batch import collate, empty_like
from danlu.objectives.policy import PolicyGradient, PolicyGradientSettings
from danlu.objectives.value import PpoObjective

GRADIENT = PolicyGradient(PolicyGradientSettings())


@dataclass
class FixedOutputs:
    """Log-probabilities that are those of the columns, and values that are given."""

    batch: Batch
    of_targets: Tensor  # [N] float64

    def logprobs(self, **asked: Any) -> TokenLogprobs:
        old = self.batch.columns["old"].double()
        return TokenLogprobs(old, -old)

    def values(self) -> Tensor:
        return self.of_targets


def ppo(**changes: Any) -> PpoObjective:
    return PpoObjective(nn.Linear(4, 1), GRADIENT, **changes)


def wide(items: Sequence[Pack]) -> Batch:
    batch = collate(items)
    return replace(batch, columns={name: values.double() for name, values in batch.columns.items()})


def totals_of(items: Sequence[Pack]) -> Totals:
    return replace(Totals.of(items), divisors=ppo().divisors(items))


def random_values(batch: Batch) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(len(batch.weights), generator=generator, dtype=torch.float64) * 0.5
    return (batch.columns["value_old"] + noise).requires_grad_()


def loss_of(objective: PpoObjective, items: Sequence[Pack], values: Tensor | None = None) -> tuple[Loss, Tensor]:
    batch = wide(items)
    values = random_values(batch) if values is None else values
    return objective({"policy": FixedOutputs(batch, values)}, batch, totals_of(items)), values  # type: ignore[dict-item]


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_loss_is_that_of_the_policy_and_a_share_of_that_of_the_values(clip: float | None) -> None:
    items = random_items(COUNT, VOCABULARY)
    batch, totals = wide(items), totals_of(items)
    loss, values = loss_of(ppo(value_clip=clip, value_weight=0.7), items)
    plain = GRADIENT({"policy": FixedOutputs(batch, values)}, batch, totals)  # type: ignore[dict-item]
    losses, clipped = [], 0
    columns = (batch.columns[name] for name in ("value_old", "return"))
    for value, old, wanted in zip(values, *columns, strict=True):
        costs = [(value - wanted) ** 2]
        if clip is not None:
            costs.append((torch.clamp(value, old - clip, old + clip) - wanted) ** 2)
        losses.append(max(costs) / 2)
        clipped += bool(costs[-1] > costs[0])
    mean = torch.stack(losses).mean()
    torch.testing.assert_close((loss.total - plain.total) / totals.weight, 0.7 * mean)
    (gradient,) = torch.autograd.grad(loss.total / totals.weight, values)
    torch.testing.assert_close(gradient, 0.7 * torch.autograd.grad(mean, values)[0])
    shown = {name: metric.sum / metric.weight for name, metric in loss.metrics.items()}
    torch.testing.assert_close(shown["value_loss"], mean.detach())
    torch.testing.assert_close(shown["value"], values.detach().mean())
    assert shown["value_clip"] == pytest.approx(clipped / len(values))
    assert (clipped > 0) == (clip is not None)
    assert shown.keys() - plain.metrics.keys() == {"value", "value_loss", "value_clip", "explained_variance"}
    # Control: without the clip, or with another weight, it is another gradient.
    other, _ = loss_of(ppo(value_clip=None if clip else 0.2, value_weight=0.7), items, values)
    assert not torch.allclose(torch.autograd.grad(other.total / totals.weight, values)[0], gradient, rtol=1e-2)


def test_gradients_are_finite_differences() -> None:
    items = random_items(5, VOCABULARY)
    _, values = loss_of(ppo(), items)
    assert torch.autograd.gradcheck(lambda values: loss_of(ppo(), items, values)[0].total, values)


def test_the_explained_variance_is_1_where_values_are_returns_and_0_where_they_are_their_mean() -> None:
    items = random_items(COUNT, VOCABULARY)
    returns = wide(items).columns["return"]
    noise = random_values(wide(items)).detach()

    def explained(values: Tensor) -> float:
        metric = loss_of(ppo(), items, values)[0].metrics["explained_variance"]
        return float(metric.sum / metric.weight)

    assert explained(returns) == pytest.approx(1)
    assert explained(returns.mean().expand_as(returns)) == pytest.approx(0, abs=1e-6)
    expected = 1 - (returns - noise).square().sum() / (returns - returns.mean()).square().sum()
    assert explained(noise) == pytest.approx(float(expected))
    assert explained(noise) < -0.01
    alike = [
        Pack((replace(sample, columns={**sample.columns, "return": sample.columns["return"] * 0}),))
        for sample in (item.samples[0] for item in items)
    ]
    metric = loss_of(ppo(), alike, noise)[0].metrics["explained_variance"]
    assert metric.weight == 0 == metric.sum  # nothing to explain


def test_the_host_waits_for_no_value_of_the_device() -> None:
    items = random_items(COUNT, VOCABULARY)
    batch = collate(items, "meta")
    values = torch.empty(len(batch.weights), device="meta", requires_grad=True)
    loss = ppo()({"policy": FixedOutputs(batch, values)}, batch, totals_of(items))  # type: ignore[dict-item]
    loss.total.backward()
    assert values.grad is not None
    with pytest.raises(RuntimeError, match="cannot be called on meta"):  # control
        loss.metrics["explained_variance"].sum.item()


def test_a_head_learns_returns_through_the_decoder() -> None:
    objective = objective_of("ppo")
    assert isinstance(objective, HeadObjective) and isinstance(objective, CountingObjective)
    items = random_items(COUNT, VOCABULARY, support=3)
    learner = preference_learner(
        scaled_model(1),
        scaled_model(0),
        objective,
        items,
        2,
        dtype=torch.float64,
        score_head=objective.score_head,
    )
    _, first, gradients = one_step(learner, items)
    weight, bias = gradients["objective.score.weight"], gradients["objective.score.bias"]
    assert weight.shape == (1, 32) and weight.abs().max() > 0 and bias.shape == (1,)
    for _ in range(8):
        for name, parameter in objective.named_parameters():
            parameter.data -= 0.1 * gradients[f"objective.{name}"]
        _, metrics, gradients = one_step(learner, items)
    assert metrics["value_loss"] < 0.8 * first["value_loss"]
    assert metrics["explained_variance"] > first["explained_variance"]


def test_an_empty_micro_batch_has_the_same_metrics_and_adds_nothing() -> None:
    items = random_items(COUNT, VOCABULARY)
    empty = collate([empty_like(items[0].samples[0])])
    outputs = {"policy": FixedOutputs(empty, torch.zeros(0, dtype=torch.float64))}
    nothing = ppo()(outputs, empty, totals_of(items))  # type: ignore[arg-type]
    assert list(nothing.metrics) == list(loss_of(ppo(), items)[0].metrics)
    assert nothing.total == 0 and all(metric.sum == 0 == metric.weight for metric in nothing.metrics.values())
    assert ppo().divisors([]) == dict.fromkeys(ppo().divisors(items), 0.0)
