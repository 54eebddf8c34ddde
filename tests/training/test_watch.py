from __future__ import annotations

import json
import math
import random

import pytest

from danlu.core.errors import CheckpointError
from danlu.recipe import sections
from danlu.training.watch import Watch


def decreasing(steps: int, seed: int, noise: float = 0.03) -> list[float]:
    """Like a small model's loss: a power law from 9 to about 2, each batch a few percent harder or easier."""
    chance = random.Random(seed)
    return [(1.8 + 7.5 / (1 + step / 15) ** 0.8) * math.exp(chance.gauss(0, noise)) for step in range(steps)]


def judge_all(watch: Watch, losses: list[float]) -> list[str]:
    """What is wrong with each step, "" where nothing is."""
    return [watch.spike_reason(loss, 1.0) for loss in losses]


def spiked_steps(reasons: list[str]) -> list[int]:
    return [step for step, reason in enumerate(reasons, start=1) if reason]


def test_a_noisy_falling_loss_is_left_alone() -> None:
    for seed in range(5):
        assert not any(judge_all(Watch(sections.Watch()), decreasing(600, seed)))
    # The same series is full of spikes for a watch that is too strict, so the test above can fail.
    strict = Watch(sections.Watch(loss_spike=1.0))
    assert any(judge_all(strict, decreasing(600, 0)))


def test_a_spike_is_seen_described_and_kept_out_of_the_window() -> None:
    losses = decreasing(300, 1)
    losses[200:204] = [loss * 1.6 for loss in losses[200:204]]
    watch = Watch(sections.Watch())
    reasons = judge_all(watch, losses)
    assert spiked_steps(reasons) == [201, 202, 203, 204]
    assert reasons[200].startswith(f"loss {losses[200]:.4f} is ")
    assert "robust standard deviations above the median" in reasons[200]
    assert "of the last 64 good steps (watch.loss_spike 6)" in reasons[200]
    assert not set(losses[200:204]) & set(watch.state()["losses"])


def test_nothing_is_judged_before_half_a_window() -> None:
    watch = Watch(sections.Watch(window=8))
    assert not any(judge_all(watch, [1.0, 50.0, 1.0, 1.0]))
    assert watch.spike_reason(50.0, 1.0)


def test_a_loss_that_hardly_varies_may_still_wiggle() -> None:
    watch = Watch(sections.Watch(window=8))
    judge_all(watch, [2.0] * 8)
    assert not watch.spike_reason(2.02, 1.0)
    assert watch.spike_reason(2.5, 1.0)


def test_the_limit_is_counted_in_standard_deviations_of_a_normal_distribution() -> None:
    """Median 2.1, median absolute deviation 0.1: a standard deviation is 0.14826, and six of them are at 2.98956."""

    def judged(loss: float) -> str:
        watch = Watch(sections.Watch(window=16, loss_spike=6.0))
        judge_all(watch, [2.0, 2.2, 2.1] * 6)
        return watch.spike_reason(loss, 1.0)

    assert judged(2.98) == ""
    assert judged(2.99).startswith("loss 2.9900 is 6.0 robust standard deviations above the median 2.1000")
    assert "is 7.4 robust standard deviations" in judged(2.1 + 7.4 * 0.14826)


def test_a_lasting_new_level_becomes_normal() -> None:
    watch = Watch(sections.Watch(window=8))
    reasons = judge_all(watch, [1.0] * 8 + [2.0] * 12)
    assert spiked_steps(reasons) == [9, 10, 11, 12]
    assert watch.spike_reason(4.0, 1.0)


def test_spikes_between_good_steps_are_never_normal() -> None:
    watch = Watch(sections.Watch(window=8))
    reasons = judge_all(watch, [1.0] * 8 + [2.0, 1.0] * 10)
    assert spiked_steps(reasons) == list(range(9, 28, 2))


def test_a_steep_gradient_is_a_spike_from_the_first_step() -> None:
    watch = Watch(sections.Watch(gradient_norm=5.0))
    assert watch.spike_reason(2.0, 5.0) == ""
    assert watch.spike_reason(2.0, 5.5) == "gradient norm 5.5 is above watch.gradient_norm 5"
    assert Watch(sections.Watch()).spike_reason(2.0, 5.5) == ""


def test_both_judgements_can_be_switched_off() -> None:
    watch = Watch(sections.Watch(loss_spike=None, window=4))
    assert not any(judge_all(watch, [1.0] * 4 + [100.0]))


def test_resumed_from_json_equals_uninterrupted() -> None:
    losses = decreasing(120, 2)
    losses[60] = losses[90] = 30.0
    whole, first, second = (Watch(sections.Watch(window=16)) for _ in range(3))
    expected = judge_all(whole, losses)
    judge_all(first, losses[:61])
    second.load(json.loads(json.dumps(first.state())))
    assert judge_all(second, losses[61:]) == expected[61:]
    assert second.state() == whole.state()


def test_a_state_with_a_value_missing_is_refused() -> None:
    with pytest.raises(CheckpointError, match="watch: the checkpoint lacks spikes_in_a_row"):
        Watch(sections.Watch()).load({"losses": []})


def test_numbers_that_are_not_finite_are_not_judged() -> None:
    with pytest.raises(AssertionError):
        Watch(sections.Watch()).spike_reason(math.nan, 1.0)
