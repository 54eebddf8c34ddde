"""One engine for the many clients of an event loop: a thread of its own runs it, as an engine is for one thread only.

The event loop puts commands into a queue; the thread carries them out between two steps, and hands all tokens of a step
to the loop at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from danlu.core.errors import DanluError
from danlu.core.terminal import print_status
from danlu.inference.grammar import Grammars
from danlu.inference.request import Completion, NewToken, Request
from danlu.inference.stopping import Decode
from danlu.serving.metrics import AnswerTimes

if TYPE_CHECKING:
    from danlu.inference.embedded import EmbeddedEngine


class EngineFailed(Exception):
    """A step failed at a request that was in order; the engine may go on with others."""


class AnswerFailed(Exception):
    """One request failed, and the others go on."""


class EngineStopped(Exception):
    """The engine has ended before an answer was complete: the server ends, or the engine failed for good."""


class QueueFull(Exception):
    """So many answers wait that no more requests are taken for now. retry_s: when it may be tried again."""

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


Event = NewToken | Completion | Exception | None
"""The engine's events for a call: at first None, where it has taken the requests."""


class Call:
    """Requests with answers that are wanted together, and the engine's events for them.

    Its methods are for the thread of the event loop that it was made in.
    """

    def __init__(
        self, requests: Sequence[Request], decode: Decode, *, stream: bool, grammars: Grammars | None = None
    ) -> None:
        self.requests = requests
        self.decode = decode
        self.grammars = grammars
        """Compile the grammars of the requests; None: the engine's do."""
        self.stream = stream
        """Whether single tokens are wanted in addition to whole answers."""
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the engine has taken all requests; raises its refusal."""
        self.missing = sum(request.samples for request in requests)
        """Answers that are not complete."""
        self.began_s = time.monotonic()
        self.first_token_s: dict[tuple[int, int], float] = {}
        """When each answer had its first token, by request and sample; for the engine's thread."""
        self._events: asyncio.Queue[NewToken | Completion | Exception] = asyncio.Queue()

    async def events(self, timeout_s: float | None = None) -> AsyncIterator[NewToken | Completion]:
        """Yields tokens, if they are wanted, and each answer as it is complete. Raises the engine's error.

        timeout_s: the time after the request at which TimeoutError is raised; None: never.
        """
        while self.missing:
            left_s = None if timeout_s is None else self.began_s + timeout_s - time.monotonic()
            async with asyncio.timeout(left_s):
                event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            self.missing -= isinstance(event, Completion)
            yield event

    def put(self, event: Event) -> None:
        """Takes an event of the engine."""
        if self.accepted.done():
            if event is not None:
                self._events.put_nowait(event)
        elif isinstance(event, Exception):
            self.accepted.set_exception(event)
        else:
            self.accepted.set_result(None)


class Work:
    """Something that the engine is to do between two steps, and who waits for it in the event loop."""

    def __init__(self, do: Callable[[], list[Completion] | None]) -> None:
        self.do = do
        """The work to do; answers that it completed go to those who wait for them."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, event: Event) -> None:
        """Takes the result: None, or the error that the work raised."""
        if self.done.done():  # nobody waits any more
            return
        if isinstance(event, Exception):
            self.done.set_exception(event)
        else:
            self.done.set_result(None)


@dataclass(frozen=True)
class Command:
    """Something for the engine's thread. refuse: tells whoever waits for it that the engine has ended."""

    carry_out: Callable[[], None]
    refuse: Callable[[EngineStopped], None] = lambda error: None


