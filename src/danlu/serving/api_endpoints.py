"""The endpoints of OpenAI's API, and some of vLLM's, over an engine of this process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from danlu.core.errors import DanluError
from danlu.data.chat_template import Turn, render_begun
from danlu.data.prompt_encoding import encode_utf8
from danlu.data.resource_limits import characters
from danlu.data.template_process import template_process
from danlu.data.thoughts import opened_thought
from danlu.inference import request as engine_request
from danlu.inference.prompts import prompt_problem
from danlu.inference.stopping import Decode
from danlu.serving.answer_grammars import chat_grammar_of, grammar_of
from danlu.serving.engine_thread import AnswerFailed, Call, EngineFailed, EngineStopped, EngineThread, QueueFull
from danlu.serving.event_stream import EventStream, collect, in_time, stream_events
from danlu.serving.forced_calls import forced_form
from danlu.serving.metrics import metrics_text
from danlu.serving.openai_answers import AnswerWriter, ChatWriter, CompletionWriter
from danlu.serving.openai_api import (
    MAX_DETOKENIZED,
    MAX_STOP_TOKENS,
    AnyBody,
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    TokenizeBody,
    parse_body,
)
from danlu.serving.served_models import ServedModel, ServedModels

MAX_BODY_BYTES = 64 * 2**20
MAX_DETOKENIZE_BYTES = 16 * MAX_DETOKENIZED
"""The most bytes of a request to make text of token ids: 16 for each."""
SHORT_BODY_BYTES = 64 * 2**10
"""A longer body is not read by the thread of the event loop."""

_PARSING = ThreadPoolExecutor(1, thread_name_prefix="parsing")

HUNG_S = 300.0
"""Seconds of one step of the engine after which it counts as hung."""

CLIENT_GONE = 499
"""The status of a request by a client that left before the answer, as nginx logs it; nobody receives it."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the model reads it. opened: the mark of a thought that it ends in; None where it ends in
    none."""

    tokens: list[int]
    opened: str | None


class Api:
    """The endpoints.

    Args:
        seed: of requests that bring none.
        timeout_s: the longest time of an answer; None: any.
        hung_s: the longest step of the engine before it counts as hung.
    """

    def __init__(
        self,
        models: ServedModels,
        engine: EngineThread,
        seed: int,
        *,
        timeout_s: float | None = None,
        hung_s: float = HUNG_S,
    ) -> None:
        self.models = models
        self._timeout_s, self._hung_s = timeout_s, hung_s
        self.engine = engine
        self._seed = seed
        self._numbers = itertools.count()  # of engine requests
        self._started = int(time.time())
        # One thread: templates and tokenizers are not for several at a time, and the event loop must not wait for them.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizing")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="writing")

    def close(self) -> None:
        """Ends the threads that tokenize and write."""
        for threads in (self._tokenizing, self._writing):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.retrieve_model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]

    # -- answers -------------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        body = await read_request(CompletionBody, request)
        model = self.models.find(body.model)
        for prompt in body.prompt:
            self._check_size(model, len(prompt) if isinstance(prompt, str) else 0, "prompt")
        prompts = [await self.encode_text(model, prompt, "prompt") for prompt in body.prompt]
        grammar = await self._tokenize(partial(grammar_of, body, model), "structured_outputs")
        requests = await self._requests(body, model, prompts, grammar)
        writer = CompletionWriter(body, model.name, requests, model.chat_tokenizer.tokenizer)
        return await self._answer(request, call_of(requests, body, model), body, writer)

    async def chat_completions(self, request: Request) -> Response:
        return await self.answer_chat(request, await read_request(ChatBody, request), ChatWriter)

    async def answer_chat(self, request: Request, body: ChatBody, kind: Callable[..., ChatWriter]) -> Response:
        """Answers a conversation. kind: makes the writer of the answer. Raises ApiError."""
        model = self.models.find(body.model)
        tools = body.shown_tools
        prompt = await self.encode_chat(model, body)
        grammar = await self._tokenize(partial(chat_grammar_of, body, model, prompt.opened), "structured_outputs")
        requests = await self._requests(body, model, [prompt.tokens], grammar)
        read_calls = replace(model.read_calls, tools=tuple(tools)) if tools else None
        if read_calls is not None and body.forced_tools:
            read_calls = replace(read_calls, form=forced_form(read_calls.form))
        thoughts = None
        if model.thought_reader is not None:
            thoughts = partial(model.thought_reader, prompt.opened)
            read_calls = read_calls and replace(read_calls, in_thought=False)
        writer = kind(body, model.name, requests, model.chat_tokenizer.tokenizer, read_calls, thoughts)
        return await self._answer(request, call_of(requests, body, model), body, writer)

    async def encode_chat(self, model: ServedModel, body: ChatBody) -> ChatPrompt:
        """The prompt of a conversation. Raises ApiError."""
        return await self._tokenize(partial(self._encode_messages, model, body, body.shown_tools), "messages")

    async def _requests(
        self, body: SamplingBody, model: ServedModel, prompts: Sequence[Sequence[int]], grammar: str | None
    ) -> list[engine_request.Request]:
        """Makes the engine's requests: one for each prompt. Raises ApiError."""
        check_stops_length(body.stop, model)
        silent_stops, stop_strings = await self._tokenize(partial(split_stops, body.stop, model), "stop")
        model_stops = frozenset[int]() if body.ignore_eos else model.stop_ids
        sampling = body.sampling_options(model.advised, self._seed, self.models.config.vocab_size)
        for prompt in prompts:
            self._check_length(body, model, prompt)
        return [
            engine_request.Request(
                number=next(self._numbers),
                prompt=tuple(prompt),
                sampling=sampling,
                max_new_tokens=body.max_new_tokens or self._room(model) - len(prompt),
                samples=body.n,
                stop_ids=model_stops | silent_stops | frozenset(body.stop_token_ids),
                stop_strings=tuple(stop_strings),
                shows_stop=body.include_stop_str_in_output,
                min_new_tokens=body.min_tokens,
                grammar=grammar,
                adapter=model.adapter,
                top_logprobs=body.most_top_logprobs,
                prompt_logprobs=body.wants_prompt_logprobs,
                # With a seed of its own, a request has the same answer whatever else the server is asked.
                draw_number=None if body.seed is None else index,
            )
            for index, prompt in enumerate(prompts)
        ]

    async def encode_text(self, model: ServedModel, text: str | list[int], param: str) -> list[int]:
        """The tokens of a text, or those that are given in its place. Raises ApiError for one that cannot fit."""
        if not isinstance(text, str):
            return text
        self._check_size(model, len(text), param)
        return await self._tokenize(partial(model.chat_tokenizer.encode_prompt, text), param)

    def _room(self, model: ServedModel) -> int:
        """The most tokens that a prompt and its answer may have."""
        return self.engine.longest - model.virtual_tokens

    def _check_size(self, model: ServedModel, characters: int, param: str) -> None:
        """Raises ApiError for a text that is longer than any that fits, before it is tokenized."""
        longest = model.chat_tokenizer.tokenizer.longest_token
        if characters > self._room(model) * longest:
            raise ApiError(
                f"{param}: {characters:,} characters are more than the {self._room(model):,} tokens that a prompt and "
                f"its answer have room for can be: the longest token has {longest}",
                param=param,
                code="context_length_exceeded",
            )

    def _encode_messages(
        self, model: ServedModel, body: ChatBody | TokenizeBody, tools: Sequence[dict[str, Any]]
    ) -> ChatPrompt:
        """The prompt of a conversation by the model's chat template. Raises ApiError, or DataError of the template.

        For the thread that tokenizes. Conversations that cannot fit are refused before the template sees them.
        """
        chat_tokenizer, messages = model.chat_tokenizer, body.messages
        chat_tokenizer.require_chat_template()
        if body.continue_final_message and not (messages[-1].role == "assistant" and messages[-1].content.strip()):
            raise ApiError(
                "continue_final_message: the last message is not the beginning of an answer: it needs role assistant "
                "and a text",
                param="continue_final_message",
            )
        if len(messages) + len(tools) > self._room(model):
            raise ApiError(
                f"messages: {len(messages) + len(tools):,} messages and tools are more than the {self._room(model):,} "
                "tokens that a prompt and its answer have room for",
                param="messages",
                code="context_length_exceeded",
            )
        turns = [message.turn for message in messages]
        if "developer" not in chat_tokenizer.tokenizer.template(tools=bool(tools)).source:
            turns = [{**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in turns]
        self._check_size(model, characters([turns, list(tools)]), "messages")
        if tools and not template_process().takes_tools(chat_tokenizer.tokenizer.template(tools=True)):
            raise ApiError(
                f"tools: the chat template of {model.name} shows the model no tools; leave them out, or start the "
                "server with one that does (`--chat-template`, `danlu recipes templates`)",
                param="tools",
            )

        def render(shown: Sequence[Turn]) -> str:
            return chat_tokenizer.render_chat(shown, tools, body.chat_template_kwargs, begins_turn=body.begins_turn)

        text = render_begun(render, turns) if body.continue_final_message else render(turns)
        self._check_size(model, len(text), "messages")
        return ChatPrompt(encode_utf8(chat_tokenizer.tokenizer, text), opened_thought(text))

    def _encode_chat(self, model: ServedModel, body: TokenizeBody) -> list[int]:
        return self._encode_messages(model, body, body.tools).tokens

    def _check_length(self, body: SamplingBody, model: ServedModel, prompt: Sequence[int]) -> None:
        """Raises ApiError for a prompt that the model cannot continue, or not so far."""
        config, param = self.models.config, prompt_parameter(body)
        if problem := prompt_problem(config, prompt, model.virtual_tokens):
            fits = len(prompt) + model.virtual_tokens < config.context_length
            code = "invalid_value" if fits else "context_length_exceeded"
            raise ApiError(f"{param}: {problem}", param=param, code=code)
        room = self._room(model)
        needed = min(len(prompt) + (body.max_new_tokens or 1), config.context_length - model.virtual_tokens)
        if needed > room:
            raise ApiError(
                f"{param}: {len(prompt)} tokens and an answer of up to {needed - len(prompt)} are more than the {room} "
                f"that {self.engine.bound}",
                param=param,
                code="context_length_exceeded",
            )

    async def _answer(self, request: Request, call: Call, body: SamplingBody, writer: AnswerWriter) -> Response:
        """Lets the engine answer. An error is in the response's status until the engine has taken the requests."""
        request.state.writer = writer
        with as_api_errors(prompt_parameter(body)), in_time(self._timeout_s):
            async with asyncio.timeout(self._timeout_s):
                await self.engine.submit(call)
            if body.stream:
                events = stream_events(call, body, writer, self._timeout_s)
                return EventStream(events, on_end=partial(self.engine.abort, call))
            try:
                completions = await unless_gone(request, collect(call, self._timeout_s))
            finally:
                self.engine.abort(call)
        if any(completion.finish == "abort" for completion in completions):
            ended_by = "the server is ending" if self.engine.is_ending else "a trainer has ended all answers"
            raise ApiError(ended_by, status=503)
        # With many choices and their likeliest tokens it takes seconds to write.
        return await in_thread(self._writing, lambda: JSONResponse(writer.whole(completions)))

    async def _tokenize(self, encode: Callable[[], Result], param: str) -> Result:
        """Runs the tokenizer or the chat template in their thread. Raises ApiError for input that they refuse."""
        with as_api_errors(param):
            return await in_thread(self._tokenizing, encode)

    # -- the rest ------------------------------------------------------------------------------------------------------

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self.models.names]})

    async def retrieve_model(self, request: Request) -> Response:
        return JSONResponse(self._card(self.models.find(request.path_params["name"]).name))

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._started, "owned_by": "danlu"}
        return {**card, "max_model_len": self._room(self.models.find(name))}

    async def tokenize(self, request: Request) -> Response:
        body = await read_request(TokenizeBody, request)
        model = self.models.find(body.model)
        tokenizer = model.chat_tokenizer.tokenizer
        if body.prompt is None:
            encode = partial(self._encode_chat, model, body)
        else:
            self._check_size(model, len(body.prompt), "prompt")
            encode = partial(
                model.chat_tokenizer.encode_prompt if body.add_special_tokens else tokenizer.encode, body.prompt
            )
        tokens = await self._tokenize(encode, "messages" if body.prompt is None else "prompt")
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": self._room(model)}
        if body.return_token_strs:
            contents = await self._tokenize(partial(tokenizer.token_bytes, tokens), "prompt")
            answer["token_strs"] = [content.decode(errors="replace") for content in contents]
        return await in_thread(self._writing, lambda: JSONResponse(answer))

    async def detokenize(self, request: Request) -> Response:
        body = await read_request(DetokenizeBody, request, MAX_DETOKENIZE_BYTES)
        tokenizer = self.models.find(body.model).chat_tokenizer.tokenizer
        if wrong := [token for token in body.tokens if token >= tokenizer.vocab_size]:
            raise ApiError(f"tokens: {wrong[0]} is none of the tokenizer's {tokenizer.vocab_size}", param="tokens")
        return JSONResponse({"prompt": await self._tokenize(partial(tokenizer.decode, body.tokens), "tokens")})

    async def health(self, request: Request) -> Response:
        state = "hung" if self.engine.busy_s > self._hung_s else self.engine.state
        return JSONResponse({"status": state}, 200 if state in ("ready", "asleep", "paused") else 503)

    async def metrics(self, request: Request) -> Response:
        sleeps = self.engine.state == "asleep"
        text = metrics_text(self.engine.statistics, self.engine.times, self.models.names[0], sleeps=sleeps)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


