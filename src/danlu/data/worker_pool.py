"""Processes that turn rows into tokens while the training process stays free of tokenizer libraries.

Importing transformers costs a process 2 s of CPU and 250 MiB for its whole life (1 s and 70 MiB without torch;
transformers 5.23, two cores), so even small inputs are tokenised in a process of their own, which does without torch.
How they are started and ended: `danlu.core.worker_process`.
"""

from __future__ import annotations

import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, cast

from danlu.core.errors import DanluError, DataError, ResourceError
from danlu.core.worker_process import Caller, WorkerProcess
from danlu.data import resource_limits

Task = TypeVar("Task")
Result = TypeVar("Result")

MIN_TASKS_FOR_POOL = 8  # below this a second process would spend longer starting than working
START = "from danlu.data.worker_pool import serve; serve()"


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
        doing: what the processes do, for that message.
    """

    def __init__(
        self,
        job: Job[Task, Result],
        count: int,
        *,
        ending: str = ": try fewer of them (data.workers)",
        doing: str = "tokenising",
    ) -> None:
        self._job = job
        self._doing = doing
        self._ending = ending
        self._count = count
        self._idle: SimpleQueue[WorkerProcess] = SimpleQueue()
        self._processes: list[WorkerProcess] = []
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
            process.end()

    def run(self, task: Task) -> Result:
        """Returns the result of one task, from an idle process, or else from a new one.

        Raises the same errors as `map`.
        """
        try:
            process = self._idle.get_nowait()
        except Empty:
            process = self._start()
        try:
            process.send(task)
        except BaseException:  # it cannot be pickled
            self._idle.put(process)
            raise
        if (content := process.receive()) is None:
            raise self._early_end(process.exit_code(None))
        self._idle.put(process)
        reply = pickle.loads(content)  # noqa: S301  # written by `serve`, never from outside
        if isinstance(reply, BaseException):
            raise reply
        return cast(Result, reply)

    def _start(self) -> WorkerProcess:
        variables = {
            "TOKENIZERS_PARALLELISM": "false",  # the processes are the parallelism
            "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # it would advise to install torch
        }
        modules = [type(self._job).__module__]
        self._processes.append(process := WorkerProcess(START, self._job, modules=modules, variables=variables))
        return process

    def _early_end(self, code: int | None) -> DanluError:
        """The error of a process that ended before it replied."""
        if code == -signal.SIGPROF:
            return DataError(
                f"the chat template has worked on one conversation for {resource_limits.SECONDS_IN_C:g} s and does "
                "not come to an end. Correct it, or name another Jinja file in model.chat_template"
            )
        why = "killed by the system, most likely for want of memory" if code == -signal.SIGKILL else f"exit code {code}"
        return ResourceError(f"a {self._doing} process ended early ({why}){self._ending}")


class UnexpectedError(RuntimeError):
    """An error inside a worker that is our own bug, with the worker's traceback."""


def serve() -> None:
    """The loop of a process: a job, then tasks until the input ends; each task is answered by a result or an error."""
    caller = Caller()
    resource_limits.end_when_stuck()
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then believes there is none
    work: Callable[[Any], Any] | None = None
    job: Job[Any, Any] = caller.receive()
    while True:
        task = caller.receive()
        reply: object
        try:
            work = work or job.start()
            reply = work(task)
        except DanluError as error:
            reply = error
        except Exception:  # whatever it is, it must reach the caller
            reply = UnexpectedError(traceback.format_exc())
        caller.send([pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)])
