"""Asynchronous rollouts: which prompts are asked when, what is trained on, and what a checkpoint has of it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from builders.asynchronous_policy import LengthRewards
from builders.asynchronous_policy import asynchronous_policy as policy
from builders.covering import fast
from builders.rollout_requests import SAMPLED, check_same, requests

from danlu.core.errors import TrainingError
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine_state import completion_state, request_to_json
from danlu.inference.request import Completion
from danlu.rewards.runner import RewardTable
from danlu.rl.asynchronous import rollouts_admitted
from danlu.rl.experience import run_lengths


@pytest.mark.parametrize(
    ("updates", "per_rollout", "staleness", "admitted"),
    [
        (0, 1, 0, 1), (1, 1, 0, 2),  # synchronous: the next one alone
        (0, 1, 1, 2), (5, 1, 1, 7),
        (0, 4, 1, 1), (2, 4, 1, 1), (3, 4, 1, 2), (4, 4, 1, 2),  # an update before the present one is done with
        (0, 4, 4, 2), (0, 4, 9, 3), (3, 4, 9, 4),
    ],
)  # fmt: skip
def test_a_rollout_may_begin_so_many_updates_before_it_is_trained_on(updates, per_rollout, staleness, admitted):
    assert rollouts_admitted(updates, per_rollout, staleness) == admitted
    last = admitted - 1
    assert last * per_rollout - updates <= staleness < (last + 1) * per_rollout - updates


def lengths(trained):
    return np.array([branch.stop - branch.start for _, sample in trained for branch in sample.branches[1:]])


@pytest.mark.parametrize(("staleness", "updates"), fast([(1, 1), (3, 1), (3, 2)], (1, 1), (3, 2)))
def test_without_changes_of_weights_rollouts_are_those_of_a_synchronous_run(small_decoder, staleness, updates):
    synchronous, beside = (policy(small_decoder, each, updates=updates) for each in (None, staleness))
    for each in (synchronous, beside):
        each.take(range(8))
    assert beside.answers == synchronous.answers
    assert len(np.unique(lengths(beside.trained))) > 4  # and not because all are alike
    if staleness == 1:  # control: the weights do count
        changing = policy(small_decoder, staleness, change=0.05, updates=updates)
        changing.take(range(8))
        assert changing.answers != synchronous.answers


class LogNormalLengths:
    """An `AsynchronousEngine` whose answers take as many passes as they have tokens, which follows from their number.

    as_complete: hands out what is complete under the names of what is asked for first, as one that does not wait for
    slow answers does.
    """

    def __init__(self, as_complete):
        self.as_complete, self.growing, self.asked, self.update_count = as_complete, {}, [], 0

    def length(self, number, sample):
        return int(np.ceil(np.random.default_rng((number, sample)).lognormal(3.0, 1.0)))

    def update(self, version, weights):
        self.update_count = version

    def submit(self, request):
        for sample in range(request.samples):
            self.growing[request.number, sample] = 0
            self.asked.append((request.number, sample))

    def receive(self, *, wait):
        done = []
        while wait and not done:
            for key in self.growing:
                self.growing[key] += 1
            done = [key for key, grown in self.growing.items() if grown >= self.length(*key)]
        for key in done:
            del self.growing[key]
        return [self.completion(key) for key in done]

    def completion(self, key):
        tokens = [9] * self.length(*key)
        number, sample = self.asked.pop(0) if self.as_complete else key
        values = [-1.0] * len(tokens)
        return Completion(number, sample, tokens, values, values, None, [self.update_count] * len(tokens), "", "stop")


@pytest.mark.parametrize("as_complete", [False, True])
def test_answers_are_as_long_as_those_of_a_synchronous_run(small_decoder, as_complete):
    made = policy(small_decoder, 2, max_new_tokens=2000, prompts=8, samples=4)
    engine = LogNormalLengths(as_complete)
    made.made.sampler.asynchronous.engine = engine
    made.take(range(12))
    drawn = lengths(made.trained)
    expected = np.array([engine.length(number, sample) for number in range(12 * 8) for sample in range(4)])
    first = lengths(made.trained[: 3 * 8]).mean() / expected[: 3 * 8 * 4].mean()
    if as_complete:  # control: what comes first is short, and what is long is trained on late
        assert drawn.tolist() != expected.tolist() and first < 0.8
    else:
        assert drawn.tolist() == expected.tolist() and first == 1


@pytest.mark.parametrize(("staleness", "updates"), fast([(1, 1), (4, 1), (1, 2), (3, 2)], (4, 1), (1, 2)))
def test_no_token_is_older_than_its_bound_and_some_are_as_old(small_decoder, tmp_path, staleness, updates):
    made = policy(small_decoder, staleness, 0.02, tmp_path, passes=(4, 1, 2), updates=updates)
    ages, per_rollout = [], updates
    for number in range(12):
        made.take([number])
        values = made.made.metrics()
        ages.append(values["staleness_max"] - number % per_rollout)
        assert 0 <= values["staleness"] <= values["staleness_max"]
    assert max(ages) == staleness
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    answers = [(line["step"], answer) for line in lines for answer in line["answers"]]
    assert any(len(answer["versions"]) > 1 for _, answer in answers)  # partial answers went on under new weights
    for step, answer in answers:
        versions = [version for version, _ in answer["versions"]]
        assert versions == sorted(set(versions)) and step - 1 - staleness <= versions[0] <= versions[-1] <= step - 1
        assert sum(tokens for _, tokens in answer["versions"]) == len(answer["tokens"])


def test_prompts_are_asked_in_order_and_none_after_the_last_rollout(small_decoder):
    made = policy(small_decoder, 3, 0.02, rollouts=5)
    made.take(range(5))
    assert made.made.sampler.asynchronous.engine.submitted == list(range(5 * 4))
    assert made.rows == [f"row {number}" for number in range(5 * 4)]


def test_prompts_without_signal_are_replaced_by_those_that_were_asked_next(small_decoder):
    class Alternating(LengthRewards):
        def score(self, answers):
            return RewardTable(np.array([[float(each.sample * (each.number % 3 > 0))] for each in answers]), [])

    trained = {}
    for staleness in (None, 2):
        made = policy(small_decoder, staleness, rewards=Alternating(), resample=3)
        made.take(range(4))
        trained[staleness] = made.rows
    assert trained[2] == trained[None] and "row 3" not in trained[2] and "row 1" in trained[2]


@pytest.mark.parametrize(("taken", "updates"), [(0, 1), (3, 1), (3, 2)])
def test_a_restored_run_trains_on_each_prompt_once_and_keeps_what_was_drawn(small_decoder, tmp_path, taken, updates):
    made = policy(small_decoder, 3, 0.02, tmp_path, passes=(5,), updates=updates)
    made.take(range(taken))
    per_update = made.made.settings.items_per_update
    state = json.loads(json.dumps(made.made.state(taken * per_update)))
    tensors = {name: tensor.clone() for name, tensor in made.made.tensors(taken * per_update).items()}
    weights = {name: value.clone() for name, value in made.model.state_dict().items()}
    made.take(range(taken, taken + 2))  # and what is not saved is gone
    made.made.close()
    again = policy(small_decoder, 3, 0.02, tmp_path, updates=updates)
    again.model.load_state_dict(weights)
    again.made.restore(state)
    if tensors:
        again.made.restore_tensors(tensors)
    again.trained = made.trained[: taken * per_update]
    again.take(range(taken, 8))
    assert sorted(again.rows) == sorted(f"row {number}" for number in range(8 * per_update))
    again.made.close()
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(8 * per_update))
    unfinished = [answer for entry in state["asynchronous"]["requests"] for answer in entry["answers"]]
    kept = {(line["number"], place): answer for line in lines for place, answer in enumerate(line["answers"])}
    assert len(unfinished) > 0
    for entry in state["asynchronous"]["requests"]:
        for answer in entry["answers"]:
            drawn = [row[0] for row in answer["drawn"]]
            own = kept[entry["request"]["number"], answer["sample"]]
            assert own["tokens"][: len(drawn)] == drawn
            # What was drawn after the checkpoint was drawn with weights that it has, or later ones.
            later = [version for version, count in own["versions"] for _ in range(count)][len(drawn) :]
            assert all(row[4] <= taken for row in answer["drawn"]) and all(version >= taken for version in later)


def test_a_restored_source_hands_the_weights_over_again_though_they_have_had_as_many_updates(small_decoder):
    """Going back to a checkpoint within a process: the engine has weights that the policy has no longer."""
    made = policy(small_decoder, 1, 0.02)
    made.take(range(2))
    state = json.loads(json.dumps(made.made.state(2 * 4)))
    beside, handed_over = made.made.sampler.asynchronous, []
    beside.engine.engine = EmbeddedEngine(small_decoder(seed=7))  # which has nothing to do, as `restore` asks for
    beside.engine.received = []
    update = beside.engine.update
    beside.engine.update = lambda version, weights: handed_over.append(version) or update(version, weights)
    beside.publish(2)
    assert handed_over == []  # control: the engine has them
    made.made.restore(state)
    beside.publish(2)
    assert handed_over == [2]


def test_staleness_counts_the_updates_of_all_passes(small_decoder, tmp_path):
    made = policy(small_decoder, 3, 0.02, tmp_path, updates=2)
    sampler = made.made.sampler
    sampler.settings = replace(sampler.settings, passes=2)
    seen = []
    for number in range(16):
        made.take([number])
        seen.append(made.made.metrics())
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    for number, values in enumerate(seen):
        first, since = number - number % 4, number % 4  # updates that the policy had had when the rollout was made
        of_rollout = [line for line in lines if line["step"] == first + 1]
        drawn = [run for line in of_rollout for answer in line["answers"] for run in answer["versions"]]
        ages = np.repeat([number - version for version, _ in drawn], [tokens for _, tokens in drawn])
        assert values["staleness"] == pytest.approx(ages.mean()) and values["staleness_max"] == ages.max()
        assert ages.min() >= since
    assert max(values["staleness_max"] for values in seen) > 3


@pytest.mark.parametrize("taken", fast([5, 8], 5))
def test_a_rewind_into_a_rollout_of_several_passes(small_decoder, taken):
    """A run goes back, in its process, to a checkpoint between two passes, and back to it once more."""
    made = policy(small_decoder, 3, 0.02, updates=2)
    sampler = made.made.sampler
    sampler.settings = replace(sampler.settings, passes=2)
    per_update, of_rollout = sampler.settings.items_per_update, 4  # updates
    made.take(range(taken))
    state = json.loads(json.dumps(made.made.state(taken * per_update)))
    tensors = {name: tensor.clone() for name, tensor in made.made.tensors(taken * per_update).items()}
    weights = {name: value.clone() for name, value in made.model.state_dict().items()}
    assert bool(tensors) == bool(taken % of_rollout)  # of the rollout that is half trained
    before = made.trained[: taken * per_update]
    runs = []
    for end in (taken + 3, taken + 6, 16):
        made.take(range(taken, end))
        runs.append(made.trained)
        made.trained, engine = list(before), sampler.asynchronous.engine
        engine.engine, engine.received = EmbeddedEngine(small_decoder(seed=7)), []  # which has nothing to do
        made.model.load_state_dict(weights)
        made.made.restore(state)
        if tensors:
            made.made.restore_tensors(tensors)
    for run in runs:
        for first in range(0, len(run) - len(run) % (of_rollout * per_update), of_rollout * per_update):
            passes = [{}, {}]
            for place in range(of_rollout * per_update):
                sample = run[first + place][1]
                passes[place // (2 * per_update)][sample.row] = sample
            assert len(passes[0]) == 2 * per_update and passes[0].keys() == passes[1].keys()
            for row, sample in passes[0].items():
                again = passes[1][row]
                assert again.tokens.tolist() == sample.tokens.tolist()
                assert all(np.array_equal(again.columns[name], column) for name, column in sample.columns.items())
    half = slice(0, -(-taken // of_rollout) * of_rollout * per_update)
    drawn = [[sample.tokens.tolist() for _, sample in run[half]] for run in runs]
    assert drawn[0][: len(drawn[1])] == drawn[1][: len(drawn[0])] and drawn[1] == drawn[2]
    assert sorted({sample.row for _, sample in runs[2]}) == sorted(
        f"row {number}" for number in range(2 * per_update * 4)
    )
    other = policy(small_decoder, 3, 0.05, updates=2)
    other.made.sampler.settings = sampler.settings
    other.take(range(16))
    assert other.answers != [sample.tokens.tolist() for _, sample in runs[2]]  # the control: the weights do count


def test_answers_whose_rewards_fail_are_asked_for_again(small_decoder):
    made = policy(small_decoder, 2, 0.02, rewards=LengthRewards(fails=0))
    made.take(range(2))
    made.made.sampler.rewards.fails = 1
    with pytest.raises(TrainingError, match="a judge that is gone"):
        made.take([2])
    state = json.loads(json.dumps(made.made.state(2 * 4)))
    assert state["next_prompt"] == 8
    entries = state["asynchronous"]["requests"][:4]
    assert [entry["request"]["number"] for entry in entries] == [8, 9, 10, 11]
    assert all(len(answer["drawn"]) > 0 for entry in entries for answer in entry["answers"])
    assert all([answer["sample"] for answer in entry["answers"]] == [0, 1] for entry in entries)
    made.take(range(2, 5))
    assert made.rows == [f"row {number}" for number in range(20)]


def test_an_engine_completes_again_what_was_complete(small_decoder):
    asked = requests(SAMPLED, 9, samples=2, top_logprobs=2, prompt_logprobs=True, stop_ids=frozenset(range(5)))
    engine = EmbeddedEngine(small_decoder())
    completions = engine.generate(asked)
    states = [
        {
            "request": request_to_json(request),
            "answers": [completion_state(each) for each in completions if each.number == request.number],
        }
        for request in asked
    ]
    again = EmbeddedEngine(small_decoder(seed=9))  # which has nothing to draw
    again.restore(json.loads(json.dumps({"requests": states})))
    restored = sorted(again.step(), key=lambda each: (each.number, each.sample))
    check_same(restored, completions, atol=0)
    shorter = [replace(asked[0], max_new_tokens=20)]
    assert again.generate(shorter)[0].tokens != completions[0].tokens  # control


def test_run_lengths_of_versions():
    assert run_lengths([3, 3, 4, 6, 6]) == [[3, 2], [4, 1], [6, 2]]
    assert run_lengths([]) == []
