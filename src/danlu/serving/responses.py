"""POST /v1/responses, OpenAI's newer API of conversations, for text and tools: whole and as a stream of its events."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from danlu.data.resource_limits import characters
from danlu.inference.request import Completion, NewToken
from danlu.serving.api_endpoints import read_request
from danlu.serving.openai_answers import ChatWriter
from danlu.serving.openai_api import ApiError, ChatBody, parse_body
from danlu.serving.responses_body import ConversationBody, ResponsesBody

if TYPE_CHECKING:
    from danlu.serving.api_endpoints import Api

STORED_RESPONSES = 1000
"""The most conversations that are kept for `previous_response_id`; the oldest go first."""
STORED_CHARACTERS = 64 * 2**20
"""The most characters of all of them together."""

Item = dict[str, Any]


class StoredResponses:
    """The conversations that a request may go on with, by the ids of their last responses; until the server ends."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, list[Any]] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def put(self, response_id: str, items: list[Any]) -> None:
        """Keeps the items of a conversation, with those of the response."""
        self._items[response_id], self._sizes[response_id] = items, characters(items)
        while len(self._items) > STORED_RESPONSES or sum(self._sizes.values()) > STORED_CHARACTERS:
            del self._sizes[self._items.popitem(last=False)[0]]

    def find(self, response_id: str | None) -> list[Any]:
        """The items of a conversation; none for None. Raises ApiError where they are not kept."""
        if response_id is None:
            return []
        if response_id not in self._items:
            raise ApiError(
                f"previous_response_id: no response {response_id!r:.100} is stored here: the server has begun since, "
                f"it was asked with store: false, or {STORED_RESPONSES} came behind it. Give its conversation in input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return self._items[response_id]


class Responses:
    """The endpoints."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._stored = StoredResponses()

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.input_tokens, methods=["POST"]),
        ]

    async def responses(self, request: Request) -> Response:
        body = await read_request(ResponsesBody, request)
        earlier = self._stored.find(body.previous_response_id)

        def keep(response_id: str, output: list[Item]) -> None:
            if body.store:
                self._stored.put(response_id, [*earlier, *body.input, *output])

        with _own_names():
            return await self._api.answer_chat(request, _chat(body, earlier), partial(ResponsesWriter, body, keep))

    async def input_tokens(self, request: Request) -> Response:
        body = await read_request(ConversationBody, request)
        earlier = self._stored.find(body.previous_response_id)
        with _own_names():
            chat = _chat(body, earlier)
            prompt = await self._api.encode_chat(self._api.models.find(chat.model), chat)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


_OWN_NAMES = {"messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens"}
"""The parameters that chat completions have under another name."""


@contextmanager
def _own_names() -> Iterator[None]:
    """Errors name the parameters of this endpoint."""
    try:
        yield
    except ApiError as error:
        own = _OWN_NAMES.get(error.param or "")
        if own is not None:
            error.message, error.param = error.message.replace(f"{error.param}:", f"{own}:", 1), own
        raise


def _chat(body: ConversationBody, earlier: Sequence[Any]) -> ChatBody:
    return parse_body(ChatBody, json.dumps(body.chat_values(earlier)).encode())


class ResponsesWriter(ChatWriter):
    """The writer of POST /v1/responses. Its items are a thought, a message, and calls of functions.

    Args:
        asked: the request.
        keep: takes the id and the items of the response when they are complete.
        arguments: those of ChatWriter.
    """

    kind = "response"
    id_prefix = "resp"
    names_events = True

    def __init__(self, asked: ResponsesBody, keep: Callable[[str, list[Item]], None], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._asked, self._keep = asked, keep
        self._events = 0
        self._output: list[Item] = []
        self._item: Item | None = None  # the one that the stream is at, empty
        self._text = ""  # of it
        self._blank = ""  # white space that belongs to a message only where text follows

    # -- whole ---------------------------------------------------------------------------------------------------------

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        (choice,) = super().whole(completions)["choices"]
        message, calls = choice["message"], choice["message"].get("tool_calls", [])
        if "reasoning" in message:
            self._output.append(_filled(_new_item("reasoning"), message["reasoning"]))
        if message["content"] or not (self._output or calls):
            self._output.append(_filled(_new_item("message"), message["content"] or ""))
        self._output += [_filled(_new_call(call), call["function"]["arguments"]) for call in calls]
        return self._ended("incomplete" if choice["finish_reason"] == "length" else "completed")

    # -- as a stream ---------------------------------------------------------------------------------------------------

    def opening(self) -> list[dict[str, Any]]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def chunks(self, token: NewToken) -> list[dict[str, Any]]:
        chunk = self.chunk(token)
        return [] if chunk is None else self._delta_events(chunk["choices"][0]["delta"])

    def closings(self, completion: Completion) -> list[dict[str, Any]]:
        events = self._delta_events(self.closing(completion)["choices"][0]["delta"])
        if self._item is None and not self._output:
            events += self._text_events("message", self._blank)
        if completion.finish == "abort":
            ended = self._ended("failed")
            ended["error"] = {"code": "server_error", "message": "the answer was ended before it was complete"}
        else:
            status = "incomplete" if completion.finish in ("length", "context") else "completed"
            events += self._end_item(status)
            ended = self._ended(status)
        return [*events, self._event(f"response.{ended['status']}", response=ended)]

    def failure(self, error: ApiError) -> dict[str, Any]:
        fault = error.body["error"]
        return self._event("error", code=fault["code"], message=fault["message"], param=fault["param"], error=fault)

    def _delta_events(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of new text, thoughts and calls."""
        events = []
        if "reasoning" in delta:
            events += self._text_events("reasoning", delta["reasoning"])
        if text := self._blank + delta.get("content", ""):
            is_in_message = self._item is not None and self._item["type"] == "message"
            self._blank = "" if is_in_message or text.strip() else text
            events += [] if self._blank else self._text_events("message", text)
        for call in delta.get("tool_calls", ()):
            self._blank = ""
            events += self._call_events(call)
        return events

    def _text_events(self, kind: str, text: str) -> list[dict[str, Any]]:
        """The events of text of a message or a thought, in an item that it begins where another one is open."""
        events = []
        if self._item is None or self._item["type"] != kind:
            events += self._end_item("completed")
            events += self._begin_item(_new_item(kind))
            events.append(self._of_item("response.content_part.added", content_index=0, part=_part(kind, "")))
        self._text += text
        if text:
            events.append(self._of_text("delta", delta=text))
        return events

    def _call_events(self, call: Item) -> list[dict[str, Any]]:
        """The events of a call, which is there as a whole."""
        events = [*self._end_item("completed"), *self._begin_item(_new_call(call))]
        self._text = call["function"]["arguments"]
        events.append(self._of_item("response.function_call_arguments.delta", delta=self._text))
        return [*events, *self._end_item("completed")]

    def _begin_item(self, item: Item) -> list[dict[str, Any]]:
        self._item, self._text = item, ""
        added = {**item, "status": "in_progress"}
        return [self._event("response.output_item.added", output_index=len(self._output), item=added)]

    def _end_item(self, status: str) -> list[dict[str, Any]]:
        """The last events of the item that is open, if one is."""
        if self._item is None:
            return []
        if self._item["type"] == "function_call":
            done = "response.function_call_arguments.done"
            events = [self._of_item(done, arguments=self._text, name=self._item["name"])]
        else:
            part = _part(self._item["type"], self._text)
            events = [
                self._of_text("done", text=self._text),
                self._of_item("response.content_part.done", content_index=0, part=part),
            ]
        item = {**_filled(self._item, self._text), "status": status}
        events.append(self._event("response.output_item.done", output_index=len(self._output), item=item))
        self._output.append(item)
        self._item = None
        return events

    def _of_text(self, name: str, **values: Any) -> dict[str, Any]:
        assert self._item is not None, "text is that of an item"
        is_thought = self._item["type"] == "reasoning"
        kind = "reasoning_text" if is_thought else "output_text"
        more: dict[str, Any] = {} if is_thought else {"logprobs": []}
        return self._of_item(f"response.{kind}.{name}", content_index=0, **values, **more)

    def _of_item(self, kind: str, **values: Any) -> dict[str, Any]:
        assert self._item is not None, "an item is open"
        return self._event(kind, item_id=self._item["id"], output_index=len(self._output), **values)

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **values}

    # -- the response --------------------------------------------------------------------------------------------------

    def _ended(self, status: str) -> dict[str, Any]:
        """The response with all of its items, of which the last has its status."""
        if self._output and status != "failed":
            self._output[-1]["status"] = status
        if status != "failed":
            self._keep(str(self._head["id"]), self._output)
        return self._response(status)

    def _response(self, status: str) -> dict[str, Any]:
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        asked = self._asked
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": {},
            "output": list(self._output),
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "store": asked.store,
            "temperature": asked.temperature,
            "tool_choice": asked.tool_choice,
            "tools": [tool.written for tool in asked.tools],
            "top_p": asked.top_p,
            "usage": None if status == "in_progress" else usage,
        }


def _new_item(kind: str) -> Item:
    """An empty thought or message."""
    if kind == "reasoning":
        return {"type": kind, "id": f"rs_{uuid4().hex}", "summary": [], "content": [], "status": "completed"}
    return {"type": kind, "id": f"msg_{uuid4().hex}", "role": "assistant", "status": "completed", "content": []}


def _new_call(call: Item) -> Item:
    """A call of a chat completion, its arguments to come."""
    named = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
    return {"type": "function_call", "id": f"fc_{uuid4().hex}", **named, "status": "completed"}


def _filled(item: Item, text: str) -> Item:
    """An item with its text, or its arguments."""
    if item["type"] == "function_call":
        return {**item, "arguments": text}
    return {**item, "content": [_part(item["type"], text)]}


def _part(kind: str, text: str) -> Item:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
