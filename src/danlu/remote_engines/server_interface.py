"""The interface of a rollout server of any kind; `vllm.py` and `sglang.py` implement it."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from danlu.core.errors import ModelError
from danlu.core.http_client import HTTPClient, RequestRefused
from danlu.inference.engine import PauseMode
from danlu.inference.request import Request
from danlu.inference.support import Support

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from danlu.models.config import ModelConfig

Route = Literal["group", "folder", "adapter"]
"""The way of weight sync to a server: over a process group that it joins, as a model folder, or the adapter alone as a
folder."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of the connections to rollout servers."""

    urls: tuple[str, ...]
    api_key_variable: str | None = None
    """The environment variable that holds the server's key; None: that which `danlu serve` has left on this machine."""
    connections: int = 64
    """Requests that are under way at a time, at all servers together."""
    timeout_s: float = 600.0
    """The longest wait for one answer."""
    reconnect_s: float = 120.0
    """Seconds to wait for a server that is gone."""

    @property
    def clients(self) -> list[HTTPClient]:
        """One for each server."""
        return [HTTPClient(url, self.timeout_s, self.api_key_variable, server_key=True) for url in self.urls]


@dataclass(frozen=True)
class Continuation:
    """A request to a server: one answer, or the rest of one."""

    request_id: str
    request: Request
    tokens: tuple[int, ...]
    """The prompt, and the tokens of the answer so far."""
    max_new_tokens: int
    adapter: str | None
    """The adapter's name; None: the base."""
    sample: int = 0
    """The number of the answer among the request's."""

    @property
    def min_new_tokens(self) -> int:
        """The fewest further tokens of the answer."""
        return max(0, self.request.min_new_tokens - (len(self.tokens) - len(self.request.prompt)))

    @property
    def seed(self) -> int:
        """The seed of servers that draw by means of their own."""
        return seed_of(self.request, self.sample, len(self.tokens))


@dataclass(frozen=True)
class ServerAnswer:
    """One answer as a server gives it; lists have an entry for each token."""

    tokens: list[int]
    logprobs: list[float]
    drawn: list[float]
    version_labels: list[str]
    finish: Literal["stop", "length", "abort"]
    support: list[Support] | None = None
    lacks_support: bool = False
    """Whether a grammar confined the tokens and the server does not say to which: they are computed here."""
    top: list[tuple[tuple[int, float], ...]] | None = None
    routes: np.ndarray | None = None
    """Routes as in `Completion.routes`, of all tokens that were continued, and of the new ones."""

    @property
    def foreign_labels(self) -> set[str]:
        """Labels of weights that no trainer has labelled, as those of a server that was started again are."""
        return {label for label in self.version_labels if not label.isdecimal()}


class WeightGroup(Protocol):
    """A process group of the trainer, which is rank 0, and the server's workers."""

    @property
    def name(self) -> str: ...

    def broadcast(self, tensor: Tensor) -> None: ...

    def close(self) -> None: ...


