"""A conversation with a model: its turns, and a KV cache that is reused from turn to turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from danlu.errors import DataError
from danlu.models.decoder import Decoder
from danlu.models.rope import rotated_by_length
from danlu.rollout.cache import KVCache
from danlu.rollout.generate import Answer, Completion, Stopping, grow, prefill
from danlu.rollout.request import SamplingOptions
from danlu.rollout.stopping import Decode, TextStream

Message = Mapping[str, str]
Render = Callable[[Sequence[Message]], list[int]]
"""From messages (role, content) to tokens, with the generation prompt for the assistant."""


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation becomes a prompt, and what is generated an answer: by a tokenizer, and by adapters."""

    render: Render
    decode: Decode
    stopping: Stopping
    stop_strings: Sequence[str] = ()
    virtual_token_ids: Sequence[int] = ()
    """What every prompt begins with: the virtual tokens of the active adapters."""


class Conversation:
    """Multi-turn chat. The KV cache outlives a turn: of each new prompt only what differs from the last one is read.

    Nothing is assumed about the template: for every turn the whole history is rendered anew, and the cache is kept for
    the common prefix of tokens. A template that rewrites earlier turns costs time, never correctness.
    """

    def __init__(
        self,
        model: Decoder,
        chat_format: ChatFormat,
        options: SamplingOptions,
        *,
        system: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.messages: list[dict[str, str]] = []  # user and assistant in turn, without the system prompt
        self.system = system
        self.prefilled = 0  # tokens of the last prompt that were not in the cache
        self._model = model
        self._format = chat_format
        self._options = options
        self._dtype = dtype
        self._cache = KVCache()
        self._cached: list[int] = []  # the tokens whose keys and values are in the cache
        self._cached_prompt_length = 0  # of the last prompt that was read into the cache
        self._turns_asked = 0  # index of the random numbers: a question that is asked again gets other ones

    def ask(self, text: str, on_text: Callable[[str], None] | None = None) -> Completion:
        """The answer to a user's turn. on_text: called with each new piece of its text as it is generated.

        After KeyboardInterrupt the turn stays in the history with the text so far, unless there is none; after an error
        it is left out. Raises DataError when the conversation no longer fits the model's context.
        """
        question = {"role": "user", "content": text}
        rendered = self._format.render([*self._preamble(), *self.messages, question])
        prompt = [*self._format.virtual_token_ids, *rendered]
        self._check_room(len(prompt))
        stream = TextStream(self._format.decode, self._format.stop_strings)
        answer = Answer(self._turns_asked, len(prompt), stream)
        self._turns_asked += 1
        texts: list[str] = []

        def on_token(sample: int, token: int, text: str) -> None:
            texts.append(text)
            if on_text is not None and text:
                on_text(text)

        try:
            with torch.inference_mode():
                logits = self._read(prompt)
                grow(
                    self._model, self._cache, logits, [answer], [rendered],
                    self._options, self._format.stopping, on_token, self._dtype,
                )  # fmt: skip
        except KeyboardInterrupt:
            if any(texts):
                self.messages += [question, {"role": "assistant", "content": "".join(texts)}]
            raise
        finally:
            if answer.tokens:  # the newest token was sampled, but its keys and values were not computed
                self._cached = prompt + answer.tokens[:-1]
        completion = answer.completion()
        self.messages += [question, {"role": "assistant", "content": completion.text}]
        return completion

    def adapters_changed(self, chat_format: ChatFormat) -> None:
        """After a switch of adapters: the turns stay, and are rendered in their format and read without the cache."""
        self._format = chat_format
        self._cache = KVCache()
        self._cached = []

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

    def _check_room(self, length: int) -> None:
        context = self._model.config.context_length
        if length >= context:
            raise DataError(
                f"the conversation now takes {length} tokens, and the model sees {context} at most (answer included): "
                "take turns back, start over, or ask something shorter"
            )

    def _read(self, prompt: list[int]) -> torch.Tensor:
        """Reads into the cache what it does not have of `prompt`; returns the logits [1, V] after its last token."""
        # Rotary scalings that depend on the length: cached keys were rotated for another one.
        longest = max(len(prompt), self._cached_prompt_length)
        cached = [] if rotated_by_length(self._model.config, longest) else self._cached
        # The last token is always read again: the answer starts from its logits.
        pairs = zip(cached, prompt[:-1], strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._cache.truncate(0, kept)
        self._cached = prompt[:kept]
        self._cached_prompt_length = len(prompt)
        self.prefilled = len(prompt) - kept
        logits = prefill(self._model, self._cache, [prompt[kept:]], self._dtype)
        self._cached = list(prompt)
        return logits