class EngineThread:
    """Runs an engine, and closes it at the end.

    Args:
        on_failure: called in the event loop when the engine has failed for good.
        longest: the most tokens of a prompt with its answer; None: what the engine has room for.
        queue_limit: answers that may wait for those that grow; None: any number.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        on_failure: Callable[[], None] | None = None,
        *,
        longest: int | None = None,
        queue_limit: int | None = None,
    ) -> None:
        self.longest = engine.longest if longest is None else min(longest, engine.longest)
        is_bounded = longest is not None and longest < engine.longest
        self.bound = (
            "the server takes (--max-model-len): ask for fewer"
            if is_bounded
            else "the server's cache holds: ask for fewer, or start it with a larger --cache-gib"
        )
        """Why a prompt and its answer have no more tokens than `longest`."""
        self.times = AnswerTimes()
        self._queue_limit, self._room = queue_limit, engine.options.sequences
        self._open_calls: set[Call] = set()
        self._busy_since_s: float | None = None
        self.statistics = engine.statistics
        """The statistics as of the last step."""
        self.failure: Exception | None = None
        """The error that ended the engine for good, once it has."""
        self._engine = engine
        self._on_failure = on_failure
        self.is_ending = False
        """Whether nothing is taken any more."""
        self.is_draining = False
        """Whether no requests are taken any more, while those that were go on."""
        self._commands: SimpleQueue[Command | None] = SimpleQueue()  # None ends the thread
        self._calls: dict[int, Call] = {}  # by the numbers of unfinished requests
        self._growing: dict[int, int] = {}  # answers of each that are not complete
        self._failed: list[tuple[Call, Exception]] = []
        self._outbox: list[tuple[Call | Work, Event]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- in the thread of the event loop -------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, in the event loop that the calls will come from."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, call: Call) -> None:
        """Waits until the engine has taken the requests. Raises its refusal of one; it has none of them then.

        Raises QueueFull where too many answers wait.
        """
        if self.is_ending or self.is_draining:
            raise EngineStopped(self._reason)
        if self._queue_limit is not None and (waiting := self.open_answers - self._room) >= self._queue_limit:
            self.times.rejected += 1
            raise QueueFull(
                f"{max(waiting, 0)} answers wait, which is the queue's limit: ask again later", self._retry_s
            )
        self._open_calls.add(call)
        self._commands.put(Command(partial(self._submit, call), call.put))
        try:
            await call.accepted
        except asyncio.CancelledError:
            self.abort(call)
            raise

    def abort(self, call: Call) -> None:
        """Takes back the unfinished requests of a call; their blocks are free with the next step."""
        self._open_calls.discard(call)
        if call.missing:
            self._commands.put(Command(partial(self._abort, call.requests)))

    @property
    def open_answers(self) -> int:
        """The number of answers whose clients still wait for all or a part of their request."""
        return sum(request.samples for call in self._open_calls for request in call.requests)

    @property
    def busy_s(self) -> float:
        """Seconds that the present step, or work between two, has taken so far; 0 where the engine waits."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def state(self) -> str:
        """The engine's state in a word: ready, asleep, paused, draining, ending, failed."""
        if self.failure is not None:
            return "failed"
        if self.is_ending or self.is_draining:
            return "ending" if self.is_ending else "draining"
        if self._engine.is_asleep:
            return "asleep"
        return "paused" if self._engine.is_paused else "ready"

    @property
    def _retry_s(self) -> int:
        """Seconds that an answer has taken on average, from 1 to 60."""
        whole = self.times.whole
        return min(60, max(1, round(whole.total / max(1, whole.count))))

    async def do(self, work: Callable[[], list[Completion] | None]) -> None:
        """Runs `work` in the engine's thread between two steps, and waits until it is done. Raises its error."""
        if self.is_ending:
            raise EngineStopped(self._reason)
        waiting = Work(work)
        self._commands.put(Command(partial(self._work, waiting), waiting.put))
        await waiting.done

    async def stop(self) -> None:
        """Ends unfinished answers as they are, and waits for the step that is going on."""
        self.is_ending = True
        self._commands.put(None)
        while self._thread.is_alive():  # no thread waits for this one: a process that is to end at once does not
            await asyncio.sleep(0.01)

    def _end(self) -> None:
        """Refuses the commands that are still queued, and those that come from now on."""
        self.is_ending = True
        with suppress(Empty):
            while True:
                if (command := self._commands.get_nowait()) is not None:
                    command.refuse(EngineStopped(self._reason))
        if self.failure is not None and self._on_failure is not None:
            self._on_failure()

    @property
    def _reason(self) -> str:
        return "the server is ending" if self.failure is None else f"the engine has failed: {_said(self.failure)}"

    # -- in the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._carry_out_commands():
                self._busy_since_s = time.monotonic()
                if self._is_growing:
                    self._step()
                self.statistics = self._engine.statistics
                self._flush()
            self._post(self._engine.pause("abort"))
            self._engine.close()
        except Exception as error:
            self.failure = error
        self._outbox += [(call, EngineStopped(self._reason)) for call in self._unfinished_calls]
        self._flush()
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._end)

    @property
    def _is_growing(self) -> bool:
        return not self._engine.is_paused and self._engine.unfinished > 0

    def _carry_out_commands(self) -> bool:
        """Carries out the commands that are there; waits for the next one where the engine has nothing else to do.
        Returns whether the thread goes on."""
        self._busy_since_s = None
        commands: list[Command | None] = [] if self._is_growing else [self._commands.get()]
        self._busy_since_s = time.monotonic()
        with suppress(Empty):
            while True:
                commands.append(self._commands.get_nowait())
        for command in commands:
            if command is not None:
                command.carry_out()
        return None not in commands

    def _work(self, work: Work) -> None:
        try:
            self._post(work.do() or ())
        except Exception as error:
            self._outbox.append((work, error))
        else:
            self._outbox.append((work, None))

    def _submit(self, call: Call) -> None:
        on_token = partial(self._take_token, call)
        for index, request in enumerate(call.requests):
            try:
                self._engine.submit(
                    request,
                    on_token,
                    decode=call.decode,
                    grammars=call.grammars,
                    on_error=partial(self._note, call),
                )
            except Exception as error:
                self._abort(call.requests[:index])
                self._outbox.append((call, error))
                return
            self._calls[request.number] = call
            self._growing[request.number] = request.samples
        self._outbox.append((call, None))

    def _take_token(self, call: Call, token: NewToken) -> None:
        call.first_token_s.setdefault((token.number, token.sample), time.monotonic())
        if call.stream:
            self._outbox.append((call, token))

    def _abort(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if self._calls.pop(request.number, None) is not None:
                del self._growing[request.number]
                self._engine.abort(request.number)

    def _step(self) -> None:
        try:
            completions = self._engine.step()
        except Exception as error:
            calls = self._unfinished_calls
            print_status(f"error: the engine failed, and {len(calls)} unfinished requests with it: {_said(error)}")
            if not isinstance(error, DanluError):
                print_status("".join(traceback.format_exception(error)))
            self._outbox += [(call, EngineFailed(f"the engine failed: {_said(error)}")) for call in calls]
            self._abort([request for call in calls for request in call.requests])
            while self._engine.unfinished:  # what this raises ends the thread
                self._engine.step()
        else:
            self._give_up_failed()
            self._post(completions)

    def _give_up_failed(self) -> None:
        """Reports to calls the errors of their requests in this step, and takes back the rest of them."""
        failed, self._failed = self._failed, []
        for call, problem in failed:
            if call in self._unfinished_calls:
                print_status(f"error: a request failed, and the others go on: {_said(problem)}")
                self._outbox.append((call, AnswerFailed(_said(problem))))
                self._abort(call.requests)

    def _note(self, call: Call, error: Exception) -> None:
        """Keeps the error of a call until the step is over, since the engine is in the midst of it."""
        self._failed.append((call, error))

    def _post(self, completions: Iterable[Completion]) -> None:
        """Hands answers to the calls that they belong to; nobody waits for those of aborted requests."""
        for completion in completions:
            number = completion.number
            if number not in self._calls:
                continue
            call, now_s = self._calls[number], time.monotonic()
            first_s = call.first_token_s.pop((number, completion.sample), None)
            waited_s = None if first_s is None else first_s - call.began_s
            self.times.add(completion, waited_s, now_s - call.began_s)
            self._outbox.append((call, completion))
            self._growing[number] -= 1
            if not self._growing[number]:
                del self._calls[number], self._growing[number]

    @property
    def _unfinished_calls(self) -> list[Call]:
        """Each of them once."""
        return list(dict.fromkeys(self._calls.values()))

    def _flush(self) -> None:
        """Hands the events since the last call to the event loop."""
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            with suppress(RuntimeError):  # the event loop has ended: nobody waits any more
                self._loop.call_soon_threadsafe(_deliver, outbox)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, DanluError) else f"{type(error).__name__}: {error}"


def _deliver(outbox: Iterable[tuple[Call | Work, Event]]) -> None:
    for receiver, event in outbox:
        receiver.put(event)
