"""Rollouts as the items of a run: which prompts, in which order, what a checkpoint has of them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from danlu.core.errors import TrainingError
from danlu.core.line_log import LineLog
from danlu.core.types import Pack
from danlu.data.prompts import Prompt
from danlu.data.trees import repeat_stem
from danlu.inference.request import Completion, SamplingOptions
from danlu.parallel.comm import ALONE
from danlu.rewards.protocol import StepRewards, Verdict
from danlu.rewards.runner import RewardFailure, RewardPart, RewardTable
from danlu.rewards.text import Mathematical
from danlu.rl.estimators import GroupEstimator
from danlu.rl.experience import Experience
from danlu.rl.experience_trees import ADVANTAGE, OLD
from danlu.rl.rollout_sampler import EVALUATION_NUMBERS, ExperienceSettings, RolloutSampler
from danlu.training.data_loader import GeneratedItems


@dataclass
class CountingEngine:
    """Answers with tokens that follow from the request's number and sample, and keeps what it was asked."""

    version: int = 0
    asked: list = field(default_factory=list)
    asleep: bool = True

    def generate(self, requests):
        assert not self.asleep
        self.asked.append([request.number for request in requests])
        return [
            Completion(
                request.number, sample, tokens, [-1.0] * len(tokens), [-1.0] * len(tokens), None,
                [self.version] * len(tokens), f"{request.number}:{sample}", "stop",
            )
            for request in requests
            for sample in range(request.samples)
            for tokens in [[request.number % 50 + 4, sample + 4]]
        ]  # fmt: skip

    def update(self, version):
        self.version = version

    def wake(self):
        self.asleep = False

    def sleep(self):
        self.asleep = True

    def close(self):
        self.asleep = True


@dataclass
class InOrder:
    """Prompts in their order, over and over."""

    prompts: list

    @property
    def per_epoch(self):
        return len(self.prompts)

    def at(self, number):
        return self.prompts[number % len(self.prompts)]

    def state(self):
        return {"prompts": len(self.prompts)}

    def restore(self, state):
        assert state == self.state()


@dataclass
class SampleRewards:
    """The reward of sample s is s, but where `reward_of` says otherwise."""

    reward_of: object = None
    parts: tuple = (RewardPart("sample", None, 1.0),)

    def score(self, answers):
        values = []
        for answer in answers:
            number, sample = map(int, answer.text.split(":"))
            values.append([sample if self.reward_of is None else self.reward_of(number, sample)])
        table = np.array(values, np.float64)
        missing = np.flatnonzero(np.isnan(table).all(1))
        return RewardTable(table, [RewardFailure("sample", int(place), "it raised") for place in missing])

    def close(self):
        pass


def experience(folder=None, reward_of=None, score=None, **changes):
    prompts = [Prompt((1, 2, 3 + number), {}, f"prompt {number}", f"row {number}") for number in range(40)]
    settings = ExperienceSettings(**{"prompts": 4, "samples": 2, "vocab_size": 64, **changes}, **SAMPLING)
    sampler = RolloutSampler(InOrder(prompts), CountingEngine(), SampleRewards(reward_of), settings, ALONE)
    log = None if folder is None else LineLog(folder / "rollouts.jsonl")
    return Experience(sampler, GroupEstimator(scale="none"), score, log)


SAMPLING = {"sampling": SamplingOptions(temperature=1.0, seed=3), "max_new_tokens": 8}


def rows(made, numbers):
    return [made.at(number).samples[0].row for number in numbers]


def test_it_is_a_source_that_makes_its_items():
    assert isinstance(experience(), GeneratedItems)


def test_each_rollout_asks_the_next_prompts_once():
    made = experience()
    assert rows(made, range(8)) == [f"row {number}" for number in range(8)]
    assert made.sampler.engine.asked == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert made.sampler.engine.version == 2


