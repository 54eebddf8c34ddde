"""The conversations of an agent as token ids: each question continues the longest history that it repeats.

An agent sends its whole history with each question, as text. A history that was answered before is recognized by its
messages, and continues from the very ids that were drawn; only new messages are encoded. A question that changes an
earlier message, asks one again, or has its history rewritten by the chat template, begins a branch.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from danlu.inference.episode import Segment
from danlu.inference.request import Completion
from danlu.rl.turn_rendering import Dialogue, TurnRenderer

if TYPE_CHECKING:
    import numpy as np

Message = Mapping[str, Any]
"""A message as chat templates see it: arguments of tool calls are objects."""


@dataclass(eq=False)
class AnsweredQuestion:
    """An answer of the policy, in the tree of an agent's conversations."""

    parent: AnsweredQuestion | None
    """The answer that the question continues; None where the question was encoded whole."""
    prompt: tuple[int, ...]
    """All ids before the answer."""
    completion: Completion
    dialogue: Dialogue
    """The conversation up to the end of the answer."""


@dataclass(eq=False)
class Question:
    """A question as token ids that the policy continues."""

    messages: tuple[Message, ...]
    parent: AnsweredQuestion | None
    dialogue: Dialogue
    repeats: int
    """The number of earlier questions with the same ids."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """The ids before the answer."""
        return self.dialogue.ids

    def draw_number(self, number: int, row_prompt: Sequence[int]) -> int:
        """Returns the number, below 2^63, that seeds the random draws of the answer. It follows from the request's
        number and the question's ids, so that the order of an agent's questions makes no difference.

        The row's own prompt, asked for the first time, has the draws of an answer without an agent.
        """
        if self.repeats == 0 and self.prompt == tuple(row_prompt):
            return number
        key = hashlib.blake2b(f"{number}/{self.repeats}/".encode(), digest_size=8)
        key.update(",".join(map(str, self.prompt)).encode())
        return int.from_bytes(key.digest(), "big") >> 1


@dataclass
class AgentConversations:
    """All conversations of one agent, answered by one policy."""

    renderer: TurnRenderer
    answered: list[AnsweredQuestion] = field(default_factory=list)
    """The answered questions, in the order in which they were answered."""
    _histories: dict[tuple[str, ...], AnsweredQuestion] = field(default_factory=dict)
    _asked: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def ask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Question:
        """A question as ids. Raises DataError where the chat template refuses it."""
        parent, known = self._longest_known(messages)
        dialogue = None
        if parent is not None:
            dialogue = replace(parent.dialogue, turns=list(parent.dialogue.turns))
            if self.renderer.extend(dialogue, messages[known:], tools):
                parent = None
        if dialogue is None:
            dialogue = self.renderer.open(messages, tools)
        question = Question(tuple(messages), parent, dialogue, self._asked[dialogue.ids])
        self._asked[dialogue.ids] += 1
        return question

    def take_back(self, question: Question) -> None:
        """Forgets a question that nobody received the answer of."""
        self._asked[question.prompt] -= 1

    def answer(self, question: Question, completion: Completion, reply: Message) -> None:
        """Takes an answer. reply: the message that the agent was sent, by which it will be known."""
        prompt = question.prompt
        self.renderer.answered(question.dialogue, completion.tokens)
        answered = AnsweredQuestion(question.parent, prompt, completion, question.dialogue)
        self.answered.append(answered)
        self._histories[tuple(message_key(message) for message in (*question.messages, reply))] = answered

    def segments(self) -> tuple[list[Segment], list[Completion]]:
        """The conversations as runs of ids, one for each branch, and the answers in the order of their drawn tokens.

        The first answer to a history continues its run; another one begins a branch, with the history as its prompt.
        """
        runs = self._runs()
        return [_segment(run) for run in runs], [answered.completion for run in runs for answered in run]

    def routes(self) -> list[np.ndarray | None]:
        """Returns the routes of each of the `segments`: those of its last answer, which include those of all earlier
        ones."""
        return [run[-1].completion.routes for run in self._runs()]

    def _runs(self) -> list[list[AnsweredQuestion]]:
        runs: list[list[AnsweredQuestion]] = []
        ending: dict[AnsweredQuestion, list[AnsweredQuestion]] = {}
        for answered in self.answered:
            run = None if answered.parent is None else ending.pop(answered.parent, None)
            if run is None:
                runs.append(run := [])
            run.append(answered)
            ending[answered] = run
        return runs

    def _longest_known(self, messages: Sequence[Message]) -> tuple[AnsweredQuestion | None, int]:
        """Returns the answer that the longest known history ends with, and the number of its messages."""
        keys = [message_key(message) for message in messages]
        for length in range(len(messages) - 1, 0, -1):
            if (answered := self._histories.get(tuple(keys[:length]))) is not None:
                return answered, length
        return None, 0


def message_key(message: Message) -> str:
    """The key by which a message is recognized.

    Of an assistant's message only the text, without spaces around it, and the calls count: clients trim answers, leave
    out the numbers of calls or add keys of their own.
    """
    if message["role"] != "assistant":
        return json.dumps(message, sort_keys=True, ensure_ascii=False)
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    called = [[call.get("name"), call.get("arguments")] for call in calls]
    content = str(message.get("content") or "").strip()
    return json.dumps(["assistant", content, called], sort_keys=True, ensure_ascii=False)


def _segment(run: Sequence[AnsweredQuestion]) -> Segment:
    tokens: list[int] = []
    drawn: list[bool] = []
    start = run[0].prompt
    for answered in run:
        between = answered.prompt[len(start) + len(tokens) :]
        tokens += [*between, *answered.completion.tokens]
        drawn += [*[False] * len(between), *[True] * len(answered.completion.tokens)]
    return Segment(start, tuple(tokens), tuple(drawn))
