"""A tokenizer for generation: prompts and conversations to tokens, answers to text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from danlu.core.errors import DataError
from danlu.data.prompt_encoding import encode_text, encode_utf8
from danlu.data.template_process import template_process
from danlu.data.tokenizer import Tokenizer


class ChatTokenizer:
    """A tokenizer with its chat template, and which tokens end an answer.

    Attributes:
        stop_ids: tokens that end an answer: those that close a turn in the chat template, end-of-text, and those that
            the model's folders name besides.
        silent_ids: tokens that have no text: these, and the beginning-of-text and padding tokens.
    """

    def __init__(self, tokenizer: Tokenizer, end_tokens: Collection[int] = ()) -> None:
        """end_tokens: of the model that answers, see `generation_config.end_tokens`."""
        self.tokenizer = tokenizer
        self.stop_ids = frozenset((*tokenizer.end_of_turn_ids, *end_tokens))
        self.silent_ids = self.stop_ids | {token for token in (tokenizer.bos_id, tokenizer.pad_id) if token is not None}

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of plain text to continue, after the beginning-of-text token where the tokenizer adds one.

        Empty text becomes that token alone, where there is one. Raises DataError where there is none.
        """
        return encode_text(self.tokenizer, text)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The tokens of a conversation by the chat template, with its generation prompt for the assistant.

        tools: that the assistant may call, for templates that tell of them.
        Raises DataError when there is no template, or when it refuses the conversation.
        """
        # The template writes the beginning-of-text token itself.
        return encode_utf8(self.tokenizer, self.render_chat(messages, tools))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        begins_turn: bool = True,
    ) -> str:
        """The text of which `encode_chat` gives the tokens; rendered in a process of its own.

        kwargs: further variables of the chat template. begins_turn: whether it ends with the generation prompt.
        """
        template = self.tokenizer.template(bool(tools))
        return template_process().render(template, messages, tools, prompt=begins_turn, kwargs=kwargs)

    def encode_chat_prompt(self, text: str) -> list[int]:
        """The tokens of one user's turn by the chat template."""
        return self.encode_chat([{"role": "user", "content": text}])

    def require_chat_template(self) -> None:
        """Raises DataError when the tokenizer has no chat template, with advice."""
        try:
            self.tokenizer.template()
        except DataError as error:
            reason = error.args[0].partition(": ")[2].partition(". Name one")[0]  # that advice is for a recipe
            raise DataError(
                f"{self.tokenizer.path}: no chat template that says who speaks ({reason}). Give one with "
                "--chat-template FILE.jinja or NAME (`danlu recipes templates` lists the names), or continue plain "
                "text with `danlu generate --prompt`"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without those that have none (`silent_ids`)."""
        return self.tokenizer.decode([token for token in ids if token not in self.silent_ids])

    def split_stops(self, stops: Sequence[str]) -> tuple[frozenset[int], list[str]]:
        """Splits texts that end an answer into tokens without text (such as "</s>") and texts to be searched for."""
        tokens = {stop: self.tokenizer.encode(stop) for stop in stops}
        silent = {stop: ids[0] for stop, ids in tokens.items() if len(ids) == 1 and ids[0] in self.silent_ids}
        return frozenset(silent.values()), [stop for stop in stops if stop not in silent]
