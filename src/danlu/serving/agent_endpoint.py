"""OpenAI's chat completions for agents that are trained: their requests are handed to the trainer, which answers.

An HTTP server in a thread of the trainer's process. The API key of a request says which episode it belongs to. Requests
that would not be trained on as they were drawn are refused with status 400 and the reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import selectors
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from danlu.core.errors import ResourceError
from danlu.data.harmony_thoughts import ANALYSIS, HarmonyReader
from danlu.data.thoughts import Said
from danlu.data.tokenizer import Tokenizer
from danlu.data.tool_calls import ReadCalls
from danlu.inference import request as engine_request
from danlu.inference.request import Completion, SamplingOptions
from danlu.rewards.environments.agents import POLICY
from danlu.rewards.environments.protocol import EpisodeKey
from danlu.serving.api_endpoints import CLIENT_GONE, build_app, read_request, unless_gone
from danlu.serving.event_stream import EventStream, event_text
from danlu.serving.openai_answers import ChatWriter, chat_message, last_said, reasoning_of
from danlu.serving.openai_api import ApiError, ChatBody, given_key
from danlu.serving.openai_api import Message as BodyMessage
from danlu.serving.server import bind, url_of

START_TIMEOUT_S = 30.0
_WAKE = b"w"

Message = dict[str, Any]


@dataclass(eq=False)
class AgentRequest:
    """A question that waits for its answer. Made and answered in the endpoint's thread."""

    key: EpisodeKey
    body: ChatBody
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    done: asyncio.Future[tuple[engine_request.Request, Completion, Message]]
    has_left: bool = False
    """Whether the agent does not wait any more."""

    @property
    def content(self) -> str:
        """The request's content in one form, by which the questions of one agent are put in order."""
        return json.dumps([self.messages, self.tools, self.body.stop, self.body.max_new_tokens], sort_keys=True)


