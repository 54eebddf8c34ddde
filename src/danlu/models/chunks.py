"""How the layers of a decoder are divided into chunks of a pipeline. Pure data; no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunks:
    """Consecutive parts of a whole decoder, and which of them one process has.

    The first chunk begins with the embedding, the last one ends with the final norm and the head.
    """

    layers: tuple[range, ...]
    """The layers of each chunk of the whole model, by their numbers."""
    local: tuple[int, ...]
    """The numbers of the chunks of this process, rising."""

    @classmethod
    def whole(cls, num_layers: int) -> Chunks:
        """A model in one chunk."""
        return cls((range(num_layers),), (0,))

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], local: Sequence[int]) -> Chunks:
        """Makes chunks with the given numbers of layers."""
        borders = itertools.accumulate(sizes, initial=0)
        return cls(tuple(range(start, stop) for start, stop in itertools.pairwise(borders)), tuple(local))

    @property
    def last(self) -> int:
        """The number of the last chunk of the whole model."""
        return len(self.layers) - 1

    @property
    def has_first(self) -> bool:
        """Whether the embedding is here."""
        return 0 in self.local

    @property
    def has_last(self) -> bool:
        """Whether the final norm and the head are here."""
        return self.last in self.local

    @property
    def local_layers(self) -> list[int]:
        """The numbers of this process's layers, rising."""
        return [layer for chunk in self.local for layer in self.layers[chunk]]

    def of_layer(self, layer: int) -> int:
        """The number of the chunk that has a layer."""
        return next(chunk for chunk, layers in enumerate(self.layers) if layer in layers)

    def of_parameter(self, name: str) -> int:
        """The number of the chunk that a parameter of the decoder belongs to; of a tied embedding the first."""
        first, *rest = name.split(".")
        if first == "layers":
            return self.of_layer(int(rest[0]))
        return 0 if first == "embed_tokens" else self.last


def layer_spans(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> `0-2 and 5`."""
    # Numbers of one run differ from their index by the same number.
    groups = itertools.groupby(enumerate(numbers), key=lambda indexed: indexed[1] - indexed[0])
    runs = [[number for _, number in group] for _, group in groups]
    spans = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return spans[0] if len(spans) == 1 else f"{', '.join(spans[:-1])} and {spans[-1]}"
