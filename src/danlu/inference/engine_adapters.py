"""The adapters of a loaded model as an engine switches between them: by name, request by request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it brings pydantic, half a second that a plain model need not wait
    import torch

    from danlu.adapters.adapter_config import AdapterFolder
    from danlu.adapters.adapter_set import AdapterSet
    from danlu.assembly.adapter_stacks import AdapterStacks

BASE = "none"
"""The name of the base without adapters."""


class EngineAdapters(ABC):
    """The adapters of a model that an engine may switch between, request by request."""

    names: Sequence[str]
    """The names that a request may have; `BASE` is always allowed."""

    def __init__(self, adapters: AdapterSet) -> None:
        self._adapters = adapters
        self._added_count = 0

    def use(self, name: str | None) -> None:
        """Activates the adapters of a name, with `BASE` none at all; None stands for those that were active at
        first."""
        active = self._names_in_set(name)
        if self._adapters.active != active:
            self._adapters.activate(*active)

    def virtual_token_ids(self, name: str | None) -> tuple[int, ...]:
        """The virtual tokens that every prompt of a name begins with, whether or not it is active."""
        return self._adapters.virtual_token_ids_of(self._names_in_set(name))

    def _add(self, label: str, folder: AdapterFolder, below: tuple[str, ...], active: tuple[str, ...]) -> str:
        """Loads an adapter, and returns its name in the set, which no other has had: labels may be alike.

        below: the adapters underneath. active: those that are active afterwards, also where it fails, which leaves
        nothing of it.
        """
        from danlu.adapters.peft_folder import add_adapter

        self._added_count += 1
        name_in_set = f"{label}-{self._added_count}"
        self._adapters.activate(*below)
        try:
            add_adapter(self._adapters, name_in_set, folder)
        except Exception:
            if name_in_set in self._adapters.added:
                self._adapters.remove(name_in_set)
            raise
        finally:
            self._adapters.activate(*active)
        return name_in_set

    def _names_in_set(self, name: str | None) -> tuple[str, ...]:
        return () if name == BASE else self._stack(name)

    @abstractmethod
    def _stack(self, name: str | None) -> tuple[str, ...]:
        """The names in the set of the adapters of a name."""


class StackedAdapters(EngineAdapters):
    """The stacks of a model, of which the first is active at first. names: one of each stack, in order."""

    def __init__(self, stacks: AdapterStacks, names: Sequence[str]) -> None:
        assert len(names) == len(stacks.names) > 0, f"{len(names)} names for {len(stacks.names)} stacks"
        super().__init__(stacks.adapters)
        self.names = tuple(names)
        self._stacks = stacks

    def _stack(self, name: str | None) -> tuple[str, ...]:
        return self._stacks.names[0 if name is None else self.names.index(name)]


class LoadableAdapters(EngineAdapters):
    """The stacks of a model, and further adapters that are loaded and dropped while the engine runs.

    stacks: the names in the set of each stack's adapters, by its own name; the first is active at first.
    """

    def __init__(self, adapters: AdapterSet, stacks: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(adapters)
        self._stacks = dict(stacks)
        self._first = next(iter(self._stacks.values()), ())

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of all that are there now."""
        return tuple(self._stacks)

    def put(self, name: str, folder: AdapterFolder) -> None:
        """Loads an adapter of a new name. Raises ModelError for one that does not fit the base."""
        assert name not in self._stacks, "each has its own name"
        self._stacks[name] = (self._add("loaded", folder, (), self._first),)

    def drop(self, name: str) -> None:
        """Gives the memory of a loaded adapter back."""
        (name_in_set,) = self._stacks.pop(name)
        self._adapters.activate(*self._first)
        self._adapters.remove(name_in_set)

    def _stack(self, name: str | None) -> tuple[str, ...]:
        return self._first if name is None else self._stacks[name]


class ReplaceableAdapters(EngineAdapters):
    """Adapters that arrive while the engine runs, each in place of one of its name.

    below: adapters of the set underneath those that arrive; they are active at first.
    """

    def __init__(self, adapters: AdapterSet, below: Sequence[str] = ()) -> None:
        super().__init__(adapters)
        self.below = tuple(below)
        self._arrived: dict[str, str] = {}  # names in the set

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the adapters that have arrived."""
        return tuple(self._arrived)

    def put(self, name: str, folder: AdapterFolder) -> None:
        """Loads an adapter; the one before it is there until the new one is.

        Raises ModelError for one that does not fit the base.
        """
        before = self._arrived.get(name)
        self._arrived[name] = self._add(name, folder, self.below, self.below)
        if before is not None:
            self._adapters.remove(before)

    def cast_base(self, dtype: torch.dtype) -> None:
        """Gives the parameters of the base another type."""
        for parameter in self._adapters.base_parameters().values():
            parameter.data = parameter.data.to(dtype)

    def _stack(self, name: str | None) -> tuple[str, ...]:
        return self.below if name is None else (*self.below, self._arrived[name])
