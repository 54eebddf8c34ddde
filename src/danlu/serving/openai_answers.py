"""Answers as OpenAI's API has them, whole and in chunks of a stream, with some of vLLM's fields."""

from __future__ import annotations

import codecs
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from danlu.core.types import ToolCall
from danlu.data.harmony_thoughts import HarmonyReader
from danlu.data.thoughts import Said, ThoughtReader
from danlu.data.tokenizer import Tokenizer
from danlu.data.tool_call_forms import Call
from danlu.data.tool_calls import AnswerReader, ReadCalls
from danlu.inference.request import Completion, Finish, NewToken, Request
from danlu.serving.openai_api import ApiError, ChatBody, CompletionBody, SamplingBody

FINISH_REASONS: dict[Finish, str] = {
    "stop": "stop",
    "stop_string": "stop",
    "length": "length",
    "context": "length",
    "abort": "abort",
}

LOWEST_LOGPROB = -9999.0
"""The value in place of minus infinity, which JSON cannot write; as in vLLM."""

Top = tuple[tuple[int, float], ...]


class AnswerWriter(ABC):
    """The answers to one HTTP request, which may be several engine requests, of consecutive numbers.

    Choices are in the order of prompts, and of samples within a prompt.
    """

    kind: str  # the object's name in the API
    chunk_kind: str
    id_prefix: str
    names_events = False
    """Whether the events of a stream have names, and the last of them is its end."""

    def __init__(self, body: SamplingBody, model: str, requests: Sequence[Request], tokenizer: Tokenizer) -> None:
        self._body = body
        self._requests = requests
        self._tokenizer = tokenizer
        self._head = {"id": f"{self.id_prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}
        self.model = model
        self._shown: dict[int, int] = {}  # characters of each choice that the stream has
        self.prompt_tokens = sum(len(request.prompt) for request in requests)
        self.completion_tokens = 0
        self.is_complete = False
        """Whether all that there is to say has been written."""

    # -- whole ---------------------------------------------------------------------------------------------------------

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """All answers in one object."""
        if not self._body.returns_answer:
            completions = [_without_tokens(completion) for completion in completions]
        choices = [self._choice(completion) for completion in sorted(completions, key=self._index)]
        self.completion_tokens = sum(len(completion.tokens) for completion in completions)
        self.is_complete = True
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage}

    @property
    def usage(self) -> dict[str, int]:
        """Tokens without the virtual ones of adapters; with those that ended answers."""
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return {**counts, "total_tokens": sum(counts.values())}

    def _choice(self, completion: Completion) -> dict[str, Any]:
        wanted = self._body.top_logprobs_count
        tops: Sequence[Top] = completion.top or [()] * len(completion.tokens)
        logprobs = None
        if wanted is not None:
            logprobs = self._logprobs(self._index(completion), completion.tokens, completion.logprobs, tops)
        choice = {
            "index": self._index(completion),
            **self._content(completion.text),
            "logprobs": logprobs,
            "finish_reason": FINISH_REASONS[completion.finish],
        }
        if self._body.return_token_ids:
            choice["token_ids"] = completion.tokens
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(completion, self._body.prompt_logprobs)
        return choice

    def _prompt_logprobs(self, completion: Completion, count: int) -> list[dict[str, Any] | None]:
        """The prompt's tokens as vLLM writes them: none of the first, then by id each token and the likeliest ones."""
        prompt = self._requests[self._prompt_index(completion)].prompt
        scores = completion.prompt_logprobs or []
        written: list[dict[str, Any] | None] = [None]
        for token, logprob, top in zip(prompt[1:], scores, completion.prompt_top or [()] * len(scores), strict=True):
            ranks = {other: rank for rank, (other, _) in enumerate(top, 1)}
            values = {token: logprob, **dict(top[:count])}
            written.append(
                {
                    str(other): {
                        "logprob": max(value, LOWEST_LOGPROB),
                        "rank": ranks.get(other),
                        "decoded_token": self._token_text(other)[0],
                    }
                    for other, value in values.items()
                }
            )
        return written

    # -- as a stream ---------------------------------------------------------------------------------------------------

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before the first token."""
        return []

    def chunk(self, token: NewToken) -> dict[str, Any] | None:
        """The chunk of a token; None where there is nothing to say yet, as its text is withheld."""
        index = self._index(token)
        self.completion_tokens += 1
        wants_tokens = self._body.return_token_ids or self._body.top_logprobs_count is not None
        if not token.text and not wants_tokens:
            return None
        self._shown[index] = self._shown.get(index, 0) + len(token.text)
        delta = self._delta(index, token.text)
        if not any(delta.values()) and not wants_tokens:
            return None
        choice = {"index": index, **delta, "logprobs": None, "finish_reason": None}
        if self._body.top_logprobs_count is not None:
            choice["logprobs"] = self._logprobs(index, [token.token], [token.logprob], [token.top])
        if self._body.return_token_ids:
            choice["token_ids"] = [token.token]
        return self._chunk([choice])

    def chunks(self, token: NewToken) -> list[dict[str, Any]]:
        """The chunks of a token."""
        chunk = self.chunk(token)
        return [] if chunk is None else [chunk]

    def closing(self, completion: Completion) -> dict[str, Any]:
        """The last chunk of an answer: the text that no token brought, and why it ended."""
        index = self._index(completion)
        rest = completion.text[self._shown.get(index, 0) :]
        delta = self._last_delta(index, rest)
        reason = self._finish_reason(completion)
        return self._chunk([{"index": index, **delta, "logprobs": None, "finish_reason": reason}])

    def closings(self, completion: Completion) -> list[dict[str, Any]]:
        """The last chunks of an answer."""
        return [self.closing(completion)]

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The last chunk of a stream that cannot be ended as it should."""
        return error.body

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk after all answers, where it is asked for."""
        return {**self._chunk([]), "usage": self.usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._body.include_usage:
            chunk["usage"] = None
        if self._body.include_obfuscation:
            # Up to a multiple of 64 characters, beyond which the length of a chunk says something of its text.
            chunk["obfuscation"] = secrets.token_hex(32)[: -len(json.dumps(choices)) % 64]
        return chunk

    # -- parts ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """The text of a whole answer, as its choice has it."""

    @abstractmethod
    def _delta(self, index: int, text: str) -> dict[str, Any]:
        """New text, as the choice of a chunk has it."""

    def _last_delta(self, index: int, text: str) -> dict[str, Any]:
        """The last text, as the choice of a chunk has it."""
        return self._delta(index, text)

    def _finish_reason(self, completion: Completion) -> str:
        return FINISH_REASONS[completion.finish]

    @abstractmethod
    def _logprobs(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top]
    ) -> dict[str, Any]:
        """Log-probabilities of the next tokens of a choice."""

    def _prompt_index(self, answer: NewToken | Completion) -> int:
        return answer.number - self._requests[0].number

    def _index(self, answer: NewToken | Completion) -> int:
        return self._prompt_index(answer) * self._body.n + answer.sample

    def _token_text(self, token: int) -> tuple[str, bytes]:
        """A token's text, or the bytes that it has of a character in OpenAI's way of writing them, and its bytes."""
        (content,) = self._tokenizer.token_bytes([token])
        try:
            return content.decode(), content
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content


def openai_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    """A call as messages of OpenAI's API have it."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call_id, "type": "function", "function": function}


