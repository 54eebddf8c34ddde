"""Preference losses against their formulas, at their edges, and what the objective around them reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from builders.preference_samples import judged, pair, preference_learner, random_rows, step_gradients
from builders.preference_steps import OBJECTIVES, items_of, scaled_model
from builders.tiny_run import VOCABULARY, tiny_model
from builders.worst_errors import worst_relative_error
from torch import Tensor

from danlu.core.types import Branch, Pack, StepLogprobs
from danlu.data.batch import collate
from danlu.data.mismatched import with_own_prompt
from danlu.objectives.branches import pairs_of, places_in_branch, sum_by_branch
from danlu.objectives.preference import Preference, StepPreference, preference_objective
from danlu.objectives.preference_losses import (
    AOT_PARTNER,
    AOT_UNPAIRED_PARTNER,
    BCO_SHIFT,
    JUDGED_LOSSES,
    KTO_KL,
    LEAST_NEGATIVE,
    NLL_WEIGHTS,
    PAIR_LOSSES,
    Answers,
    log_odds,
)
from danlu.recipe.sections import (
    AlphaDivergence,
    Aot,
    AotUnpaired,
    ApoZeroUnpaired,
    Bco,
    Cpo,
    Exo,
    ForwardKlDivergence,
    Hinge,
    JsDivergence,
    Kto,
    PreferenceTerm,
    Robust,
    Sft,
    Sigmoid,
    SigmoidNorm,
    Simpo,
)

KINDS = {kind: terms[0] for kind, terms in OBJECTIVES.items() if kind == terms[0].kind}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def answers(seed: int = 0, pairs: int = 5, **changes: Any) -> Answers:
    """Answers with log-probabilities of a few nats a token, and every fact."""
    generator = torch.Generator().manual_seed(seed)

    def values(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(pairs, generator=generator, dtype=torch.float64)

    facts = [{name: values(-1, 1) for name in (AOT_PARTNER, AOT_UNPAIRED_PARTNER, BCO_SHIFT, KTO_KL)} for _ in "cr"]
    built = Answers(*(values(-9, -2) for _ in range(4)), values(2, 6), values(2, 6), values(0, 1), *facts)
    return replace(built, **changes)


# What TRL has not, written out for the numbers of one pair: c, r (policy), cr, rr (reference), lc, lr (tokens), m.
WRITTEN_OUT: list[tuple[PreferenceTerm, Callable[..., float]]] = [
    (
        Sigmoid(beta=0.3, label_smoothing=0.2),
        lambda c, r, cr, rr, lc, lr, m: (
            -0.8 * math.log(sigmoid(0.3 * (c - cr - r + rr) - m))
            - 0.2 * math.log(sigmoid(-0.3 * (c - cr - r + rr) + m))
        ),
    ),
    (
        Robust(beta=0.3, label_smoothing=0.2),
        lambda c, r, cr, rr, lc, lr, m: (
            (
                -0.8 * math.log(sigmoid(0.3 * (c - cr - r + rr) - m))
                + 0.2 * math.log(sigmoid(-0.3 * (c - cr - r + rr) + m))
            )
            / 0.6
        ),
    ),
    (Hinge(beta=0.3), lambda c, r, cr, rr, lc, lr, m: max(0.0, 1 + m - 0.3 * (c - cr - r + rr))),
    (
        SigmoidNorm(beta=2.0),
        lambda c, r, cr, rr, lc, lr, m: -math.log(sigmoid(2 * ((c - cr) / lc - (r - rr) / lr) - m)),
    ),
    (Simpo(gamma=0.3), lambda c, r, cr, rr, lc, lr, m: -math.log(sigmoid(2 * (c / lc - r / lr) - 0.3 - m))),
    (Cpo(beta=0.2), lambda c, r, cr, rr, lc, lr, m: -math.log(sigmoid(0.2 * (c - r) - m))),
    (
        Sigmoid(divergence=JsDivergence()),
        lambda c, r, cr, rr, lc, lr, m: (
            -math.log(sigmoid(0.1 * (math.log(2 * sigmoid(c - cr)) - math.log(2 * sigmoid(r - rr))) - m))
        ),
    ),
    (
        Sigmoid(divergence=AlphaDivergence(alpha=1.0)),
        lambda c, r, cr, rr, lc, lr, m: -math.log(sigmoid(0.1 * (c - cr - r + rr) - m)),
    ),
    (
        Exo(label_smoothing=0.01),
        lambda c, r, cr, rr, lc, lr, m: sum(
            sigmoid(x) * math.log(sigmoid(x) / share)
            for x, share in ((0.1 * (c - cr - r + rr), 0.99), (-0.1 * (c - cr - r + rr), 0.01))
        ),
    ),
]


@pytest.mark.parametrize(("term", "formula"), WRITTEN_OUT)
def test_a_loss_is_its_formula(term: Any, formula: Callable[..., float]) -> None:
    given = answers()

    def written_out(beta: float = 1.0) -> list[float]:
        columns = (given.chosen * beta, given.rejected, given.reference_chosen, given.reference_rejected)
        columns += (given.chosen_tokens, given.rejected_tokens, given.margins)
        return [formula(*numbers) for numbers in zip(*(column.tolist() for column in columns), strict=True)]

    losses = PAIR_LOSSES[term.kind](term, given).tolist()
    assert losses == pytest.approx(written_out(), rel=1e-12)
    assert losses != pytest.approx(written_out(1.01), rel=1e-5)


def test_the_shift_of_bco_is_a_mean_of_rewards() -> None:
    given, term = answers(), Bco(beta=0.2, shift="running-mean")
    chosen, rejected = given.ratios
    shift = 0.2 * given.chosen_facts[BCO_SHIFT]
    want = -torch.log(torch.sigmoid(0.2 * chosen - shift)) - torch.log(torch.sigmoid(-(0.2 * rejected - shift)))
    torch.testing.assert_close(PAIR_LOSSES["bco"](term, given), want, rtol=1e-12, atol=0)
    assert not torch.allclose(PAIR_LOSSES["bco"](Bco(beta=0.2), given), want, rtol=1e-4)


def losses_of(term: Any, given: Answers) -> Tensor:
    if term.kind in JUDGED_LOSSES:
        return torch.cat(JUDGED_LOSSES[term.kind](term, given))
    return PAIR_LOSSES[term.kind](term, given)


COMPARING = [kind for kind in KINDS if kind != "sft"]


def test_every_kind_has_a_loss() -> None:
    assert set(KINDS) == PAIR_LOSSES.keys() | JUDGED_LOSSES.keys() | NLL_WEIGHTS.keys()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in PAIR_LOSSES])
def test_a_margin_is_in_the_loss_of_a_kind_that_says_so(kind: str) -> None:
    given, term = answers(), KINDS[kind]
    without = replace(given, margins=torch.zeros_like(given.margins))
    assert term.takes_margins == (not torch.equal(losses_of(term, given), losses_of(term, without)))


@pytest.mark.parametrize("kind", [kind for kind in COMPARING if kind != "aot-unpaired"])
def test_gradients_equal_finite_differences(kind: str) -> None:
    given = answers()

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        return losses_of(KINDS[kind], replace(given, chosen=chosen, rejected=rejected))

    assert torch.autograd.gradcheck(loss, (given.chosen.requires_grad_(), given.rejected.requires_grad_()))


@pytest.mark.parametrize("kind", COMPARING)
@pytest.mark.parametrize("far", [1e4, -1e4])
def test_far_from_the_reference_nothing_is_nan_and_a_nan_stays_one(kind: str, far: float) -> None:
    given = answers(pairs=4)
    divergences = [{}, *({"divergence": each()} for each in (JsDivergence, AlphaDivergence, ForwardKlDivergence))]
    for changes in divergences if hasattr(KINDS[kind], "divergence") else [{}]:
        term = KINDS[kind].model_copy(update=changes)
        # the chosen far, the rejected far, both, and one certain of both its answers
        chosen = torch.tensor([-3 + far, -3, -3 + far, 0.0], dtype=torch.float64, requires_grad=True)
        rejected = torch.tensor([-3, -3 + far, -3 + far, 0.0], dtype=torch.float64, requires_grad=True)
        if not term.needs_reference:  # there, log-probabilities are all there is, and none is above 0
            chosen, rejected = ((-each.detach().abs()).requires_grad_() for each in (chosen, rejected))
        losses = losses_of(term, replace(given, chosen=chosen, rejected=rejected))
        assert losses.isfinite().all(), losses
        losses.sum().backward()
        assert chosen.grad is not None and chosen.grad.isfinite().all(), chosen.grad
        assert rejected.grad is not None and rejected.grad.isfinite().all(), rejected.grad
        with_nan = replace(given, chosen=torch.full_like(given.chosen, torch.nan))
        assert losses_of(term, with_nan)[:4].isnan().all()


def test_log_odds_are_exact_from_near_certain_to_impossible() -> None:
    probabilities = [1 - 2.0**-20, 1 - 1e-5, 0.9, 0.5, 0.49, 1e-3, 1e-30]
    got = log_odds(torch.tensor([math.log(p) for p in probabilities], dtype=torch.float64))
    torch.testing.assert_close(got.tolist(), [math.log(p / (1 - p)) for p in probabilities], rtol=1e-9, atol=0)
    certain = log_odds(torch.tensor([0.0, 1e-7, LEAST_NEGATIVE], dtype=torch.float64))
    assert certain.isfinite().all() and (certain == certain[0]).all()
    assert torch.autograd.gradcheck(log_odds, torch.tensor([-1e-3, -0.6, -0.8, -30.0]).double().requires_grad_())


def test_a_policy_that_is_its_reference_has_no_margin() -> None:
    """The first step of DPO: ln 2, exactly; control: not with another reference."""
    items, model = items_of("sigmoid"), tiny_model(0)
    step, _ = step_gradients(preference_learner(model, model, preference_objective([Sigmoid()], True), items, 3), items)
    assert step.loss > math.log(2) + 0.1 and step.metrics["margin"] == 0  # half of the rows ask for a margin
    items = [pair({**row, "margin": math.nan}) for row in random_rows(6, VOCABULARY)]
    for reference in (model, tiny_model(1)):
        learner = preference_learner(model, reference, preference_objective([Sigmoid()], True), items, 3)
        step, _ = step_gradients(learner, items)
        same = reference is model
        assert (step.loss == pytest.approx(math.log(2), rel=1e-12, abs=0)) == same
        assert (step.metrics["margin"] == step.metrics["rewards/chosen"] == 0) == same


@pytest.mark.parametrize("kind", ["sigmoid", "orpo", "kto"])
def test_a_loss_scale_is_in_every_gradient_before_the_division(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16's scale enters at the total, and reaches what comes down to log-probabilities; the value has none of it."""
    items = items_of(kind)
    objective = preference_objective(OBJECTIVES[kind], has_reference=True)
    learner = preference_learner(scaled_model(0), scaled_model(1), objective, items, 4, dtype=torch.float64)
    arrived = []
    learner.model.lm_head.weight.register_hook(arrived.append)
    plain, wanted = step_gradients(learner, items)
    count_of_plain = len(arrived)
    scaled, gradients = step_gradients(learner, items, loss_scale=2.0**12)
    assert scaled.loss == plain.loss and worst_relative_error(gradients, wanted) < 1e-12
    ratios = [(b.norm() / a.norm()).item() for a, b in zip(arrived, arrived[count_of_plain:], strict=False)]
    assert ratios == pytest.approx([2.0**12] * len(ratios)) and ratios
    monkeypatch.setattr("danlu.stages.learner.scale_gradient", lambda x, scale: x)
    _, without = step_gradients(learner, items, loss_scale=2.0**12)
    assert worst_relative_error(without, wanted) > 0.9


