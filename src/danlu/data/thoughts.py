"""The thought at the beginning of an answer, apart from what is said behind it, whole or as a stream."""

from __future__ import annotations

from typing import NamedTuple

THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<|channel>thought": "<channel|>"}
"""The marks that open a thought, with those that end it; the last are Gemma 4's."""


def opened_thought(prompt: str) -> str | None:
    """The mark at the end of a prompt that opens a thought, with which the answer goes on; None where there is none."""
    return next((mark for mark in THOUGHTS if prompt.rstrip().endswith(mark)), None)


class Said(NamedTuple):
    """New text of an answer."""

    reasoning: str
    content: str


class ThoughtReader:
    """Divides an answer as it comes. A thought has to be the first that is written; white space around it is dropped.

    opened: the mark with which the prompt has opened a thought.
    """

    def __init__(self, opened: str | None = None) -> None:
        self._end = None if opened is None else THOUGHTS[opened]
        self._rest = ""
        self._is_over = False  # what comes is content, from its first letter on
        self._has_content = self._has_thought = False

    @property
    def in_thought(self) -> bool:
        """Whether the text so far ends within a thought."""
        return self._end is not None and not self._is_over

    def feed(self, text: str) -> Said:
        """Takes more of the answer; returns what is certain now."""
        self._rest += text
        return self._read(ended=False)

    def finish(self) -> Said:
        """Ends the answer; returns the rest."""
        return self._read(ended=True)

    def _read(self, *, ended: bool) -> Said:
        if self._is_over:
            return Said("", self._take_content())
        if self._end is None:
            begun = self._rest.lstrip()
            mark = next((mark for mark in THOUGHTS if begun.startswith(mark)), None)
            if mark is None:
                if not ended and any(mark.startswith(begun) for mark in THOUGHTS):
                    return Said("", "")
                self._is_over = self._has_content = True
                return Said("", self._take_content())
            self._end, self._rest = THOUGHTS[mark], begun.removeprefix(mark)
        thought, end, behind = self._rest.partition(self._end)
        if end:
            self._is_over, self._rest = True, behind
            return Said(self._shown(thought.rstrip()), self._take_content())
        keep = 0 if ended else self._withheld()
        shown, self._rest = self._rest[: len(self._rest) - keep], self._rest[len(self._rest) - keep :]
        return Said(self._shown(shown), "")

    def _shown(self, thought: str) -> str:
        if not self._has_thought:
            thought = thought.lstrip()
            self._has_thought = bool(thought)
        return thought

    def _withheld(self) -> int:
        """The number of last characters that may be white space before the end of the thought, or its end's mark."""
        assert self._end is not None, "a thought has an end"
        for size in range(min(len(self._end) - 1, len(self._rest)), 0, -1):
            if self._end.startswith(self._rest[-size:]):
                break
        else:
            size = 0
        before = self._rest[: len(self._rest) - size]
        return size + len(before) - len(before.rstrip())

    def _take_content(self) -> str:
        text, self._rest = self._rest, ""
        if not self._has_content:
            text = text.lstrip()
            self._has_content = bool(text)
        return text
