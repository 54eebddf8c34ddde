"""An engine that draws episodes while the trainer works: each goes on as soon as its own environment has replied.

Turns of one episode may be drawn under different weights. Nothing here waits for one environment while another has
replied or the engine has something to draw; where several could go on, the one that was asked for first does.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from danlu.inference.engine_state import completion_state, episode_from_state, request_from_json, request_to_json
from danlu.inference.episode import Episode
from danlu.inference.request import Completion, Request
from danlu.rewards.environments.protocol import EpisodeKey, Reply
from danlu.rl.open_episode import EpisodeRules, OpenEpisode
from danlu.rl.rollout_worker import WorkerEngine

if TYPE_CHECKING:
    from torch import Tensor

    from danlu.rewards.environments.workers import EnvironmentWorkers

WAIT_S = 0.05
"""Seconds that a step waits for environments when there is nothing to draw. It is short since the caller has other
work."""


class _Playing(OpenEpisode):
    """An episode that goes on, with the replies and answers of a checkpoint that it has not reached again.

    place: its position in the order in which episodes were asked for.
    """

    def __init__(self, rules: EpisodeRules, request: Request, state: dict[str, Any], place: int) -> None:
        assert request.source is not None, "requests for episodes come with what they were made of"
        super().__init__(rules, request, state["sample"], request.source)
        self.place = place
        self.given_replies = deque(Reply.from_json(reply) for reply in state.get("replies", ()))
        self.given_answers = deque(state.get("answers", ()))

    def state(self, growing: dict[str, Any] | None) -> dict[str, Any]:
        """The replies and answers so far. growing: the state of its present answer, where the engine has one."""
        answers = [completion_state(completion) for completion in self.completions]
        answers += [] if growing is None else [growing]
        return {
            "sample": self.sample,
            "replies": [reply.as_json() for reply in (*self.replies, *self.given_replies)],
            "answers": [*answers, *self.given_answers],
        }


class EpisodeEngine:
    """A `rollout_worker.WorkerEngine` that answers with episodes.

    Args:
        engine: draws their turns.
        environments: asked for replies while the engine draws.
        most_growing: answers that the engine grows at a time; it is given no more, so that a later turn of an episode
            comes before the first one of those that were asked for after it.
    """

    def __init__(
        self, engine: WorkerEngine, environments: EnvironmentWorkers, rules: EpisodeRules, *, most_growing: int = 256
    ) -> None:
        self._engine, self._environments, self._rules = engine, environments, rules
        self._most_growing = most_growing
        self._playing: dict[EpisodeKey, _Playing] = {}
        self._by_turn: dict[int, _Playing] = {}  # by the number of its turns' requests
        # A heap: those with a next answer that the engine was not given.
        self._to_draw: list[tuple[int, EpisodeKey]] = []
        self._asked: set[EpisodeKey] = set()  # with environments that are to reply
        self._done: list[tuple[Request, Episode]] = []
        self._places = itertools.count()

    @property
    def unfinished(self) -> int:
        """Episodes that were asked for and that `step` has not returned."""
        return len(self._playing) + len(self._done)

    @property
    def is_stuck(self) -> bool:
        """Whether there is nothing that a step could go on with before the engine has other weights."""
        return not (self._done or self._asked or self._to_draw or self._engine.unfinished)

    def submit(self, request: Request) -> None:
        """Takes a request with its `source`; its episodes come with later steps.

        Raises RecipeError or ResourceError from loading the environment.
        """
        for sample in request.sample_numbers:
            self._play(request, {"sample": sample})

    def step(self) -> list[Episode]:
        """Advances all episodes that can go on, and waits a little where none can; returns those that are over.

        Raises the engine's errors.
        """
        if self._asked:
            has_work = self._done or self._to_draw or self._engine.unfinished
            for key, reply in self._environments.receive(0.0 if has_work else WAIT_S):
                if key in self._asked:
                    self._asked.remove(key)
                    self._take_reply(self._playing[key], reply)
        self._draw_next()
        if self._engine.unfinished:
            for completion in self._engine.step():
                self._take_answer(self._by_turn[completion.number], completion)
            self._draw_next()
        done, self._done = self._done, []
        return [episode for _, episode in done]

    def update(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Goes on with other weights: unfinished answers, and all turns after them."""
        self._engine.update(version, weights)

    def state(self) -> dict[str, Any]:
        """Returns the requests that `step` has not returned, as JSON: environments are repeated from it."""
        growing = {entry["request"]["number"]: entry["answers"][0] for entry in self._engine.state()["requests"]}
        requests: dict[int, dict[str, Any]] = {}
        done = [(request, completion_state(episode)) for request, episode in self._done]
        playing = [(each.request, each.state(growing.get(each.turn_number))) for each in self._playing.values()]
        for request, answer in (*done, *playing):
            entry = requests.setdefault(request.number, {"request": request_to_json(request), "answers": []})
            entry["answers"].append(answer)
        return {"requests": list(requests.values())}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up the requests of another one's `state`, each with its `source`."""
        for entry in state["requests"]:
            request = request_from_json(entry["request"])
            for answer in entry["answers"]:
                if "episode" in answer:
                    self._done.append((request, episode_from_state(request.number, answer)))
                else:
                    self._play(request, answer)

    def close(self) -> None:
        """Closes the environments and the engine."""
        self._environments.close()
        self._engine.close()

    def _play(self, request: Request, state: dict[str, Any]) -> None:
        playing = _Playing(self._rules, request, state, next(self._places))
        self._playing[playing.key] = self._by_turn[playing.turn_number] = playing
        self._ask(playing)

    def _ask(self, playing: _Playing) -> None:
        """Has the environment reply to the row or to the last answer, if its reply is not known."""
        if playing.given_replies:
            self._take_reply(playing, playing.given_replies.popleft())
        else:
            self._asked.add(playing.key)
            self._environments.ask(playing.call)

    def _take_reply(self, playing: _Playing, reply: Reply) -> None:
        playing.take_reply(reply)
        if playing.is_open:
            heapq.heappush(self._to_draw, (playing.place, playing.key))
        else:
            self._end(playing)

    def _draw_next(self) -> None:
        """Submits answers to the engine while it has room, in the order in which episodes were asked for."""
        while self._to_draw and self._engine.unfinished < self._most_growing:
            _, key = heapq.heappop(self._to_draw)
            playing = self._playing[key]
            request = playing.next_request()
            if playing.given_answers:
                answer = {**playing.given_answers.popleft(), "sample": 0}
                self._engine.restore({"requests": [{"request": request_to_json(request), "answers": [answer]}]})
            else:
                self._engine.submit(request)

    def _take_answer(self, playing: _Playing, completion: Completion) -> None:
        playing.take_answer(completion)
        if playing.is_open:
            self._ask(playing)
        else:
            self._end(playing)

    def _end(self, playing: _Playing) -> None:
        del self._playing[playing.key], self._by_turn[playing.turn_number]
        self._environments.end_episode(playing.key)
        self._done.append((playing.request, playing.episode()))
