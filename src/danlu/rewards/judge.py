"""A language model behind an HTTP server as a judge: it sees an answer, and a number is read from its reply.

The server is any that answers POST /chat/completions as OpenAI's does: vLLM, SGLang, llama.cpp, `danlu serve`, OpenAI.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

from danlu.core.errors import ResourceError
from danlu.core.http_client import HTTPClient, post_with_retries
from danlu.core.prompt_template import PromptTemplate
from danlu.rewards.protocol import LONGEST_SHOWN, Explains, JudgedAnswer, Verdict, is_null, shortened

MOST_BYTES = 4 * 2**20
"""The most bytes of a server's reply; a mark takes some hundred, and reasons for it some thousands."""


class NoMark(ResourceError):
    """The judge said something, and no mark is in it."""


@dataclass(frozen=True)
class Judge(Explains):
    """The mark that a model gives to an answer.

    `template` is the user's turn; it may name {prompt}, {completion} and the columns of the row. The mark is the first
    group of `pattern` where it matches last, or without a pattern the last number that is no bound of a scale (3 in
    "3/10"); with `bounds` (low, high) it becomes (mark - low) / (high - low), and a mark outside is none. Thoughts,
    between <think> tags, have no mark.

    Raises (when called):
        ConnectionLost: the server does not answer, after `retries` more attempts.
        RequestRefused: it refuses.
        NoMark: its reply has no mark, or one out of bounds, or was cut off.
    """

    url: str
    model: str
    template: PromptTemplate
    pattern: str | None = None
    bounds: tuple[float, float] | None = None
    max_new_tokens: int = 512
    temperature: float = 0.0
    api_key_variable: str | None = None
    connections: int = 16
    """How many answers `RewardRunner` has judged at a time."""
    timeout_s: float = 60.0
    """The time limit for the server's whole reply to one question."""
    retries: int = 3

    @cached_property
    def client(self) -> HTTPClient:
        """Raises RecipeError for a url that is none, or a key that the environment lacks."""
        return HTTPClient(self.url, self.timeout_s, self.api_key_variable, MOST_BYTES, total_s=self.timeout_s)

    def judge(self, answer: JudgedAnswer) -> Verdict:
        """Returns the mark, with its text and the end of the judge's reply."""
        row = {name: _plain(value) for name, value in answer.row.items()}
        columns = {**row, "prompt": prompt_text(answer.prompt), "completion": answer.text}
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.template.fill(columns)}],
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
        }
        reply = post_with_retries(self.client, "/chat/completions", request, self.retries)
        said = _content(reply, self.url)
        if reply["choices"][0].get("finish_reason") == "length":
            raise NoMark(
                f"{self.url}: what the judge says was cut off (max_new_tokens: {self.max_new_tokens}): {_shown(said)}"
            )
        return self._mark(said)

    def _mark(self, said: str) -> Verdict:
        _, closing, behind = said.rpartition("</think>")
        said = behind if closing else said
        if "<think>" in said:
            raise NoMark(f"{self.url}: the judge's thoughts do not end: {_shown(said)}")
        if self.pattern is None:
            # The last number that is no bound of a scale.
            numbers = re.findall(rf"(?<![\d.]){_NUMBER}", _BOUNDS.sub(" ", _EMPHASIS.sub("", said)))
            text, where = numbers[-1] if numbers else None, "there is no number"
        else:
            matches = list(re.finditer(self.pattern, said, re.DOTALL))
            text = matches[-1].group(1) if matches else None
            where = f"pattern {self.pattern!r} finds {'nothing' if text is None else repr(text)}"
        try:
            mark = float(text or "")
        except ValueError:
            raise NoMark(f"{self.url}: {where} in what the judge says: {_shown(said)}") from None
        why = f"the judge says: {said.strip()[-LONGEST_SHOWN // 2 :]}"
        if self.bounds is None:
            return Verdict.of(mark, text, why)
        low, high = self.bounds
        if not low <= mark <= high:
            raise NoMark(f"{self.url}: the mark {mark:g} is not between {low:g} and {high:g}: {_shown(said)}")
        return Verdict.of((mark - low) / (high - low), text, why)


_EMPHASIS = re.compile(r"[*_`]+")
_NUMBER = r"-?\d+(?:\.\d+)?"
_BOUNDS = re.compile(
    rf"(?<=\d)\s*(?:/|out\s+of|of)\s*{_NUMBER}(?![\d.]*\d)"
    rf"|\bscale\W+(?:(?:of|from|is|goes)\W+)*(?:from\W+)?{_NUMBER}\s*(?:to|-|–|\.\.)\s*{_NUMBER}"
    rf"|[(\[]\s*{_NUMBER}\s*(?:to|-|–|\.\.)\s*{_NUMBER}\s*[)\]]"
    rf"|\b{_NUMBER}\s*(?:to|-|–)\s*{_NUMBER}\W+scale\b"
    rf"|\bout\s+of\s+{_NUMBER}",
    re.IGNORECASE,
)
"""The bounds of a scale: "/10", "out of 10", "on a scale from 1 to 10", "(1-10)"."""


def _plain(value: Any) -> Any:
    """A number of a column as it is read: 0.00001 and 2000000, not 1e-05 and 2000000.0."""
    if not isinstance(value, float) or not math.isfinite(value):
        return None if is_null(value) else value
    return int(value) if value.is_integer() else f"{Decimal(repr(value)):f}"


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Returns a prompt as a text: the turns of a conversation with their roles, or the content of a single turn."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0].get("content") or "")
    return "\n\n".join(f"{turn.get('role', 'user')}: {turn.get('content') or ''}" for turn in prompt)


def _content(value: Any, url: str) -> str:
    """Returns the text of a chat completion. Raises NoMark for a reply without one."""
    try:
        content = value["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        raise NoMark(f"{url}: the server's answer is no chat completion with a text: {_shown(value)}")
    return content


def _shown(value: Any) -> str:
    return shortened(repr(value))
