"""Calls to a server that answers, refuses, breaks off or says nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from danlu.core.errors import RecipeError
from danlu.core.http_client import ConnectionLost, HTTPClient, RequestRefused

ANSWERS = {
    "/json": (200, b'{"a": [1, 2]}'),
    "/text": (200, b"Cache flushed.\n"),
    "/empty": (200, b""),
    "/openai": (400, b'{"error": {"message": "Token id 9 is out of vocabulary", "type": "BadRequest"}}'),
    "/fastapi": (404, b'{"detail": "Not Found"}'),
    "/sglang": (400, b'{"success": false, "message": "no such group"}'),
    "/long": (500, b"x" * 10_000),
    "/gateway": (503, b"upstream is gone"),
    "/busy": (429, b'{"error": {"message": "slow down"}}'),
    "/deep": (200, b"[" * 100_000),
}


class _Handler(BaseHTTPRequestHandler):
    seen: list[tuple[str, str | None, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.append((self.path, self.headers.get("Authorization"), body))
        path = self.path.removeprefix("/behind").partition("?")[0]
        if path == "/silent":
            time.sleep(2)
        if path == "/drips":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(40):
                    self.wfile.write(b" ")
                    time.sleep(0.05)
            return
        if path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"{}")
            return
        if path in ("/silent", "/breaks"):
            self.close_connection = True
            return
        status, content = ANSWERS[path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if status == 429:
            self.send_header("Retry-After", "3")
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *arguments: object) -> None:
        return None


@pytest.fixture
def server():
    """(url, what was asked)"""
    seen: list = []
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"seen": seen}))
    http.daemon_threads, http.block_on_close = True, False
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{http.server_address[1]}", seen
    http.shutdown()
    http.server_close()


def test_answers_are_parsed_where_they_are_json(server):
    client = HTTPClient(server[0], 5)
    assert client.get("/json") == {"a": [1, 2]}
    assert client.post("/text", {"x": 1}, {"timeout": 2}) == "Cache flushed.\n"
    assert client.post("/empty") == ""
    assert server[1][1:] == [("/text?timeout=2", None, b'{"x": 1}'), ("/empty", None, b"")]


def test_a_path_of_the_url_comes_before_the_server_s_own(server):
    assert HTTPClient(f"{server[0]}/behind/", 5).get("/json") == {"a": [1, 2]}
    assert server[1][0][0] == "/behind/json"


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/openai", 400, "Token id 9 is out of vocabulary"),
        ("/fastapi", 404, "Not Found"),
        ("/sglang", 400, "no such group"),
        ("/long", 500, "x" * 500),
    ],
)
def test_refusals_say_what_the_server_says(server, path, status, message):
    with pytest.raises(RequestRefused) as refusal:
        HTTPClient(server[0], 5).post(path)
    assert refusal.value.status == status
    assert str(refusal.value) == f"{server[0]}: POST {path}: status {status}: {message}"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/breaks", "the connection was lost during GET /breaks"),
        ("/silent", "no answer to GET /silent within 0.2 s"),
        ("/gateway", "status 503: the engine is gone"),
    ],
)
def test_what_is_no_answer_is_a_lost_connection(server, path, message):
    with pytest.raises(ConnectionLost, match=message):
        HTTPClient(server[0], 0.2).get(path)


def test_answers_are_read_up_to_a_size_and_for_a_time(server):
    assert HTTPClient(server[0], 5, most_bytes=13, total_s=5).get("/json") == {"a": [1, 2]}
    with pytest.raises(ConnectionLost, match="an answer of more than 12 bytes"):
        HTTPClient(server[0], 5, most_bytes=12).get("/json")
    with pytest.raises(ConnectionLost, match="not there in whole after 0.2 s"):
        HTTPClient(server[0], 5, total_s=0.2).get("/drips")
    with pytest.raises(ConnectionLost, match="lost during GET /short: IncompleteRead"):
        HTTPClient(server[0], 5, total_s=5).get("/short")
    assert HTTPClient(server[0], 5).get("/deep").startswith("[[[")


def test_a_busy_server_says_when_to_come_back(server):
    with pytest.raises(RequestRefused, match="slow down") as refusal:
        HTTPClient(server[0], 5).get("/busy")
    assert refusal.value.retry_after_s == 3
    with pytest.raises(RequestRefused) as refusal:
        HTTPClient(server[0], 5).get("/openai")
    assert refusal.value.retry_after_s is None


def test_a_port_that_nobody_listens_at():
    client = HTTPClient("http://127.0.0.1:9", 1)
    with pytest.raises(ConnectionLost, match="127.0.0.1:9: the connection was lost during GET /json: .*refused"):
        client.get("/json")
    start = time.monotonic()
    assert not client.wait_until_healthy(0.3)
    assert 0.2 < time.monotonic() - start < 5


def test_the_key_is_taken_from_the_environment(server, monkeypatch):
    with pytest.raises(RecipeError, match="the environment has no ROLLOUT_KEY"):
        HTTPClient(server[0], 5, "ROLLOUT_KEY")
    monkeypatch.setenv("ROLLOUT_KEY", "abc")
    HTTPClient(server[0], 5, "ROLLOUT_KEY").get("/json")
    assert server[1][0][1] == "Bearer abc"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "unix:/x"])
def test_urls_that_are_none(url):
    with pytest.raises(RecipeError, match="looks like http://localhost:8000"):
        HTTPClient(url, 5)
