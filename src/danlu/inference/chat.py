"""A conversation with a model: its turns, asked of a rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from danlu.core.errors import DataError
from danlu.inference.request import Completion, NewToken, OnToken, Request, SamplingOptions
from danlu.inference.stopping import Decode

if TYPE_CHECKING:
    from danlu.inference.embedded import EmbeddedEngine

Message = Mapping[str, str]
Render = Callable[[Sequence[Message]], list[int]]
"""Maps messages (role, content) to tokens, with the generation prompt for the assistant."""


@dataclass(frozen=True)
class ChatFormat:
    """The conversion of a conversation to a prompt, and of tokens to an answer: by a tokenizer, and by an adapter."""

    render: Render
    decode: Decode
    max_new_tokens: int
    context: int
    """The most tokens that the model sees, prompt and answer together."""
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    adapter: str | None = None
    """The adapter's name in requests; None: the adapter that is active in the model."""
    virtual_tokens: int = 0
    """The number of tokens that the adapter puts before every prompt."""


class Conversation:
    """Multi-turn chat. The engine does not compute cached earlier turns again.

    Nothing is assumed about the template: for every turn the whole history is rendered again, and the engine finds its
    cached beginning by the tokens. A template that rewrites earlier turns costs time, never correctness.
    """

    def __init__(
        self, engine: EmbeddedEngine, chat_format: ChatFormat, options: SamplingOptions, *, system: str | None = None
    ) -> None:
        self.messages: list[dict[str, str]] = []  # user and assistant in turn, without the system prompt
        self.system = system
        self._engine = engine
        self._format = chat_format
        self._options = options
        self._turns_asked = 0  # number of the next request: a question that is asked again gets other random numbers

    def ask(self, text: str, on_text: Callable[[str], None] | None = None) -> Completion:
        """The answer to a user's turn. on_text: called with each new piece of its text as it is generated.

        After KeyboardInterrupt the turn stays in the history with the text so far, unless there is none; after an error
        it is left out. Raises DataError when the conversation no longer fits the model's context.
        """
        question = {"role": "user", "content": text}
        request = self._request([*self._preamble(), *self.messages, question])
        texts: list[str] = []

        def on_token(new: NewToken) -> None:
            texts.append(new.text)
            if on_text is not None and new.text:
                on_text(new.text)

        try:
            completion = self._answer(request, on_token)
        except KeyboardInterrupt:
            if any(texts):
                self.messages += [question, {"role": "assistant", "content": "".join(texts)}]
            raise
        self.messages += [question, {"role": "assistant", "content": completion.text}]
        return completion

    def adapter_changed(self, chat_format: ChatFormat) -> None:
        """Goes on with another adapter, in its format: the turns stay."""
        self._format = chat_format

    def undo(self) -> bool:
        """Removes the last turn, question and answer. Returns whether there was one."""
        removed = self.messages[-2:]
        self.messages = self.messages[:-2]
        return bool(removed)

    def reset(self) -> None:
        """Removes every turn; the system prompt stays."""
        self.messages = []

    def _preamble(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _request(self, messages: Sequence[Message]) -> Request:
        chat_format = self._format
        prompt = tuple(chat_format.render(messages))
        if (length := chat_format.virtual_tokens + len(prompt)) >= chat_format.context:
            raise DataError(
                f"the conversation now takes {length} tokens, and the model sees {chat_format.context} at most (answer "
                "included): take turns back, start over, or ask something shorter"
            )
        request = Request(
            self._turns_asked,
            prompt,
            self._options,
            chat_format.max_new_tokens,
            stop_ids=chat_format.stop_ids,
            stop_strings=chat_format.stop_strings,
            adapter=chat_format.adapter,
        )
        self._turns_asked += 1
        return request

    def _answer(self, request: Request, on_token: OnToken) -> Completion:
        """The engine's answer. After an interruption or an error the engine has forgotten the request."""
        self._engine.submit(request, on_token, decode=self._format.decode)
        try:
            while True:
                for completion in self._engine.step():
                    if completion.number == request.number:  # others were interrupted
                        return completion
        except BaseException:
            self._engine.abort(request.number)
            raise
