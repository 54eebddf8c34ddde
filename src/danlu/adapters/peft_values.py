"""Values of an adapter_config.json and tensors of an adapter's file, each checked as it is taken out.

`where` is the file that messages name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from danlu.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
"""What PEFT puts before the name of a module of the model."""


def take_tensor(tensors: Mapping[str, Tensor], key: str, shape: tuple[int, ...], where: str) -> Tensor:
    """One tensor, float32. Raises ModelError where it is missing, or of another shape."""
    if key not in tensors:
        raise ModelError(f"{where}: {key} is missing")
    found = tensors[key]
    if tuple(found.shape) != shape:
        raise ModelError(
            f"{where}: {key} is {list(found.shape)}, this model needs {list(shape)}: the adapter is of another base"
        )
    return found.float()


def check_supported(values: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raises ModelError for a setting with a value beyond those that change nothing."""
    for key, values_of_no_effect in harmless.items():
        if values.get(key) not in values_of_no_effect:
            raise ModelError(f"{where}: {key} is {values[key]!r}, which danlu does not support")


def positive_int(values: Mapping[str, Any], key: str, where: str) -> int:
    """A setting that is a number of things. Raises ModelError if it is none."""
    found = values.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ModelError(f"{where}: {key} is {found!r}; expected a whole number above 0")
    return found


def finite_number(values: Mapping[str, Any], key: str, default: float, where: str) -> float:
    """A setting that is a finite number; `default` where it is not there or null. Raises ModelError if it is none."""
    found = values.get(key)
    if found is None:
        return default
    if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
        raise ModelError(f"{where}: {key} is {found!r}; expected a number")
    return float(found)


def choice(values: Mapping[str, Any], key: str, known: Collection[str], where: str) -> Any:
    """A setting that is one of a few words. Raises ModelError if it is none of them."""
    if not isinstance(values.get(key), str) or values[key] not in known:
        raise ModelError(f"{where}: {key} is {values.get(key)!r}, which is none of {', '.join(known)}")
    return values[key]