class RolloutServer(ABC):
    """A server that continues prompts with a model that can get new weights.

    Calls raise ConnectionLost where the server is not there, RequestRefused where it refuses.
    """

    name: str  # in messages
    is_asleep = False
    labels_tokens = True
    """Whether an answer says which weights drew each of its tokens, also where they were replaced meanwhile."""
    shares_grammars = False
    """Whether it reads a grammar as the trainer does, from any token of an answer on, and says which tokens it allowed.
    Else it is sent one that both read alike (`grammar.shared_lark`), each answer begins at its first token, and the
    allowed tokens are computed here."""

    def __init__(self, client: HTTPClient) -> None:
        self.client = client
        self.context = 0
        """The most tokens of a prompt and its answer; known after `check`."""

    @property
    def address(self) -> str:
        """The url of the server."""
        return self.client.url

    @abstractmethod
    def check(self, config: ModelConfig) -> None:
        """Raises ModelError for a version that is not supported, a setting that log-probabilities could not be trusted
        with, and a model with another vocabulary, or one that the server may rotate otherwise.

        Nothing but questions is sent before the version is known.
        """

    def check_grammars(self) -> None:  # noqa: B027  # the servers of danlu have nothing to set
        """Raises ModelError for settings with which answers with a grammar could not be trained on; after `check`."""

    def problem(self, request: Request) -> str | None:
        """Returns the reason why the server cannot answer as a `Completion` promises; None: it can."""
        return None

    @abstractmethod
    def answer(self, continuation: Continuation) -> ServerAnswer:
        """Waits for an answer, or the rest of one."""

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends answers as they are."""

    @abstractmethod
    def pause(self, mode: PauseMode) -> None:
        """Stops answering until `resume`."""

    @abstractmethod
    def resume(self) -> None:
        """Goes on after `pause`."""

    @abstractmethod
    def sleep(self) -> None:
        """Aborts the requests that are under way, and gives the cache's memory back until `wake`."""

    def wake_weights(self) -> None:  # noqa: B027  # most have nothing to do
        """Wakes the weights alone, so that they can be replaced. Does nothing where they never sleep."""

    @abstractmethod
    def wake(self) -> None:
        """Takes the memory again, and goes on."""

    @abstractmethod
    def drop_prefix_cache(self) -> None:
        """Drops the prefix cache; while paused. Running answers are read again."""

    @abstractmethod
    def version_label(self) -> str:
        """Returns the label of the weights that are loaded."""

    @abstractmethod
    def label_version(self, label: str) -> None:
        """Gives the weights that are loaded a label."""

    @abstractmethod
    def load_folder(self, folder: Path, label: str) -> None:
        """Replaces the weights by those of a model folder, and labels them."""

    @abstractmethod
    def load_adapter(self, name: str, folder: Path) -> None:
        """Loads an adapter in place of one of the same name."""

    @abstractmethod
    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names those of these tensors of a model folder, in the type that was handed over, that are others on the
        server. A tensor that the server has in a form of its own cannot be compared, and passes."""


class GroupServer(RolloutServer):
    """A `RolloutServer` that takes weights over a process group too."""

    @abstractmethod
    def open_group(self, address: str) -> WeightGroup:
        """Forms a group with the server's workers. address: where they reach this machine."""

    @abstractmethod
    def begin_update(self) -> None:
        """Begins a replacement of all weights."""

    @abstractmethod
    def send_bucket(self, group: WeightGroup, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Sends some of them."""

    @abstractmethod
    def finish_update(self, label: str) -> None:
        """Ends the replacement, and labels the weights."""


def seed_of(request: Request, sample: int, position: int) -> int:
    """A server's seed from one position of an answer on: a hash of the options' seed, the request's number, the sample
    and the position, below 2^63.

    A server draws by means of its own, so the tokens are not those of the embedded engine with the same options.
    """
    key = f"{request.sampling.seed}/{request.random_number}/{request.draw_sample + sample}/{position}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class VersionRange:
    """Releases with a known interface: from `first` up to, but not including, `end`."""

    first: tuple[int, ...]
    end: tuple[int, ...]

    def __str__(self) -> str:
        return f">={'.'.join(map(str, self.first))},<{'.'.join(map(str, self.end))}"


SUPPORTED = {
    "vLLM": VersionRange((0, 32, 0), (0, 34)),
    "SGLang": VersionRange((0, 5, 23), (0, 5, 24)),
}
"""The interfaces change between minor releases (vLLM 0.26 and 0.28 both broke weight updates), so another release is
refused until its own was read."""


def check_version(name: str, url: str, version: Any) -> tuple[int, ...]:
    """Returns the numbers of a server's version. Raises ModelError unless it is one of those supported."""
    numbers = re.match(r"\d+(\.\d+)*", str(version))
    supported = SUPPORTED[name]
    release = tuple(int(number) for number in numbers[0].split(".")) if numbers else ()
    if not supported.first <= release < supported.end:
        raise ModelError(
            f"{url}: {name} {version} is not supported, only {name} {supported}: requests and weight updates differ "
            "between releases. Nothing was sent to it. Install a supported release of the server"
        )
    return release


def unknown_option(name: str, request: Request) -> str | None:
    """Returns the reason why a server that is no danlu refuses a request, whatever its kind; None: it need not."""
    if request.min_new_tokens:
        return f"{name} is not asked for answers of a least length: leave min_new_tokens at 0"
    if request.grammar is not None and request.top_logprobs:
        return f"{name} gives log-probabilities of the tokens that a grammar allows alone: leave top_logprobs at 0"
    if request.sampling.biased_ids:
        return f"{name} is not asked to bias tokens: leave out biased_ids"
    return None


def check_grammar_engine(where: str, setting: str, engine: Any, wanted: str, reasoning_parser: Any) -> None:
    """Raises ModelError where a server's grammars are not those of llguidance, or begin behind a thought.

    where: address and name of the server. setting, engine, wanted: the flag of the grammar engine, its value, and the
    one that stands for llguidance.
    """
    if engine != wanted:
        raise ModelError(
            f"{where} was started with {setting} {engine}, whose grammars allow other tokens than those that training "
            f"computes for rollout.format. Start it with {setting} {wanted}, which is llguidance"
        )
    if reasoning_parser:
        raise ModelError(
            f"{where} was started with --reasoning-parser {reasoning_parser}, with which a grammar begins behind the "
            "thought, and the trainer's with the answer. Start it without"
        )


def is_accepted(ask: Callable[[], object]) -> bool:
    """Whether a server takes a request, or refuses it with status 400. Raises RequestRefused for other refusals."""
    try:
        ask()
    except RequestRefused as error:
        if error.status != 400:
            raise
        return False
    return True


def check_vocabulary(name: str, url: str, rows: int, accepts: Callable[[int], bool]) -> None:
    """Raises ModelError unless the largest token id that a server accepts is the last of the model's vocabulary."""
    if not accepts(rows - 1) or accepts(rows):
        smaller = "smaller" if not accepts(rows - 1) else "larger"
        raise ModelError(
            f"{url}: the vocabulary of the model that {name} serves is {smaller} than that of the model in training, "
            f"which has {rows} tokens: start the server with the model that training starts from"
        )


def check_rotation(name: str, url: str, config: ModelConfig, context: int) -> None:
    """Raises ModelError where a server may rotate a text otherwise than training does.

    LongRoPE and dynamic scaling rotate a text by the length that it has at last. vLLM takes the long factors for all
    texts where its context is longer than the short ones reach, SGLang where any text of a batch is. Up to that length
    all of them take the short factors, for which the canary's short texts are enough.
    """
    short = config.fixed_rotation_length
    if short is not None and context > short:
        raise ModelError(
            f"{url}: this model's rotary scaling (LongRoPE, dynamic) depends on how long each text gets, and {name}, "
            f"which was started for {context} tokens, goes by its context or its batch: answers would be drawn with "
            f"other rotations than they are trained with. Start it for at most {short} tokens (vLLM: --max-model-len "
            f"{short}; SGLang: --context-length {short}), or use danlu serve --rollouts"
        )


def versions_by_token(spans: Sequence[Mapping[str, Any]], tokens: int) -> list[str]:
    """The label of the weights that each token was drawn with, from half-open ranges {version, start, end}."""
    labels = [str(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    assert len(labels) == tokens, f"weight versions of {len(labels)} tokens for an answer of {tokens}"
    return labels


def during(action: Callable[[], Any], client: HTTPClient, path: str, body: Mapping[str, Any]) -> Any:
    """Returns the result of `action`, with a request to the server under way that takes part in it. Raises the error of
    either: the server's refusal, where the action failed because the server was not there."""
    executor = ThreadPoolExecutor(1)
    call = executor.submit(client.post, path, body)
    try:
        result = action()
    except Exception:
        if call.done():
            call.result()
        raise
    finally:
        # Not waited for: where the action failed, the server may wait for its part until the call's own timeout.
        executor.shutdown(wait=False)
    call.result()
    return result
