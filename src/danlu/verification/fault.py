"""Faults to inject into a layout, to see that `danlu verify` finds them: where each applies, and how it is injected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from danlu.core.errors import RecipeError
from danlu.parallel.layout import Layout
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.verification.proxy import Proxy


@dataclass(frozen=True)
class Fault:
    """A fault: in which layouts it can be made at all, and how it is injected.

    A module offers its faults by name in a dict `FAULTS`; docs/verify.md#adding-a-fault has an example.
    """

    is_possible: Callable[[Recipe, Layout, Proxy], bool]
    inject: Callable[[Recipe, Ranks], AbstractContextManager[None]]
    """Called on each process of the layout, on none of the reference; the fault is there within the context."""
    setting: Callable[[], AbstractContextManager[None]] = nullcontext
    """The setting of all processes, those of the reference too, in which the fault can show."""


def faults_of_module(entry: str) -> Mapping[str, Fault]:
    """The faults of the module that an entry, MODULE:NAME, names.

    Raises RecipeError where the entry has another form, and where the module cannot be imported or has no faults.
    """
    module, _, name = entry.partition(":")
    if not (module and name):
        raise RecipeError(
            f"--inject {entry}: not of the form MODULE:NAME, such as my_faults:halved for FAULTS['halved'] of "
            "my_faults.py"
        )
    try:
        faults = getattr(import_module(module), "FAULTS", None)
    except Exception as error:  # whatever the user's code raises
        raise RecipeError(
            f"--inject {entry}: {module} cannot be imported: {type(error).__name__}: {error}. Modules are looked for "
            "where Python looks for them: put the folder of the file into PYTHONPATH"
        ) from error
    if not isinstance(faults, Mapping) or not all(isinstance(fault, Fault) for fault in faults.values()):
        raise RecipeError(
            f"--inject {entry}: {module} has no FAULTS, a dict from names to danlu.verification.fault.Fault"
        )
    return faults


def load_fault(entry: str) -> Fault:
    """The fault of an entry, MODULE:NAME, that exists. Raises as `faults_of_module`."""
    return faults_of_module(entry)[entry.partition(":")[2]]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute; taken from `__dict__`, so that properties and functions are put back as they were."""
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