def test_updates_and_passes_take_each_tree_once_a_pass():
    made = experience(updates=2, passes=2)
    first, second = rows(made, range(4)), rows(made, range(4, 8))
    assert sorted(first) == sorted(second) == [f"row {number}" for number in range(4)]
    assert first != second
    fresh = [made.at(number).samples[0].facts["fresh"].max() for number in range(8)]
    assert fresh == [1, 1, 0, 0, 0, 0, 0, 0]
    assert len(made.sampler.engine.asked) == 1


def test_scores_are_asked_for_in_the_micro_batches_of_the_first_update():
    asked = []

    def score(items):
        asked.append([item.samples[0].row for item in items])
        values = [{OLD: np.full(item.tokens, -1.5, np.float32)} for item in items]
        return values, [{} for _ in items]

    made = experience(updates=2, score=score)
    in_order = rows(made, range(4))
    assert asked == [in_order[:2], in_order[2:]]
    assert made.at(0).samples[0].columns[OLD][3:].tolist() == [-1.5] * 4
    assert made.metrics()["rollout_gap_mean"] == pytest.approx(0.5)


def test_scores_of_repeated_prompts_belong_to_the_same_answers():
    def score(items):
        columns = [{OLD: -np.arange(item.tokens, dtype=np.float32)} for item in items]
        return columns, [{} for _ in items]

    made = experience(score=score)
    made.laid_out = lambda item: Pack((repeat_stem(item.samples[0]),))
    (sample,) = made.at(0).samples
    assert [branch.parent for branch in sample.branches] == [-1, -1]  # three tokens of the prompt, two of an answer
    assert sample.columns[OLD].tolist() == [0, 0, 0, -3, -4, 0, 0, 0, -8, -9]


@pytest.mark.parametrize("taken", [0, 3, 4, 6, 8])
def test_a_restored_source_goes_on_as_an_uninterrupted_one(tmp_path, taken):
    whole = experience(tmp_path / "whole", updates=2)
    expected = [whole.at(number) for number in range(16)]
    first = experience(tmp_path / "again", updates=2)
    for number in range(taken):
        first.at(number)
    state, tensors = json.loads(json.dumps(first.state(taken))), first.tensors(taken)
    assert bool(tensors) == (taken % 4 != 0)
    first.at(taken)  # and what was not saved is made again
    first.close()
    again = experience(tmp_path / "again", updates=2)
    again.restore(state)
    if tensors:
        again.restore_tensors({name: tensor.clone() for name, tensor in tensors.items()})
    for number in range(taken, 16):
        (mine,), (theirs,) = again.at(number).samples, expected[number].samples
        assert mine.row == theirs.row
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        np.testing.assert_array_equal(mine.columns[ADVANTAGE], theirs.columns[ADVANTAGE])
        np.testing.assert_array_equal(mine.facts["fresh"], theirs.facts["fresh"])
    again.close(), whole.close()
    read = [(tmp_path / name / "rollouts.jsonl").read_text() for name in ("whole", "again")]
    assert read[0] == read[1] and read[0].count("\n") == 16


def test_a_rollout_that_no_step_was_taken_of_is_made_again_from_the_same_prompts():
    made = experience()
    made.at(0)
    state = made.state(0)
    again = experience()
    again.restore(state)
    assert rows(again, range(4)) == [f"row {number}" for number in range(4)]


def test_prompts_without_signal_are_replaced_by_the_next_ones():
    def reward_of(number, sample):
        return 1.0 if number in (1, 2) else float(sample)

    made = experience(reward_of=reward_of, resample=2)
    assert rows(made, range(4)) == ["row 0", "row 3", "row 4", "row 5"]
    assert made.metrics()["prompts_asked"] == 6 and made.metrics()["no_signal"] == 0
    assert rows(made, [4]) == ["row 6"]
    plain = experience(reward_of=reward_of)
    assert rows(plain, range(4)) == [f"row {number}" for number in range(4)]
    assert plain.metrics()["no_signal"] == 0.5


