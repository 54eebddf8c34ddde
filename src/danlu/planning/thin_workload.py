"""A workload with fewer layers, which bounds of a search measure a layer of each kind by. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from danlu.models.config import ModelConfig
from danlu.planning.model_tensors import ModelTensor, ModelTensors
from danlu.planning.workload import Workload


class PerLayer(NamedTuple):
    """A quantity of a model: of one layer of each kind, and of all that is outside of layers."""

    layers: tuple[float, ...]
    outside: float

    def of(self, counts: Sequence[int]) -> float:
        """That of some layers alone. counts: of each kind."""
        return sum(count * each for count, each in zip(counts, self.layers, strict=True))


class ThinWorkloads:
    """A workload with one layer of each kind, and those with one layer more."""

    def __init__(self, workload: Workload, kinds: Sequence[int]) -> None:
        """kinds: the number of the kind of each layer (`stage_kinds`)."""
        first = [kinds.index(kind) for kind in range(max(kinds) + 1)]
        self.base = _with_layers(workload, first)
        """One layer of each kind, in the order of the kinds."""
        self._more = [_with_layers(workload, sorted([*first, layer])) for layer in first]
        self.trained_alike = tuple(
            _is_trained_alike(thin, workload, layers)
            for thin, layers in ((more, sorted([*first, layer])) for more, layer in zip(self._more, first, strict=True))
        )
        """Whether one layer more of each kind is trained as in the whole model."""
        self.first_twice = _with_layers(workload, [0, 0])
        """The model's first layer, twice."""

    def measure(self, quantities: Callable[[Workload], Sequence[float]]) -> tuple[PerLayer, ...]:
        """Some quantities that are sums over layers, and of what is outside of them."""
        base = quantities(self.base)
        more = [quantities(workload) for workload in self._more]
        measured = []
        for number, whole in enumerate(base):
            layers = tuple(each[number] - whole for each in more)
            measured.append(PerLayer(layers, whole - sum(layers)))
        return tuple(measured)


def _is_trained_alike(thin: Workload, workload: Workload, layers: Sequence[int]) -> bool:
    """Not so of adapters that are in layers of some numbers, nor of a first layer that sends no gradient on."""
    return list(thin.training) == [workload.training[layer] for layer in layers]


def _with_layers(workload: Workload, layers: Sequence[int]) -> Workload:
    """The workload with some layers of its policy alone, which are renumbered, and without other models."""
    policy = workload.policy
    return replace(
        workload,
        config=_config(workload.config, layers),
        policy=ModelTensors(_tensors(policy.tensors, layers), _tensors(policy.originals, layers)),
        frozen=(),
        critic=None,
    )


def _config(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    return replace(config, layers=tuple(config.layers[layer] for layer in layers))


def _tensors(tensors: Iterable[ModelTensor], layers: Sequence[int]) -> tuple[ModelTensor, ...]:
    kept = []
    for each in tensors:
        if not each.name.startswith("layers."):
            kept.append(each)
            continue
        old = int(each.name.split(".", 2)[1])
        for new, layer in enumerate(layers):
            if layer == old:
                name, linear = (_renumbered(name, old, new) for name in (each.name, each.linear))
                kept.append(replace(each, name=name, linear=linear))
    return tuple(kept)


def _renumbered(name: str, old: int, new: int) -> str:
    return name.replace(f"layers.{old}.", f"layers.{new}.", 1)
