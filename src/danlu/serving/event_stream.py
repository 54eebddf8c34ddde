"""Answers of the engine as responses over HTTP: whole, or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from danlu.inference.request import Completion
from danlu.serving.engine_thread import AnswerFailed, Call, EngineFailed, EngineStopped
from danlu.serving.openai_answers import AnswerWriter
from danlu.serving.openai_api import ApiError, SamplingBody


async def collect(call: Call, timeout_s: float | None = None) -> list[Completion]:
    """All answers of a call, as they end. Raises TimeoutError where they are not there in time."""
    return [event async for event in call.events(timeout_s) if isinstance(event, Completion)]


NO_RETRY = {"x-should-retry": "false"}
"""The header by which OpenAI's clients do not ask again."""


@contextmanager
def in_time(timeout_s: float | None) -> Iterator[None]:
    """Raises ApiError where an answer is not there in time."""
    try:
        yield
    except TimeoutError:
        raise ApiError(too_late(timeout_s), status=504, headers=NO_RETRY) from None


def too_late(timeout_s: float | None) -> str:
    """The message of an answer that was ended for its time."""
    return f"the answer was not complete after {timeout_s:g} s, the server's --request-timeout: ask for fewer tokens"


async def stream_events(
    call: Call, body: SamplingBody, writer: AnswerWriter, timeout_s: float | None = None
) -> AsyncGenerator[str]:
    """Yields the answers as server-sent events. An error of the engine is one of them, since the status is sent.

    timeout_s: the longest time of all of them.
    """
    named = writer.names_events
    for opening in writer.opening():
        yield event_text(opening, named=named)
    try:
        async for event in call.events(timeout_s):
            for chunk in writer.closings(event) if isinstance(event, Completion) else writer.chunks(event):
                yield event_text(chunk, named=named)
    except TimeoutError:
        yield event_text(writer.failure(ApiError(too_late(timeout_s), status=504)), named=named)
    except (AnswerFailed, EngineFailed, EngineStopped) as error:
        yield event_text(writer.failure(ApiError(str(error), status=500)), named=named)
    else:
        if body.include_usage:
            yield event_text(writer.usage_chunk())
    if not named:
        yield "data: [DONE]\n\n"
    writer.is_complete = True


def event_text(value: dict[str, Any], *, named: bool = False) -> str:
    """A server-sent event with a JSON object. named: its type is the event's name too."""
    name = f"event: {value['type']}\n" if named else ""
    return f"{name}data: {json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events. on_end: called when all are sent, and when the client has left before."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], on_end: Callable[[], None]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
