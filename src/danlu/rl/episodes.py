"""Rollouts of several turns: the engine answers, the environment replies, and so on until the episode is over.

All episodes take a turn together: the draws must not depend on how long an environment takes, since rounding depends on
which other sequences are in the batch. Every process draws; the first asks the environment, and sends its replies to
the others. Asynchronous rollouts have `episode_engine.py` in place of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from danlu.data.prompts import Prompt
from danlu.inference.episode import Episode
from danlu.inference.request import Completion, Request
from danlu.parallel.comm import Group
from danlu.parallel.phase import PHASE
from danlu.parallel.process_group import from_first_untimed
from danlu.rl.open_episode import EpisodeRules, OpenEpisode

if TYPE_CHECKING:
    from danlu.rewards.environments.workers import EnvironmentWorkers


@dataclass
class Episodes:
    """Has requests answered in several turns; all processes make the same calls.

    Args:
        environments: asked by the first process alone.
    """

    environments: EnvironmentWorkers
    rules: EpisodeRules
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
            OpenEpisode(self.rules, request, sample, prompt)
            for request, prompt in zip(requests, prompts, strict=False)
            for sample in range(request.samples)
        ]
        self._reply(episodes)
        while open_ := [episode for episode in episodes if episode.is_open]:
            PHASE.begin("rollout")
            asked = [episode.next_request() for episode in open_]
            for episode, request, completion in zip(open_, asked, generate(asked), strict=True):
                assert completion.number == request.number, "answers come in the order of requests"
                episode.take_answer(completion)
            self._reply([episode for episode in open_ if episode.is_open])
        from_first_untimed(self.world, self.environments.end_episodes, "environments")
        return [episode.episode() for episode in episodes]

    def close(self) -> None:
        """Closes the environments."""
        self.environments.close()

    def _reply(self, episodes: Sequence[OpenEpisode]) -> None:
        """Asks the environments of these episodes, and continues the episodes with the replies."""
        if not episodes:
            return
        PHASE.begin("environments")
        calls = [episode.call for episode in episodes]
        replies = from_first_untimed(self.world, lambda: self.environments.replies(calls), "environments")
        for episode, reply in zip(episodes, replies, strict=True):
            episode.take_reply(reply)
