"""Rollouts of several turns: the engine answers, the environment says something to it, and so on until it is over.

All episodes take a turn together: what is drawn must not hang on how long an environment takes, where rounding hangs on
what is computed beside. Every process draws; the first asks the environment, and tells the others.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from danlu.data.prompts import Prompt
from danlu.errors import DataError
from danlu.parallel.comm import Group
from danlu.parallel.process_group import untimed_barrier
from danlu.parallel.watchdog import PHASE
from danlu.rewards.environments.protocol import EpisodeCall, Reply
from danlu.rollout.request import Completion, Finish, Request
from danlu.rollout.turn_rendering import Dialogue, TurnRenderer

TURN_NUMBERS = 1 << 42
"""Requests for later turns have their prompt's number and this times one more than the sample; see `GREEDY_NUMBERS`."""
_barriers = itertools.count()


@dataclass(frozen=True)
class Segment:
    """Tokens that were drawn one behind the other, with what the environment said between them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    drawn: tuple[bool, ...]
    """Of each token, whether the policy drew it."""


@dataclass(frozen=True)
class Episode(Completion):
    """Several answers as one: lists have the drawn tokens of all turns, and `text` is that of the last answer."""

    segments: tuple[Segment, ...] = ()
    """One, and another each time that the chat template rewrote history."""
    turns: tuple[Mapping[str, Any], ...] = ()
    """The messages behind the prompt."""
    answers: int = 0
    reward: float | None = None
    """Of the environment."""
    failure: str | None = None
    """Why the environment did not go on: the episode is left out."""
    errors: int = 0
    """Calls of tools that could not be made, or that raised."""


class Environments(Protocol):
    """See `rewards.environments.workers`."""

    def replies(self, calls: Sequence[EpisodeCall]) -> list[Reply]: ...

    def end_episodes(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class _Open:
    """An episode that goes on."""

    number: int
    sample: int
    prompt: Prompt
    first: Request
    dialogue: Dialogue | None = None
    segments: list[Segment] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    finish: Finish | None = None
    failure: str | None = None

    @property
    def is_open(self) -> bool:
        return self.finish is None


@dataclass
class Episodes:
    """Has requests answered in several turns; all processes make the same calls.

    Args:
        environments: asked by the first process alone.
        renderer: of what environments say.
        max_turns: answers of an episode.
        max_length: tokens of an episode, prompt included.
        gives_reward: whether an episode that was cut off is worth what its turns earned, 0 without any.
        seed: of the run; environments have one that follows from it and from the number of the prompt.
    """

    environments: Environments
    renderer: TurnRenderer
    max_turns: int
    max_length: int
    gives_reward: bool
    seed: int
    world: Group

    def answer(
        self,
        generate: Callable[[Sequence[Request]], list[Completion]],
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
    ) -> list[Episode]:
        """The episodes of requests, each of one of the prompts in order, by request and sample.

        generate: the engine's.
        """
        episodes = [
            _Open(request.number, sample, prompt, request)
            for request, prompt in zip(requests, prompts, strict=False)
            for sample in range(request.samples)
        ]
        self._reply(episodes)
        for episode in episodes:
            self._begin(episode)
        for turn in range(1, self.max_turns + 1):
            open_ = [episode for episode in episodes if episode.is_open]
            if not open_:
                break
            PHASE.begin("rollout")
            asked = [self._request(episode) for episode in open_]
            for episode, request, completion in zip(open_, asked, generate(asked), strict=True):
                assert completion.number == request.number, "answers come in the order of requests"
                self._take(episode, completion)
            asking = [episode for episode in open_ if episode.is_open]
            self._reply(asking)
            for episode in asking:
                self._go_on(episode, is_last=turn == self.max_turns)
        self._on_first(self.environments.end_episodes)
        return [self._episode(episode) for episode in episodes]

    def close(self) -> None:
        """Ends what holds environments."""
        self.environments.close()

    def _on_first(self, make: Callable[[], Any]) -> Any:
        # Environments may take longer than a collective may.
        name = f"environments-{next(_barriers)}"
        return self.world.from_first(make, barrier=lambda: untimed_barrier(name))

    def _reply(self, episodes: Sequence[_Open]) -> None:
        """Asks the environments of these episodes, and notes what they say."""
        if not episodes:
            return
        PHASE.begin("environments")
        calls = [
            EpisodeCall(
                (episode.number, episode.sample),
                episode.prompt.row,
                environment_seed(self.seed, episode.number),
                tuple(episode.texts),
                tuple(episode.replies),
            )
            for episode in episodes
        ]
        for episode, reply in zip(episodes, self._on_first(lambda: self.environments.replies(calls)), strict=True):
            if reply.failure is None:
                episode.replies.append(reply)
            else:
                episode.finish, episode.failure = "abort", reply.failure

    def _begin(self, episode: _Open) -> None:
        turns = episode.replies[0].turns if episode.replies else ()
        try:
            dialogue = self.renderer.begin(episode.prompt, turns)
        except DataError as error:
            episode.finish, episode.failure = "abort", str(error)
            dialogue = Dialogue([], "", episode.prompt.tokens, 0)
        episode.dialogue = dialogue
        if len(dialogue.ids) >= self.max_length and episode.is_open:
            episode.finish = "abort"
            episode.failure = (
                f"what reset returned makes a prompt of {len(dialogue.ids)} tokens, and data.max_length is "
                f"{self.max_length}"
            )
        episode.segments.append(Segment(dialogue.ids, (), ()))

    def _request(self, episode: _Open) -> Request:
        """The request for the next answer of an episode; random numbers go on where the one before ended."""
        dialogue = episode.dialogue
        assert dialogue is not None, "it was begun"
        drawn_as = episode.first.random_number + (len(episode.segments) - 1 << 50)  # positions begin anew
        return replace(
            episode.first,
            number=episode.number + (episode.sample + 1) * TURN_NUMBERS,
            prompt=dialogue.ids,
            samples=1,
            max_new_tokens=min(episode.first.max_new_tokens, self.max_length - len(dialogue.ids)),
            draw_number=drawn_as,
            draw_sample=episode.sample,
        )

    def _take(self, episode: _Open, completion: Completion) -> None:
        """Takes an answer into its episode."""
        dialogue = episode.dialogue
        assert dialogue is not None, "it was begun"
        episode.completions.append(completion)
        episode.texts.append(completion.text)
        self.renderer.answered(dialogue, completion.tokens)
        segment = episode.segments[-1]
        between = dialogue.ids[len(segment.prompt) + len(segment.tokens) : -len(completion.tokens) or None]
        drawn = (*segment.drawn, *[False] * len(between), *[True] * len(completion.tokens))
        episode.segments[-1] = Segment(segment.prompt, (*segment.tokens, *between, *completion.tokens), drawn)
        if completion.finish == "abort":
            episode.finish, episode.failure = "abort", "its answer was taken back"

    def _go_on(self, episode: _Open, *, is_last: bool) -> None:
        """Goes on with what the environment said to the last answer, or ends the episode."""
        dialogue = episode.dialogue
        assert dialogue is not None, "it was begun"
        if not episode.is_open:  # the environment failed
            return
        reply, finish = episode.replies[-1], episode.completions[-1].finish
        if reply.done or finish not in ("stop", "stop_string"):  # what was cut off is judged, and nothing follows it
            episode.finish = finish
            return
        try:
            rewritten = self.renderer.go_on(dialogue, reply.turns)
        except DataError as error:
            episode.finish, episode.failure = "abort", str(error)
            return
        if is_last:
            episode.finish = "turns"
        elif len(dialogue.ids) >= self.max_length:
            episode.finish = "length"
        elif rewritten:
            episode.segments.append(Segment(dialogue.ids, (), ()))

    def _episode(self, episode: _Open) -> Episode:
        assert episode.finish is not None and episode.dialogue is not None, "all episodes are over"
        completions = episode.completions
        supports = [support for completion in completions for support in completion.support or ()]
        segments = tuple(segment for segment in episode.segments if segment.tokens)
        if not segments:  # it failed before its first answer; a branch has a token at least
            prompt = episode.segments[0].prompt
            segments = (Segment(prompt, prompt[-1:], (False,)),)
        rewards = [reply.reward for reply in episode.replies if reply.reward is not None]
        cut_off = episode.failure is None and not (episode.replies and episode.replies[-1].done)
        reward = sum(rewards) if rewards else (0.0 if cut_off and self.gives_reward else None)
        return Episode(
            episode.number,
            episode.sample,
            [token for completion in completions for token in completion.tokens],
            [value for completion in completions for value in completion.logprobs],
            [value for completion in completions for value in completion.drawn],
            supports or None,
            [version for completion in completions for version in completion.versions],
            completions[-1].text if completions else "",
            episode.finish,
            segments=segments,
            turns=tuple(episode.dialogue.after_prompt),
            answers=len(completions),
            reward=None if episode.failure is not None else reward,
            failure=episode.failure,
            errors=sum(reply.errors for reply in episode.replies),
        )


def environment_seed(seed: int, number: int) -> int:
    """What an environment's randomness follows from: the same for all answers to a prompt, the greedy one (whose number
    is another by a multiple of 2^40) among them; below 2^63."""
    key = f"{seed}/{number % (1 << 40)}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def episode_metrics(completions: Sequence[Sequence[Completion]]) -> dict[str, float]:
    """Of a rollout with an environment: mean turns, the share that had all their turns, failures, branches, errors."""
    episodes = [each for of_prompt in completions for each in of_prompt if isinstance(each, Episode)]
    if not episodes:
        return {}
    return {
        "turns_mean": float(np.mean([episode.answers for episode in episodes])),
        "out_of_turns": float(np.mean([episode.finish == "turns" for episode in episodes])),
        "environment_failures": float(np.mean([episode.failure is not None for episode in episodes])),
        "history_rewritten": float(np.mean([len(episode.segments) > 1 for episode in episodes])),
        "tool_errors": float(np.mean([episode.errors for episode in episodes])),
    }


def segments_of(completion: Completion, prompt: Sequence[int]) -> tuple[Segment, ...]:
    """The runs of tokens that a completion is: of a single answer one, all of which was drawn."""
    if isinstance(completion, Episode):
        return completion.segments
    return (Segment(tuple(prompt), tuple(completion.tokens), (True,) * len(completion.tokens)),)
