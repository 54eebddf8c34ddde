"""POST /v1/responses, OpenAI's newer API of conversations, for text: whole and as a stream of its events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from danlu.inference.request import Completion, NewToken
from danlu.serving.api_endpoints import read_request
from danlu.serving.openai_answers import ChatWriter
from danlu.serving.openai_api import Body, ChatBody, Positive, parse_body

if TYPE_CHECKING:
    from danlu.serving.api_endpoints import Api

_TEXT_PARTS = ("input_text", "output_text", "text")


def _as_items(value: Any) -> Any:
    """The items of `input`: a text is one message of the user. Raises ValueError for items that are no messages."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError("expected a text, or a list of messages, which is not empty")
    return [_as_message(item, index) for index, item in enumerate(value)]


def _as_message(item: Any, index: int) -> dict[str, Any]:
    if not isinstance(item, dict) or item.get("type", "message") != "message" or not isinstance(item.get("role"), str):
        kind = item.get("type") if isinstance(item, dict) else type(item).__name__
        raise ValueError(f"item {index} is of type {kind}; only messages are read, with a role and a content")
    content = item.get("content")
    if isinstance(content, list):
        wrong = [part for part in content if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS]
        if wrong:
            raise ValueError(f"item {index} has content that is no text, which alone is read")
        content = "\n".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"item {index} has no content")
    return {"role": "system" if item["role"] == "developer" else item["role"], "content": content}


class TextFormat(Body):
    """`text.format`: as `response_format` of chat completions, with the schema next to its name."""

    model: None = None
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    of_answer: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @property
    def response_format(self) -> dict[str, Any]:
        """The same for chat completions."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.of_answer}}


class TextOptions(Body):
    """`text`."""

    model: None = None
    format: TextFormat = TextFormat()


class ResponsesBody(Body):
    """The body of POST /v1/responses."""

    input: Annotated[list[dict[str, Any]], BeforeValidator(_as_items)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions = TextOptions()
    stream: bool = False
    truncation: Literal["disabled"] = "disabled"
    tools: Annotated[list[dict[str, Any]], Field(max_length=0, default_factory=list)]
    tool_choice: Literal["auto", "none"] = "auto"

    @property
    def chat_values(self) -> dict[str, Any]:
        """The same question as the body of a chat completion."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        values = {
            "model": self.model,
            "messages": [*system, *self.input],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": self.text.format.response_format,
            "stream": self.stream,
        }
        return {name: value for name, value in values.items() if value is not None}


class Responses:
    """The endpoint. Answers are not stored: a question brings all of its conversation."""

    def __init__(self, api: Api) -> None:
        self._api = api

    @property
    def routes(self) -> list[Route]:
        return [Route("/v1/responses", self.responses, methods=["POST"])]

    async def responses(self, request: Request) -> Response:
        body = await read_request(ResponsesBody, request)
        chat = parse_body(ChatBody, json.dumps(body.chat_values).encode())
        return await self._api.answer_chat(request, chat, ResponsesWriter)


class ResponsesWriter(ChatWriter):
    """The writer of POST /v1/responses."""

    kind = "response"
    id_prefix = "resp"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._item_id = f"msg_{uuid4().hex}"
        self._events = 0
        self._text = ""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        (choice,) = super().whole(completions)["choices"]
        message, ends = choice["message"], choice["finish_reason"]
        output: list[dict[str, Any]] = []
        if "reasoning" in message:
            thought = [{"type": "reasoning_text", "text": message["reasoning"]}]
            output.append({"type": "reasoning", "id": f"rs_{uuid4().hex}", "summary": [], "content": thought})
        status = "incomplete" if ends == "length" else "completed"
        output.append(self._item(message["content"] or "", status))
        return self._response(status, output)

    def opening(self) -> list[dict[str, Any]]:
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=self._item(None, "in_progress")),
            self._of_text("response.content_part.added", part=_part("")),
        ]

    def chunk(self, token: NewToken) -> dict[str, Any] | None:
        chunk = super().chunk(token)
        text = None if chunk is None else chunk["choices"][0]["delta"].get("content")
        return self._delta_event(text) if text else None

    def closings(self, completion: Completion) -> list[dict[str, Any]]:
        rest = super().closing(completion)["choices"][0]["delta"].get("content")
        events = [self._delta_event(rest)] if rest else []
        status = "incomplete" if completion.finish in ("length", "context") else "completed"
        item = self._item(self._text, status)
        return [
            *events,
            self._of_text("response.output_text.done", text=self._text, logprobs=[]),
            self._of_text("response.content_part.done", part=_part(self._text)),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{status}", response=self._response(status, [item])),
        ]

    def _delta_event(self, text: str) -> dict[str, Any]:
        self._text += text
        return self._of_text("response.output_text.delta", delta=text, logprobs=[])

    def _of_text(self, kind: str, **values: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **values)

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **values}

    def _item(self, text: str | None, status: str) -> dict[str, Any]:
        """The message of the answer; text: None before it begins."""
        content = [] if text is None else [_part(text)]
        return {"type": "message", "id": self._item_id, "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "metadata": {},
            "output": output,
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": None if status == "in_progress" else usage,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
