"""The end of an answer, and the part of its text that can be shown while it is still being generated.

One character can be encoded in several tokens, and a stop string can begin in one token and end in another. So text is
withheld until no later token can change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, without special tokens. Bytes that are not (yet) a character come out as U+FFFD."""

# Prompt tokens decoded together with the first new one, so that a tokenizer which treats the start of a text in its own
# way (dropping a leading space) does not take the answer for a start.
CONTEXT = 8


class Detokenizer:
    """Decodes tokens one by one to text in whole characters; joined they are the text of all tokens after `context`."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context[-CONTEXT:])
        self._shown_count = len(self._tokens)  # tokens with text that has been returned
        self._shown = decode(self._tokens) if self._tokens else ""
        if "\ufffd" in self._shown:  # cut within a character, or the prompt itself ends within one
            self._tokens, self._shown_count = list(context), 0
            self._shown = decode(self._tokens).rstrip("\ufffd")

    def push(self, token: int) -> str:
        """Takes the next token; returns the text that it completes, which may be empty."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        # U+FFFD at the end may be the first bytes of a character, and the others are still to come.
        return "" if text.endswith("\ufffd") else self._show(text)

    def flush(self) -> str:
        """The rest of the text when no token follows; an incomplete character as U+FFFD."""
        return self._show(self._decode(self._tokens)) if self._tokens else ""

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        if new:
            # The tokens of this text become the context of the next. The list is cut nowhere else: tokenizers with byte
            # fallback decode a run of bytes as a whole, and a run cut within a character would never decode to it.
            self._tokens = self._tokens[self._shown_count :]
            self._shown_count = len(self._tokens)
            self._shown = self._decode(self._tokens)
        return new


class StopStrings:
    """Withholds text that may be the beginning of a stop string, and ends before the first that is complete."""

    def __init__(self, strings: Sequence[str], *, shows_stop: bool = False) -> None:
        """shows_stop: whether the stop string itself is shown."""
        assert all(strings), "an empty stop string would stop before the first character"
        self._strings, self._shows_stop = tuple(strings), shows_stop
        self._withheld = ""
        self.matched = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Returns the text that can be shown: up to a complete stop string, or up to a possible beginning of one.

        may_stop: whether the answer may end here; else all of the text is shown.
        """
        if not self._strings or not may_stop:
            return self.flush() + text
        text = self._withheld + text
        places = [(start, string) for string in self._strings if (start := text.find(string)) >= 0]
        if places:
            self.matched, self._withheld = True, ""
            start, string = min(places)
            return text[: start + len(string) if self._shows_stop else start]
        shown = len(text) - max(_overlap(text, string) for string in self._strings)
        self._withheld = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text that was withheld, when no more follows."""
        withheld, self._withheld = self._withheld, ""
        return withheld


def _overlap(text: str, string: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `string`, but not all of it."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)


class TextStream:
    """The text of one answer as it grows: in whole characters, and up to the first stop string."""

    def __init__(
        self,
        decode: Decode,
        stop_strings: Sequence[str] = (),
        context: Sequence[int] = (),
        *,
        shows_stop: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(decode, context)
        self._stop = StopStrings(stop_strings, shows_stop=shows_stop)
        self.text = ""  # all that was returned so far

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Takes the next token; returns the new text that can be shown. may_stop: see `StopStrings.push`."""
        return self._show(self._stop.push(self._detokenizer.push(token), may_stop=may_stop))

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
        return self._stop.matched