def test_a_sum_reports_each_of_its_terms() -> None:
    items = items_of("sigmoid")
    terms = [Sft(weight=0.25), Sigmoid(weight=2.0), Sigmoid(beta=0.5), Aot()]
    objective = preference_objective(terms, has_reference=True)
    step, _ = step_gradients(preference_learner(tiny_model(0), tiny_model(1), objective, items, 5), items)
    names = ["loss/sft", "loss/sigmoid", "loss/sigmoid-2", "loss/aot"]
    weighted = sum(term.weight * step.metrics[name] for term, name in zip(terms, names, strict=True))
    assert step.loss == pytest.approx(weighted, rel=1e-6)
    alone = preference_objective([Sigmoid()], has_reference=True)
    of_alone, _ = step_gradients(preference_learner(tiny_model(0), tiny_model(1), alone, items, 5), items)
    assert of_alone.loss == pytest.approx(step.metrics["loss/sigmoid"], rel=1e-6)
    shared = [name for name in step.metrics if not name.startswith("loss/")]
    assert shared == list(of_alone.metrics)  # the rewards are those of the first term that compares answers
    assert [step.metrics[name] for name in shared] == pytest.approx([of_alone.metrics[name] for name in shared])
    assert isinstance(objective, StepPreference) and set(names) < objective.preference.better.keys()


