"""Rollouts of agents: programs of the user that ask the policy over HTTP, any number of times and about anything.

An agent runs for each answer to a prompt. All running agents ask, or end, before any is answered: so the batch that is
computed follows from the agents' questions, and not from how long they take. Every process draws; the first alone has
the endpoint and the agents, and sends the questions to the others.
"""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from danlu.core.errors import DataError
from danlu.data.prompts import Prompt
from danlu.inference.episode import Episode, Segment
from danlu.inference.request import Completion, Finish, Request
from danlu.parallel.comm import Group
from danlu.parallel.phase import PHASE
from danlu.parallel.process_group import from_first_untimed
from danlu.recipe.sections import AgentSection
from danlu.rewards.environments.agent_processes import AgentProcesses
from danlu.rewards.environments.agents import AgentCall, AgentResult
from danlu.rewards.environments.protocol import EpisodeKey
from danlu.rl.agent_conversations import AgentConversations, Question
from danlu.rl.open_episode import TURN_NUMBERS, environment_seed
from danlu.rl.turn_rendering import TurnRenderer
from danlu.serving.agent_endpoint import AgentEndpoint, AgentRequest
from danlu.serving.openai_api import ApiError

AT_ONCE_NUMBERS = 1 << 53
"""Requests of one agent that are answered together have its number and this times their place."""
_LONGEST_WAIT_S = 0.5


@dataclass(eq=False)
class _Asked:
    """A question on its way through the engine."""

    http: AgentRequest
    question: Question
    request: Request


@dataclass(eq=False)
class _Open:
    """An episode of the present rollout."""

    number: int
    sample: int
    prompt: Prompt
    first: Request
    conversations: AgentConversations
    api_key: str = ""
    deadline: float = math.inf
    """The `time.monotonic` by which the agent has to ask or to end."""
    waiting: list[AgentRequest] = field(default_factory=list)
    """The agent's requests that were not yet read."""
    asked: list[_Asked] = field(default_factory=list)
    cut: Finish | None = None
    """The reason why its questions are refused; None while they are answered."""
    result: AgentResult | None = None
    """Once it has ended."""

    @property
    def key(self) -> EpisodeKey:
        return self.number, self.sample


