"""A fault to inject into a layout: where it applies, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from danlu.parallel.layout import Layout
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.verification.proxy import Proxy


@dataclass(frozen=True)
class Fault:
    """One mistake: in which layouts it can be made at all, and how it is injected."""

    is_possible: Callable[[Recipe, Layout, Proxy], bool]
    inject: Callable[[Recipe, Ranks], AbstractContextManager[None]]
    setting: Callable[[], AbstractContextManager[None]] = nullcontext
    """The setting of all processes, those of the reference too, in which the fault can show."""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute; taken from `__dict__`, so that properties and functions are put back as they were."""
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
