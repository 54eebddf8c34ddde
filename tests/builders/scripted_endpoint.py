"""A server with OpenAI's interface on loopback that answers as a function says, and fails as another one says."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal["busy", "break", "garble", "empty", "refuse", "length", "slow", "key"]
Answer = Callable[[Mapping[str, Any]], str]
"""From a request's body to the answer."""
Faults = Callable[[str, int], Fault | None]
"""From the last text of a request and the number of its attempt (from 1) to what goes wrong."""


def question(body: Mapping[str, Any]) -> str:
    """The text that a request asks about: its prompt, or its last message."""
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


@dataclass
class ScriptedEndpoint:
    """The server's side, and its account.

    Attributes:
        asked: how often each request has come, by its whole body.
        answered: how often each was answered.
        most: (under way, most under way).
        dies_after: the requests after which connections break without an answer; None for never.
    """

    answer: Answer
    faults: Faults = lambda text, attempt: None
    model: str = "scripted"
    has_logprobs: bool = True
    most_logprobs: int = 20
    latency_s: float = 0.0
    dies_after: int | None = None
    url: str = ""
    asked: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    keys: set[str | None] = field(default_factory=set)
    most: list[int] = field(default_factory=lambda: [0, 0])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, body: Mapping[str, Any]) -> tuple[int, Any] | None:
        """(status, body) of the reply to a request; None breaks the connection."""
        name, text = json.dumps(body, sort_keys=True), question(body)
        with self.lock:
            self.asked[name] += 1
            attempt = self.asked[name]
            dead = self.dies_after is not None and self.asked.total() > self.dies_after
        fault = "break" if dead else self.faults(text, attempt)
        time.sleep(0.5 if fault == "slow" else self.latency_s)
        match fault:
            case "break":
                return None
            case "busy":
                return 429, {"error": {"message": "slow down"}}
            case "refuse":
                return 400, {"error": {"message": "the prompt is against the rules"}}
            case "key":
                return 401, {"error": {"message": "wrong key"}}
            case "garble":
                return 200, "}{ this is not JSON"
        content = "" if fault == "empty" else self.answer(body)
        with self.lock:
            self.answered[name] += 1
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if fault == "length" else "stop"}
        choice |= {"text": content} if "prompt" in body else {"message": {"role": "assistant", "content": content}}
        if body.get("logprobs") and self.has_logprobs:
            count = min(self.most_logprobs, body["top_logprobs"])
            top = [{"token": f"t{number}", "logprob": -0.5 * (number + 1)} for number in range(count)]
            tokens = content.split()[: body["max_tokens"]] or ["x"]
            choice["logprobs"] = {"content": [{"token": each, "logprob": -0.5, "top_logprobs": top} for each in tokens]}
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(content.split())}
        return 200, {"choices": [choice], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    script: ScriptedEndpoint

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            return self._send(404, {"error": "no such path"})
        return self._send(200, {"object": "list", "data": [{"id": self.script.model}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script = self.script
        with script.lock:
            script.keys.add(self.headers.get("Authorization"))
            script.most[0] += 1
            script.most[1] = max(script.most)
        reply = script.reply(body)
        with script.lock:
            script.most[0] -= 1
        if reply is None:
            self.close_connection = True
            return None
        return self._send(*reply)

    def _send(self, status: int, value: Any) -> None:
        content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            pass  # whoever asked was killed

    def log_message(self, *arguments: object) -> None:
        return None


@contextmanager
def serving(script: ScriptedEndpoint) -> Iterator[ScriptedEndpoint]:
    """The server with its url, in threads of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"script": script}))
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()


NOUNS = [
    "river", "bridge", "garden", "letter", "winter", "market", "teacher", "engine", "forest", "island", "mirror",
    "ladder", "blanket", "harbour", "candle",
]  # fmt: skip
VERBS = ["describe", "compare", "list", "explain", "translate", "summarise", "rewrite", "classify", "compute", "invent"]


def synthetic_answer(body: Mapping[str, Any]) -> str:
    """An answer that hangs on the whole request, and has the form that the request of a generator asks for."""
    draw = random.Random(json.dumps(body, sort_keys=True))
    text = question(body)

    def sentence() -> str:
        return f"{draw.choice(VERBS)} {' '.join(draw.choices(NOUNS, k=draw.randint(4, 9)))}"

    if "prompt" in body:
        return sentence()
    if match := re.search(r"Write (\d+) further tasks", text):
        return "\n".join(f"{number}. {sentence()}." for number in range(1, int(match[1]) + 1))
    if "Judge an assistant's work" in text:
        names = re.findall(r"^Score( [AB])?: NUMBER", text, re.MULTILINE)
        return "\n".join(["I think so.", *(f"Score{name}: {draw.randint(1, 5)}" for name in names)])
    if "Write two lines" in text:
        return f"Question: {sentence()}?\nAnswer: {sentence()}."
    return f"{sentence()}. {sentence()}."
