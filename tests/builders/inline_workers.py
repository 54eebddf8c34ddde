"""Work that has processes of its own, done in this one: a process takes a second to load the tokenizer library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from danlu.data.worker_pool import Job


class InlineWorkers:
    """In the place of `danlu.data.worker_pool.WorkerPool`, for tests of what is done rather than of where."""

    def __init__(self, job: Job[Any, Any], count: int) -> None:
        self._job = job

    def __enter__(self) -> InlineWorkers:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        return map(self._job.start(), tasks)

    def close(self) -> None:
        pass
