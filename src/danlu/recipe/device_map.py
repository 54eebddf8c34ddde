"""The keys and values of `parallel.device_map`: parts of a decoder, and devices. No torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from danlu.core.spelling import did_you_mean

ByHand = Mapping[str, str | int]
"""A map as a recipe gives it: from parts to devices."""

REST = ""
"""The key of all that no other key names, as in accelerate."""
_PARTS: dict[str, Literal["embed", "head"]] = {
    "embed": "embed",
    "embed_tokens": "embed",
    "head": "head",
    "lm_head": "head",
    "norm": "head",
}
_LAYERS = re.compile(r"layers\.(\d{1,5})(?:-(\d{1,5}))?")
_DEVICE = re.compile(r"cuda(?::(\d{1,3}))?|(\d{1,3})|cpu")

_DEVICES_MEANT = {"cpu": "cpu", "cuda:0": "cuda:0", "gpu": "cuda:0", "gpu:0": "cuda:0", "gpu:1": "cuda:1"}


@dataclass(frozen=True)
class MapEntry:
    """A key of the map and its device."""

    key: str
    part: Literal["", "embed", "head"] | range
    """range: of layers, by their numbers."""
    device: str
    """`cpu`, or `cuda:` and the number of a GPU."""


def entries_of(by_hand: ByHand) -> list[MapEntry]:
    """The entries of a map that `entry_problems` has nothing against."""
    entries = []
    for key, value in by_hand.items():
        part, device = part_named(key), device_named(value)
        assert part is not None and device is not None, "the recipe's rules look at them first"
        entries.append(MapEntry(key, part, device))
    return entries


def part_named(key: str) -> Literal["", "embed", "head"] | range | None:
    """Returns the part that a key names: embed, head, layers.3, layers.0-15, or transformers' names
    (model.embed_tokens, model.norm, lm_head).

    None for a name of no part with a device.
    """
    name = key.removeprefix("model.")
    if name == REST:
        return ""
    if name in _PARTS:
        return _PARTS[name]
    if (layers := _LAYERS.fullmatch(name)) is None:
        return None
    first = int(layers[1])
    return range(first, int(layers[2] or first) + 1)


def device_named(value: str | int) -> str | None:
    """Returns `cpu` or `cuda:1` (also written 1; `cuda` is the first GPU); None for a value that names no device."""
    if (device := _DEVICE.fullmatch(str(value))) is None:
        return None
    return "cpu" if device[0] == "cpu" else f"cuda:{int(device[1] or device[2] or 0)}"


def named_devices(by_hand: ByHand) -> dict[str, str]:
    """Returns the first key that names each device of a map, by device."""
    return {entry.device: entry.key for entry in reversed(entries_of(by_hand))}


def entry_problems(by_hand: ByHand) -> Iterator[str]:
    """Yields the faults in the entries of a map, whatever the model."""
    if not by_hand:
        yield "a map without entries. Give auto, balanced, or {embed: cuda:0, layers.0-15: cuda:0, ..}"
    ranges: list[tuple[str, range]] = []
    devices: dict[str, tuple[str, str | None]] = {}
    for key, value in by_hand.items():
        part, device = part_named(key), device_named(value)
        if part is None:
            yield f"{key!r} names no part that has a device.{_part_meant(key)}"
        if device is None:
            guess = did_you_mean(str(value), _DEVICES_MEANT)
            yield f"{key}: {value!r} is no device; there are cpu and cuda:0, cuda:1, ...{guess}"
        if isinstance(part, range):
            if not len(part):
                yield f"{key}: the last layer comes before the first"
            ranges.append((key, part))
        elif part in ("embed", "head"):
            other, own = devices.setdefault(part, (key, device))
            if own != device:
                yield f"{other} and {key} are on one device (the norm, the head and the loss stand together)"
    for (key, layers), (other, others) in itertools.combinations(ranges, 2):
        if twice := sorted({*layers} & {*others}):
            yield f"layer {twice[0]} is in {key} and in {other}. Name each layer once"


def _part_meant(key: str) -> str:
    if (layer := re.match(r"(?:model\.)?layers\.(\d+)\.", key)) is not None:
        return f" A layer is on one device as a whole: use layers.{layer[1]}"
    if key.removeprefix("model.") == "rotary_emb":
        return " Rotary tables are made for each micro-batch: leave it out"
    guess = did_you_mean(key.removeprefix("model."), ["embed", "head", "layers.0", "lm_head", "embed_tokens"])
    return guess or " There are embed, layers.0 (or layers.0-15) and head"
