"""Linear layers as Hugging Face folders have them, where q, k and v (or gate and up) may be fused into one.

The rows of a fused layer are those of its parts, one part after the other, or in turns (`Site.turns`): some rows
of each part, then the next ones of each, as where each head of queries is followed by its gate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from danlu.core.layer_types import Site

if TYPE_CHECKING:
    from torch import Tensor

Rows = slice | list[int]
"""The rows of a matrix, as an index of its first dimension."""


@dataclass(frozen=True)
class HFLayer:
    """A layer of a Hugging Face folder, and the sites of danlu's model that are its parts."""

    name: str
    parts: tuple[Site, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I) of the fused layer."""
        return sum(site.shape[0] for site in self.parts), self.parts[0].shape[1]

    def rows(self) -> Iterator[tuple[Site, Rows]]:
        """Each part, and which outputs of the fused layer are its own, in the order of the part's."""
        turns = self.parts[0].turns
        whole_turn, start = self.shape[0] // turns, 0
        for site in self.parts:
            in_turn = site.shape[0] // turns
            if turns == 1:
                yield site, slice(start, start + in_turn)
            else:
                first_rows = range(start, start + whole_turn * turns, whole_turn)
                yield site, [row for first in first_rows for row in range(first, first + in_turn)]
            start += in_turn

    def assembled(self, parts: Sequence[Tensor]) -> Tensor:
        """A tensor of the fused layer's outputs [O, ..], of those of its parts."""
        whole = parts[0].new_empty(self.shape[0], *parts[0].shape[1:])
        for (_, rows), part in zip(self.rows(), parts, strict=True):
            whole[rows] = part
        return whole


def hf_layers(sites: Sequence[Site]) -> list[HFLayer]:
    """All layers, in the order of their first parts. `sites` are those of the whole model."""
    parts: dict[str, list[Site]] = {}
    for site in sites:
        parts.setdefault(site.hf_name, []).append(site)
    return [HFLayer(name, tuple(sharing)) for name, sharing in parts.items()]


TargetLayers = list[tuple[HFLayer, list[Site]]]
"""Layers of a Hugging Face folder, each with those of its parts that an adapter sits on."""


def target_layers(targets: Sequence[Site], all_sites: Sequence[Site]) -> TargetLayers:
    """The layers that have one of the targets for a part, each with those of its parts that are targets."""
    names = {site.name for site in targets}
    layers = adapted_layers(names, all_sites)
    return [(layer, [site for site in layer.parts if site.name in names]) for layer in layers]


def adapted_layers(names: Collection[str], sites: Sequence[Site]) -> list[HFLayer]:
    """Those of all layers that have a part of these names."""
    return [layer for layer in hf_layers(sites) if any(site.name in names for site in layer.parts)]
