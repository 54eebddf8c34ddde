"""Asynchronous rollouts made again: under each version as many tokens as were recorded, and these the same."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
from builders.asynchronous_policy import asynchronous_policy

from danlu.core.errors import CheckpointError
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.numerics.batch_invariant import batch_invariant
from danlu.rl.recorded_engine import RecordedEngine

UPDATES = 7


def options(numerics):
    return EngineOptions(exact=numerics == "exact")


def recorded_versions(folder):
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    return {
        (line["number"], sample): answer["versions"] for line in lines for sample, answer in enumerate(line["answers"])
    }


@pytest.fixture(scope="module")
def recorded(small_decoder, tmp_path_factory):
    """Of a run with each kind of numerics: what it was trained on, versions of answers, and the state at update 3."""
    runs = {}
    for numerics in ("fast", "exact"):
        folder = tmp_path_factory.mktemp(numerics)
        made = asynchronous_policy(
            small_decoder, 3, 0.03, folder, passes=(4, 1), greedy=True, options=options(numerics)
        )
        with batch_invariant():
            made.take(range(3))
            weights = {name: value.clone() for name, value in made.model.state_dict().items()}
            state = json.loads(json.dumps(made.made.state(3 * 4)))
            made.take(range(3, UPDATES))
        runs[numerics] = made.trained, recorded_versions(folder), state, weights
    assert any(len(versions) > 2 for versions in runs["fast"][1].values())
    return runs


def replayed(small_decoder, versions, numerics="fast", change=0.03):
    made = asynchronous_policy(small_decoder, None, change, greedy=True, options=options(numerics))
    made.use(RecordedEngine(EmbeddedEngine(made.model, options(numerics)), versions), 3)
    return made


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_the_same_tokens_are_drawn_from_the_start(small_decoder, recorded, numerics):
    trained, versions, _, _ = recorded[numerics]
    again = replayed(small_decoder, versions, numerics)
    with batch_invariant():
        again.take(range(UPDATES))
    for (_, mine), (_, theirs) in zip(again.trained, trained, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        if numerics == "exact":  # log-probabilities too, whatever was computed beside them
            assert mine.columns["sampled"].tolist() == theirs.columns["sampled"].tolist()


def test_the_same_tokens_are_drawn_from_a_checkpoint(small_decoder, recorded):
    trained, versions, state, weights = recorded["fast"]
    again = replayed(small_decoder, versions)
    again.model.load_state_dict(weights)
    again.made.restore(deepcopy(state))
    again.take(range(3, UPDATES))
    assert again.answers == [sample.tokens.tolist() for number, sample in trained if number >= 3]


def test_other_weights_or_versions_draw_other_tokens(small_decoder, recorded):
    trained, versions, _, _ = recorded["fast"]
    expected = [sample.tokens.tolist() for _, sample in trained]
    other = replayed(small_decoder, versions, change=0.031)
    other.take(range(UPDATES))
    assert other.answers[:4] == expected[:4] and other.answers != expected
    earlier = {key: [[runs[0][0], sum(count for _, count in runs)]] for key, runs in versions.items()}
    other = replayed(small_decoder, earlier)
    other.take(range(UPDATES))
    assert other.answers != expected


def test_an_answer_that_was_drawn_anew_after_its_process_died_is_drawn_from_its_start(small_decoder, recorded):
    trained, versions, state, weights = recorded["fast"]
    states = {
        (entry["request"]["number"], answer["sample"]): len(answer["drawn"])
        for entry in state["asynchronous"]["requests"]
        for answer in entry["answers"]
    }
    lengths = {key: sum(count for _, count in runs) for key, runs in versions.items()}
    key = next(key for key, drawn in states.items() if 1 < drawn < lengths.get(key, 0))
    again = replayed(small_decoder, {**versions, key: [[3, lengths[key]]]})
    again.model.load_state_dict(weights)
    again.made.restore(deepcopy(state))
    again.take(range(3, UPDATES))
    model = small_decoder()
    model.load_state_dict(weights)
    sampler = again.made.sampler
    (request, _) = sampler._requests_of([key[0]], [sampler.prompts.at(key[0])])
    (mine,) = (one for _, one in again.trained if one.row == f"row {key[0]}")
    (theirs,) = (one for _, one in trained if one.row == f"row {key[0]}")
    own, before = (one.branches[1 + key[1]] for one in (mine, theirs))
    expected = EmbeddedEngine(model).generate([request])[key[1]].tokens
    assert mine.tokens[own.start : own.stop].tolist() == expected
    assert theirs.tokens[before.start : before.stop].tolist() != expected  # control


def test_what_is_not_recorded_whole_is_refused(small_decoder, recorded):
    _, versions, state, weights = recorded["fast"]
    with pytest.raises(CheckpointError, match="not recorded whole: none is complete with the weights of 0 updates"):
        replayed(small_decoder, {}).take([0])
    late = replayed(small_decoder, versions)
    late.model.load_state_dict(weights)
    without = deepcopy(state)
    for entry in without["asynchronous"]["requests"]:
        for answer in entry["answers"]:
            answer["drawn"] = answer["drawn"][:1]
    late.made.restore(without)
    with pytest.raises(
        CheckpointError, match=r"token \d of sample \d of prompt \d+ was drawn with the weights of [0-2]"
    ):
        late.take([3])
