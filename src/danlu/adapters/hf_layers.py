"""Linear layers as Hugging Face folders have them, where q, k and v (or gate and up) may be fused into one.

The rows of a fused layer's weight are those of its parts, one part after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from danlu.layer_types import Site


@dataclass(frozen=True)
class HFLayer:
    """A layer of a Hugging Face folder, and the sites of danlu's model that are its parts."""

    name: str
    parts: tuple[Site, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I) of the fused layer."""
        return sum(site.shape[0] for site in self.parts), self.parts[0].shape[1]

    def rows(self) -> Iterator[tuple[Site, slice]]:
        """Each part, and which outputs of the fused layer are its own."""
        start = 0
        for site in self.parts:
            yield site, slice(start, start + site.shape[0])
            start += site.shape[0]


def hf_layers(sites: Sequence[Site]) -> list[HFLayer]:
    """All layers, in the model's order. `sites` are those of the whole model."""
    return [HFLayer(name, tuple(parts)) for name, parts in groupby(sites, key=lambda site: site.hf_name)]


def adapted_layers(names: Collection[str], sites: Sequence[Site]) -> list[HFLayer]:
    """Those of all layers that have a part of these names."""
    return [layer for layer in hf_layers(sites) if any(site.name in names for site in layer.parts)]
