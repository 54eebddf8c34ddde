"""The values of a config.json, read with their types; every complaint names the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from danlu.core.errors import ModelError


class HFValues:
    """A config.json over a family's defaults. `null` counts as given, as it does for transformers.

    Args:   values: the JSON object; defaults: transformers' values for absent keys;
            where: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self._values = {**defaults, **values}
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def keys(self) -> set[str]:
        return set(self._values)

    def raw(self, key: str) -> Any:
        return self._values.get(key)

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.where}: {key}: {problem}")

    def integer(self, key: str) -> int:
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"expected an integer, found {value!r}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if key in self else None

    def number(self, key: str) -> float:
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"expected a number, found {value!r}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.error(key, "expected a number that is finite")
        return number

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if key in self else None

    def flag(self, key: str) -> bool:
        value = self._values.get(key)
        if not isinstance(value, bool | None):
            raise self.error(key, f"expected true or false, found {value!r}")
        return bool(value)

    def text(self, key: str) -> str:
        value = self._required(key)
        if not isinstance(value, str):
            raise self.error(key, f"expected a text, found {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """None, one id, or a list of them."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise self.error(key, f"expected a token id or a list of them, found {value!r}")
        return tuple(ids)

    def section(self, key: str) -> Mapping[str, Any]:
        """A JSON object; empty when absent or null."""
        value = self._values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, f"expected an object, found {value!r}")
        return value

    def _required(self, key: str) -> Any:
        if self._values.get(key) is None:
            raise self.error(key, "missing; the model cannot be built without it")
        return self._values[key]