def test_where_no_prompt_has_signal_the_rollout_is_full_all_the_same():
    made = experience(reward_of=lambda number, sample: 1.0, resample=1)
    assert rows(made, range(4)) == [f"row {number}" for number in range(4)]
    assert made.metrics()["prompts_asked"] == 8 and made.metrics()["no_signal"] == 1


def test_too_many_answers_without_reward_end_the_run():
    made = experience(reward_of=lambda number, sample: float("nan") if sample else 1.0, failures=0.4)
    with pytest.raises(TrainingError, match=r"50% of the answers to prompts 0 to 3 have no reward.*it raised"):
        made.at(0)
    assert experience(reward_of=lambda number, sample: float("nan") if sample else 1.0, failures=0.5).at(0)


def test_a_rollout_that_is_refused_leaves_its_prompts_to_be_asked_and_its_answers_to_be_read(tmp_path):
    made = experience(tmp_path, reward_of=lambda number, sample: float("nan") if number > 3 else 1.0)
    made.at(0)
    with pytest.raises(TrainingError, match=r"The answers are in rollouts\.jsonl"):
        made.at(4)
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(8))
    assert lines[4]["answers"][0]["text"] == "4:0" and lines[4]["answers"][0]["rewards"] == {"sample": None}
    assert lines[4]["answers"][0]["failures"] == ["sample: it raised"]
    state = made.state(4)
    assert made.sampler.next_prompt == state["next_prompt"] == 4
    assert state["log_lines"] == 4  # of rollouts that are trained on: the refused one is made again
    made.close()
    again = experience(tmp_path)
    again.restore(state)
    again.at(4)
    numbers = [json.loads(line)["number"] for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert numbers == list(range(8)) and again.state(5)["log_lines"] == 8
    again.close()
    experience(tmp_path).at(0)  # a run that begins anew: nothing was saved of what there is
    assert [json.loads(line)["number"] for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()] == [
        0,
        1,
        2,
        3,
    ]


@dataclass
class ExplainedRewards(SampleRewards):
    """Say of each answer how they came about; the second sample of each prompt took too long to compare."""

    parts: tuple = (RewardPart("sums", Mathematical("answer"), 1.0),)

    def score(self, answers):
        named = [tuple(map(int, answer.text.split(":"))) for answer in answers]
        verdicts = {
            (place, 0): Verdict(float(not sample), f"{number}", "by hand", is_late=bool(sample))
            for place, (number, sample) in enumerate(named)
        }
        return RewardTable(np.array([[verdict.value] for verdict in verdicts.values()]), [], {}, verdicts)


def test_a_rollout_says_how_each_reward_came_about_and_which_were_late(tmp_path):
    made = experience(tmp_path)
    made.sampler.rewards = ExplainedRewards()
    for start in (0, 4):
        made.at(start)
        assert made.metrics()["reward/sums/late"] == 4, "of this rollout alone"
    made.close()
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [answer["verdicts"] for answer in lines[5]["answers"]] == [
        {"sums": {"extracted": "5", "why": "by hand"}},
        {"sums": {"extracted": "5", "why": "by hand", "late": True}},
    ]
    plain = experience()
    plain.at(0)
    assert "reward/sample/late" not in plain.metrics(), "only what compares formulas can be late"


@dataclass
class TwoRewards(SampleRewards):
    """The sample's number, which counts double, and one that some answers do not get: it gives them None, or fails."""

    parts: tuple = (RewardPart("sample", None, 2.0), RewardPart("missing", None, 1.0))
    declined: bool = True
    without: object = None
    """(number, sample) of the answers; None: of all."""

    def score(self, answers):
        (values,) = super().score(answers).values.T
        named = [tuple(map(int, answer.text.split(":"))) for answer in answers]
        lacking = [place for place, name in enumerate(named) if self.without is None or name in self.without]
        table = np.stack([values, np.ones(len(values))], 1)
        table[lacking, 1] = np.nan
        reason = "it gave None" if self.declined else "it raised"
        return RewardTable(table, [RewardFailure("missing", place, reason, self.declined) for place in lacking])


def test_an_answer_that_one_reward_fails_for_is_left_out_whatever_the_others_say(tmp_path):
    made = experience(tmp_path / "failed", samples=3)
    made.sampler.rewards = TwoRewards(declined=False, without={(0, 2), (2, 0)})
    (first,), (second,) = made.at(0).samples, made.at(1).samples
    assert first.weights.tolist() == [0] * 3 + [1] * 4 + [0] * 2 and second.weights.sum() == 6
    # Rewards of 1, 3 and (not 4 of 5) none: the mean is of two.
    assert first.columns[ADVANTAGE][3:].tolist() == [-1, -1, 1, 1, 0, 0]
    assert second.columns[ADVANTAGE][3:].tolist() == [-2, -2, 0, 0, 2, 2]
    for name in ("reward", "reward/sample", "reward/missing"):
        assert np.isnan(first.facts[name]).tolist() == [True, False, False, True], name  # the stem, and the answer
    assert made.metrics()["unrewarded"] == pytest.approx(2 / 12)
    line = json.loads((tmp_path / "failed" / "rollouts.jsonl").read_text().splitlines()[0])
    assert line["answers"][2]["rewards"] == {"sample": None, "missing": None}
    assert line["answers"][2]["failures"] == ["missing: it raised"]
    # Control: a reward that gives None leaves out its own part of the sum alone.
    made = experience(tmp_path / "none", samples=3)
    made.sampler.rewards = TwoRewards(declined=True, without={(0, 2), (2, 0)})
    (first,) = made.at(0).samples
    assert first.weights.tolist() == [0] * 3 + [1] * 6 and made.metrics()["unrewarded"] == 0
    assert first.facts["reward"][1:].tolist() == [1, 3, 4]
    np.testing.assert_allclose(first.columns[ADVANTAGE][3::2], np.array([1, 3, 4]) - 8 / 3, rtol=1e-6)


def test_a_reward_that_fails_too_often_ends_the_run_whatever_the_others_say():
    made = experience(failures=0.4)
    made.sampler.rewards = TwoRewards(declined=False, without={(number, 1) for number in range(4)})
    with pytest.raises(TrainingError, match=r"50% of the answers to prompts 0 to 3 have no reward.*missing: it raised"):
        made.at(0)
    made = experience(failures=0.4)
    made.sampler.rewards = TwoRewards(declined=True)
    assert made.at(0)  # control


def test_steps_of_an_answer_that_another_reward_fails_for_are_left_out_too():
    class WithSteps(TwoRewards):
        def score(self, answers):
            table = super().score(answers)
            return replace(table, steps={(place, 0): StepRewards((1,), (0.5,)) for place in range(len(answers))})

    made = experience()
    made.sampler.rewards = WithSteps(declined=False, without={(1, 0)})
    prompts = [made.sampler.prompts.at(number) for number in range(3)]
    with made.sampler.awake():
        answered = made.sampler.answer(range(3), prompts, SAMPLING["sampling"])
    assert [len(of_answer) for (of_answer,) in answered.steps] == [1, 0, 1]
    assert np.isnan(answered.rewards).all(-1).tolist() == [[False], [True], [False]]


def test_failures_of_one_reward_are_no_signal_and_are_held_out_too():
    """Of each prompt's two answers one is left out: the other has nothing to be compared with."""
    made = experience()
    made.sampler.rewards = TwoRewards(declined=False, without={(number, 1) for number in range(4)})
    made.at(0)
    assert made.metrics()["no_signal"] == 1 and made.metrics()["reward_std"] == 0
    held_out = [Prompt((1, 2, 3), {}, "held out", f"row {number}") for number in range(2)]
    made.sampler.rewards = TwoRewards(declined=False, without={(EVALUATION_NUMBERS + 1, 0)})
    items = made.held_out(held_out)
    assert items[0].samples[0].facts["reward"][1] == 1
    assert all(np.isnan(items[1].samples[0].facts[name][1]) for name in ("reward", "reward/sample"))


def test_a_reward_that_one_of_several_gives_is_one(tmp_path):
    made = experience(tmp_path, failures=0.0)
    made.sampler.rewards = TwoRewards()
    facts = made.at(0).samples[0].facts
    assert facts["reward"][1:].tolist() == [0, 2] and np.isnan(facts["reward/missing"][1:]).all()
    assert made.metrics()["unrewarded"] == 0 and made.metrics()["no_signal"] == 0
    answers = json.loads((tmp_path / "rollouts.jsonl").read_text().splitlines()[0])["answers"]
    assert [answer["rewards"] for answer in answers] == [{"sample": 0, "missing": None}, {"sample": 1, "missing": None}]
    assert [answer["tokens"] for answer in answers] == [[4, 4], [4, 5]]


@pytest.mark.parametrize("given", [3.0, -3.0])
def test_answers_without_a_reward_are_no_signal(given):
    """Each prompt has one answer that was judged, and none to compare it with; as 0 the other would be one."""
    made = experience(reward_of=lambda number, sample: float("nan") if sample else given)
    made.at(0)
    metrics = made.metrics()
    assert (metrics["no_signal"], metrics["unrewarded"], metrics["reward_std"]) == (1, 0.5, 0)
    weights = made.at(0).samples[0].weights
    assert weights.tolist() == [0, 0, 0, 1, 1, 0, 0]


def test_lines_of_a_rollout_have_the_first_step_that_is_trained_on_it(tmp_path):
    made = experience(tmp_path, updates=2, passes=3)
    for number in range(2 * 12):
        made.at(number)
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1] * 4 + [7] * 4
    assert [line["number"] for line in lines] == list(range(8))


