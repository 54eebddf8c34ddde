"""How a decoder is divided: into chunks of a pipeline, or among the devices of one process. Pure data; no torch."""

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


@dataclass(frozen=True)
class DeviceMap:
    """The devices of one decoder's parts by their names ("cuda:0"), as `device_map` of accelerate says it."""

    embed: str
    """The device of the embedding."""
    layers: tuple[str, ...]
    """The device of each layer."""
    head: str
    """The device of the final norm and the head, where the loss is computed; micro-batches are created there."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Each device once, in the order in which a forward pass comes to them."""
        return tuple(dict.fromkeys((self.embed, *self.layers, self.head)))

    def layers_on(self, device: str) -> list[int]:
        """The numbers of a device's layers, rising."""
        return [number for number, own in enumerate(self.layers) if own == device]

    def of_parameter(self, name: str) -> str:
        """The device of a parameter of the decoder, or of an adapter on it, by its name."""
        first, *rest = name.split(".")
        if first == "layers":
            return self.layers[int(rest[0])]
        return self.embed if first == "embed_tokens" else self.head

    def __str__(self) -> str:
        """`embed, layers 0-1 on cuda:0; layers 2-3, head on cuda:1`."""
        return "; ".join(f"{', '.join(self._parts_on(device))} on {device}" for device in self.devices)

    def _parts_on(self, device: str) -> list[str]:
        parts = ["embed"] if self.embed == device else []
        if own := self.layers_on(device):
            parts.append(f"layer{'s' if len(own) > 1 else ''} {layer_spans(own)}")
        return [*parts, "head"] if self.head == device else parts
