"""When an answer ends, and which part of its text is safe to show while it is still being written.

A token is not a piece of text: one character can be spread over several tokens, and a stop string can begin in one and
end in another. So text is held back until nothing that follows can change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, without special tokens. Bytes that are not (yet) a character come out as U+FFFD."""

# Prompt tokens decoded together with the first new one, so that a tokenizer which treats the start of a text in its own
# way (dropping a leading space) does not take the answer for a start.
CONTEXT = 8


class Detokenizer:
    """Token by token to text, never half a character; the pieces joined are the text of all tokens after `context`."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context[-CONTEXT:])
        self._done = len(self._tokens)  # tokens that may be forgotten when the next piece is shown
        self._shown = decode(self._tokens) if self._tokens else ""
        if "\ufffd" in self._shown:  # cut within a character, or the prompt itself ends within one
            self._tokens, self._done = list(context), 0
            self._shown = decode(self._tokens).rstrip("\ufffd")

    def push(self, token: int) -> str:
        """The text that is certain now."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        # U+FFFD at the end may be the first bytes of a character whose others are still to come.
        return "" if text.endswith("\ufffd") else self._show(text)

    def flush(self) -> str:
        """What is left when no token follows, broken characters included (as U+FFFD)."""
        return self._show(self._decode(self._tokens)) if self._tokens else ""

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        if new:
            # The tokens of this piece are the context of the next. Cut only here: tokenizers with byte fallback decode
            # a run of bytes as a whole, and one cut within a character would come out broken for good.
            self._tokens = self._tokens[self._done :]
            self._done = len(self._tokens)
            self._shown = self._decode(self._tokens)
        return new


class StopStrings:
    """Passes text on, except what may be the beginning of a stop string, and ends at the first one that is complete."""

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings), "an empty stop string would stop before the first character"
        self._strings = tuple(strings)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that can be shown: up to a complete stop string, or up to what might become one."""
        if not self._strings:
            return text
        text = self._held + text
        starts = [start for start in (text.find(string) for string in self._strings) if start >= 0]
        if starts:
            self.found, self._held = True, ""
            return text[: min(starts)]
        held = max(_overlap(text, string) for string in self._strings)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, when nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string` without completing it."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)


class TextStream:
    """The text of one answer as it grows: whole characters, nothing past a stop string, nothing shown too early."""

    def __init__(self, decode: Decode, stop_strings: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(decode, context)
        self._stop = StopStrings(stop_strings)
        self.text = ""  # all that was shown so far

    def push(self, token: int) -> str:
        """The new text that is safe to show."""
        return self._show(self._stop.push(self._detokenizer.push(token)))

    def close(self) -> str:
        """The rest, when the answer is over."""
        if self.stopped:
            return ""
        rest = self._stop.push(self._detokenizer.flush())
        return self._show(rest if self.stopped else rest + self._stop.flush())

    def _show(self, text: str) -> str:
        self.text += text
        return text

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._stop.found
