"""An episode while it is played: the next request, and the handling of each answer and of each reply.

An episode consists of its prompt, the answers and the replies, so that it can be repeated from these. `episodes.py` and
`episode_engine.py` decide who asks the engine and the environment, and when.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from danlu.core.errors import DataError
from danlu.data.prompts import Prompt
from danlu.inference.episode import Episode, Segment
from danlu.inference.request import Completion, Finish, Request
from danlu.rewards.environments.protocol import EpisodeCall, EpisodeKey, Reply
from danlu.rl.turn_rendering import Dialogue, TurnRenderer

if TYPE_CHECKING:
    import numpy as np

TURN_NUMBERS = 1 << 42
"""Requests for turns have their prompt's number and this times one more than the sample; see `GREEDY_NUMBERS`."""


@dataclass(frozen=True)
class EpisodeRules:
    """Settings that all episodes of a run share.

    Args:
        renderer: renders the environment's replies.
        max_turns: answers of an episode.
        max_length: tokens of an episode, prompt included.
        gives_reward: whether a truncated episode is worth the sum of its turns' rewards, 0 without any.
        seed: the run's seed; environments have one that follows from it and from the number of the prompt.
    """

    renderer: TurnRenderer
    max_turns: int
    max_length: int
    gives_reward: bool
    seed: int


class OpenEpisode:
    """One answer to a request, which goes on: a reply to the row, an answer, a reply to it, and so on.

    Args:
        request: the request for the first answer. sample: the number of this answer among its samples. prompt: the
            prompt of the request.
    """

    def __init__(self, rules: EpisodeRules, request: Request, sample: int, prompt: Prompt) -> None:
        self.rules, self.request, self.sample, self.prompt = rules, request, sample, prompt
        self.segments: list[Segment] = []
        self.completions: list[Completion] = []
        self.replies: list[Reply] = []
        self.finish: Finish | None = None
        self.failure: str | None = None
        self._dialogue: Dialogue | None = None  # from the first reply on
        self._routes: dict[tuple[int, ...], np.ndarray | None] = {}  # by the prompt of a segment: of its last turn

    @property
    def key(self) -> EpisodeKey:
        return self.request.number, self.sample

    @property
    def is_open(self) -> bool:
        return self.finish is None

    @property
    def call(self) -> EpisodeCall:
        """The next call of its environment: for the reply to the row, or to the last answer."""
        return EpisodeCall(
            self.key,
            self.prompt.row,
            environment_seed(self.rules.seed, self.request.number),
            tuple(completion.text for completion in self.completions),
            tuple(self.replies),
        )

    def take_reply(self, reply: Reply) -> None:
        """Continues with the environment's reply to the row or to the last answer; or ends."""
        if reply.failure is None:
            self.replies.append(reply)
        else:
            self._fail(reply.failure)
        if self._dialogue is None:
            self._begin()
        elif self.is_open:
            self._go_on()

    def next_request(self) -> Request:
        """The request for the next answer; random numbers go on where the one before ended."""
        ids = self._begun.ids
        drawn_as = self.request.random_number + (len(self.segments) - 1 << 50)  # positions begin again
        return replace(
            self.request,
            number=self.turn_number,
            prompt=ids,
            samples=1,
            max_new_tokens=min(self.request.max_new_tokens, self.rules.max_length - len(ids)),
            draw_number=drawn_as,
            draw_sample=self.sample,
            rotary_length=self.rules.max_length,
            source=None,
        )

    @property
    def turn_number(self) -> int:
        """The number of the requests for its answers."""
        return self.request.number + (self.sample + 1) * TURN_NUMBERS

    def take_answer(self, completion: Completion) -> None:
        """Takes the answer to `next_request`, to which the environment replies next, unless it was taken back."""
        dialogue = self._begun
        self.completions.append(completion)
        self.rules.renderer.answered(dialogue, completion.tokens)
        segment = self.segments[-1]
        between = dialogue.ids[len(segment.prompt) + len(segment.tokens) : -len(completion.tokens) or None]
        drawn = (*segment.drawn, *[False] * len(between), *[True] * len(completion.tokens))
        self.segments[-1] = Segment(segment.prompt, (*segment.tokens, *between, *completion.tokens), drawn)
        self._routes[segment.prompt] = completion.routes  # which are those of all before it too
        if completion.finish == "abort":
            self._fail("its answer was taken back")

    def episode(self) -> Episode:
        """The episode, which is over."""
        assert self.finish is not None, "the episode goes on"
        completions = self.completions
        segments = tuple(segment for segment in self.segments if segment.tokens)
        if not segments:  # it failed before its first answer; a branch has a token at least
            prompt = self.segments[0].prompt
            segments = (Segment(prompt, prompt[-1:], (False,)),)
        rewards = [reply.reward for reply in self.replies if reply.reward is not None]
        cut_off = self.failure is None and not (self.replies and self.replies[-1].done)
        reward = sum(rewards) if rewards else (0.0 if cut_off and self.rules.gives_reward else None)
        return Episode.joined(
            *self.key,
            completions,
            completions[-1].text if completions else "",
            self.finish,
            segments,
            [self._routes.get(each.prompt) for each in segments],
            turns=self._begun.after_prompt,
            reward=reward,
            failure=self.failure,
            errors=sum(reply.errors for reply in self.replies),
        )

    @property
    def _begun(self) -> Dialogue:
        assert self._dialogue is not None, "it begins with a reply to the row"
        return self._dialogue

    def _fail(self, reason: str) -> None:
        self.finish, self.failure = "abort", reason

    def _begin(self) -> None:
        turns = self.replies[0].turns if self.replies else ()
        try:
            dialogue = self.rules.renderer.begin(self.prompt, turns)
        except DataError as error:
            self._fail(str(error))
            dialogue = Dialogue([], "", self.prompt.tokens, 0)
        self._dialogue = dialogue
        if len(dialogue.ids) >= self.rules.max_length and self.is_open:
            self._fail(
                f"what reset returned makes a prompt of {len(dialogue.ids)} tokens, and data.max_length is "
                f"{self.rules.max_length}"
            )
        self.segments.append(Segment(dialogue.ids, (), ()))

    def _go_on(self) -> None:
        """Continues with the environment's reply to the last answer, or ends the episode."""
        dialogue = self._begun
        reply, finish = self.replies[-1], self.completions[-1].finish
        if reply.done or finish not in ("stop", "stop_string"):  # what was cut off is judged, and nothing follows it
            self.finish = finish
            return
        try:
            rewritten = self.rules.renderer.go_on(dialogue, reply.turns)
        except DataError as error:
            self._fail(str(error))
            return
        if len(self.completions) == self.rules.max_turns:
            self.finish = "turns"
        elif len(dialogue.ids) >= self.rules.max_length:
            self.finish = "length"
        elif rewritten:
            self.segments.append(Segment(dialogue.ids, (), ()))


def environment_seed(seed: int, number: int) -> int:
    """Returns the seed of an environment's random numbers: the same for all answers to a prompt, the greedy one (its
    number differs by a multiple of 2^40) included; below 2^63."""
    key = f"{seed}/{number % (1 << 40)}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
