"""Processes that turn rows into tokens while the training process stays free of tokenizer libraries.

Importing transformers costs a process 2 s of CPU and 250 MiB for its whole life (1 s and 70 MiB without torch;
transformers 5.23, two cores), so even small inputs are tokenised in a process of their own, which does without torch.
How they are started and ended: `danlu.core.worker_process`.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, cast

from danlu.core.errors import DanluError, DataError, ResourceError
from danlu.core.worker_process import end_with_the_caller, import_paths, python_command, take_over_pipes
from danlu.data import resource_limits

Task = TypeVar("Task")
Result = TypeVar("Result")

MIN_TASKS_FOR_POOL = 8  # below this a second process would spend longer starting than working
START = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from danlu.data.worker_pool import serve; serve()"


class Job(Protocol[Task, Result]):  # type: ignore[misc]  # invariance is not needed: a job is only called
    """The work of a process.

    It is pickled once to each process; `start` loads everything that tasks need.
    """

    def start(self) -> Callable[[Task], Result]: ...


class WorkerPool(Generic[Task, Result]):
    """Runs a job over tasks in up to `count` processes, results in the order of the tasks.

    Processes start when there is work for them. Use as a context manager: leaving it ends them at once.

    Args:
        ending: the end of the message about a process that ended early.
    """

    def __init__(
        self, job: Job[Task, Result], count: int, *, ending: str = ": try fewer of them (data.workers)"
    ) -> None:
        self._job = job
        self._ending = ending
        self._count = count
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[ThreadPoolExecutor] = []

    def __enter__(self) -> WorkerPool[Task, Result]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def map(self, tasks: Iterable[Task]) -> Iterator[Result]:
        """Yields results in order; at most a few tasks per process are read ahead.

        Raises:
            DanluError: as the job raised it.
            ResourceError: a process ended, most likely for want of memory.
        """
        iterator = iter(tasks)
        first = list(islice(iterator, MIN_TASKS_FOR_POOL))
        count = self._count if len(first) == MIN_TASKS_FOR_POOL else 1
        # One thread for each busy process: it sends, waits and receives.
        threads = ThreadPoolExecutor(count, thread_name_prefix="tokenise")
        self._threads.append(threads)
        pending: deque[Future[Result]] = deque()
        try:
            for task in chain(first, iterator):
                pending.append(threads.submit(self.run, task))
                if len(pending) > 2 * count:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
            process.wait()

    def run(self, task: Task) -> Result:
        """Returns the result of one task, from an idle process, or else from a new one.

        Raises the same errors as `map`.
        """
        try:
            process = self._idle.get_nowait()
        except Empty:
            process = self._start()
        try:
            reply = _exchange(process, task)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            code = process.wait()
            if code == -signal.SIGPROF:
                raise DataError(
                    f"the chat template has worked on one conversation for {resource_limits.SECONDS_IN_C:g} s and does "
                    "not come to an end. Correct it, or name another Jinja file in model.chat_template"
                ) from error
            why = (
                "killed by the system, most likely for want of memory"
                if code == -signal.SIGKILL
                else f"exit code {code}"
            )
            raise ResourceError(f"a tokenising process ended early ({why}){self._ending}") from error
        self._idle.put(process)
        if isinstance(reply, BaseException):
            raise reply
        return cast(Result, reply)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(import_paths([__name__, type(self._job).__module__])),
            "TOKENIZERS_PARALLELISM": "false",  # the processes are the parallelism
            "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # it would advise to install torch
        }
        pipe = subprocess.PIPE
        process = subprocess.Popen(python_command(START), stdin=pipe, stdout=pipe, env=environment)
        self._processes.append(process)
        with suppress(BrokenPipeError):  # if it ended at once, the exchange that follows says so
            _send(process, self._job)
        return process


class UnexpectedError(RuntimeError):
    """An error inside a worker that is our own bug, with the worker's traceback."""


def serve() -> None:
    """The loop of a process: a job, then tasks until the input ends; each task is answered by a result or an error."""
    requests, replies = take_over_pipes()
    end_with_the_caller(requests)
    resource_limits.end_when_stuck()
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then believes there is none
    work: Callable[[Any], Any] | None = None
    job: Job[Any, Any] = pickle.load(requests)  # noqa: S301  # from the process that started this one
    while True:
        try:
            task = pickle.load(requests)  # noqa: S301
        except EOFError:
            return
        reply: object
        try:
            work = work or job.start()
            reply = work(task)
        except DanluError as error:
            reply = error
        except Exception:  # whatever it is, it must reach the caller
            reply = UnexpectedError(traceback.format_exc())
        try:
            pickle.dump(reply, replies, pickle.HIGHEST_PROTOCOL)
            replies.flush()
        except BrokenPipeError:  # the caller is gone
            os._exit(0)


def _send(process: subprocess.Popen[bytes], message: object) -> None:
    assert process.stdin is not None
    pickle.dump(message, process.stdin, pickle.HIGHEST_PROTOCOL)
    process.stdin.flush()


def _exchange(process: subprocess.Popen[bytes], task: object) -> object:
    _send(process, task)
    assert process.stdout is not None
    return pickle.load(process.stdout)  # noqa: S301  # written by `serve`, never from outside
