"""JSON over HTTP with Python's own client, for rollout servers, judges and models that make data. No torch here.

Each call has a connection of its own. An answer takes seconds and a new connection a fraction of a millisecond, and one
that was kept would leave open, when it breaks, whether the server has seen the request.
"""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from danlu.core.errors import RecipeError, ResourceError
from danlu.core.server_key import read_key

GATEWAY_STATUSES = (502, 503, 504)
"""The statuses that a gateway, or a server that is about to end, answers in place of the engine."""
BUSY_STATUSES = (408, 409, 425, 429, 500)
"""The statuses of a server that may answer later; those of a gateway are lost connections."""
FIRST_PAUSE_S = 0.5
"""The seconds before a server is asked again; twice as long each time."""
LONGEST_PAUSE_S = 30.0

_POLL_S = 0.1
_CHUNK_BYTES = 1 << 16
_MESSAGE_CHARACTERS = 500


class ConnectionLost(ResourceError):
    """The server did not answer: it is not there, it ended midway, or it took longer than it may."""


class RequestRefused(ResourceError):
    """The server answered that it will not, or cannot, serve the request."""

    def __init__(self, message: str, status: int, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        """The seconds after which to ask again, where the server gives them."""


@dataclass(frozen=True)
class HTTPClient:
    """Calls to one server, from any number of threads."""

    url: str  # http://host:port, with a path where a gateway puts one before the server's own
    timeout_s: float  # of each wait for the server to say something
    api_key_variable: str | None = None  # the environment variable with the key that goes with each call
    most_bytes: int | None = None  # that an answer may have
    server_key: bool = False  # where no variable is named: whether a server of this machine has left its key in a file
    total_s: float | None = None  # until all of an answer is there, of a server that says something now and then

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RecipeError(f"{self.url}: the url of a server looks like http://localhost:8000")
        if self.api_key_variable is not None and not os.environ.get(self.api_key_variable):
            raise RecipeError(
                f"api_key_variable: the environment has no {self.api_key_variable}, which should hold the key of "
                f"{self.url}"
            )
        if self.api_key_variable is not None and not os.environ[self.api_key_variable].isprintable():
            raise RecipeError(
                f"api_key_variable: {self.api_key_variable} has a line break or another control character"
            )

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """Returns the server's answer to GET: parsed, if it is JSON, else text.

        Raises ConnectionLost, or RequestRefused for any status from 400 on but those of a gateway.
        """
        return self._call("GET", path, None, query)

    def post(self, path: str, body: Any = None, query: Mapping[str, Any] | None = None) -> Any:
        """Sends POST with a body as JSON; returns and raises as `get` does."""
        return self._call("POST", path, body, query)

    def post_file(self, path: str, file: Path) -> Any:
        """Sends POST with the bytes of a file; returns and raises as `get` does."""
        with file.open("rb") as content:
            return self._call("POST", path, content, None)

    def wait_until_healthy(self, timeout_s: float) -> bool:
        """Whether the server answers GET /health with success at some moment of the next `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.get("/health")
                return True
            except (ConnectionLost, RequestRefused):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_S)

    @property
    def _key(self) -> str | None:
        if self.api_key_variable is not None:
            return os.environ[self.api_key_variable]
        return read_key(self.url) if self.server_key else None  # each time: a server that is started again has another

    def _call(self, method: str, path: str, body: Any, query: Mapping[str, Any] | None) -> Any:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout_s)
        target = f"{parts.path.rstrip('/')}{path}{'?' + urlencode(query) if query else ''}"
        headers: dict[str, str | bytes] = {"Accept": "application/json"}
        if (key := self._key) is not None:
            headers["Authorization"] = f"Bearer {key}".encode()
        content: bytes | io.BufferedReader | None = None
        if isinstance(body, io.BufferedReader):
            content = body
            headers |= {
                "Content-Type": "application/octet-stream",
                "Content-Length": str(os.fstat(body.fileno()).st_size),
            }
        elif body is not None:
            content = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            deadline = math.inf if self.total_s is None else time.monotonic() + self.total_s
            connection.request(method, target, content, headers)
            response = connection.getresponse()
            status, answer = response.status, self._read(response, connection, deadline)
        except TimeoutError:
            raise ConnectionLost(
                f"{self.url}: no answer to {method} {path} within {self.timeout_s:g} s (timeout_s)"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionLost(
                f"{self.url}: the connection was lost during {method} {path}: {error or type(error).__name__}"
            ) from error
        finally:
            connection.close()
        if status in GATEWAY_STATUSES:
            raise ConnectionLost(f"{self.url}: {method} {path} was answered with status {status}: the engine is gone")
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError):  # not JSON, or so deep that nobody means it
            value = answer.decode(errors="replace")
        if status >= 400:
            message = f"{self.url}: {method} {path}: status {status}: {_message(value)}"
            again = response.headers.get("Retry-After") or ""  # in seconds, or a date
            raise RequestRefused(message, status, float(again) if again.strip().isdecimal() else None)
        return value

    def _read(
        self, response: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float
    ) -> bytes:
        """The content of an answer. Raises ConnectionLost for one that is too long, or not there in time."""
        if self.most_bytes is None and self.total_s is None:
            return response.read()
        content = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):
            content += chunk
            if self.most_bytes is not None and len(content) > self.most_bytes:
                raise ConnectionLost(f"{self.url}: an answer of more than {self.most_bytes:,} bytes: no more is read")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ConnectionLost(f"{self.url}: an answer that is not there in whole after {self.total_s:g} s")
            if connection.sock is not None:
                connection.sock.settimeout(min(self.timeout_s, left_s))
        if response.length:  # of what Content-Length has promised
            raise http.client.IncompleteRead(bytes(content), response.length)
        return bytes(content)


def post_with_retries(
    client: HTTPClient, path: str, body: Any, retries: int, pause: Callable[[float], object] = time.sleep
) -> Any:
    """Sends POST as `HTTPClient.post` does, and again where the server is busy or the connection is lost.

    Args:
        retries: how many more attempts there are.
        pause: waits for so many seconds; true ends the attempts, as `threading.Event.wait` does once the event is set.
    """
    for attempt in range(retries):
        pause_s = FIRST_PAUSE_S * 2**attempt
        try:
            return client.post(path, body)
        except ConnectionLost as error:
            lost: ResourceError = error
        except RequestRefused as refusal:
            if refusal.status not in BUSY_STATUSES:
                raise
            lost, pause_s = refusal, refusal.retry_after_s or pause_s
        if pause(min(LONGEST_PAUSE_S, pause_s)):
            raise lost
    return client.post(path, body)


def _message(value: Any) -> str:
    """Returns the message of an error answer, in each of the forms of vLLM, SGLang and FastAPI."""
    while isinstance(value, Mapping):
        value = next(
            (value[key] for key in ("error", "detail", "message", "error_message") if key in value), str(value)
        )
    return str(value)[:_MESSAGE_CHARACTERS]