@dataclass
class AgentEpisodes:
    """Has requests answered by way of agents; all processes make the same calls.

    Args:
        agents: the programs, on the first process alone.
        endpoint: where they ask, on the first process alone.
        renderer: of their conversations.
        section: how many run at a time, how long they may take, and how many answers each gets.
        max_length: tokens of a conversation, answer included.
        seed: of the run; agents have one that follows from it and from the number of the prompt.
    """

    agents: AgentProcesses
    endpoint: AgentEndpoint
    renderer: TurnRenderer
    section: AgentSection
    max_length: int
    seed: int
    world: Group
    _episodes: dict[EpisodeKey, _Open] = field(default_factory=dict)
    _to_begin: list[_Open] = field(default_factory=list)

    def answer(
        self,
        generate: Callable[[Sequence[Request]], list[Completion]],
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
    ) -> list[Episode]:
        """The episodes of requests, each of one of the prompts in order, by request and sample.

        generate: the engine's.
        """
        self._episodes = {
            (request.number, sample): _Open(request.number, sample, prompt, request, AgentConversations(self.renderer))
            for request, prompt in zip(requests, prompts, strict=False)
            for sample in range(request.samples)
        }
        self._to_begin = list(self._episodes.values())
        while asked := from_first_untimed(self.world, self._next_requests, "agents"):
            PHASE.begin("rollout")
            self._deliver(generate(asked))
        return from_first_untimed(
            self.world, lambda: [self._episode(episode) for episode in self._episodes.values()], "agents"
        )

    def close(self) -> None:
        """Ends the agents and their endpoint."""
        self.agents.close()
        self.endpoint.close()

    # -- on the first process ------------------------------------------------------------------------------------------

    def _next_requests(self) -> list[Request]:
        """Collects the next requests of all running agents. Empty when all have ended."""
        PHASE.begin("agents")
        self.endpoint.start()
        try:
            while True:
                self._wait()
                asking = [episode for episode in self._episodes.values() if episode.waiting]
                for episode in asking:
                    for http in sorted(episode.waiting, key=lambda each: each.content):
                        self._ask(episode, http)
                    episode.waiting.clear()
                if not self._thinking:
                    break
        except BaseException:  # Ctrl-C, above all
            self.agents.close()
            raise
        return [asked.request for episode in self._episodes.values() for asked in episode.asked]

    @property
    def _running(self) -> list[_Open]:
        """Agents that have begun and not ended."""
        return [episode for episode in self._episodes.values() if episode.api_key and episode.result is None]

    @property
    def _thinking(self) -> list[_Open]:
        """Those that wait for no answer."""
        return [episode for episode in self._running if not (episode.waiting or episode.asked)]

    def _begin_agents(self) -> None:
        """Begins as many as may run at a time, in the order of the prompts."""
        while self._to_begin and len(self._running) < self.section.at_once:
            episode = self._to_begin.pop(0)
            episode.api_key = self.endpoint.open(episode.key)
            try:
                messages = self.renderer.prompt_messages(episode.prompt)
            except DataError as error:
                self._end(episode, AgentResult(failure=str(error)))
                continue
            self.agents.begin(
                AgentCall(
                    episode.key,
                    episode.prompt.row,
                    messages,
                    environment_seed(self.seed, episode.number),
                    self.endpoint.base_url,
                    episode.api_key,
                )
            )
            episode.deadline = time.monotonic() + self.section.timeout_s

    def _wait(self) -> None:
        """Waits until each running agent has asked or ended; others begin in the place of those that ended, and those
        that take too long are ended."""
        self._begin_agents()
        while self._thinking:
            with selectors.DefaultSelector() as selector:
                self.endpoint.register(selector)
                self.agents.register(selector)
                due = min((episode.deadline for episode in self._thinking), default=math.inf)
                selector.select(max(0.0, min(_LONGEST_WAIT_S, due - time.monotonic())))
            # Ends first: what an agent asked before it ended has come before, and nobody waits for it.
            results = self.agents.results()
            for http in self.endpoint.take():
                episode = self._episodes.get(http.key)
                if episode is not None and episode.result is None:
                    episode.waiting.append(http)
            for key, result in results.items():
                self._end(self._episodes[key], result)
            for episode in self._running:
                episode.waiting = [http for http in episode.waiting if not http.has_left]
            now = time.monotonic()
            for episode in [each for each in self._thinking if now > each.deadline]:
                self.agents.end(episode.key)
                self._end(
                    episode, AgentResult(failure=f"it neither asked nor ended within {self.section.timeout_s:g} s")
                )
            self._begin_agents()

    def _end(self, episode: _Open, result: AgentResult) -> None:
        episode.result = result
        episode.waiting.clear()
        self.endpoint.shut(episode.api_key)

    def _ask(self, episode: _Open, http: AgentRequest) -> None:
        """Makes a question a request of the engine, or refuses it."""
        answers = len(episode.conversations.answered) + len(episode.asked)
        try:
            if answers >= self.section.max_turns:
                episode.cut = episode.cut or "turns"
                raise ApiError(
                    f"the agent has had its {self.section.max_turns} answers (environment.max_turns)",
                    code="out_of_turns",
                )
            question = self._question(episode, http)
        except ApiError as error:
            self.endpoint.refuse(http, error)
            episode.deadline = time.monotonic() + self.section.timeout_s
            return
        episode.asked.append(_Asked(http, question, self._request(episode, http, question)))

    def _question(self, episode: _Open, http: AgentRequest) -> Question:
        """Encodes an agent's request as a question.

        Raises ApiError for a request that the chat template refuses, and where the conversation has no room left.
        """
        if http.tools and not self.renderer.tokenizer.template(tools=True).takes_tools:
            raise ApiError(
                "tools: the chat template shows the policy no tools; leave them out, or train with one that does "
                "(`model.chat_template`, `danlu recipes templates`)",
                param="tools",
            )
        try:
            question = episode.conversations.ask(http.messages, http.tools)
        except DataError as error:
            raise ApiError(str(error), param="messages") from None
        if len(question.prompt) >= self.max_length:
            episode.cut = episode.cut or "length"
            episode.conversations.take_back(question)
            raise ApiError(
                f"messages: {len(question.prompt)} tokens, and a conversation has {self.max_length} with its answers "
                "(data.max_length)",
                param="messages",
                code="context_length_exceeded",
            )
        return question

    def _request(self, episode: _Open, http: AgentRequest, question: Question) -> Request:
        first, body = episode.first, http.body
        room = self.max_length - len(question.prompt)
        return replace(
            first,
            number=episode.number + (episode.sample + 1) * TURN_NUMBERS + len(episode.asked) * AT_ONCE_NUMBERS,
            prompt=question.prompt,
            samples=1,
            max_new_tokens=min(first.max_new_tokens, body.max_new_tokens or room, room),
            stop_strings=tuple(dict.fromkeys((*first.stop_strings, *body.stop))),
            draw_number=question.draw_number(first.random_number, episode.prompt.tokens),
            draw_sample=episode.sample,
            rotary_length=self.max_length,
        )

    def _deliver(self, completions: Sequence[Completion]) -> None:
        """Sends answers to the agents that asked for them, and takes them into their conversations."""
        answers = {completion.number: completion for completion in completions}
        for episode in self._episodes.values():
            for asked in episode.asked:
                completion = answers[asked.request.number]
                if completion.finish == "abort":
                    episode.conversations.take_back(asked.question)
                    self.endpoint.refuse(asked.http, ApiError("the answer was taken back", status=503))
                elif asked.http.has_left or episode.result is not None:
                    episode.conversations.take_back(asked.question)
                else:
                    reply = self.endpoint.answer(asked.http, asked.request, completion)
                    episode.conversations.answer(asked.question, completion, reply)
            if episode.asked:
                episode.asked.clear()
                episode.deadline = time.monotonic() + self.section.timeout_s

    def _episode(self, episode: _Open) -> Episode:
        """Joins an agent's questions and answers to one episode."""
        assert episode.result is not None, "all agents have ended"
        answered = episode.conversations.answered
        segments, completions = episode.conversations.segments()
        failure = self._failure(episode, segments)
        if not segments:  # a branch has a token at least
            segments = [Segment(episode.prompt.tokens, episode.prompt.tokens[-1:], (False,))]
        reward = episode.result.reward
        if reward is None and episode.cut is not None and self.section.gives_reward:
            reward = 0.0
        finish: Finish = "abort"
        if failure is None:
            finish = episode.cut or answered[-1].completion.finish
        return Episode.joined(
            *episode.key,
            completions,
            answered[-1].completion.text if answered else "",
            finish,
            segments,
            episode.conversations.routes() or [None],
            turns=answered[-1].dialogue.turns if answered else (),
            reward=reward,
            failure=failure,
        )

    def _failure(self, episode: _Open, segments: Sequence[Segment]) -> str | None:
        """Returns why an episode is left out; None where it is kept."""
        result = episode.result
        assert result is not None, "it has ended"
        if result.failure is not None and episode.cut is None:  # what it does when it is refused is not held against it
            return result.failure
        if not segments:
            return "it ended without an answer of the policy"
        if any(segment.prompt[0] != episode.prompt.tokens[0] for segment in segments):
            return (
                "its conversation begins with another token than the row's prompt, so both cannot share a tree: the "
                "chat template writes the first role without a token before it"
            )
        return None
