"""Values of adapter_config.json and tensors of an adapter's file, each checked as it is read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from danlu.adapters.hf_layers import adapted_layers, hf_layers
from danlu.core.errors import ModelError
from danlu.core.layer_types import LANGUAGE_PART, Site

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
"""PEFT's prefix of the name that a module has in Hugging Face folders."""

PeftContent: TypeAlias = "tuple[dict[str, Any], dict[str, Tensor]]"
"""The written form of an adapter: values of adapter_config.json, and tensors by their keys in the adapter's file."""
ModuleValues: TypeAlias = "dict[str, dict[str, Tensor]]"
"""The values that are read for an adapter: of each module's parameters, by the module's site or slot."""


class PeftReader:
    """Reads an adapter's settings and tensors. Each method raises ModelError for values that are missing or do not fit.

    Args:
        values: adapter_config.json.
        tensors: by their keys in the adapter's file.
        where: the file that error messages name.
    """

    def __init__(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> None:
        self.values = values
        self.tensors = tensors
        self.where = where
        self.used: set[str] = set()
        """Keys of the tensors that were read."""

    def tensor(self, key: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `key` in float32, which has to be of this shape."""
        if key not in self.tensors:
            raise ModelError(f"{self.where}: {key} is missing")
        tensor = self.tensors[key]
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.where}: {key} is {list(tensor.shape)}, this model needs {list(shape)}: the adapter is of "
                "another base"
            )
        self.used.add(key)
        return tensor.float()

    def check_supported(self, harmless: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises ModelError for an unsupported setting with a value that changes the adapter's results.

        harmless: the values of each unsupported setting that change nothing.
        """
        for key, harmless_values in harmless.items():
            if self.values.get(key) not in harmless_values:
                raise ModelError(f"{self.where}: {key} is {self.values[key]!r}, which danlu does not support")

    def positive_int(self, key: str, default: int | None = None) -> int:
        """The setting `key`, an integer above 0; `default` where it is missing."""
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.where}: {key} is {value!r}; expected a whole number above 0")
        return value

    def finite_number(self, key: str, default: float) -> float:
        """The setting `key`, a finite number; `default` where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ModelError(f"{self.where}: {key} is {value!r}; expected a number")
        return float(value)

    def choice(self, key: str, known: Collection[str]) -> Any:
        """The setting `key`, one of the `known` texts."""
        value = self.values.get(key)
        if not isinstance(value, str) or value not in known:
            raise ModelError(f"{self.where}: {key} is {value!r}, which is none of {', '.join(known)}")
        return value


def target_modules(modules: Collection[str], sites: Sequence[Site]) -> list[str]:
    """PEFT's `target_modules` for adapters of some of all `sites`: the ends of their layers' names (`q_proj`) where no
    other layer has one of them, else their whole names; those of a multimodal model's language part always."""
    return _shortest(modules, [site for site in sites if site.experts is None], parts=1)


def target_parameters(modules: Collection[str], sites: Sequence[Site]) -> list[str]:
    """PEFT's `target_parameters` likewise, for the stacked matrices of experts: `mlp.experts.down_proj`."""
    return _shortest(modules, [site for site in sites if site.experts is not None], parts=3)


def target_weights(modules: Collection[str], sites: Sequence[Site]) -> list[str]:
    """PEFT's `target_parameters` for linear layers, by their weights: `mlp.shared_experts.down_proj.weight`."""
    dense = [site for site in sites if site.experts is None]
    return [f"{name}.weight" for name in _shortest(modules, dense, parts=3)]


def is_taken_for_experts(site: Site, sites: Sequence[Site]) -> bool:
    """Whether PEFT would take a linear layer that `target_modules` names for experts of the same name.

    PEFT (0.21) makes `gate_proj`, `up_proj` and `down_proj` of models with experts `target_parameters`, for adapters
    that were trained with transformers 4: also those of dense layers and shared experts, whichever names are given.
    """
    named = site.experts is None and site.hf_name.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj")
    return named and any(other.experts is not None for other in sites)


def _shortest(modules: Collection[str], sites: Sequence[Site], *, parts: int) -> list[str]:
    """Names of the layers of some of the sites: their last parts where these mean no other layer, else whole."""

    def end(name: str) -> str:
        return ".".join(name.split(".")[-parts:])

    targets = [layer.name for layer in adapted_layers(modules, sites)]
    ends = sorted({end(name) for name in targets})
    matched = {layer.name for layer in hf_layers(sites) if end(layer.name) in ends}
    is_part = any(name.startswith(LANGUAGE_PART) for name in targets)  # a vision tower has layers of the same ends
    return ends if matched == set(targets) and not is_part else targets
