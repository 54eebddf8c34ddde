"""Rollout processes and their protocol: what they answer, hand back and take up, and what becomes of one that dies."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from builders.rollout_jobs import SmallDecoderJob, small_decoder_of
from builders.rollout_requests import SAMPLED, check_same, requests

from danlu.core.errors import DataError, TrainingError
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.request import Request
from danlu.rl.rollout_processes import RolloutProcesses

pytestmark = pytest.mark.distributed


def weights_of(seed):
    return list(small_decoder_of(seed).named_parameters())


def started(count=1, jobs=None):
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in weights_of(0)}
    said = []
    return RolloutProcesses(jobs or [SmallDecoderJob()] * count, shapes, said.append), said


def all_of(processes, count):
    completions = []
    while len(completions) < count:
        completions += processes.receive(wait=True)
    return sorted(completions, key=lambda each: (each.number, each.sample))


@pytest.fixture(scope="module")
def two():
    processes, _ = started(2)
    yield processes
    processes.close()


def test_several_answer_as_one_engine_in_this_process_does(two):
    asked = requests(SAMPLED, 12, samples=2)
    for version, seed in ((4, 1), (5, 2)):
        two.update(version, weights_of(seed))
        for request in asked:
            two.submit(request)
        assert two.receive(wait=False) is not None
        engine = EmbeddedEngine(small_decoder_of(seed))
        engine.version = version
        check_same(all_of(two, 8), engine.generate(asked))


def test_a_state_is_taken_up_where_it_was_left(two):
    asked = requests(SAMPLED, 200, samples=2)  # more than is drawn in between
    two.update(6, weights_of(3))
    for request in asked:
        two.submit(request)
    received = two.receive(wait=False)
    state = json.loads(json.dumps(two.state()))
    answers = [answer for entry in state["requests"] for answer in entry["answers"]]
    assert len(answers) + len(received) == 8
    two.restore(state)
    two.update(7, weights_of(3))  # the same ones
    engine = EmbeddedEngine(small_decoder_of(3))
    expected = engine.generate(asked)
    again = sorted([*all_of(two, 8 - len(received)), *received], key=lambda each: (each.number, each.sample))
    assert [each.tokens for each in again] == [each.tokens for each in expected]
    drawn = {tuple(row[0] for row in answer["drawn"]) for answer in answers}
    for each in again:
        kept = each.versions.count(6)
        assert each.versions == [6] * kept + [7] * (len(each.versions) - kept)
        assert tuple(each.tokens[:kept]) in drawn or kept == len(each.versions)


def test_a_bad_request_is_told_by_its_error():
    processes, _ = started()
    processes.update(0, weights_of(0))
    processes.submit(Request(3, (999,)))
    with pytest.raises(DataError, match="rollout process: prompt 3"):
        processes.receive(wait=True)
    processes.close()


def test_one_that_is_killed_is_replaced_and_asked_again_and_one_that_keeps_dying_is_told():
    processes, said = started(jobs=[SmallDecoderJob(dies_at=9)])
    expected = EmbeddedEngine(small_decoder_of(1)).generate(requests(SAMPLED, 12))
    processes.update(0, weights_of(1))
    for request in requests(SAMPLED, 12):
        processes.submit(request)
    os.kill(processes.process_ids[0], signal.SIGKILL)
    check_same(all_of(processes, 4), expected)
    assert len(said) == 1
    assert said[0].startswith("the rollout process was ended by SIGKILL; a new one is asked for its 4 unfinished")
    first = processes.process_ids
    processes.submit(Request(9, (1, 2)))
    with pytest.raises(TrainingError, match=r"(?s)ended with exit code 1; 3 have ended so .*ValueError: at 9"):
        processes.receive(wait=True)
    assert processes.process_ids != first and len(said) == 3
    (process,) = processes.process_ids
    processes.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert torch.is_grad_enabled()
