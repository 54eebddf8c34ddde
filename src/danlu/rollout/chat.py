"""A conversation with a model: turns, their history, and a cache that is read again instead of computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
"""Messages (role, content) to tokens, up to the place where the assistant begins to speak."""


class Conversation:
    """Multi-turn chat. The cache outlives a turn: of each new prompt only what differs from the last one is read.

    Nothing is assumed about the template: after every turn the whole history is rendered anew, and the cache is kept as
    far as the tokens are the same. A template that rewrites earlier turns costs time, never correctness.
    """

    def __init__(
        self,
        model: Decoder,
        render: Render,
        decode: Decode,
        options: SamplingOptions,
        stopping: Stopping,
        *,
        stop_strings: Sequence[str] = (),
        system: str | None = None,
        dtype: torch.dtype | None = None,
        virtual_token_ids: Sequence[int] = (),
    ) -> None:
        self.messages: list[dict[str, str]] = []  # user and assistant in turn, without the system prompt
        self.system = system
        self.prefilled = 0  # tokens the last turn had to read; the rest of its prompt was in the cache
        self._model = model
        self._render = render
        self._decode = decode
        self._options = options
        self._stopping = stopping
        self._stop_strings = tuple(stop_strings)
        self._dtype = dtype
        self._virtual_token_ids = tuple(virtual_token_ids)  # what the model's adapters put before every prompt
        self._cache = KVCache()
        self._cached: list[int] = []  # the tokens whose keys and values are in the cache
        self._read_length = 0  # of the prompt that was read into the cache last
        self._asked = 0  # every turn draws its own random numbers, also the same one asked again

    def ask(self, text: str, on_text: Callable[[str], None] | None = None) -> Completion:
        """The answer to a user's turn, handed to `on_text` piece by piece as it is written.

        After KeyboardInterrupt the turn stays in the history with what was said so far, unless nothing was; after an
        error it is left out. Raises DataError when the conversation no longer fits the model's context.
        """
        question = {"role": "user", "content": text}
        rendered = self._render([*self._preamble(), *self.messages, question])
        prompt = [*self._virtual_token_ids, *rendered]
        self._check_room(len(prompt))
        answer = Answer(self._asked, len(prompt), TextStream(self._decode, self._stop_strings))
        self._asked += 1
        said: list[str] = []

        def on_token(sample: int, token: int, piece: str) -> None:
            said.append(piece)
            if on_text is not None and piece:
                on_text(piece)

        try:
            with torch.inference_mode():
                logits = self._read(prompt)
                grow(
                    self._model, self._cache, logits, [answer], [rendered],
                    self._options, self._stopping, on_token, self._dtype,
                )  # fmt: skip
        except KeyboardInterrupt:
            if any(said):
                self.messages += [question, {"role": "assistant", "content": "".join(said)}]
            raise
        finally:
            if answer.tokens:  # the newest token was chosen, but its keys and values were not made
                self._cached = prompt + answer.tokens[:-1]
        completion = answer.completion()
        self.messages += [question, {"role": "assistant", "content": completion.text}]
        return completion

    def model_changed(self, virtual_token_ids: Sequence[int] = ()) -> None:
        """Empties the cache after adapters were switched; from now on prompts begin with `virtual_token_ids`."""
        self._virtual_token_ids = tuple(virtual_token_ids)
        self._cache = KVCache()
        self._cached = []

    def tokenizer_changed(
        self, render: Render, decode: Decode, stopping: Stopping, stop_strings: Sequence[str] = ()
    ) -> None:
        """After adapters were switched that have words of their own: the turns stay, and are rendered by these."""
        self._render, self._decode, self._stopping = render, decode, stopping
        self._stop_strings = tuple(stop_strings)

    def undo(self) -> bool:
        """Takes the last turn back, question and answer. False if there is none."""
        taken = self.messages[-2:]
        self.messages = self.messages[:-2]
        return bool(taken)

    def reset(self) -> None:
        """Forgets every turn; the system prompt stays."""
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
        """Brings the cache to `prompt`; logits [1, V] after its last token."""
        kept = 0
        # Where frequencies go by the length, keys that an earlier turn left are those of another length.
        longest = max(len(prompt), self._read_length)
        cached = [] if rotated_by_length(self._model.config, longest) else self._cached
        # The last token is always read: its logits are what the answer starts from.
        for old, new in zip(cached, prompt[:-1], strict=False):
            if old != new:
                break
            kept += 1
        self._cache.truncate(0, kept)
        self._cached = prompt[:kept]
        self._read_length = len(prompt)
        self.prefilled = len(prompt) - kept
        logits = prefill(self._model, self._cache, [prompt[kept:]], self._dtype)
        self._cached = list(prompt)
        return logits
