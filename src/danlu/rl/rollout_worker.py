"""A rollout process: it has an engine of its own, to which the trainer sends weights and requests.

It receives an `EngineJob` first, then requests and messages, each taken between two passes of the engine. Its replies
are a byte for their kind, and bytes.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from danlu.core.errors import DanluError
from danlu.core.terminal import relay_status
from danlu.core.worker_process import Caller
from danlu.inference.completion_bytes import to_bytes
from danlu.inference.request import Completion, Request
from danlu.rl.shared_weights import SharedWeights, WeightFile

if TYPE_CHECKING:
    from torch import Tensor

START = "from danlu.rl.rollout_worker import serve; serve()"

COMPLETIONS, UPDATED, STATE, REMARK, ERROR = b"c", b"u", b"s", b"r", b"e"
"""Kinds of replies: completions as `completion_bytes` has them; as JSON the version of the weights that were read, the
state that was asked for, a remark to be printed, and the name and text of a DanluError, after which the process ends.
"""


class WorkerEngine(Protocol):
    """The engine of a rollout process: a `RolloutEngine`, or one of episodes. A step does not wait for long."""

    @property
    def unfinished(self) -> int: ...

    def submit(self, request: Request) -> None: ...

    def step(self) -> Sequence[Completion]: ...

    def update(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class EngineJob(Protocol):
    """Makes the engine of the process; a pickle of it is sent to the process first."""

    def __call__(self) -> AbstractContextManager[WorkerEngine]: ...


@dataclass(frozen=True)
class NewWeights:
    """A message: the shared weights have changed."""

    version: int


@dataclass(frozen=True)
class TakeUp:
    """Requests with their answers so far, as `RolloutEngine.state` has them, and with the source of each. They go on
    with the next `NewWeights`."""

    state: dict[str, Any]


@dataclass(frozen=True)
class AskState:
    """A message that requests the engine's state."""


Message = Request | NewWeights | TakeUp | AskState


def serve() -> None:
    """The process, which ends when its input does."""
    caller = Caller()
    relay_status(lambda text: _reply(caller, REMARK, text))
    try:
        job, file = caller.receive()
        with job() as engine:
            answer_until_the_end(engine, file, caller)
    except DanluError as error:
        _reply(caller, ERROR, [type(error).__name__, str(error)])
        sys.exit(1)


def answer_until_the_end(engine: WorkerEngine, file: WeightFile, caller: Caller) -> None:
    """Answers with the weights of the file until the input ends, which ends the process.

    No pass is made before the first weights have come. Raises the engine's errors.
    """
    weights = SharedWeights(file)
    messages: queue.Queue[Message] = queue.Queue()
    threading.Thread(target=_read_messages, args=(caller, messages), daemon=True).start()
    has_weights = False
    while True:
        works = has_weights and engine.unfinished > 0
        for message in _next_messages(messages, wait=not works):
            match message:
                case Request():
                    engine.submit(message)
                case NewWeights(version):
                    engine.update(version, weights.read())
                    has_weights = True
                    _reply(caller, UPDATED, version)
                case TakeUp(state):
                    engine.restore(state)
                    has_weights = False
                case AskState():
                    _reply(caller, STATE, engine.state())
        if has_weights and (completions := engine.step()):
            caller.send([COMPLETIONS, to_bytes(completions)])


def _reply(caller: Caller, kind: bytes, value: Any) -> None:
    caller.send([kind, json.dumps(value).encode()])


def _read_messages(caller: Caller, messages: queue.Queue[Message]) -> None:
    while True:
        messages.put(caller.receive())


def _next_messages(messages: queue.Queue[Message], *, wait: bool) -> Iterator[Message]:
    """All messages that have come; wait: at least one."""
    if wait:
        yield messages.get()
    while True:
        try:
            yield messages.get_nowait()
        except queue.Empty:
            return