def _without_tokens(completion: Completion) -> Completion:
    """An answer of no token, for a request that only asks about its prompt."""
    nothing: dict[str, Any] = {name: [] for name in ("tokens", "logprobs", "drawn", "versions")}
    return replace(completion, **nothing, top=None, text="", finish="length")


def last_said(reader: ThoughtReader | HarmonyReader, text: str) -> Said:
    """The rest of an answer, thought and text, with its last text; all of it where the reader has read none."""
    return Said(*map("".join, zip(reader.feed(text), reader.finish(), strict=True)))


def reasoning_of(said: Said) -> dict[str, str]:
    """Text of a thought: under vLLM's name, and under the one of DeepSeek's API, which was vLLM's too."""
    return {"reasoning": said.reasoning, "reasoning_content": said.reasoning} if said.reasoning else {}


def chat_message(
    text: str, read_calls: ReadCalls | None, call_id: Callable[[int], str], *, several: bool = True
) -> dict[str, Any]:
    """An answer as the message of a chat completion, its calls apart from its text; read_calls: None without tools.

    call_id: names the calls by their places. several: whether calls after the first are kept. A text with a call that
    cannot be read stays as it is.
    """
    said, calls = (text, []) if read_calls is None else read_calls(text)
    valid = [call for call in calls if isinstance(call, ToolCall)]
    if valid and len(valid) == len(calls):
        written = [openai_call(call, call_id(index)) for index, call in enumerate(valid if several else valid[:1])]
        return {"role": "assistant", "content": said.strip() or None, "tool_calls": written}
    return {"role": "assistant", "content": text}