class AgentEndpoint:
    """The server, which begins with `start`. All methods are for the trainer's thread.

    Args:
        host, port: of this machine; port 0 takes one that is free.
        sampling: how answers that are trained on are drawn.
    """

    def __init__(self, host: str, port: int, sampling: SamplingOptions, tokenizer: Tokenizer) -> None:
        self._host, self._port = host, port
        self._sampling, self._tokenizer = sampling, tokenizer
        self._episodes: dict[str, EpisodeKey] = {}
        self._requests: deque[AgentRequest] = deque()
        self._wake_reading, self._wake_writing = os.pipe()
        os.set_blocking(self._wake_reading, False)
        os.set_blocking(self._wake_writing, False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._created = int(time.time())
        self._calls: ReadCalls | None = None  # without tools
        self.base_url = ""

    # -- for the trainer -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listens; nothing where it does already. Raises ResourceError for an address that cannot be listened at."""
        if self._thread is not None:
            return
        listener = bind(self._host, self._port, "environment.host", "environment.port")
        listener.listen(1024)  # all agents may come at once
        self.base_url = url_of(listener)
        routes = [
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
            Route("/v1/models", self._list_models),
            Route("/{path:path}", self._refuse_path, methods=["GET", "POST"]),
        ]
        config = uvicorn.Config(build_app(routes), ws="none", log_config=None, access_log=False, lifespan="off")
        self._server = server = uvicorn.Server(config)
        started = threading.Event()

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(started.set)
            await server.serve(sockets=[listener])

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), name="agent-endpoint", daemon=True)
        self._thread.start()
        if not started.wait(START_TIMEOUT_S):
            raise ResourceError(f"the endpoint for agents has not started within {START_TIMEOUT_S:g} s")

    def open(self, key: EpisodeKey) -> str:
        """Lets an episode's agent ask. Returns its API key."""
        api_key = f"danlu-{key[0]}-{key[1]}-{secrets.token_urlsafe(16)}"
        self._episodes[api_key] = key
        return api_key

    def shut(self, api_key: str) -> None:
        """Refuses an episode's agent from now on."""
        self._episodes.pop(api_key, None)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Has a selector wake up when something is asked."""
        selector.register(self._wake_reading, selectors.EVENT_READ)

    def take(self) -> list[AgentRequest]:
        """Returns the requests since the last call."""
        with suppress(BlockingIOError):
            while os.read(self._wake_reading, 4096):
                pass
        requests = []
        with suppress(IndexError):
            while True:
                requests.append(self._requests.popleft())
        return requests

    def answer(self, request: AgentRequest, asked: engine_request.Request, completion: Completion) -> Message:
        """Sends an answer, where its agent still waits. Returns the message as chat templates would see it."""
        # Not of the clock or of chance: templates may show the names of calls.
        name = f"{asked.random_number}/{asked.draw_sample}/{len(asked.prompt)}"
        said = Said("", completion.text)
        if self._tokenizer.has_template and ANALYSIS in self._tokenizer.template(tools=True).source:
            said = last_said(HarmonyReader(), completion.text)  # its template refuses a thought in the content
        message = chat_message(said.content, self._read_calls(request.tools), partial(call_id, name))
        message |= reasoning_of(said)
        self._finish(request, (asked, completion, message))
        return BodyMessage.model_validate(message).turn

    def _read_calls(self, tools: Sequence[Mapping[str, Any]]) -> ReadCalls | None:
        """The parser for calls of these tools; None without tools."""
        if not tools:
            return None
        self._calls = self._calls or ReadCalls.of(self._tokenizer.template(tools=True), ())
        return replace(self._calls, tools=tuple(tools))

    def refuse(self, request: AgentRequest, error: ApiError) -> None:
        """Sends an error in the place of an answer."""
        self._finish(request, error)

    def close(self) -> None:
        """Ends the server; agents that wait are cut off."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(START_TIMEOUT_S)
            if self._thread.is_alive():  # which may still write into what would be closed
                return
            self._server = self._thread = None
        for descriptor in (self._wake_reading, self._wake_writing):
            with suppress(OSError):
                os.close(descriptor)

    def _finish(
        self, request: AgentRequest, outcome: tuple[engine_request.Request, Completion, Message] | ApiError
    ) -> None:
        def finish() -> None:
            if request.done.done():
                return
            if isinstance(outcome, ApiError):
                request.done.set_exception(outcome)
            else:
                request.done.set_result(outcome)

        assert self._loop is not None, "it was asked, so it runs"
        with suppress(RuntimeError):  # the loop has ended: nobody waits
            self._loop.call_soon_threadsafe(finish)

    # -- in the server's thread ----------------------------------------------------------------------------------------

    async def _chat_completions(self, request: Request) -> Response:
        key = self._episode_of(request)
        body = await read_request(ChatBody, request)
        check_trained_as_drawn(body, self._sampling)
        asked = AgentRequest(
            key,
            body,
            tuple(message.turn for message in body.messages),
            tuple(body.shown_tools),
            asyncio.get_running_loop().create_future(),
        )
        self._requests.append(asked)
        self._wake()
        try:
            engine_asked, completion, message = await unless_gone(request, asked.done)
        except ClientDisconnect:
            asked.has_left = True
            self._wake()
            return Response(status_code=CLIENT_GONE)
        return self._response(body, engine_asked, completion, message)

    def _response(
        self, body: ChatBody, asked: engine_request.Request, completion: Completion, message: Message
    ) -> Response:
        writer = ChatWriter(body, POLICY, [asked], self._tokenizer)
        if body.stream:
            return EventStream(_events(writer, body, completion, message), on_end=lambda: None)
        answer = writer.whole([completion])
        (choice,) = answer["choices"]
        choice["message"] = message
        if "tool_calls" in message:
            choice["finish_reason"] = "tool_calls"
        return JSONResponse(answer)

    async def _list_models(self, request: Request) -> Response:
        self._episode_of(request)
        card = {"id": POLICY, "object": "model", "created": self._created, "owned_by": "danlu"}
        return JSONResponse({"object": "list", "data": [card]})

    async def _refuse_path(self, request: Request) -> Response:
        raise ApiError(
            f"{request.method} {request.url.path}: not there. The policy is asked with POST /v1/chat/completions: "
            "its conversations are trained on",
            status=404,
        )

    def _episode_of(self, request: Request) -> EpisodeKey:
        key = self._episodes.get(given_key(request.headers).decode(errors="replace"))
        if key is None:
            raise ApiError(
                "the API key is that of no episode that goes on: each agent has its own, which ends with it",
                status=401,
                code="invalid_api_key",
            )
        return key

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it is awake
            os.write(self._wake_writing, _WAKE)


