"""The trainer's side of rollout processes: weights and requests go there, answers come back while it trains.

A process that dies is started again, with the present weights, and its unanswered requests are sent again. Replies are
read while the trainer works, so that no process ever waits for it.
"""

from __future__ import annotations

import json
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from danlu.core import errors
from danlu.core.errors import TrainingError
from danlu.core.worker_process import WorkerProcess, end_all
from danlu.inference.completion_bytes import from_bytes
from danlu.inference.engine_state import (
    completion_state,
    fresh_answer_state,
    request_from_json,
    request_to_json,
    request_with_source,
)
from danlu.inference.request import Completion, Request
from danlu.rl.rollout_worker import (
    COMPLETIONS,
    ERROR,
    REMARK,
    START,
    STATE,
    UPDATED,
    AskState,
    EngineJob,
    NewWeights,
    TakeUp,
)
from danlu.rl.shared_weights import SharedWeights, WeightFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_DEATHS = 3
"""Processes that die one after the other without an answer in between; the last one ends the run."""
_STDERR_CHARACTERS = 2000
_END_S = 30.0


class RolloutProcesses:
    """An `asynchronous.AsynchronousEngine`: processes with an engine each, among which requests are dealt.

    Args:
        jobs: how each process makes its engine.
        shapes: shapes and types of the weights that are handed over, by name.
        log: called with a message when a process has to be started again.

    Raises ResourceError where there is no memory for the weights.
    """

    def __init__(
        self,
        jobs: Sequence[EngineJob],
        shapes: Mapping[str, tuple[Sequence[int], torch.dtype]],
        log: Callable[[str], None],
    ) -> None:
        self._jobs, self._log = list(jobs), log
        self._weights = SharedWeights.create(shapes)
        self._version: int | None = None
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._requests: dict[int, Request] = {}  # with answers that `receive` has not returned
        self._received: list[Completion] = []
        self._deaths = 0  # since the last answer
        self._processes: list[_Process] = []
        weakref.finalize(self, end_all, self._processes)
        self._processes += [self._start(job) for job in self._jobs]

    @property
    def process_ids(self) -> list[int]:
        """The operating system's ids of the processes."""
        return [process.id for process in self._processes]

    def update(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Hands weights over. Waits until all processes have read those before, which they do between two passes."""
        self._wait_for_weights()
        self._weights.write(weights)
        self._version = version
        for process in self._processes:
            process.send(NewWeights(version))

    def submit(self, request: Request) -> None:
        """Gives a request to the process with the fewest tokens to come."""
        process = min(self._processes, key=lambda each: each.tokens_to_come)
        self._requests[request.number] = request
        process.ask(request, range(request.samples))
        process.send(request)

    def receive(self, *, wait: bool) -> list[Completion]:
        """The answers that have come since the last call. wait: at least one, of those that are asked for."""
        assert self._received or not wait or any(each.samples for each in self._processes), "nothing is asked for"
        while self._take_event(wait=wait and not self._received):
            pass
        received, self._received = self._received, []
        unfinished = {number for process in self._processes for number in process.samples}
        self._requests = {number: request for number, request in self._requests.items() if number in unfinished}
        return received

    def state(self) -> dict[str, Any]:
        """Requests that `receive` has not returned all answers to, with the other answers as far as they are."""
        for process in self._processes:
            process.ask_state()
        while lacking := [process for process in self._processes if process.state is None]:
            for process in lacking:
                if not process.asked_state:  # it has taken the place of another
                    process.ask_state()
            self._take_event()
        answers: dict[int, dict[int, Any]] = {}
        for entry in (entry for process in self._processes for entry in (process.state or {})["requests"]):
            by_sample = answers.setdefault(entry["request"]["number"], {})
            by_sample |= {answer["sample"]: answer for answer in entry["answers"]}
        for completion in self._received:  # some since the state was sent
            answers.setdefault(completion.number, {})[completion.sample] = completion_state(completion)
        return {
            "requests": [
                {"request": request_to_json(self._requests[number]), "answers": list(of_request.values())}
                for number, of_request in answers.items()
            ]
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up the requests of `state` in place of all others; they go on with the next update."""
        if self._received or any(process.samples for process in self._processes):
            end_all(self._processes)
            self._received = []
            self._processes[:] = [self._start(job) for job in self._jobs]
        else:
            self._wait_for_weights()
        self._version = None
        requests = [request_from_json(entry["request"]) for entry in state["requests"]]
        self._requests = {request.number: request for request in requests}
        parts: list[list[dict[str, Any]]] = [[] for _ in self._processes]
        for request, entry in zip(requests, state["requests"], strict=True):
            place = min(range(len(parts)), key=lambda place: self._processes[place].tokens_to_come)
            self._processes[place].ask(request, [answer["sample"] for answer in entry["answers"]])
            parts[place].append(entry)
        for process, entries in zip(self._processes, parts, strict=True):
            process.version = None
            process.send(TakeUp({"requests": entries}))

    def close(self) -> None:
        """Ends the processes."""
        if self._processes:
            end_all(self._processes)
            self._processes.clear()
            self._weights.close()

    def _wait_for_weights(self) -> None:
        """Waits until all processes have read the latest weights."""
        while any(process.version != self._version for process in self._processes):
            self._take_event()

    def _start(self, job: EngineJob) -> _Process:
        return _Process(job, self._weights.file, self._events)

    def _take_event(self, *, wait: bool = True) -> bool:
        """Handles the next event: a reply of a process, or its end. Returns False where there is none.

        Raises the DanluError that a process has sent, and TrainingError where processes keep dying.
        """
        try:
            process, reply = self._events.get(block=wait)
        except queue.Empty:
            return False
        if process not in self._processes:  # ended by `restore`, or replaced
            return True
        kind, payload = (reply[:1], reply[1:]) if reply is not None else (b"", b"")
        match kind:
            case _ if kind == COMPLETIONS:
                self._deaths = 0
                self._received += [each for each in from_bytes(payload) if process.answered(each)]
            case _ if kind == UPDATED:
                process.version = json.loads(payload)
            case _ if kind == STATE:
                process.state = json.loads(payload)
            case _ if kind == REMARK:
                self._log(json.loads(payload))
            case _ if kind == ERROR:
                name, text = json.loads(payload)
                raise getattr(errors, name)(f"rollout process: {text}")
            case _:
                self._replace(process)
        return True

    def _replace(self, process: _Process) -> None:
        """Starts a process again, and asks it for the answers that the other still owed."""
        self._deaths += 1
        how = process.ending(_END_S)  # it may still be giving memory back
        if self._deaths >= MOST_DEATHS:
            raise TrainingError(
                f"the rollout process {how}; {self._deaths} have ended so without an answer in between. The last "
                f"checkpoint stays, and the same command goes on from there. What it wrote last:\n{_last_said(process)}"
            )
        place = self._processes.index(process)
        lost = sum(map(len, process.samples.values()))
        self._log(
            f"the rollout process {how}; a new one is asked for its {lost} unfinished answers. {_last_said(process)}"
        )
        process.end()
        new = self._processes[place] = self._start(self._jobs[place])
        entries = []
        for number, samples in process.samples.items():
            new.ask(self._requests[number], samples)
            answers = [fresh_answer_state(sample) for sample in sorted(samples)]
            entries.append({"request": request_with_source(self._requests[number]), "answers": answers})
        new.send(TakeUp({"requests": entries}))
        if self._version is not None:
            new.send(NewWeights(self._version))


class _Process(WorkerProcess):
    """A process, and the requests that it was asked."""

    def __init__(self, job: EngineJob, weights: WeightFile, events: queue.SimpleQueue[_Event]) -> None:
        self.version: int | None = None
        """The version of the weights that it has read."""
        self.state: dict[str, Any] | None = None
        """The reply to `ask_state`."""
        self.asked_state = False
        self.samples: dict[int, set[int]] = {}
        """The samples that are to come, by the number of their request, in the order in which they were asked."""
        self.tokens_to_come = 0
        """The most tokens that may come of the requests that are not complete."""
        self._tokens: dict[int, int] = {}  # by request, that part of it
        super().__init__(START, (job, weights), keeps_stderr=True, pass_fds=(weights.descriptor,))
        threading.Thread(target=_read, args=(self, events), daemon=True).start()

    def send(self, request: Any, *, waits: bool = True) -> None:
        """Sends a message whole, as the trainer has other work than to look after the rest."""
        super().send(request, waits=waits)

    def ask(self, request: Request, samples: Iterable[int]) -> None:
        """Takes note of a request that it is sent, and of the answers that it is to give."""
        own = self.samples[request.number] = set(samples)
        self._tokens[request.number] = len(request.prompt) + len(own) * request.max_new_tokens
        self.tokens_to_come += self._tokens[request.number]

    def ask_state(self) -> None:
        """Has it send its state."""
        self.state, self.asked_state = None, True
        self.send(AskState())

    def answered(self, completion: Completion) -> bool:
        """Takes note of an answer. False for one that was not asked for."""
        samples = self.samples.get(completion.number, set())
        if completion.sample not in samples:
            return False
        samples.remove(completion.sample)
        if not samples:
            del self.samples[completion.number]
            self.tokens_to_come -= self._tokens.pop(completion.number)
        return True


_Event = tuple[_Process, bytes | None]
"""A process and its reply; None: the process is gone."""


def _read(process: _Process, events: queue.SimpleQueue[_Event]) -> None:
    reply: bytes | None = b""
    while reply is not None:
        reply = process.receive()
        events.put((process, reply))


def _last_said(process: WorkerProcess) -> str:
    return process.stderr()[-_STDERR_CHARACTERS:] or "(nothing on stderr)"
