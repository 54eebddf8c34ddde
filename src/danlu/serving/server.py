"""The HTTP server under `danlu serve`: its socket, who may speak with it, its log, and how it ends."""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from danlu.core.errors import ResourceError
from danlu.core.server_key import remove_key
from danlu.core.terminal import print_status
from danlu.remote_engines.danlu_protocol import PREFIX
from danlu.serving.api_endpoints import CLIENT_GONE, HUNG_S, Api, build_app
from danlu.serving.embeddings import Embeddings, Pooling
from danlu.serving.engine_thread import EngineThread
from danlu.serving.openai_answers import AnswerWriter
from danlu.serving.openai_api import ApiError, given_key
from danlu.serving.responses import Responses
from danlu.serving.rollout_endpoints import RolloutEndpoints
from danlu.serving.served_models import ServedModels

if TYPE_CHECKING:  # they bring torch
    from danlu.inference.embedded import EmbeddedEngine
    from danlu.serving.adapter_endpoints import AdapterEndpoints, AdapterLoader
    from danlu.serving.served_weights import ServedWeights

OPEN_PATHS = ("/health", "/metrics")
"""Paths that need no API key, and are not logged: monitors of a server ask every few seconds."""
UNLOGGED_PATHS = (*OPEN_PATHS, f"{PREFIX}/answer", f"{PREFIX}/info")
"""Paths that are not logged: those, and the ones that a trainer asks hundreds of times."""

GRACE_S = 5
"""Seconds that answers which were ended have for reaching their clients."""

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Limits:
    """The bounds of a server's work; None: none."""

    longest: int | None = None
    """The most tokens of a prompt with its answer."""
    queue: int | None = None
    """Answers that may wait for those that grow."""
    timeout_s: float | None = None
    """The longest time of an answer."""
    hung_s: float = HUNG_S
    """The longest step of the engine before `/health` says that it hangs."""
    drain_s: float = 0.0
    """The time that unfinished answers have after SIGTERM."""


@dataclass(frozen=True)
class ServerOptions:
    """The settings of a server.

    seed: of requests that bring none. quiet: no line for each request. leaves_key: whether the key lies in a file for
    trainers of this machine (`danlu.core.server_key`), which is deleted at the end. weights_root: the folder below
    which a trainer may name folders of weights.
    """

    seed: int
    api_key: str | None = None
    quiet: bool = False
    limits: Limits = Limits()
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may ask, as CORS has them; "*": all."""
    pooling: Pooling = "last"
    certificate: tuple[Path, Path] | None = None
    """The files of a TLS certificate and of its key; None: plain HTTP."""
    leaves_key: bool = False
    weights_root: Path = field(default_factory=Path.cwd)


def bind(host: str, port: int, host_option: str = "--host", port_option: str = "--port") -> socket.socket:
    """Opens a socket on an address, which nobody can connect to yet. port: 0 takes a free one.

    host_option, port_option: the names of their options in messages.

    Raises ResourceError that explains the fault of the address, before a model is loaded for nothing.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise ResourceError(f"{host_option} {host}: no address of this machine: {error}") from None
    listener = socket.socket(family, kind, protocol)
    # A server that has just ended leaves connections behind that would keep the port for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _refused(host, port, error, port_option) from None
    return listener


def _refused(host: str, port: int, error: OSError, port_option: str = "--port") -> ResourceError:
    if error.errno == errno.EADDRINUSE:
        what = f"another program listens there. End it, or take another port with {port_option} (0: any that is free)"
    elif error.errno == errno.EACCES:
        what = f"ports below 1024 are for root. Take another one with {port_option}"
    elif error.errno == errno.EADDRNOTAVAIL:
        what = "no address of this machine. 127.0.0.1 is for this machine alone, 0.0.0.0 for all networks that it is in"
    else:
        what = f"cannot be listened at: {error.strerror}"
    return ResourceError(f"{host}, port {port}: {what}")


