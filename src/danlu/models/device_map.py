"""The device of each part of a decoder within one process. Pure data; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from danlu.models.chunks import layer_spans


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
