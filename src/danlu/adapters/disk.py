"""Layers as Hugging Face folders name them, and tensors taken out of an adapter's file.

q, k and v (or gate and up) may be one layer there; its parts then lie one under the other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from danlu.errors import ModelError
from danlu.types import Site

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HFLayer:
    """A layer of a Hugging Face folder, and the sites that are its parts."""

    name: str
    parts: tuple[Site, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I) of the whole."""
        return sum(site.shape[0] for site in self.parts), self.parts[0].shape[1]

    def rows(self) -> Iterator[tuple[Site, slice]]:
        """The parts, and which outputs of the whole are theirs."""
        start = 0
        for site in self.parts:
            yield site, slice(start, start + site.shape[0])
            start += site.shape[0]


def hf_layers(sites: Sequence[Site]) -> list[HFLayer]:
    """All layers, in the model's order. `sites` are those of the whole model."""
    return [HFLayer(name, tuple(parts)) for name, parts in groupby(sites, key=lambda site: site.hf_name)]


def take(tensors: Mapping[str, Tensor], key: str, shape: tuple[int, ...], where: str) -> Tensor:
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


def whole(values: Mapping[str, Any], key: str, where: str) -> int:
    """A setting that is a number of things. Raises ModelError if it is none."""
    found = values.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ModelError(f"{where}: {key} is {found!r}; expected a whole number above 0")
    return found


def number(values: Mapping[str, Any], key: str, default: float, where: str) -> float:
    """A setting that is a finite number; `default` where it is not there or null. Raises ModelError if it is none."""
    found = values.get(key)
    if found is None:
        return default
    if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
        raise ModelError(f"{where}: {key} is {found!r}; expected a number")
    return float(found)


def one_of(values: Mapping[str, Any], key: str, known: Collection[str], where: str) -> Any:
    """A setting that is one of a few words. Raises ModelError if it is none of them."""
    if not isinstance(values.get(key), str) or values[key] not in known:
        raise ModelError(f"{where}: {key} is {values.get(key)!r}, which is none of {', '.join(known)}")
    return values[key]
