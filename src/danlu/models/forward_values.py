"""Values that a function recomputed in the backward pass takes from its forward pass instead of making them again.

Recomputation runs a function a second time with the same inputs. Values received from other processes are the same
then: `from_forward` asks them once. It is not for activations, since kept values take memory until the backward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def from_forward(make: Callable[[], T]) -> T:
    """Returns `make()`; in a recomputation, the value that it returned at this place of the forward pass.

    Outside of functions that are recomputed, each call calls `make`.
    """
    calls = _thread.calls
    repeated = max((number for number, (_, repeats) in enumerate(calls) if repeats), default=-1)
    value: T = make() if repeated < 0 else calls[repeated][0].next()
    for recorded, _ in calls[repeated + 1 :]:  # calls within the one that is repeated are new, and may be repeated too
        recorded.add(value)
    return value


class ForwardValues:
    """The values that `from_forward` made in one call of a recomputed function, in order."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._read = 0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records values while the function runs for the first time."""
        with self._active(repeats=False):
            yield

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Replays values while the function runs again."""
        self._read = 0
        with self._active(repeats=True):
            yield

    def add(self, value: Any) -> None:
        """Takes up the next value of the forward pass."""
        self._values.append(value)

    def next(self) -> Any:
        """The next value in a repetition."""
        assert self._read < len(self._values), "a recomputation asks for what its forward pass did not make"
        self._read += 1
        return self._values[self._read - 1]

    @contextmanager
    def _active(self, *, repeats: bool) -> Iterator[None]:
        _thread.calls.append((self, repeats))
        try:
            yield
        finally:
            _thread.calls.pop()


class _Thread(threading.local):
    """The running calls of a thread; on a GPU the backward pass runs in a thread of its own."""

    def __init__(self) -> None:
        self.calls: list[tuple[ForwardValues, bool]] = []  # those that run, the innermost one last; whether it repeats


_thread = _Thread()
