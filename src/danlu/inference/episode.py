"""An answer in several turns, as it is when it is over. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from danlu.inference.recorded_routes import end_to_end
from danlu.inference.request import Completion, Finish


@dataclass(frozen=True)
class Segment:
    """Tokens that were drawn one after the other, with the environment's replies between them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    drawn: tuple[bool, ...]
    """Whether the policy drew each token."""

    @property
    def read(self) -> int:
        """Tokens of prompt and answers that have routes: all but the last, which nothing comes after."""
        return len(self.prompt) + len(self.tokens) - 1


@dataclass(frozen=True)
class Episode(Completion):
    """Several answers as one: lists have the drawn tokens of all turns, `routes` are those of all segments one behind
    the other, and `text` is that of the last answer."""

    segments: tuple[Segment, ...] = ()
    """One, and another each time that the chat template rewrote history."""
    turns: tuple[Mapping[str, Any], ...] = ()
    """The messages behind the prompt."""
    answers: int = 0
    reward: float | None = None
    """The environment's reward."""
    failure: str | None = None
    """The reason why the environment stopped: the episode is left out."""
    errors: int = 0
    """Calls of tools that could not be made, or that raised."""

    @classmethod
    def joined(
        cls,
        number: int,
        sample: int,
        completions: Sequence[Completion],
        text: str,
        finish: Finish,
        segments: Sequence[Segment],
        routes: Sequence[np.ndarray | None],
        *,
        turns: Sequence[Mapping[str, Any]],
        reward: float | None,
        failure: str | None,
        errors: int = 0,
    ) -> Episode:
        """Joins answers, in the order of their drawn tokens, to one; a failure takes the reward away.

        routes: of each segment.
        """
        supports = [support for completion in completions for support in completion.support or ()]
        return cls(
            number,
            sample,
            [token for completion in completions for token in completion.tokens],
            [value for completion in completions for value in completion.logprobs],
            [value for completion in completions for value in completion.drawn],
            supports or None,
            [version for completion in completions for version in completion.versions],
            text,
            finish,
            routes=end_to_end(routes, [segment.read for segment in segments]),
            segments=tuple(segments),
            turns=tuple(turns),
            answers=len(completions),
            reward=None if failure is not None else reward,
            failure=failure,
            errors=errors,
        )

    def own_fields(self) -> dict[str, Any]:
        """The fields that an episode has in addition to a single answer's, as JSON."""
        segments = [[list(each.prompt), list(each.tokens), list(map(int, each.drawn))] for each in self.segments]
        return {
            "segments": segments,
            "turns": [dict(turn) for turn in self.turns],
            "answers": self.answers,
            "reward": self.reward,
            "failure": self.failure,
            "errors": self.errors,
        }

    @classmethod
    def of(cls, completion: Completion, own: Mapping[str, Any]) -> Episode:
        """Restores an episode from its `own_fields` and a completion with the other fields."""
        segments = tuple(
            Segment(tuple(prompt), tuple(tokens), tuple(map(bool, drawn))) for prompt, tokens, drawn in own["segments"]
        )
        shared = {each.name: getattr(completion, each.name) for each in fields(Completion)}
        return cls(**{**shared, **own, "segments": segments, "turns": tuple(own["turns"])})


def episode_metrics(completions: Sequence[Sequence[Completion]]) -> dict[str, float]:
    """Computes metrics of a rollout with an environment: mean turns, the share that had all their turns, failures,
    branches, errors."""
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
