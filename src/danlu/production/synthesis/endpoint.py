"""A server with OpenAI's interface as a model that makes data: vLLM, SGLang, llama.cpp, `danlu serve`, OpenAI."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from danlu.core.errors import ModelError, RecipeError, ResourceError
from danlu.core.http_client import ConnectionLost, HTTPClient, RequestRefused, post_with_retries
from danlu.data.thoughts import ThoughtReader, opened_thought
from danlu.production.synthesis.requests import Answered, Completion, Key, Message, Request

MOST_BYTES = 64 * 2**20
"""The most bytes of a server's reply: of long answers with the log-probabilities of many tokens."""
GARBLED_TRIES = 3
"""How often a request is made where each reply is no completion."""
FATAL_STATUSES = (401, 403, 404)
"""Refusals that concern every request: the key, or the name of the model."""
REFUSALS_AT_FIRST = 16
"""Refused requests, none of them answered, after which the server is taken to refuse all."""


class _Garbled(Exception):
    """A reply that is no completion."""


@dataclass
class Endpoint:
    """A model behind a server.

    Attributes:
        url: with the path before /chat/completions, such as http://localhost:8000/v1.
        name: the model's name at the server.
        key_variable: the environment variable with the key of the server; None for none.
        price: of a million tokens of prompts, and of answers.
        in_flight: the most requests at a time.
        retries: how often a request is made again, where the server is busy or the connection is lost.
        timeout_s: for the whole answer to a request.
        has_answered: whether it has answered a request before, so that a refusal is that of one request.

    Raises (when made): RecipeError for a url that is none, and a key that the environment lacks.
    """

    url: str
    name: str
    key_variable: str | None = None
    price: tuple[float, float] = (0.0, 0.0)
    in_flight: int = 16
    retries: int = 6
    timeout_s: float = 600.0
    user_header: str | None = None
    user_end: tuple[str, ...] = ()
    has_answered: bool = False
    _stopping: threading.Event = field(default_factory=threading.Event, repr=False)
    _under_way: dict[Future[Completion], Request] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _ = self.client

    @cached_property
    def client(self) -> HTTPClient:
        return HTTPClient(self.url, self.timeout_s, self.key_variable, MOST_BYTES, total_s=self.timeout_s)

    def check(self, top_logprobs: int) -> None:
        """Raises ResourceError where nothing answers at the url, or the key is refused; ModelError where the model is
        not there, or gives no log-probabilities of so many tokens, for which one token is asked."""
        try:
            listed = self.client.get("/models")
        except ConnectionLost as error:
            raise ResourceError(f"{error}. No server of models is at {self.url}: start it, or mend model.url") from None
        except RequestRefused as refusal:
            if refusal.status in (401, 403):
                raise ResourceError(f"{refusal}. The server refuses the key: mend model.key") from None
            listed = None  # a server may do without the list
        names = _model_names(listed)
        if names and self.name not in names:
            shown = ", ".join(names[:5])
            raise ModelError(f"{self.url}: there is no model {self.name!r}. It has {shown}: mend model.name")
        if top_logprobs:
            self._check_logprobs(top_logprobs)

    def generate(self, requests: Iterable[Request]) -> Iterator[Answered]:
        """Every answer as soon as it is there.

        Raises:
            ResourceError: the server does not answer after all retries, or it refuses every request. The answers to
                requests that were under way come first.
        """
        self._stopping.clear()
        waiting, refused = iter(requests), list[Answered]()
        failure: ResourceError | None = None
        pool = ThreadPoolExecutor(self.in_flight, thread_name_prefix="synthesis-request")
        under_way = self._under_way = {}
        try:
            while True:
                while failure is None and len(under_way) < self.in_flight:
                    request = next(waiting, None)
                    if request is None:
                        break
                    under_way[pool.submit(self._answer, request)] = request
                if not under_way:
                    break
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    request = under_way.pop(future)
                    try:
                        completion = future.result()
                    except ResourceError as error:
                        failure = failure or error
                        self._stopping.set()  # those that wait for their next attempt do not make it
                        continue
                    if completion.finish == "refused" and not self.has_answered:
                        refused.append(Answered(request, completion))
                        if len(refused) >= REFUSALS_AT_FIRST:
                            failure = failure or ResourceError(completion.detail)
                        continue
                    self.has_answered |= completion.finish in ("stop", "length")
                    yield Answered(request, completion)
                    if self.has_answered:
                        yield from refused
                        refused = []
            if failure is None and refused:
                failure = ResourceError(refused[0].completion.detail)
            if failure is not None:
                raise failure
        finally:
            self._stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> Iterator[Answered]:
        """The answers to the requests that were under way when `generate` was interrupted; nothing is tried again."""
        self._stopping.set()
        under_way, self._under_way = self._under_way, {}
        for future, request in under_way.items():
            try:
                completion = future.result()
            except (ResourceError, CancelledError):
                continue
            if completion.finish != "refused":
                yield Answered(request, completion)

    def close(self) -> None:
        """Ends the waiting for attempts."""
        self._stopping.set()

    def _answer(self, request: Request) -> Completion:
        """The answer to a request. Raises ResourceError where the server is gone, or refuses all requests."""
        path = "/chat/completions" if request.prompt is None else "/completions"
        problem = ""
        for _ in range(GARBLED_TRIES):
            try:
                reply = post_with_retries(self.client, path, self._body(request), self.retries, self._stopping.wait)
                return self._completion(reply, request)
            except _Garbled as garbled:
                problem = str(garbled)
            except RequestRefused as refusal:
                if refusal.status in FATAL_STATUSES or refusal.status == 429 or refusal.status >= 500:
                    raise
                return Completion("", "refused", detail=str(refusal))
        return Completion("", "garbled", detail=problem)

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.name}
        if request.prompt is None:
            body["messages"] = [message._asdict() for message in request.messages]
        else:
            body["prompt"] = request.prompt
        body |= {
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
        }
        if request.stop:
            body["stop"] = list(request.stop)
        if request.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
        return body

    def _completion(self, reply: Any, request: Request) -> Completion:
        """The completion in a reply. Raises _Garbled for one that has none."""
        try:
            choice = reply["choices"][0]
            text = choice["text"] if request.prompt is not None else choice["message"]["content"]
            usage = reply.get("usage") or {}
            counts = [usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")]
            top = _top_tokens(choice) if request.top_logprobs else None
            if not isinstance(text, str) or not all(type(count) is int and count >= 0 for count in counts):
                raise TypeError
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise _Garbled(f"{self.url}: the reply is no completion: {repr(reply)[:200]}") from None
        if not usage and any(self.price):
            raise ResourceError(f"{self.url}: replies have no `usage`, so nobody knows what they cost: leave price out")
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        cost = (counts[0] * self.price[0] + counts[1] * self.price[1]) / 1e6
        content = without_thought(text, opened_by=request.prompt)
        return Completion(content, finish, counts[0], counts[1], cost, top)  # type: ignore[arg-type]

    def _check_logprobs(self, top_logprobs: int) -> None:
        """Raises ModelError where an answer has no log-probabilities of so many tokens."""
        hello = (Message("user", "Hello"),)
        probe = Request(Key(0, 0, "", 0), hello, temperature=0, max_new_tokens=1, top_logprobs=top_logprobs)
        asked = f"log-probabilities of {top_logprobs} tokens (top_k), which distill needs"
        try:
            reply = post_with_retries(self.client, "/chat/completions", self._body(probe), self.retries)
        except RequestRefused as refusal:
            raise ModelError(f"{refusal}. It was asked for {asked}: lower top_k, or ask another server") from None
        try:
            top = _top_tokens(reply["choices"][0])
        except (KeyError, IndexError, TypeError, ValueError):
            top = ()
        most = max(map(len, top), default=0)
        if most < top_logprobs:
            has = f"gives those of {most}" if most else "gives none"
            raise ModelError(f"{self.url}: the server was asked for {asked}, and {has}. Ask a server that gives them")


def without_thought(text: str, opened_by: str | None = None) -> str:
    """An answer without the thought before it. opened_by: the text of the prompt, which may have opened one."""
    reader = ThoughtReader(opened_thought(opened_by or ""))
    return (reader.feed(text).content + reader.finish().content).strip()


def key_variable(key: str | None) -> str | None:
    """The environment variable that a key of a recipe names, `API_KEY` of `env:API_KEY`."""
    if key is None:
        return None
    if not key.startswith("env:"):
        raise RecipeError("model.key: names the environment variable with the key, as env:API_KEY, and not the key")
    return key.removeprefix("env:")


def _top_tokens(choice: Mapping[str, Any]) -> tuple[tuple[tuple[str, float], ...], ...]:
    """The likeliest tokens of each token of an answer, as the interface of chats has them."""
    return tuple(
        tuple((str(each["token"]), float(each["logprob"])) for each in token["top_logprobs"])
        for token in choice["logprobs"]["content"]
    )


def _model_names(listed: Any) -> list[str]:
    """The names of a server's models; none where its list is not one."""
    data = listed.get("data") if isinstance(listed, Mapping) else None
    entries = data if isinstance(data, list) else []
    return [str(entry["id"]) for entry in entries if isinstance(entry, Mapping) and "id" in entry]
