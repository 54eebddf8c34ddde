"""Adapters that a chat switches between: a base, and each adapter over it with the tokenizer that it was trained
with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.core.errors import DataError
from danlu.inference.chat import ChatFormat
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.inference.engine_adapters import BASE
from danlu.inference.generation_config import end_tokens
from danlu.inference.load_model import LoadedModel, load_chat_tokenizer
from danlu.inference.resolve_model import ResolvedModel, adapter_names, adapter_tokenizer_folder


@dataclass(frozen=True)
class ActiveAdapter:
    """The settings with which the base or an adapter answers while it is active."""

    chat_tokenizer: ChatTokenizer
    stop_ids: frozenset[int]
    adapter: str | None
    """The adapter's name in requests to an engine; None where there is nothing to switch between."""
    virtual_tokens: int
    """The number of virtual tokens that its prompts begin with."""

    def chat_format(self, stops: Sequence[str], max_new_tokens: int, context: int) -> ChatFormat:
        """The format of its conversations. stops: texts that end an answer; one without text is a token."""
        tokenizer = self.chat_tokenizer
        silent, texts = tokenizer.split_stops(stops)
        return ChatFormat(
            tokenizer.encode_chat,
            tokenizer.decode,
            max_new_tokens,
            context,
            self.stop_ids | silent,
            tuple(texts),
            self.adapter,
            self.virtual_tokens,
        )


class ChatAdapters:
    """The adapters of a loaded model that a chat can switch between, the base alone among them."""

    def __init__(
        self,
        resolved: ResolvedModel,
        loaded: LoadedModel,
        chat_template: Path | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._resolved = resolved
        self._loaded = loaded
        self._chat_template = chat_template
        self._template_kwargs = template_kwargs
        self._chat_tokenizers = {resolved.tokenizer_folder: loaded.chat_tokenizer}
        self.adapters = tuple(adapter_names(resolved.stacks))
        """The adapters' names, in the order in which they were given."""
        self.active_name = self.adapters[0] if self.adapters else BASE

    def switch(self, name: str) -> ActiveAdapter:
        """Makes an adapter the one that speaks, or with `none` the base alone.

        Raises DataError for a name that is not there, and for one without a chat template; nothing has changed then.
        """
        active = self.tokenizer_of(name)
        self.active_name = name
        return active

    def tokenizer_of(self, name: str, *, chat: bool = True) -> ActiveAdapter:
        """The tokenizer and stop tokens of an adapter, or with `none` of the base. chat: it has to have a chat
        template.

        Raises DataError for a name that is not there, and for one without the template that it has to have.
        """
        if name not in (BASE, *self.adapters):
            known = f"{', '.join(self.adapters)} and {BASE}" if self.adapters else "none. Start with --adapter PATH"
            raise DataError(f"{name}: no such adapter; there are {known}")
        number = None if name == BASE else self.adapters.index(name)
        folder, chat_tokenizer = self._find_chat_tokenizer(number, chat)
        stop_ids = end_tokens(chat_tokenizer.tokenizer, self._loaded.model.config, self._resolved.folder, folder)
        if (adapters := self._loaded.engine_adapters) is None:
            return ActiveAdapter(chat_tokenizer, stop_ids, None, 0)
        return ActiveAdapter(chat_tokenizer, stop_ids, name, len(adapters.virtual_token_ids(name)))

    def _find_chat_tokenizer(self, number: int | None, chat: bool) -> tuple[Path, ChatTokenizer]:
        """The first of `_tokenizer_folders` with a tokenizer, and it. number: of a stack; None: base.

        chat: one with a chat template.
        """
        problem: DataError | None = None
        for folder in self._tokenizer_folders(number):
            try:
                chat_tokenizer = self._chat_tokenizer(folder)
                if chat:
                    chat_tokenizer.require_chat_template()
            except DataError as error:
                problem = problem or error
            else:
                return folder, chat_tokenizer
        assert problem is not None, "there is always a folder to look at"
        raise problem

    def _tokenizer_folders(self, number: int | None) -> Iterator[Path]:
        """Folders that may hold the tokenizer, best first: a base without a chat template borrows an adapter's."""
        if number is not None:
            yield adapter_tokenizer_folder(self._resolved.stacks[number], self._resolved.folder)
            return
        yield self._resolved.folder
        yield from (adapter_tokenizer_folder(stack, self._resolved.folder) for stack in self._resolved.stacks)

    def _chat_tokenizer(self, folder: Path) -> ChatTokenizer:
        if folder not in self._chat_tokenizers:
            model = self._resolved.folder
            self._chat_tokenizers[folder] = load_chat_tokenizer(
                folder, self._chat_template, self._template_kwargs, model=model
            )
        return self._chat_tokenizers[folder]
