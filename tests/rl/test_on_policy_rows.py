"""Rows of which a share is answered by the policy: which ones, what is asked and trained, and stopping in a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from danlu.core.errors import DataError
from danlu.core.line_log import LineLog
from danlu.core.types import Pack, Sample
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.rl.on_policy_rows import OnPolicyRows, OnPolicySettings, prompt_tokens, with_answer

STOP = 99


def row(number: int, length: int = 3) -> Sample:
    """A turn, its answer, another turn of `length` tokens, and its answer in three tokens, weighed twice."""
    weights = [0, 0, 1, 1, *[0] * length, 2, 2, 2, 0]
    tokens = np.arange(len(weights), dtype=np.int32) + 100 * (number + 1)
    return Sample(tokens, np.array(weights, np.float32), f"rows:{number}", source="some")


class Rows:
    def at(self, number: int) -> Pack:
        return Pack((row(number % 7, 3 + number % 2),))

    def state(self, number: int) -> dict[str, Any]:
        return {"rows": 7}

    def restore(self, state: dict[str, Any]) -> None:
        assert state == {"rows": 7}


class Engine:
    """Answers with the version of its weights and the request's number; asleep unless it is asked."""

    def __init__(self) -> None:
        self.version, self.awake, self.closed = 0, False, False
        self.requests: list[Request] = []

    def wake(self) -> None:
        self.awake = True

    def sleep(self) -> None:
        self.awake = False

    def update(self, version: int, weights: Any = None) -> None:
        self.version = version

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        assert self.awake
        self.requests += requests
        return [self.completion(request) for request in requests]

    def completion(self, request: Request) -> Completion:
        tokens = [self.version, request.number, STOP][: request.max_new_tokens]
        finish: Any = "stop" if tokens[-1] == STOP else "length"
        zeros = [0.0] * len(tokens)
        return Completion(request.number, 0, tokens, zeros, zeros, None, [0] * len(tokens), "said", finish)

    def close(self) -> None:
        self.closed = True


def source(share: float = 0.5, log: LineLog | None = None, **changes: Any) -> OnPolicyRows:
    settings = {"share": share, "per_step": 4, "sampling": SamplingOptions(seed=3), "max_new_tokens": 5, "seed": 3}
    settings |= {"max_length": 50, **changes}
    return OnPolicyRows(Rows(), Engine(), OnPolicySettings(**settings), lambda ids: " ".join(map(str, ids)), log)  # type: ignore[arg-type]


def steps(items: OnPolicyRows, numbers: Sequence[int]) -> list[list[int]]:
    return [items.at(number).samples[0].tokens.tolist() for number in numbers]


def test_the_last_answer_is_replaced_and_weighs_what_the_row_says() -> None:
    assert prompt_tokens(row(0)) == 7
    answered = with_answer(row(0), np.array([8, 9], np.int32))
    assert answered.tokens.tolist() == [100, 101, 102, 103, 104, 105, 106, 8, 9]
    assert answered.weights.tolist() == [0] * 7 + [2, 2]  # the first answer is context
    assert (answered.row, answered.source) == ("rows:0", "some")
    assert row(0).weights.sum() == 8  # what it was made of has not changed


@pytest.mark.parametrize(
    ("weights", "message"),
    [([0, 0, 0], "a:1: no token is trained"), ([0, 1, 1], "a:1: has no prompt that the policy could answer")],
)
def test_rows_without_a_prompt_are_refused(weights: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prompt_tokens(Sample(np.arange(3, dtype=np.int32), np.array(weights, np.float32), "a:1"))
    assert prompt_tokens(Sample(np.arange(3, dtype=np.int32), np.array([0, 0, 1], np.float32), "a:1")) == 2  # control


def test_a_share_of_the_items_has_own_answers_of_the_weights_of_the_step() -> None:
    items = source()
    own = [number for number in range(400) if items.settings.answers(number)]
    assert 160 < len(own) < 240
    for number in range(12):
        tokens, given = items.at(number).samples[0].tokens.tolist(), row(number % 7, 3 + number % 2)
        if number in own:
            assert tokens == [*given.tokens[: prompt_tokens(given)].tolist(), 1 + number // 4, number, STOP]
        else:
            assert tokens == given.tokens.tolist()
    assert [request.number for request in items.engine.requests] == own[: len(items.engine.requests)]  # type: ignore[attr-defined]
    assert not items.engine.awake  # type: ignore[attr-defined]
    assert own != [number for number in range(400) if source(seed=4).settings.answers(number)]  # control


@pytest.mark.parametrize(("share", "own"), [(0.0, 0), (1.0, 4)])
def test_none_and_all(share: float, own: int) -> None:
    items = source(share)
    steps(items, range(4))
    assert len(items.engine.requests) == own  # type: ignore[attr-defined]
    assert items.metrics()["on_policy"] == own / 4
    assert ("length" in items.metrics()) == bool(own)


def test_what_is_asked_leaves_room_for_the_prompt() -> None:
    items = source(1.0, max_length=9)
    steps(items, range(2))
    first, second = items.engine.requests[:2]  # type: ignore[attr-defined]
    assert first.prompt == tuple(range(100, 107)) and first.max_new_tokens == 2
    assert second.prompt == tuple(range(200, 208)) and second.max_new_tokens == 1
    assert first.sampling == SamplingOptions(seed=3)
    expected = {"on_policy": 1.0, "length": 1.5, "length_max": 2.0, "truncated": 1.0}
    assert {name: value for name, value in items.metrics().items() if name != "rollout_s"} == expected
    source_with_room = source(1.0)
    steps(source_with_room, range(1))
    assert source_with_room.engine.requests[0].max_new_tokens == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_run_stopped_in_a_step_goes_on_with_its_answers(tmp_path: Path, place: int) -> None:
    whole = source(0.7, LineLog(tmp_path / "whole.jsonl"))
    expected = steps(whole, range(16))
    stopped = source(0.7, LineLog(tmp_path / "stopped.jsonl"))
    steps(stopped, range(8 + place + 1))  # the item at `place` was asked for, and its step did not happen
    state, tensors = json.loads(json.dumps(stopped.state(8 + place))), stopped.tensors(8 + place)
    assert bool(tensors) == (place > 0)
    again = source(0.7, LineLog(tmp_path / "stopped.jsonl"))
    again.restore(state)
    if tensors:
        again.restore_tensors({name: tensor.clone() for name, tensor in tensors.items()})
        assert again.metrics() == stopped.metrics()
    again.engine.version = 3 if place else 2  # type: ignore[misc]
    assert steps(again, range(8 + place, 16)) == expected[8 + place :]
    assert (tmp_path / "whole.jsonl").read_text() == (tmp_path / "stopped.jsonl").read_text()
    if place:  # control: without its tensors the step would be drawn anew, with other weights
        redrawn = source(0.7)
        redrawn.engine.version = 3  # type: ignore[misc]
        assert steps(redrawn, range(8 + place, 12)) != expected[8 + place : 12]


def test_own_answers_are_written_down(tmp_path: Path) -> None:
    items = source(1.0, LineLog(tmp_path / "rollouts.jsonl"))
    steps(items, [4])
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == [4, 5, 6, 7] and {line["step"] for line in lines} == {2}
    assert lines[0]["row"] == "rows:4" and lines[0]["prompt"] == "500 501 502 503 504 505 506"
    assert lines[0]["answers"] == [{"text": "said", "finish": "stop", "tokens": [1, 4, STOP], "rewards": {}}]
    items.close()
    assert items.engine.closed  # type: ignore[attr-defined]