def check_trained_as_drawn(body: ChatBody, sampling: SamplingOptions) -> None:
    """Raises ApiError for a request that could not be trained on as it is drawn.

    sampling: of answers that are trained on. Greedy evaluations take the same requests, and ignore their temperature.
    """
    if body.model not in (None, POLICY):
        raise ApiError(f"model: {body.model!r} is not here; the policy is called {POLICY!r}", param="model", status=404)
    if body.n > 1:
        raise ApiError(
            "n: more than one answer at a time is not recorded, and rollout.samples runs the agent several times. "
            "Leave it out, or ask again",
            param="n",
        )
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value, own = getattr(body, name), getattr(sampling, name)
        if value is not None and value != own and not (name == "top_k" and value == -1 and own == 0):
            where = "always 1" if name == "repetition_penalty" else f"rollout.{name} of the recipe, {own:g}"
            raise ApiError(
                f"{name}: {value:g}, and answers that are trained on are drawn with {where}: the update needs the "
                "probabilities that they were drawn with. Leave it out, or change the recipe",
                param=name,
            )
    for name, off in _NOT_TRAINED.items():
        if (value := getattr(body, name)) not in (off, None):
            raise ApiError(
                f"{name}: {value!r} is not there while the policy is trained: draws follow from the recipe and its "
                "seed. Leave it out",
                param=name,
            )
    if body.forced_tools or body.form_names:
        name = "tool_choice" if body.forced_tools else body.form_names[0]
        raise ApiError(
            f"{name}: the form of answers that are trained on is rollout.format of the recipe. Leave it out", param=name
        )
    if body.stream and body.logprobs:
        raise ApiError("logprobs: not in a stream; leave out one of both", param="logprobs")
    if body.messages[-1].role == "assistant":
        raise ApiError("messages: the last is the assistant's, and the policy answers others'", param="messages")


_NOT_TRAINED: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "seed": None,
    "stop_token_ids": [],
    "ignore_eos": False,
    "allowed_token_ids": None,
    "logit_bias": {},
    "min_tokens": 0,
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "include_stop_str_in_output": False,
    "prompt_logprobs": None,
    "parallel_tool_calls": True,
    "top_logprobs": 0,
    "skip_special_tokens": True,
}
"""Parameters that an answer must not have, and the values with which they change nothing."""


def call_id(name: str, index: int) -> str:
    """The name of a call in an answer: nine letters and digits, which Mistral's templates ask for."""
    return hashlib.blake2b(f"{name}/{index}".encode()).hexdigest()[:9]


async def _events(writer: ChatWriter, body: ChatBody, completion: Completion, message: Message) -> AsyncGenerator[str]:
    """An answer as server-sent events: all of it in one, since answers of all agents end together."""
    for opening in writer.opening():
        yield event_text(opening)
    closing = writer.closing(completion)
    (choice,) = closing["choices"]
    if "tool_calls" in message or "reasoning" in message:
        calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
        choice["delta"] = {name: value for name, value in message.items() if name != "role" and value} | (
            {"tool_calls": calls} if calls else {}
        )
        choice["finish_reason"] = "tool_calls" if calls else choice["finish_reason"]
    if body.return_token_ids:
        choice["token_ids"] = completion.tokens
    yield event_text(closing)
    writer.completion_tokens = len(completion.tokens)
    if body.include_usage:
        yield event_text(writer.usage_chunk())
    yield "data: [DONE]\n\n"
    writer.is_complete = True