class CompletionWriter(AnswerWriter):
    """The writer of POST /v1/completions."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, body: CompletionBody, model: str, requests: Sequence[Request], tokenizer: Tokenizer) -> None:
        super().__init__(body, model, requests, tokenizer)
        self._echoes, self._prompts = body.echo, body.prompt
        self._offsets: dict[int, tuple[int, codecs.IncrementalDecoder]] = {}  # characters so far of each choice

    def opening(self) -> list[dict[str, Any]]:
        if not self._body.return_token_ids:
            return []
        samples = [(request, sample) for request in self._requests for sample in range(request.samples)]
        choices = [
            {"index": index, "text": "", "logprobs": None, "finish_reason": None, "prompt_token_ids": request.prompt}
            for index, (request, _) in enumerate(samples)
        ]
        return [self._chunk([choice]) for choice in choices]

    def _choice(self, completion: Completion) -> dict[str, Any]:
        echo = self._echo(completion) if self._echoes else None  # before the answer: its offsets follow from it
        choice = super()._choice(completion)
        if echo is not None:
            text, logprobs = echo
            choice["text"] = text + choice["text"]
            choice["logprobs"] = logprobs and {
                key: column + choice["logprobs"][key] for key, column in logprobs.items()
            }
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._requests[self._prompt_index(completion)].prompt
        return choice

    def _echo(self, completion: Completion) -> tuple[str, dict[str, Any] | None]:
        """The prompt's text, and its log-probabilities where they are wanted: none of the first token."""
        place = self._prompt_index(completion)
        given, prompt = self._prompts[place], self._requests[place].prompt
        text = given if isinstance(given, str) else self._tokenizer.decode(prompt)
        if completion.prompt_logprobs is None or self._body.top_logprobs_count is None:
            return text, None
        # A tokenizer may put a token or a space before a text: places are counted from the prompt's end.
        length = len(b"".join(self._tokenizer.token_bytes(prompt)).decode(errors="ignore"))
        index = self._index(completion)
        self._offsets[index] = (len(text) - length, codecs.getincrementaldecoder("utf-8")("ignore"))
        tops = completion.prompt_top or [()] * len(completion.prompt_logprobs)
        written = self._logprobs(index, prompt, [0.0, *completion.prompt_logprobs], [(), *tops])
        written["token_logprobs"][0] = written["top_logprobs"][0] = None
        written["text_offset"] = [max(offset, 0) for offset in written["text_offset"]]
        self._offsets[index] = (len(text), codecs.getincrementaldecoder("utf-8")("ignore"))
        return text, written

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, index: int, text: str) -> dict[str, Any]:
        return self._content(text)

    def _logprobs(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top]
    ) -> dict[str, Any]:
        wanted = self._body.top_logprobs_count
        offset, decoder = self._offsets.get(index) or (0, codecs.getincrementaldecoder("utf-8")("ignore"))
        written: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True):
            text, content = self._token_text(token)
            written["tokens"].append(text)
            written["token_logprobs"].append(max(logprob, LOWEST_LOGPROB))
            # As with OpenAI, the drawn token is there too where it is none of the likeliest.
            by_text = {self._token_text(other)[0]: max(value, LOWEST_LOGPROB) for other, value in top[:wanted]}
            written["top_logprobs"].append({text: max(logprob, LOWEST_LOGPROB), **by_text})
            written["text_offset"].append(offset)
            offset += len(decoder.decode(content))
        self._offsets[index] = (offset, decoder)
        return written