def test_answers_of_one_label_have_no_margin() -> None:
    rows = [{**row, "label": True} for row in random_rows(4, VOCABULARY)]
    for labels, expected in (([True] * 4, False), ([True, False, True, True], True)):
        items = judged([{**row, "label": label} for row, label in zip(rows, labels, strict=True)])
        objective = preference_objective([ApoZeroUnpaired()], has_reference=True)
        step, _ = step_gradients(preference_learner(tiny_model(0), tiny_model(1), objective, items, 2), items)
        assert ("margin" in step.metrics) == ("rewards/rejected" in step.metrics) == expected
        if expected:
            difference = step.metrics["rewards/chosen"] - step.metrics["rewards/rejected"]
            assert step.metrics["margin"] == pytest.approx(difference, rel=1e-6)


def test_without_a_reference_ratios_are_log_probabilities() -> None:
    items = items_of("sigmoid")
    steps = []
    for terms, has_reference in (([Sigmoid()], False), ([Cpo(nll=0.0)], False), ([Sigmoid()], True)):
        reference = tiny_model(1) if has_reference else None
        objective = preference_objective(terms, has_reference)
        steps.append(step_gradients(preference_learner(tiny_model(0), reference, objective, items, 4), items)[0].loss)
    assert steps[0] == pytest.approx(steps[1], rel=1e-9) and steps[0] != pytest.approx(steps[2], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_micro_batch_without_answers_adds_nothing(kind: str) -> None:
    items = items_of(kind)
    objective = preference_objective([KINDS[kind]], has_reference=True)
    learner = preference_learner(tiny_model(0), tiny_model(1), objective, items, 4)
    loss = learner.losses(learner.collate([]), learner.totals(items))
    assert loss.total == 0 and all(metric.sum == 0 and metric.weight == 0 for metric in loss.metrics.values())
    loss.total.backward()
    with_answers = learner.prepare(items, [range(len(items))], None)
    assert (
        learner.losses(learner.collate(with_answers[:2]), learner.totals(items)).metrics.keys() == loss.metrics.keys()
    )


def test_only_losses_that_see_the_step_take_a_pass_before_it() -> None:
    taken = {kind: isinstance(preference_objective(terms, True), StepPreference) for kind, terms in OBJECTIVES.items()}
    of_step = {"aot", "aot-unpaired", "bco with a shift", "kto", "kto and sft", "sigmoid with everything"}
    assert {kind for kind, takes in taken.items() if takes} == of_step


def test_the_running_mean_of_rewards_is_one_of_steps_and_evaluation_leaves_it_alone() -> None:
    objective = StepPreference(Preference((Bco(shift="running-mean"),), has_reference=True))
    items = items_of("bco")[:2]
    label = torch.tensor([np.nan, 1, 0] * 2)
    numbers = count(1)

    def shift(training: bool) -> float:
        number = float(next(numbers))
        policy = torch.tensor([0.0, number, number + 2] * 2, dtype=torch.float64)
        logprobs = StepLogprobs(policy, torch.zeros_like(policy), torch.ones_like(policy), {"label": label})
        prepared = objective.prepared(items, logprobs, training=training)
        (value,) = {float(fact) for item in prepared for fact in item.samples[0].facts[BCO_SHIFT]}
        return value

    assert shift(False) == 2  # before the first step, the mean of the rows themselves
    assert [shift(True), shift(True)] == [3, 3.5]  # of 3, and of 3 and 4
    assert shift(False) == 3.5
    assert {name: float(value) for name, value in objective.named_buffers()} == {"mean_ratio": 3.5, "steps_seen": 2}
    assert not list(StepPreference(Preference((Aot(),), True)).named_buffers())


def test_judged_answers_lose_the_mismatched_branch_once_it_has_been_seen() -> None:
    (item, *others) = items = judged(random_rows(3, VOCABULARY))
    objective = preference_objective([Kto()], has_reference=True)
    assert isinstance(objective, StepPreference)
    (seen, *_) = objective.step_items(items)
    sample, of_answer, of_next = item.samples[0], *item.samples[0].branches[1:]
    stem = sample.branches[0].stop
    mismatched = sample.tokens[of_next.start : of_next.stop]
    np.testing.assert_array_equal(seen.samples[0].tokens, [*sample.tokens[:stem], *mismatched])
    np.testing.assert_array_equal(seen.samples[0].weights, [0] * stem + [1] * len(mismatched))
    assert seen.samples[0].branches == (Branch(-1, 0, stem), Branch(0, stem, stem + len(mismatched)))
    values = torch.arange(6, dtype=torch.float64)  # stem and mismatched answer of each item
    facts = {"mismatched": torch.tensor([0.0, 1.0] * 3)}
    for sign, kl in ((1, 3.0), (-1, 0.0)):  # the mean of 1, 3 and 5, or 0
        logprobs = StepLogprobs(sign * values, torch.zeros_like(values), torch.ones_like(values), facts)
        answer = objective.prepared(items, logprobs, training=True)[0].samples[0]
        np.testing.assert_array_equal(answer.tokens, sample.tokens[: of_answer.stop])
        assert len(answer.branches) == 2 and set(answer.facts[KTO_KL].tolist()) == {kl}
        np.testing.assert_array_equal(answer.facts["label"], [np.nan, 1])
    assert len(others) == 2
    # Behind a copy of its prompt the mismatched answer is seen alike, and it and the copy go alike.
    copies = [Pack((with_own_prompt(each.samples[0]),)) for each in items]
    seen_of_copy, answer_of_copy = (
        objective.step_items(copies)[0],
        objective.prepared(copies, logprobs, training=True)[0],
    )
    assert len(copies[0].samples[0].tokens) == len(sample.tokens) + stem
    for got, want in ((seen_of_copy.samples[0], seen.samples[0]), (answer_of_copy.samples[0], answer)):
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_array_equal(got.weights, want.weights)
        assert got.branches == want.branches


def test_a_pair_is_scored_at_the_positions_of_its_own_answers() -> None:
    """Length desensitising counts trained tokens: the shorter answer keeps its weight whatever the longer one has."""
    batch = collate([pair(row) for row in random_rows(3, VOCABULARY)])
    places, counts = places_in_branch(batch)
    assert batch.branch is not None
    for branch, size in enumerate(counts.tolist()):
        assert places[batch.branch == branch].tolist() == list(range(size))


@pytest.mark.parametrize("term", [Aot(label_smoothing=0.1), AotUnpaired(beta=0.5)])
def test_sorted_losses_are_those_of_the_sorted_step(term: Any) -> None:
    """Against a sort of the step's own log-probabilities with autograd through it, in micro-batches of 3 pairs."""
    items = items_of("aot")
    policy, reference = scaled_model(0), scaled_model(1)
    objective = preference_objective([term], has_reference=True)
    learner = preference_learner(policy, reference, objective, items, 3, dtype=torch.float64)
    step, gradients = step_gradients(learner, items)
    batch = learner.collate(items)
    outputs = learner.outputs(batch, 1.0)
    c, r = pairs_of(batch)
    sums = {role: sum_by_branch(each.logprobs().logprobs, batch) for role, each in outputs.items()}
    ours, theirs = sums["policy"], sums["reference"].detach()
    if isinstance(term, Aot):
        x = (ours[c] - ours[r]).sort().values - (theirs[c] - theirs[r]).sort().values
    else:
        x = (ours - theirs)[c].sort().values - (ours - theirs)[r].sort().values
    s = torch.nn.functional.logsigmoid
    want = (-(1 - term.label_smoothing) * s(term.beta * x) - term.label_smoothing * s(-term.beta * x)).mean()
    policy.zero_grad()
    want.backward()
    wanted = {name: p.grad.to_dense() for name, p in policy.named_parameters() if p.grad is not None}
    assert step.loss == pytest.approx(want.item(), rel=1e-6)
    assert worst_relative_error(gradients, wanted) < 1e-6
