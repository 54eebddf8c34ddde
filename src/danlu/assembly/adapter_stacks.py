"""Adapters one upon the other, put into a model: several stacks, of which one is active, or none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from danlu.adapters.adapter_config import AdapterFolder, open_adapter
from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.peft_folder import add_adapter


class AdapterStacks:
    """Stacks of adapters, each trained upon those below it, in one AdapterSet; an adapter of several is loaded once."""

    def __init__(self, adapters: AdapterSet) -> None:
        self.adapters = adapters
        self.names: list[tuple[str, ...]] = []
        """The names of each stack's adapters in the set, lowest first."""
        self._opened: dict[Path, str] = {}

    def add(self, folders: Sequence[AdapterFolder]) -> int:
        """Loads one more stack, lowest adapter first, and returns its number. No stack is active afterwards.

        Raises ModelError for adapters that do not fit the base.
        """
        names = []
        for folder in folders:
            path = folder.path.resolve()
            if path not in self._opened:
                # By the folder, with characters that a module's name may not have replaced.
                word = re.sub(r"\W", "-", (path.parent if path.name == "adapter" else path).name)
                name = f"{len(self._opened)}-{word}"
                # With none active: copies of the base's parameters must not be made of another adapter's copies.
                self.adapters.activate()
                add_adapter(self.adapters, name, open_adapter(folder.path))
                self._opened[path] = name
            names.append(self._opened[path])
        self.adapters.activate()
        self.names.append(tuple(names))
        return len(self.names) - 1

    def use(self, number: int | None) -> None:
        """Activates one of the stacks; None leaves the bare base. Raises ModelError if they cannot be stacked."""
        self.adapters.activate(*(() if number is None else self.names[number]))