@contextmanager
def as_api_errors(param: str | None = None, *, answer_failed: int = 500) -> Iterator[None]:
    """Raises ApiError where a request is refused, and where the engine fails at it or has ended.

    answer_failed: the status where this answer alone failed.
    """
    try:
        yield
    except DanluError as error:
        raise ApiError(str(error), param=param) from None
    except AnswerFailed as error:
        raise ApiError(str(error), status=answer_failed) from None
    except EngineFailed as error:
        raise ApiError(str(error), status=500) from None
    except EngineStopped as error:
        raise ApiError(str(error), status=503, headers={"retry-after": "1"}) from None
    except QueueFull as error:
        headers = {"retry-after": str(error.retry_s)}
        raise ApiError(str(error), status=429, code="rate_limit_exceeded", headers=headers) from None


def build_app(routes: Sequence[Route]) -> Starlette:
    """The application, for an engine thread that runs."""
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        ApiError: _refuse,
        HTTPException: _refuse_route,
        ClientDisconnect: _give_up,
        Exception: _fail,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


async def _refuse(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _refuse_route(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    return JSONResponse(ApiError(message, status=error.status_code).body, error.status_code, error.headers)


async def _give_up(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _fail(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(f"the server failed: {type(error).__name__}: {error}", status=500).body, 500)


def prompt_parameter(body: SamplingBody) -> str:
    """The parameter that a request's prompt is in."""
    return "messages" if isinstance(body, ChatBody) else "prompt"


# -- requests ----------------------------------------------------------------------------------------------------------


async def in_thread(threads: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    """Does work in another thread, while the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(threads, work)


async def read_request(kind: type[AnyBody], request: Request, most_bytes: int | None = None) -> AnyBody:
    """The request, of a body that is read by another thread where that takes long. Raises ApiError.

    most_bytes: of a body of this kind; a longer one is refused with status 400.
    """
    body = await read_body(request, most_bytes)
    if len(body) <= SHORT_BODY_BYTES:
        return parse_body(kind, body)
    return await in_thread(_PARSING, partial(parse_body, kind, body))


async def read_body(request: Request, most_bytes: int | None = None) -> bytes:
    """The request's body. Raises ApiError where it is too large, or not declared to be JSON.

    A page in a browser can send other types to any address without asking the server, which this refuses.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"Content-Type is {kind or 'missing'}: send JSON, with the header Content-Type: application/json"
        raise ApiError(message, status=415)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise ApiError(f"the request's body is longer than {MAX_BODY_BYTES} bytes", status=413)
        if most_bytes is None or size <= most_bytes:
            chunks.append(chunk)
    if most_bytes is not None and size > most_bytes:  # read to its end, as clients read the answer only then
        raise ApiError(f"the request's body is longer than {most_bytes:,} bytes, which is more than it may say")
    return b"".join(chunks)


def call_of(requests: Sequence[engine_request.Request], body: SamplingBody, model: ServedModel) -> Call:
    """The engine's part of an HTTP request."""
    return Call(requests, decode_of(body, model), stream=body.stream, grammars=model.grammars)


def decode_of(body: SamplingBody, model: ServedModel) -> Decode:
    """Returns the function that makes text of an answer's tokens: with or without special ones, as the request says."""
    chat_tokenizer = model.chat_tokenizer
    if body.skip_special_tokens is None:
        return chat_tokenizer.decode
    if not body.skip_special_tokens:
        return chat_tokenizer.tokenizer.decode
    special = chat_tokenizer.tokenizer.special_ids
    return lambda ids: chat_tokenizer.decode([token for token in ids if token not in special])


def check_stops_length(stops: Sequence[str], model: ServedModel) -> None:
    """Raises ApiError for texts that end an answer and are longer than any of so few tokens, before these are made."""
    longest = model.chat_tokenizer.tokenizer.longest_token
    if sum(map(len, stops)) > MAX_STOP_TOKENS * longest:
        raise ApiError(
            f"stop: {sum(map(len, stops)):,} characters are more than {MAX_STOP_TOKENS} tokens can have, which is what "
            f"all of them together may be: the longest token has {longest}",
            param="stop",
        )


def split_stops(stops: Sequence[str], model: ServedModel) -> tuple[frozenset[int], list[str]]:
    """Splits stops as `ChatTokenizer.split_stops` does. Raises ApiError for texts of too many tokens together."""
    tokens = sum(len(model.chat_tokenizer.tokenizer.encode(stop)) for stop in stops)
    if tokens > MAX_STOP_TOKENS:
        raise ApiError(f"stop: {tokens} tokens together are more than {MAX_STOP_TOKENS}", param="stop")
    return model.chat_tokenizer.split_stops(stops)


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Waits for work while the client does. Raises ClientDisconnect when it has left, and cancels the work."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