def test_a_greedy_answer_is_asked_for_at_temperature_0_and_the_others_as_the_recipe_says():
    asked = []
    made = experience(greedy=True)
    generate = made.sampler.engine.generate
    made.sampler.engine.generate = lambda requests: asked.extend(requests) or generate(requests)
    made.at(0)
    assert [(request.sampling.temperature, request.samples) for request in asked] == [(1.0, 2)] * 4 + [(0.0, 1)] * 4
    assert {request.sampling.seed for request in asked} == {3} and len({request.number for request in asked}) == 8


def test_greedy_answers_are_a_baseline_and_not_trained():
    made = experience(greedy=True)
    made.estimator = GroupEstimator(baseline="greedy", scale="none")
    (sample,) = made.at(0).samples
    assert len(sample.branches) == 3
    # The greedy answer is sample 0 of its request, whose reward is 0.
    assert [sample.columns[ADVANTAGE][branch.start] for branch in sample.branches[1:]] == [0, 1]


def test_held_out_answers_leave_training_as_it_is():
    made, plain = experience(), experience()
    made.at(0)
    (item,) = made.held_out([Prompt((5, 6), {}, "held out", "row h")])
    assert item.samples[0].facts["reward"][1:].tolist() == [0]
    assert rows(made, range(8)) == rows(plain, range(8))
    assert not set(made.sampler.engine.asked[1]) & set(range(1000))


@pytest.mark.parametrize(("finish", "truncated"), [("length", 1), ("context", 1), ("stop", 0), ("stop_string", 0)])
def test_answers_that_reach_the_end_of_the_context_are_cut_off_too(finish, truncated):
    made = experience()
    generate = made.sampler.engine.generate
    made.sampler.engine.generate = lambda requests: [replace(each, finish=finish) for each in generate(requests)]
    assert made.at(0).samples[0].facts["truncated"][1:].tolist() == [truncated] * 2