class ChatWriter(AnswerWriter):
    """The writer of POST /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self,
        body: ChatBody,
        model: str,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        read_calls: ReadCalls | None = None,
        thoughts: Callable[[], ThoughtReader | HarmonyReader] | None = None,
    ) -> None:
        """read_calls: reads the calls of tools in answers, which then stand apart from the text; None without tools.
        thoughts: makes the reader of an answer's thought, which then stands apart too; None where it does not."""
        super().__init__(body, model, requests, tokenizer)
        self._read_calls, self._thoughts = read_calls, thoughts
        self._several_calls, self._shows_thoughts = body.may_call_several, body.include_reasoning
        self._thought_readers: dict[int, ThoughtReader | HarmonyReader] = {}  # of each choice of a stream
        self._readers: dict[int, AnswerReader] = {}  # of each choice of a stream
        self._calls: Counter[int] = Counter()  # of each choice

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        answer = super().whole(completions)
        if self._body.prompt_logprobs is not None:  # there is one prompt
            answer["prompt_logprobs"] = [choice.pop("prompt_logprobs") for choice in answer["choices"]].pop()
        return {**answer, "prompt_token_ids": self._requests[0].prompt} if self._body.return_token_ids else answer

    def opening(self) -> list[dict[str, Any]]:
        opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        chunks = [self._chunk([{"index": index, **opening}]) for index in range(self._body.n)]
        if self._body.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._requests[0].prompt
        return chunks

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _choice(self, completion: Completion) -> dict[str, Any]:
        choice = super()._choice(completion)
        said = Said("", completion.text)
        if self._thoughts is not None:
            said = last_said(self._thoughts(), completion.text)
        message = chat_message(
            said.content, self._read_calls, lambda index: uuid4().hex[:9], several=self._several_calls
        )
        if said.reasoning:
            message["content"] = message["content"] or None
        choice["message"] = message | self._reasoning(said)
        self._calls[self._index(completion)] = len(choice["message"].get("tool_calls", ()))
        choice["finish_reason"] = self._finish_reason(completion)
        return choice

    def _reasoning(self, said: Said) -> dict[str, Any]:
        return reasoning_of(said) if self._shows_thoughts else {}

    def _delta(self, index: int, text: str) -> dict[str, Any]:
        if self._thoughts is None:
            return {"delta": self._delta_of_content(index, text)}
        said = self._thought_readers.setdefault(index, self._thoughts()).feed(text)
        return {"delta": self._reasoning(said) | self._delta_of_content(index, said.content)}

    def _last_delta(self, index: int, text: str) -> dict[str, Any]:
        said = Said("", text)
        if self._thoughts is not None:
            reader = self._thought_readers.setdefault(index, self._thoughts())
            said = last_said(reader, text)
        return {"delta": self._reasoning(said) | self._delta_of_content(index, said.content, is_last=True)}

    def _delta_of_content(self, index: int, text: str, *, is_last: bool = False) -> dict[str, Any]:
        if self._read_calls is None:
            return {"content": text} if text else {}
        reader = self._readers.setdefault(index, self._read_calls.reader())
        return self._delta_of(index, [*reader.feed(text), *(reader.finish() if is_last else ())])

    def _delta_of(self, index: int, parts: Sequence[str | Call]) -> dict[str, Any]:
        """Text and calls of an answer; a call that cannot be read is text."""
        text = "".join(part if isinstance(part, str) else part.text for part in parts if not isinstance(part, ToolCall))
        calls = []
        for call in parts:
            if isinstance(call, ToolCall) and (self._several_calls or not self._calls[index]):
                calls.append({"index": self._calls[index], **openai_call(call, uuid4().hex[:9])})
                self._calls[index] += 1
        return ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})

    def _finish_reason(self, completion: Completion) -> str:
        reason = super()._finish_reason(completion)
        return "tool_calls" if reason == "stop" and self._calls[self._index(completion)] else reason

    def _logprobs(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top]
    ) -> dict[str, Any]:
        written = []
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True):
            likeliest = [self._token(other, value) for other, value in top[: self._body.top_logprobs_count]]
            written.append({**self._token(token, logprob), "top_logprobs": likeliest})
        return {"content": written, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, content = self._token_text(token)
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(content)}