def is_loopback(listener: socket.socket) -> bool:
    """Whether only programs on this machine can connect."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """The url of the API."""
    host, port, *_ = listener.getsockname()
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"


class Guard:
    """Lets in who may speak with the server, and writes a line for each request."""

    def __init__(self, app: ASGIApp, options: ServerOptions, *, local: bool) -> None:
        self._app = app
        self._options = options
        self._local = local  # only programs on this machine can connect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status, is_cut_off = time.monotonic(), CLIENT_GONE, False

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            error = self._refusal(scope)
            answer = self._app if error is None else JSONResponse(error.body, error.status)
            await answer(scope, receive, watched_send)
        except asyncio.CancelledError:  # the server ends, and does not wait any longer
            is_cut_off = True
            raise
        finally:
            if not self._options.quiet and scope["path"] not in UNLOGGED_PATHS:
                print_status(_log_line(scope, status, time.monotonic() - began_s, is_cut_off=is_cut_off))

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if scope["path"].startswith(PREFIX) and ("origin" in headers or "sec-fetch-site" in headers):
            return ApiError(f"{PREFIX}: a trainer speaks here, and no page in a browser", status=403)
        if self._options.api_key is None:
            # A page in a browser can have its own name resolved to this machine, and read what it is answered.
            if self._local and not _is_local(headers.get("host", "")):
                return ApiError(
                    f"the host {headers['host']!r} is not this machine: a server without an API key answers to "
                    "localhost only. Start it with --api-key",
                    status=403,
                )
            return None
        if scope["path"] in OPEN_PATHS or hmac.compare_digest(given_key(headers), self._options.api_key.encode()):
            return None
        return ApiError("the API key is missing or wrong", status=401, code="invalid_api_key")


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    if name.lower().removesuffix(".") in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _log_line(scope: Scope, status: int, duration_s: float, *, is_cut_off: bool) -> str:
    """Formats a request: `POST /v1/completions 200 tiny 12 + 34 tokens 0.52 s`."""
    writer: AnswerWriter | None = scope.get("state", {}).get("writer")
    has_left = status == CLIENT_GONE or (status == 200 and writer is not None and not writer.is_complete)
    outcome = "cut off" if is_cut_off else "client left" if has_left else str(status)
    # A path may hold line breaks, which would look like a line of their own.
    shown = (json.dumps(text, ensure_ascii=False)[1:-1] for text in (scope["method"], scope["path"]))
    fields = [*shown, outcome]
    if writer is not None:
        fields += [writer.model, f"{writer.prompt_tokens} + {writer.completion_tokens} tokens"]
    return "  ".join([*fields, f"{duration_s:.2f} s"])


class Server(uvicorn.Server):
    """Serves with uvicorn, and ends unfinished answers at shutdown, so that their streams can close.

    A second SIGINT during shutdown cuts off the remaining ones. With `rollouts` a trainer may replace the weights: the
    endpoints for that are there too.
    """

    def __init__(
        self,
        models: ServedModels,
        engine: EmbeddedEngine,
        listener: socket.socket,
        options: ServerOptions,
        rollouts: ServedWeights | None = None,
        adapters: AdapterLoader | None = None,
    ) -> None:
        limits = options.limits
        self.engine = EngineThread(engine, on_failure=self._leave, longest=limits.longest, queue_limit=limits.queue)
        self._models = models
        self._listener, self._options = listener, options
        self._api = Api(models, self.engine, options.seed, timeout_s=limits.timeout_s, hung_s=limits.hung_s)
        self._rollouts: RolloutEndpoints | None = None
        routes = [*self._api.routes, *Embeddings(self._api, engine, options.pooling).routes]
        routes += Responses(self._api).routes
        if rollouts is not None:
            decode = models.find(None).chat_tokenizer.decode
            self._rollouts = RolloutEndpoints(rollouts, self.engine, decode, options.weights_root)
            routes += self._rollouts.routes
        self._adapters: AdapterEndpoints | None = None
        if adapters is not None:
            from danlu.serving.adapter_endpoints import AdapterEndpoints  # here, since it brings torch

            self._adapters = AdapterEndpoints(models, self.engine, adapters)
            routes += self._adapters.routes
        app: ASGIApp = Guard(build_app(routes), options, local=is_loopback(listener))
        if options.allowed_origins:  # outside: a browser asks first whether it may, without the key
            app = CORSMiddleware(
                app, allow_origins=options.allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
            )
        certificate, key = options.certificate or (None, None)
        # websockets are not spoken, and lines for requests are written by the guard.
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=GRACE_S,
                lifespan="off",
                ssl_certfile=certificate,
                ssl_keyfile=key,
            )
        )

    def listen(self) -> None:
        """Answers until a signal comes; SIGINT and SIGTERM end the process afterwards, as they would without a server.

        Raises the engine's error, where it failed for good.
        """
        host, port, *_ = self._listener.getsockname()
        try:
            self._listener.listen()
        except OSError as error:  # somebody was faster while the model was loaded
            raise _refused(host, port, error) from None
        with self._without_log_of_the_end():
            self.run(sockets=[self._listener])
        if self.engine.failure is not None:
            raise self.engine.failure
        for number in reversed(self._captured_signals):
            if number == signal.SIGINT and signal.getsignal(number) is signal.default_int_handler:
                # The process ends now: one more Ctrl-C would break its exit off with a traceback of somebody's module.
                signal.signal(number, signal.SIG_IGN)
                raise KeyboardInterrupt
            signal.raise_signal(number)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures signals as uvicorn does, except that `listen` raises them again, when the event loop has ended.

        Two that are raised within the loop break it off with the requests that are still in it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.signal(number, self.handle_exit) for number in ENDING_SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.start()
        await super().startup(sockets)
        url = url_of(self._listener, "http" if self._options.certificate is None else "https")
        print_status(f"{url} answers with {', '.join(self._models.names)}  (Ctrl-C ends)")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._options.leaves_key and self._options.api_key is not None:
            remove_key(self._listener.getsockname()[1], self._options.api_key)
        await self._drain()
        stopping = asyncio.ensure_future(self.engine.stop())
        await asyncio.wait((stopping,), timeout=1)
        if not stopping.done():
            print_status("ending after this step of the engine; Ctrl-C again ends at once")
        while not stopping.done() and not self.force_exit:
            await asyncio.wait((stopping,), timeout=0.1)
        await super().shutdown(sockets)
        self._api.close()
        for endpoints in (self._rollouts, self._adapters):
            if endpoints is not None:
                endpoints.close()
        if cut_off := len(self.server_state.tasks):
            why = "Ctrl-C came again" if self.force_exit else f"their answers were not read within {GRACE_S} s"
            print_status(f"requests cut off: {cut_off} ({why})")

    async def _drain(self) -> None:
        """Waits until all answers are complete, after SIGTERM and for a bounded time; Ctrl-C ends the wait."""
        drain_s = self._options.limits.drain_s
        if signal.SIGTERM not in self._captured_signals or not drain_s or not self.engine.open_answers:
            return
        self.engine.is_draining = True
        print_status(f"SIGTERM: {self.engine.open_answers} answers have {drain_s:g} s; new requests are refused")
        end_s = time.monotonic() + drain_s
        while self.engine.open_answers and time.monotonic() < end_s and signal.SIGINT not in self._captured_signals:
            await asyncio.sleep(0.05)

    def _leave(self) -> None:
        self.should_exit = True

    @contextmanager
    def _without_log_of_the_end(self) -> Iterator[None]:
        """Keeps uvicorn from logging each request that is cut off with a traceback; `shutdown` says how many are."""

        def is_logged(record: logging.LogRecord) -> bool:
            is_cut_off = record.exc_info is None or isinstance(record.exc_info[1], asyncio.CancelledError)
            return not (self.should_exit and is_cut_off)

        log = logging.getLogger("uvicorn.error")
        log.addFilter(is_logged)
        try:
            yield
        finally:
            log.removeFilter(is_logged)
