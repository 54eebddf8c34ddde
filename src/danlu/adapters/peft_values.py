"""Values of adapter_config.json and tensors of an adapter's file, each checked as it is read.

`where` is the file that error messages name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from danlu.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
"""What PEFT puts in front of the name that a module has in Hugging Face folders."""


def take_tensor(tensors: Mapping[str, Tensor], key: str, shape: tuple[int, ...], where: str) -> Tensor:
    """The tensor `key` in float32. Raises ModelError where it is missing, or of another shape."""
    if key not in tensors:
        raise ModelError(f"{where}: {key} is missing")
    tensor = tensors[key]
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"{where}: {key} is {list(tensor.shape)}, this model needs {list(shape)}: the adapter is of another base"
        )
    return tensor.float()


def check_supported(values: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raises ModelError for a setting that danlu does not support, with a value that changes what the adapter computes.

    harmless: of each such setting, the values that change nothing.
    """
    for key, harmless_values in harmless.items():
        if values.get(key) not in harmless_values:
            raise ModelError(f"{where}: {key} is {values[key]!r}, which danlu does not support")


def positive_int(values: Mapping[str, Any], key: str, where: str) -> int:
    """The setting `key`. Raises ModelError unless it is an integer above 0."""
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: {key} is {value!r}; expected a whole number above 0")
    return value


def finite_number(values: Mapping[str, Any], key: str, default: float, where: str) -> float:
    """The setting `key`; `default` where it is missing or null. Raises ModelError unless it is a finite number."""
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelError(f"{where}: {key} is {value!r}; expected a number")
    return float(value)


def choice(values: Mapping[str, Any], key: str, known: Collection[str], where: str) -> Any:
    """The setting `key`. Raises ModelError unless it is one of the `known` texts."""
    if not isinstance(values.get(key), str) or values[key] not in known:
        raise ModelError(f"{where}: {key} is {values.get(key)!r}, which is none of {', '.join(known)}")
    return values[key]
