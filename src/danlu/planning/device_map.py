"""The device of each part of a model: by hand, or in equal or fitting shares of its parameters. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from danlu.models.chunks import DeviceMap, layer_spans
from danlu.models.config import ModelConfig
from danlu.models.hf_layout import hf_name
from danlu.planning.pipeline_split import even_in_cost
from danlu.recipe.device_map import PARTS, PREFIX, ByHand, entries_of, part_named, without_prefix


class Device(NamedTuple):
    """A device that a part of a model may go to."""

    name: str
    free_bytes: int | None
    """None where nothing tells."""


def device_map_problems(section: Literal["auto", "balanced"] | ByHand | None, config: ModelConfig) -> Iterator[str]:
    """Yields the reasons why a model cannot be shared out, or why a map that is given by hand does not fit it."""
    if section is not None and config.carries_values:
        yield (
            "parallel.device_map: devices are handed the residual stream alone, and layers of this model read "
            f"{config.carried}. Use parallel.tensor, or parallel.shard: zero3"
        )
        return
    if section is None or isinstance(section, str):
        return
    key, count, entries = "parallel.device_map", len(config.layers), entries_of(section)
    for entry in entries:
        if not _is_name_in(config, entry.key):
            first, *others = (hf_name(name, config) for name in ("embed_tokens", "norm", "lm_head"))
            own = ", ".join((first, f"{first.rpartition('.')[0]}.layers.0", *others))
            yield f"{key}: {entry.key} names a part of another family. This model has {own}"
        if isinstance(entry.part, range) and entry.part.stop > count:
            yield f"{key}: {entry.key}, and the model has {count} layers, 0 to {count - 1}"
    if not any(entry.part == "" for entry in entries):
        named = {layer for entry in entries if isinstance(entry.part, range) for layer in entry.part}
        if missing := [number for number in range(count) if number not in named]:
            yield f"{key}: no device for layer{'s' if len(missing) > 1 else ''} {layer_spans(missing)}"
        parts = {entry.part for entry in entries}
        for part in ("embed", "head"):
            if part not in parts:
                yield f"{key}: no device for {part}"
    devices = {entry.part: entry.device for entry in entries if not isinstance(entry.part, range)}
    embed, head = (devices.get(part, devices.get("")) for part in ("embed", "head"))
    is_tied = config.tie_word_embeddings and config.task == "causal-lm"
    if is_tied and None not in (embed, head) and embed != head:
        yield (
            f"{key}: this model's head is its embedding, one matrix, and cannot be on {embed} and {head}. Put embed "
            "and head on one device; hidden states are moved back to it"
        )


def _is_name_in(config: ModelConfig, key: str) -> bool:
    """Whether a key is danlu's name of a part, that of transformers' Llama, or the one that the model's family has."""
    prefix, name = without_prefix(key)
    outer = dict(without_prefix(hf_name(part, config))[::-1] for part in ("lm_head", "embed_tokens", "norm"))
    is_outer = part_named(key) in ("embed", "head")
    return prefix in ("", PREFIX, *outer.values()) and (not is_outer or name in PARTS or name in outer)


def device_map_of(
    section: Literal["auto", "balanced"] | ByHand,
    config: ModelConfig,
    devices: Sequence[Device],
    *,
    loss_device: str | None = None,
) -> DeviceMap:
    """Makes the map of a model, for a section without `device_map_problems`.

    `balanced` gives each device a run of layers, with as many parameters as can be made equal; `auto` with as many as
    go with its free memory. The embedding counts on the first device, the head on the last; a tied head is the
    embedding, on the first.

    devices: those that torch sees, in the order in which layers are dealt to them. Where there are more than layers,
    the last ones are left out. loss_device: the device of the head, for a model of another role with its loss computed
    there; by default the map decides.
    """
    if not isinstance(section, str):
        entries = entries_of(section)
        given = {entry.part: entry.device for entry in entries if not isinstance(entry.part, range)}
        of_layers = {number: each.device for each in entries if isinstance(each.part, range) for number in each.part}
        layers = tuple(of_layers.get(number) or given[""] for number in range(len(config.layers)))
        return DeviceMap(given.get("embed") or given[""], layers, given.get("head") or given[""])
    devices = devices[: len(config.layers)]
    names = [device.name for device in devices]
    is_tied = config.tie_word_embeddings and config.task == "causal-lm"
    head = loss_device or (names[0] if is_tied else names[-1])
    embed = head if is_tied else names[0]
    extras = [0] * len(devices)
    matrix = config.vocab_size * config.hidden_size
    for place in {embed, head} if is_tied else (embed, *((head,) if config.has_own_head else ())):
        if place in names:
            extras[names.index(place)] += matrix
    free = [device.free_bytes for device in devices]
    shares = None if section == "balanced" or None in free else [float(size or 1) for size in free]
    sizes = even_in_cost(layer_parameters(config), extras, shares)
    return DeviceMap(embed, tuple(name for name, size in zip(names, sizes, strict=True) for _ in range(size)), head)


def layer_parameters(config: ModelConfig) -> list[int]:
    """Parameters of each layer, all experts' included, which decide its memory."""
    of_kind = {
        kind: sum(math.prod(shape) for shape in kind.parameter_shapes(config.hidden_size).values())
        for kind in config.kinds
    }
    return [of_kind[layer] for layer in config.layers]
