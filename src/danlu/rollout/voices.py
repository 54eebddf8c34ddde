"""Who can speak in a chat: a base, and each adapter over it with the tokenizer and template it was trained with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from danlu.errors import DataError
from danlu.rollout.finding import Found, speaking_names, words_of
from danlu.rollout.generate import Stopping
from danlu.rollout.opening import OpenModel, open_wording, stops_of
from danlu.rollout.wording import Wording

BASE = "none"
"""What the base alone is called."""


@dataclass(frozen=True)
class Voice:
    """The base or an adapter while it speaks."""

    name: str
    wording: Wording
    stop_ids: frozenset[int]
    before: tuple[int, ...]
    """Tokens that its prompts begin with."""

    def stopping(self, stops: Sequence[str], max_new_tokens: int, context: int) -> tuple[Stopping, list[str]]:
        """What ends its answers, and which of the texts `stops` that leaves to be looked for in them."""
        silent, texts = self.wording.split_stops(stops)
        return Stopping(max_new_tokens, context, self.stop_ids | silent), texts


class Voices:
    """The voices of an opened model."""

    def __init__(self, found: Found, opened: OpenModel, chat_template: Path | None = None) -> None:
        self._found = found
        self._opened = opened
        self._chat_template = chat_template
        self._wordings = {found.words: opened.wording}
        self.adapters = tuple(speaking_names(found.stacks))
        """Names, in the order in which they were given."""
        self.now = self.adapters[0] if self.adapters else BASE

    def switch(self, name: str) -> Voice:
        """Makes an adapter active, or with `none` the base alone.

        Raises DataError for a name that is not there, and for one that has no chat template; nothing has changed then.
        """
        if name not in (BASE, *self.adapters):
            known = ", ".join(self.adapters)
            raise DataError(
                f"{name}: no such adapter; there are {known} and {BASE}"
                if known
                else f"{name}: no such adapter; there are none. Start with --adapter PATH"
            )
        number = None if name == BASE else self.adapters.index(name)
        folder, wording = self._words(number)
        if self._opened.stacks is not None:
            self._opened.stacks.use(number)
        self.now = name
        stop_ids = stops_of(self._opened.model, wording, self._found.folder, folder)
        return Voice(name, wording, stop_ids, self._opened.before)

    def _words(self, number: int | None) -> tuple[Path, Wording]:
        problem: DataError | None = None
        for folder in self._words_folders(number):
            try:
                wording = self._wording(folder)
                wording.require_chat_template()
            except DataError as error:
                problem = problem or error
            else:
                return folder, wording
        assert problem is not None, "there is always a folder to look at"
        raise problem

    def _words_folders(self, number: int | None) -> Iterator[Path]:
        """Where the words are looked for; a base that was never taught to chat borrows those of its adapters."""
        if number is not None:
            yield words_of(self._found.stacks[number], self._found.folder)
            return
        yield self._found.folder
        yield from (words_of(stack, self._found.folder) for stack in self._found.stacks)

    def _wording(self, folder: Path) -> Wording:
        if folder not in self._wordings:
            self._wordings[folder] = open_wording(folder, self._chat_template, model=self._found.folder)
        return self._wordings[folder]
