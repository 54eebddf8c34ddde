"""Answers in the harmony format of gpt-oss: thoughts (channel analysis) apart from text, and from calls of tools.

The format is that of github.com/openai/harmony, docs/format.md. Messages to a recipient are calls, and stay as they are
for the reader of calls; of all others the headers are left out.
"""

from __future__ import annotations

from danlu.data.thoughts import Said
from danlu.data.tool_call_forms import (
    HARMONY_CHANNEL,
    HARMONY_END,
    HARMONY_MESSAGE,
    HARMONY_RECIPIENT,
    longest_beginning,
)

ANALYSIS = "<|channel|>analysis"
"""The header of a thought, as chat templates write it."""
_START, _CHANNEL = "<|start|>", "<|channel|>"
_HEADERS = (_START, _CHANNEL, HARMONY_MESSAGE)
"""The beginnings of messages."""
_PROMPT_HEADER = "to="
"""The beginning of an answer that goes on with the header that the prompt has begun."""
_MARKS = (_START, _CHANNEL, "<|end|>", "<|call|>", "<|return|>")


class HarmonyReader:
    """Divides an answer as it comes. Parts of one kind have a line break between them, as with vLLM.

    opened: as `ThoughtReader` has it, of other families.
    """

    def __init__(self, opened: str | None = None) -> None:
        self._rest = ""
        self._kind = ""  # reasoning, content or call, of the message that is open; empty between two
        self._has_begun = False  # anything was read, so no header of the prompt goes on
        self._said: set[str] = set()  # the kinds so far
        self._is_joined = True  # the next text of the message that is open needs no line break before it
        self._new = {"reasoning": "", "content": ""}

    def feed(self, text: str) -> Said:
        """Takes more of the answer; returns what is certain now."""
        self._rest += text
        return self._read(ended=False)

    def finish(self) -> Said:
        """Ends the answer; returns the rest."""
        return self._read(ended=True)

    def _read(self, *, ended: bool) -> Said:
        while self._rest and (self._read_text(ended) if self._kind else self._read_header(ended)):
            pass
        said = Said(**self._new)
        self._new = {"reasoning": "", "content": ""}
        return said

    def _read_header(self, ended: bool) -> bool:
        """Reads up to the text of a message; returns whether there may be more to read."""
        begun = self._rest.lstrip()
        headers = _HEADERS if self._has_begun else (*_HEADERS, _PROMPT_HEADER)
        if not ended and any(header.startswith(begun) for header in headers):
            return False
        if not begun.startswith(headers):
            self._begin("content")  # text that is in no message
            return True
        header, message, behind = self._rest.partition(HARMONY_MESSAGE)
        if not message:
            if ended:  # a header alone says nothing, but one that began no message is text
                self._begin("content")
                self._emit("" if begun.startswith(_HEADERS) else self._rest)
                self._rest = ""
            return False
        channel = HARMONY_CHANNEL.search(header)
        if HARMONY_RECIPIENT.search(header):
            self._begin("call")
            self._emit(header + message)
        else:
            self._begin("reasoning" if channel is not None and channel[1] == "analysis" else "content")
        self._rest = behind
        return True

    def _read_text(self, ended: bool) -> bool:
        """Reads text of the message that is open; returns whether there may be more to read."""
        end = HARMONY_END.search(self._rest)
        header = self._rest.find(_CHANNEL) if self._kind == "content" else -1
        if header >= 0 and (end is None or header < end.start()):  # behind text that is in no message
            self._emit(self._rest[:header])
            self._kind, self._rest = "", self._rest[header:]
            return True
        if end is not None:
            self._emit(self._rest[: end.end() if self._kind == "call" else end.start()])
            self._kind, self._rest = "", self._rest[end.end() :]
            return True
        withheld = 0 if ended else longest_beginning(self._rest, _MARKS)
        size = len(self._rest) - withheld
        self._emit(self._rest[:size])
        self._rest = self._rest[size:]
        return False

    def _begin(self, kind: str) -> None:
        self._kind, self._has_begun, self._is_joined = kind, True, kind not in self._said

    def _emit(self, text: str) -> None:
        if not text:
            return
        column = "reasoning" if self._kind == "reasoning" else "content"
        joined = "" if self._is_joined or self._kind == "call" else "\n"
        self._new[column] += joined + text
        self._said.add(self._kind)
        self._is_joined = True
