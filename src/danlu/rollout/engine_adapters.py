"""The adapters of a loaded model as an engine switches between them: by name, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it brings pydantic, half a second that a plain model need not wait
    from danlu.assembly.adapter_stacks import AdapterStacks

BASE = "none"
"""The name of the base without adapters."""


class StackedAdapters:
    """An `engine.EngineAdapters`: the stacks of a model, of which the first is what was active at first."""

    def __init__(self, stacks: AdapterStacks, names: Sequence[str]) -> None:
        assert len(names) == len(stacks.names) > 0, f"{len(names)} names for {len(stacks.names)} stacks"
        self.names = tuple(names)
        """One of each stack, in order."""
        self._stacks = stacks

    def use(self, name: str | None) -> None:
        """Activates a stack, with `BASE` none of them; None stands for the first."""
        active = self._names_in_set(name)
        if self._stacks.adapters.active != active:
            self._stacks.adapters.activate(*active)

    def virtual_token_ids(self, name: str | None) -> tuple[int, ...]:
        """What every prompt of a stack begins with, whether or not it is active."""
        return self._stacks.adapters.virtual_token_ids_of(self._names_in_set(name))

    def _names_in_set(self, name: str | None) -> tuple[str, ...]:
        if name == BASE:
            return ()
        return self._stacks.names[0 if name is None else self.names.index(name)]
