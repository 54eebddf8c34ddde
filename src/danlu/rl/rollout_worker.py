"""A rollout process: it has an engine of its own, to which the trainer sends weights and requests.

It receives pickles: an `EngineJob` first, then requests and messages, each taken between two passes of the engine. It
sends frames: a byte for their kind, a length, and bytes.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from danlu.core.errors import DanluError
from danlu.core.terminal import relay_status
from danlu.core.worker_process import end_with_the_caller, take_over_pipes
from danlu.inference.completion_bytes import to_bytes
from danlu.inference.request import Completion, Request
from danlu.rl.shared_weights import SharedWeights, WeightFile

if TYPE_CHECKING:
    from torch import Tensor

START = "from danlu.rl.rollout_worker import serve; serve()"

COMPLETIONS, UPDATED, STATE, REMARK, ERROR = b"c", b"u", b"s", b"r", b"e"
"""Frames: completions as `completion_bytes` has them; as JSON the version of the weights that were read, the state that
was asked for, a remark to be printed, the name and the text of a DanluError, after which the process ends."""
_HEADER = struct.Struct(">cQ")


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


_writing = threading.Lock()


def write_frame(file: BinaryIO, kind: bytes, payload: bytes) -> None:
    """Writes one frame; from any thread."""
    with _writing:
        file.write(_HEADER.pack(kind, len(payload)))
        file.write(payload)
        file.flush()


def read_frames(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """The frames of a file until its end, or until one that is torn."""
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        kind, length = _HEADER.unpack(header)
        payload = file.read(length)
        if len(payload) < length:
            return
        yield kind, payload


def serve() -> None:
    """The process, which ends when its input does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who is interrupted is the trainer, which ends this one
    requests, replies = take_over_pipes()
    end_with_the_caller(requests)
    relay_status(lambda text: write_frame(replies, REMARK, json.dumps(text).encode()))
    try:
        job, file = pickle.load(requests)  # noqa: S301  # from the process that started this one
        with job() as engine:
            answer_until_the_end(engine, file, requests, replies)
    except DanluError as error:
        write_frame(replies, ERROR, json.dumps([type(error).__name__, str(error)]).encode())
        sys.exit(1)


def answer_until_the_end(engine: WorkerEngine, file: WeightFile, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answers with the weights of the file until the input ends, which ends the process.

    No pass is made before the first weights have come. Raises the engine's errors.
    """
    weights = SharedWeights(file)
    messages: queue.Queue[Message] = queue.Queue()
    threading.Thread(target=_read_messages, args=(requests, messages), daemon=True).start()
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
                    write_frame(replies, UPDATED, json.dumps(version).encode())
                case TakeUp(state):
                    engine.restore(state)
                    has_weights = False
                case AskState():
                    write_frame(replies, STATE, json.dumps(engine.state()).encode())
        if has_weights and (completions := engine.step()):
            write_frame(replies, COMPLETIONS, to_bytes(completions))


def _read_messages(requests: BinaryIO, messages: queue.Queue[Message]) -> None:
    while True:
        try:
            messages.put(pickle.load(requests))  # noqa: S301
        except (EOFError, pickle.UnpicklingError):
            os._exit(0)


def _next_messages(messages: queue.Queue[Message], *, wait: bool) -> Iterator[Message]:
    """All messages that have come; wait: at least one."""
    if wait:
        yield messages.get()
    while True:
        try:
            yield messages.get_nowait()
        except queue.Empty:
            return
