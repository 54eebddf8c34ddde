"""The policy gradient against its formulas, written out token by token in float64, and over the parts of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders.context_mistakes import GradientOfOneRank, SumsOfOneRank
from builders.policy_formulas import FixedOutputs, mean_loss, token_losses
from builders.policy_samples import NAN, drawn, random_items
from builders.policy_steps import (
    COUNT,
    DIVERGENCE_WEIGHT,
    OBJECTIVES,
    SETTINGS,
    PerMicroBatch,
    Seen,
    objective_of,
    one_step,
    see,
)
from builders.preference_samples import preference_learner
from builders.preference_steps import scaled_model
from builders.process_group import run_group
from builders.tiny_run import VOCABULARY
from builders.worst_errors import worst_relative_error
from torch import Tensor

from danlu.core.types import Batch, Branch, Loss, Pack, Totals
from danlu.data.batch import collate, empty_like
from danlu.data.trees import repeat_stem
from danlu.models.attend import attend_for
from danlu.models.decoder import Decoder
from danlu.numerics.batch_invariant import batch_invariant
from danlu.objectives.policy import PolicyEvaluation, PolicyGradient, PolicyGradientSettings
from danlu.objectives.policy_losses import GammaWeight, ImportanceBounds
from danlu.recipe.sections import Context, Parallel
from danlu.stages.learner import DecoderLearner
from danlu.training.evaluation import evaluate

CLOSE = 1e-6


def totals_of(items: Sequence[Pack]) -> Totals:
    return replace(Totals.of(items), divisors=PolicyGradient(PolicyGradientSettings()).divisors(items))


def wide(items: Sequence[Pack]) -> Batch:
    """All items as one micro-batch whose columns are float64."""
    batch = collate(items)
    return replace(batch, columns={name: values.double() for name, values in batch.columns.items()})


def outputs_of(batch: Batch) -> dict[str, Any]:
    """A policy near the one that drew, which carries gradients, and a reference that is farther from it."""
    generator = torch.Generator().manual_seed(5)
    old = batch.columns["old"].double()

    def near(scale: float) -> Tensor:
        return old + torch.randn(old.shape, generator=generator, dtype=torch.float64) * scale

    policy = FixedOutputs(near(0.3).requires_grad_(), near(0.1).neg().requires_grad_())
    return {"policy": policy, "reference": FixedOutputs(near(0.8), -old)}


def gradients_of(loss: Tensor, outputs: dict[str, Any]) -> tuple[Tensor, ...]:
    policy = outputs["policy"]
    return torch.autograd.grad(loss, (policy.values, policy.entropies), retain_graph=True, allow_unused=True)


MORE = {
    "plain": PolicyGradientSettings(),
    "plain sequences": PolicyGradientSettings(normalise="sequences"),
    "masked by sequence": PolicyGradientSettings(
        importance=ImportanceBounds("sequence", low=0.3, high=1.5, masks=True), dual_clip=1.25
    ),
    "cispo of both": PolicyGradientSettings(loss="cispo", clip_high=1.1, off_policy=0.1, normalise="groups"),
    "sapo by sequence": PolicyGradientSettings(loss="sapo", ratio="sequence", kl=0.3, kl_with_ratio=True),
    "sapo, colder": PolicyGradientSettings(loss="sapo", sapo_temperatures=(0.5, 3.0)),
    "vespo, sharper": PolicyGradientSettings(
        loss="vespo", vespo_weights=(GammaWeight(1.0, 0.5), GammaWeight(0.5, 4.0))
    ),
    "vespo alone": PolicyGradientSettings(loss="vespo", kl=0.2, kl_estimator="k2"),
}


@pytest.mark.parametrize("name", [*SETTINGS, *MORE])
def test_loss_and_gradient_are_those_of_the_formulas(name: str) -> None:
    settings = {**SETTINGS, **MORE}[name]
    items = random_items(COUNT, VOCABULARY)
    batch, totals = wide(items), totals_of(items)
    outputs = outputs_of(batch)
    wanted = mean_loss(settings, batch, outputs)
    loss = PolicyGradient(settings, has_reference=True)(outputs, batch, totals).total / totals.weight
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-12)
    expected, got = gradients_of(wanted, outputs), gradients_of(loss, outputs)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-7, atol=1e-10)
    assert (got[1] is None) == (settings.entropy == 0)
    torch.testing.assert_close(torch.zeros_like(expected[1]) if got[1] is None else got[1], expected[1])
    # Control: another way to normalise, or a ratio to the reference, is another gradient.
    other = "sequences" if settings.normalise != "sequences" else "tokens"
    changed = PolicyGradient(replace(settings, normalise=other), has_reference=True)(outputs, batch, totals)
    assert not torch.allclose(gradients_of(changed.total / totals.weight, outputs)[0], expected[0], rtol=1e-3)
    if not settings.single_update:
        columns = {**batch.columns, "old": outputs["reference"].values}
        to_reference = PolicyGradient(settings, True)(outputs, replace(batch, columns=columns), totals).total
        assert not torch.allclose(gradients_of(to_reference / totals.weight, outputs)[0], expected[0], rtol=1e-3)


@pytest.mark.parametrize("name", ["tokens", "sequences", "sapo"])
def test_gradients_are_finite_differences(name: str) -> None:
    items = random_items(5, VOCABULARY)
    batch, totals = collate(items), totals_of(items)
    outputs, objective = outputs_of(batch), PolicyGradient(SETTINGS[name], has_reference=True)

    def loss(logprobs: Tensor, entropies: Tensor) -> Tensor:
        return objective({**outputs, "policy": FixedOutputs(logprobs, entropies)}, batch, totals).total

    policy = outputs["policy"]
    assert torch.autograd.gradcheck(loss, (policy.values, policy.entropies))


def test_masks_in_the_loss_leave_the_divisor_and_masks_in_the_weights_do_not() -> None:
    items = random_items(COUNT, VOCABULARY)
    counts = PolicyGradient(PolicyGradientSettings()).divisors(items)
    answers = [
        (float(sample.facts["group"][number]), sample.weights[branch.start : branch.stop].sum())
        for sample in (item.samples[0] for item in items)
        for number, branch in enumerate(sample.branches)
        if branch.parent >= 0
    ]
    trained = [group for group, weight in answers if weight]
    assert 0 < len(trained) < len(answers)
    assert counts["answers"] == len(trained) and counts["groups"] == len(set(trained)) == COUNT
    assert PolicyGradient(PolicyGradientSettings()).divisors([]) == dict.fromkeys(counts, 0.0)
    batch = collate(items)
    outputs, totals = outputs_of(batch), totals_of(items)
    # Nothing is near enough: answers with negative advantages cost nothing, and are divided by all the same.
    masked = PolicyGradient(PolicyGradientSettings(off_policy=-1e9))(outputs, batch, totals).total / totals.weight
    good = (batch.columns["advantage"] >= 0).double()
    kept = torch.stack(token_losses(PolicyGradientSettings(), batch, outputs)) * good
    torch.testing.assert_close(masked, kept.sum() / len(kept))
    assert good.mean() < 0.9


@pytest.mark.parametrize("normalise", ["groups", "sequences"])
def test_answers_with_a_copy_of_the_prompt_each_are_the_same_groups(normalise: Any) -> None:
    items = random_items(COUNT, VOCABULARY)
    copies = [Pack((repeat_stem(item.samples[0]),)) for item in items]
    assert sum(pack.documents for pack in copies) > COUNT
    objective = PolicyGradient(PolicyGradientSettings(normalise=normalise))
    outputs = outputs_of(collate(items))
    losses = [objective(outputs, collate(each), totals_of(each)) for each in (items, copies)]
    torch.testing.assert_close(losses[0].total, losses[1].total, rtol=1e-12, atol=0)
    assert means(losses[0]) == pytest.approx(means(losses[1]))
    # Control: groups that are told apart by their documents are others.
    apart = [
        Pack((replace(sample, facts={**sample.facts, "group": np.arange(len(sample.branches), dtype=np.float32)}),))
        for sample in (pack.samples[0] for pack in copies)
    ]
    others = objective(outputs, collate(apart), totals_of(apart)).total
    assert torch.isclose(others, losses[0].total, rtol=1e-3) == (normalise == "sequences")


def in_two_branches(item: Pack, *, counted_twice: bool) -> Pack:
    """Each answer of two tokens or more goes on in a second branch, as behind a history that was rewritten.

    counted_twice: the second has all facts of an answer, as if it were another.
    """
    (sample,) = item.samples
    branches, numbers, begins = [sample.branches[0]], [0], [True]
    for number, branch in enumerate(sample.branches[1:], 1):
        middle = branch.start + (branch.stop - branch.start) // 2
        ends = [middle, branch.stop] if middle > branch.start else [branch.stop]
        for start, stop in zip([branch.start, *ends], ends, strict=False):
            branches.append(Branch(0, start, stop))
            numbers.append(number)
            begins.append(start == branch.start or counted_twice)
    facts = {
        name: np.where(np.array(begins) | (name in ("group", "fresh")), values[numbers], np.float32(np.nan))
        for name, values in sample.facts.items()
    }
    return Pack((replace(sample, branches=tuple(branches), facts=facts),))


@pytest.mark.parametrize("name", SETTINGS)
def test_an_answer_in_several_branches_is_one_answer(name: str) -> None:
    items = random_items(COUNT, VOCABULARY)
    whole, cut, apart = (
        items, *([in_two_branches(item, counted_twice=twice) for item in items] for twice in (False, True))
    )  # fmt: skip
    outputs, objective = outputs_of(collate(items)), PolicyGradient(SETTINGS[name], has_reference=True)
    counts, seen = zip(
        *(
            (objective.divisors(each), objective(outputs, collate(each), totals_of(each)))
            for each in (whole, cut, apart)
        ),
        strict=True,
    )
    assert counts[1] == counts[0] and counts[2]["answers"] > counts[0]["answers"]
    torch.testing.assert_close(seen[1].total, seen[0].total, rtol=1e-12, atol=0)
    wanted, found, other = (gradients_of(loss.total, outputs)[0] for loss in seen)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert means(seen[1]) == pytest.approx(means(seen[0]))
    # Control: as two answers they are others, where anything is of answers.
    settings = SETTINGS[name]
    of_answers = settings.normalise in ("sequences", "constant") or settings.ratio == "sequence"
    of_answers |= settings.loss == "vespo" or settings.off_policy is not None
    of_answers |= settings.importance is not None and settings.importance.level == "sequence"
    assert torch.allclose(other, wanted, rtol=1e-3, atol=0) == (not of_answers)


@pytest.fixture(scope="module")
def whole() -> dict[str, Seen]:
    return see(list(OBJECTIVES), COUNT)


def differs(seen: Seen, wanted: Seen) -> bool:
    same_metrics = seen[1].keys() == wanted[1].keys() and seen[1] == pytest.approx(wanted[1], rel=CLOSE, abs=1e-9)
    same = seen[0] == pytest.approx(wanted[0], rel=CLOSE) and worst_relative_error(seen[2], wanted[2]) < CLOSE
    return not (same and same_metrics)


@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_micro_batches_change_nothing(whole: dict[str, Seen], micro: int) -> None:
    seen = see(list(OBJECTIVES), micro)
    assert [name for name, wanted in whole.items() if differs(seen[name], wanted)] == []


def test_a_mean_over_each_micro_batch_is_seen(whole: dict[str, Seen]) -> None:
    seen = see(list(OBJECTIVES), 4, PerMicroBatch)
    assert [name for name, wanted in whole.items() if worst_relative_error(seen[name][2], wanted[2]) < 1e-3] == []


@pytest.mark.distributed
def test_two_processes_change_nothing_and_means_of_their_shares_are_seen(whole: dict[str, Seen]) -> None:
    for seen in run_group(see, 2, list(OBJECTIVES), 2):
        assert [name for name, wanted in whole.items() if differs(seen[name], wanted)] == []
    for seen in run_group(see, 2, list(OBJECTIVES), 5, PerMicroBatch):
        assert [name for name, wanted in whole.items() if not differs(seen[name], wanted)] == []


@pytest.mark.distributed
@pytest.mark.parametrize("context", [Context(size=2), Context(size=2, method="ulysses")], ids=["ring", "ulysses"])
def test_context_ranks_change_nothing(whole: dict[str, Seen], context: Context) -> None:
    for seen in run_group(see, 2, list(OBJECTIVES), 2, DecoderLearner, Parallel(context=context)):
        assert [name for name, wanted in whole.items() if differs(seen[name], wanted)] == []


@pytest.mark.distributed
def test_what_context_ranks_do_not_sum_is_seen(whole: dict[str, Seen]) -> None:
    """Negative controls: sums over answers, and their gradient, where there is one."""
    section = Parallel(context=Context(size=2))
    (seen, _), (stopped, _) = (
        run_group(see, 2, list(OBJECTIVES), 2, mistake, section) for mistake in (SumsOfOneRank, GradientOfOneRank)
    )
    of_answers = ["sequences", "constant", "groups", "cispo", "sapo", "vespo", "distilled"]
    assert [name for name in of_answers if not differs(seen[name], whole[name])] == []
    assert differs(stopped["sequences"], whole["sequences"])


def dense_divergence(items: Sequence[Pack]) -> tuple[float, dict[str, Tensor]]:
    """The mean over trained tokens of T^2 KL(policy || teacher), of whole logits in float64, and its gradients."""
    policy, batch = scaled_model(1), collate(items)

    def logprobs(model: Decoder) -> Tensor:
        hidden = model(batch.tokens, batch.positions, attend_for(batch), torch.float64)
        return (model.logits(hidden)[batch.logits_indices] / 1.5).log_softmax(1)  # [N, V]

    own, said = logprobs(policy), logprobs(scaled_model(0)).detach()
    values = 1.5**2 * (own.exp() * (own - said)).sum(1)
    mean = (values * batch.weights).sum() / batch.weights.sum()
    mean.backward()
    return mean.item(), {name: p.grad.to_dense() for name, p in policy.named_parameters() if p.grad is not None}


def test_a_divergence_from_teachers_is_a_mean_over_the_trained_tokens_beside_the_policy_gradient(
    whole: dict[str, Seen],
) -> None:
    value, wanted = dense_divergence(random_items(COUNT, VOCABULARY, support=5))
    (mixed, metrics, gradients), (plain, _, without) = whole["distilled"], whole["sequences"]
    assert metrics["divergence"] == pytest.approx(value, rel=1e-6)
    assert mixed == pytest.approx(plain + DIVERGENCE_WEIGHT * value, rel=1e-6)
    more = {name: (gradient - without[name]) / DIVERGENCE_WEIGHT for name, gradient in gradients.items()}
    assert worst_relative_error(more, wanted) < 1e-6
    # Control: a twentieth more is seen.
    assert worst_relative_error({name: 1.05 * gradient for name, gradient in more.items()}, wanted) > 1e-2


def redrawn(items: Sequence[Pack], temperature: float, *, within: bool = True) -> list[Pack]:
    """The items as a rollout of the policy leaves them: `old` and `sampled` are its log-probabilities, one by one."""
    objective = PolicyGradient(PolicyGradientSettings())
    learner = replace(preference_learner(scaled_model(1).float(), None, objective, items, 1), exact=True)
    redone = []
    for item in items:
        batch = learner.collate([item])
        support = batch.columns["support"].long() if within else None
        with torch.no_grad():
            policy = learner.outputs(batch, 1.0)["policy"]
            said = policy.logprobs(temperature=temperature, support=support).logprobs
        sample = item.samples[0]
        logprobs = sample.columns["old"].copy()
        logprobs[sample.weights > 0] = said.numpy()
        redone.append(Pack((replace(sample, columns={**sample.columns, "old": logprobs, "sampled": logprobs}),)))
    return redone


def first_update(items: Sequence[Pack], **changes: Any) -> dict[str, float]:
    """The metrics of the first update of a rollout, in micro-batches of four prompts."""
    objective = PolicyGradient(PolicyGradientSettings(temperature=0.7, normalise="sequences", **changes))
    learner = replace(preference_learner(scaled_model(1).float(), None, objective, items, 4), exact=True)
    return one_step(learner, items)[1]


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_ratio_of_the_first_update_is_exactly_1_at_any_temperature_and_support(ratio: str) -> None:
    with batch_invariant():
        items = random_items(COUNT, VOCABULARY, support=6)
        metrics = first_update(redrawn(items, 0.7), ratio=ratio)
        assert [metrics[name] for name in ("ratio", "approx_kl", "clip", "gap")] == [1.0, 0.0, 0.0, 0.0]
        # Controls: log-probabilities at another temperature, or over the whole vocabulary.
        for others in (redrawn(items, 1.0), redrawn(items, 0.7, within=False)):
            metrics = first_update(others, ratio=ratio)
            assert metrics["ratio"] != 1 and metrics["approx_kl"] > 1e-3 and metrics["gap"] > 1e-2


def test_a_single_update_needs_no_old_log_probabilities() -> None:
    items = random_items(COUNT, VOCABULARY)
    batch, totals = collate(items), totals_of(items)
    outputs = outputs_of(batch)
    single = PolicyGradient(PolicyGradientSettings(single_update=True))(outputs, batch, totals)
    assert single.metrics["ratio"].sum == batch.weight and not single.metrics["clip"].sum
    assert not single.metrics["approx_kl"].sum
    columns = {name: values for name, values in batch.columns.items() if name != "old"}
    without = PolicyGradient(PolicyGradientSettings(single_update=True))(
        outputs, replace(batch, columns=columns), totals
    )
    assert without.total == single.total
    assert PolicyGradient(PolicyGradientSettings())(outputs, batch, totals).metrics["clip"].sum > 0  # control


def means(loss: Loss) -> dict[str, float]:
    return {name: float(metric.sum) / metric.weight for name, metric in loss.metrics.items() if metric.weight}


def answers() -> list[Pack]:
    """Three prompts, all tokens with round numbers."""
    return [
        drawn(
            0,
            [1, 2],
            [
                {"tokens": [3, 4], "reward": 1.0, "reward/math": 1.0, "sampled": -1.5, "fresh": 1},
                {"tokens": [5], "reward": NAN, "reward/math": NAN, "advantage": 0.0, "fresh": 1},
            ],
        ),
        drawn(
            1,
            [1, 2],
            [
                {"tokens": [3], "reward": -0.5, "reward/math": 0.0, "old": -2.0, "sampled": -3.0, "fresh": 0},
                {"tokens": [6, 7, 8], "reward": 0.0, "reward/math": 0.0, "truncated": 1, "weights": 0.0},
            ],
        ),
        drawn(2, [9], [{"tokens": [3, 1], "reward": 1.5, "reward/math": NAN, "advantage": -2.0, "sampled": -1.25}]),
    ]


def test_metrics_are_means_over_what_they_are_of() -> None:
    items = answers()
    batch, totals = collate(items), totals_of(items)
    policy = FixedOutputs(torch.tensor([-1.0, -1, -1, -1, -1, -2]), torch.tensor([0.5, 1, 1.5, 2, 2.5, 3]))
    outputs = {"policy": policy, "reference": FixedOutputs(torch.full((6,), -1.5), torch.zeros(6))}
    got = means(PolicyGradient(PolicyGradientSettings(), True)(outputs, batch, totals))  # type: ignore[arg-type]
    e = math.e
    x = [-0.5, -0.5, -0.5, -0.5, -0.5, 0.5]
    assert got == pytest.approx(
        {
            "reward": (1 - 0.5 + 0 + 1.5) / 4,  # an answer without a reward is in no mean
            "reward/math": 1 / 3,
            "length": (2 + 1 + 1 + 3 + 2) / 5,
            "truncated": 1 / 5,
            "entropy": 10.5 / 6,
            "advantage": (1 + 1 + 0 - 0.5 - 2 - 2) / 6,
            "ratio": (1 + 1 + 1 + e + 1 + 1 / e) / 6,
            "approx_kl": (e - 2 + 1 / e) / 6,
            "clip_low": 1 / 6,
            "clip_high": 0.0,  # what is above has a negative advantage
            "clip": 1 / 6,
            "gap": (0.5 + 0.5 + 0 + 0.25 + 0.75) / 5,  # of fresh tokens
            "kl/k1": 2.0 / 6,
            "kl/k2": 0.125,
            "kl/k3": sum(math.exp(each) - 1 - each for each in x) / 6,
        }
    )
    everything = PolicyGradientSettings(dual_clip=1.5, importance=ImportanceBounds(high=1.2), off_policy=0.1)
    got = means(PolicyGradient(everything)(outputs, batch, totals))  # type: ignore[arg-type]
    assert got["clip_dual"] == pytest.approx(1 / 6) == got["clip"]
    assert got["importance"] == pytest.approx((5 * 1.2 + 1) / 6)
    assert got["off_policy"] == pytest.approx(2 / 6)


@pytest.mark.parametrize("name", [*SETTINGS, *MORE])
def test_an_empty_micro_batch_has_the_same_metrics_and_adds_nothing(name: str) -> None:
    items = random_items(COUNT, VOCABULARY, support=3)
    objective, totals = PolicyGradient({**SETTINGS, **MORE}[name], has_reference=True), totals_of(items)
    empty, batch = collate([empty_like(items[0].samples[0])]), collate(items)
    nothing = objective(outputs_of(empty), empty, totals)
    assert list(nothing.metrics) == list(objective(outputs_of(batch), batch, totals).metrics)
    assert nothing.total == 0 and all(metric.sum == 0 == metric.weight for metric in nothing.metrics.values())


@pytest.mark.parametrize("name", [*SETTINGS, *MORE])
def test_the_host_waits_for_no_value_of_the_device(name: str) -> None:
    items = random_items(COUNT, VOCABULARY, support=3)
    batch, totals = collate(items, "meta"), totals_of(items)
    values = torch.empty(len(batch.weights), device="meta", requires_grad=True)
    outputs: dict[str, Any] = dict.fromkeys(("policy", "reference"), FixedOutputs(values, values))
    loss = PolicyGradient({**SETTINGS, **MORE}[name], has_reference=True)(outputs, batch, totals)
    loss.total.backward()
    assert values.grad is not None
    with pytest.raises(RuntimeError, match="cannot be called on meta"):  # control
        loss.total.item()


def test_a_log_ratio_without_bounds_is_no_reason_for_nan() -> None:
    items = answers()
    batch, totals = collate(items), totals_of(items)
    values = torch.full((6,), 200.0, requires_grad=True)  # e^201 is no float32, and one of the advantages is 0
    outputs = {"policy": FixedOutputs(values, torch.zeros(6))}
    loss = PolicyGradient(PolicyGradientSettings())(outputs, batch, totals)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(loss.total, values)
    assert loss.total.isfinite() and gradient.isfinite().all()
    assert all(metric.sum.isfinite() for metric in loss.metrics.values())


def test_held_out_answers_are_judged_by_their_mean_reward() -> None:
    items = [*answers(), *random_items(COUNT, VOCABULARY)]
    objective, policy = PolicyGradient(PolicyGradientSettings()), scaled_model(1)
    learner = preference_learner(policy, None, objective, items, 2, dtype=torch.float64)
    seen = [
        evaluate(replace(learner, evaluation=PolicyEvaluation(0.7), micro=micro), items) for micro in (2, len(items))
    ]
    assert seen[0] is not None and seen[1] is not None
    rewards = [value for item in items for value in item.samples[0].facts["reward"].tolist() if not math.isnan(value)]
    for scores in seen:
        assert scores.loss == pytest.approx(-sum(rewards) / len(rewards))
        assert scores.metrics["reward"] == pytest.approx(-scores.loss)
    assert seen[0].metrics == pytest.approx(dict(seen[1].metrics))
    assert {"reward", "reward/math", "length", "truncated", "entropy"} == set(seen[0].metrics)
    other = evaluate(replace(learner, evaluation=PolicyEvaluation(1.0)), items)
    assert other is not None and other.metrics["entropy"] > seen[0].metrics["entropy"] > 0


def test_held_out_answers_without_any_reward_are_not_judged_as_if_it_were_0() -> None:
    items = [drawn(0, [1], [{"tokens": [2], "reward": NAN}])]
    learner = preference_learner(scaled_model(1).float(), None, PolicyGradient(PolicyGradientSettings()), items, 1)
    scores = evaluate(replace(learner, evaluation=PolicyEvaluation()), items)
    assert scores is not None and math.isnan(scores.loss) and "reward" not in scores.metrics


def test_models_are_asked_for_what_the_terms_need() -> None:
    plain = PolicyGradient(PolicyGradientSettings())
    assert (plain.needs, plain.roles) == ({"logprobs"}, set())
    distilled = objective_of("distilled")
    assert (distilled.needs, distilled.roles) == ({"logprobs", "divergence"}, {"reference"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalise": "constant"}, "constant length"),
        ({"loss": "vespo", "importance": ImportanceBounds("sequence")}, "VESPO"),
    ],
)
def test_settings_that_contradict_each_other_are_a_bug(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        PolicyGradientSettings(**changes)
