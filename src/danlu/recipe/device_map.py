"""The keys and values of `parallel.device_map`: parts of a decoder, and devices. No torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from danlu.core.layer_types import LANGUAGE_PART
from danlu.core.spelling import did_you_mean

ByHand = Mapping[str, str | int]
"""A map as a recipe gives it: from parts to devices."""

REST = ""
"""The key of all that no other key names, as in accelerate."""
PARTS: dict[str, Literal["embed", "head"]] = {
    "embed": "embed",
    "embed_tokens": "embed",
    "head": "head",
    "lm_head": "head",
    "norm": "head",
}
"""The parts outside of layers by danlu's names and those of transformers' Llama, which every model answers to."""
_FAMILY_PARTS: dict[str, Literal["embed", "head"]] = {
    "embed_in": "embed",
    "embed_out": "head",
    "final_layer_norm": "head",
}
"""Further names, of GPT-NeoX, which only models of their family answer to."""
PREFIX = "model."
_FAMILY_PREFIXES = (f"{LANGUAGE_PART}.", "gpt_neox.")
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
    """Returns the part that a key names: embed, head, layers.3, layers.0-15, or transformers' names of any family
    (model.embed_tokens, gpt_neox.embed_in, model.norm, lm_head).

    None for a name of no part with a device.
    """
    _, name = without_prefix(key)
    if name == REST:
        return ""
    if (part := PARTS.get(name) or _FAMILY_PARTS.get(name)) is not None:
        return part
    if (layers := _LAYERS.fullmatch(name)) is None:
        return None
    first = int(layers[1])
    return range(first, int(layers[2] or first) + 1)


def without_prefix(key: str) -> tuple[str, str]:
    """`gpt_neox.layers.3` -> `gpt_neox.`, `layers.3`: the module of a family's classes that has everything but the
    head, and the name in it."""
    prefix = next((each for each in (*_FAMILY_PREFIXES, PREFIX) if key.startswith(each)), "")
    return prefix, key.removeprefix(prefix)


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
    _, name = without_prefix(key)
    if (layer := re.match(r"layers\.(\d+)\.", name)) is not None:
        return f" A layer is on one device as a whole: use layers.{layer[1]}"
    if name == "rotary_emb":
        return " Rotary tables are made for each micro-batch: leave it out"
    guess = did_you_mean(name, ["embed", "head", "layers.0", "lm_head", "embed_tokens"])
    return guess or " There are embed, layers.0 (or layers.0-15) and head"
