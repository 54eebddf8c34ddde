"""Naive model parallelism: the layers of a decoder on several devices of one process, as a `DeviceMap` says.

Hidden states are moved where the next part is on another device, and nowhere else; their gradients go back the same
way, by autograd. The rotary tables of a micro-batch, which every layer reads, are moved once to each device. Attention
builds its tensors of boundaries on the device of its queries. Hooks before the parts move the tensors, so the decoder
and its recomputed parts stay as they are: a layer that is recomputed keeps its input on its own device.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from danlu.adapters.adapter_set import AdapterSet
from danlu.core import device_moves
from danlu.models.chunks import DeviceMap
from danlu.models.decoder import Decoder
from danlu.models.rope import Rotation


def parts_of(model: Decoder, device_map: DeviceMap) -> Iterator[tuple[nn.Module, str]]:
    """(part, its device) of all that has parameters; a tied head has those of the embedding."""
    yield model.embed_tokens, device_map.embed
    for name, layer in model.layers.items():
        yield layer, device_map.layers[int(name)]
    yield model.norm, device_map.head
    if model.lm_head is not None:
        yield model.lm_head, device_map.head


def allocate(model: Decoder, device_map: DeviceMap) -> None:
    """Allocates the parameters of a model on the meta device, without values: each on its own device."""
    for part, device in parts_of(model, device_map):
        part._apply(partial(torch.empty_like, device=torch.device(device)))


def move_parameters(model: Decoder, adapters: AdapterSet | None, device_map: DeviceMap) -> None:
    """Moves parameters and buffers to their devices: adapters', and those that a trained copy replaces, too."""
    for part, device in parts_of(model, device_map):
        move_part(part, device)
    if adapters is None:
        return
    adapters.refresh_copies()
    moved: dict[nn.Parameter, nn.Parameter] = {}  # several adapters may have copies of one parameter
    for copy in (copy for added in adapters.added.values() for copy in added.copies):
        for name in ("original", "trained"):
            parameter = getattr(copy, name)
            if parameter is getattr(copy.owner, copy.attribute):  # moved with its part
                continue
            if parameter not in moved:
                values = device_moves.move(parameter.detach(), device_map.of_parameter(copy.name))
                moved[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            setattr(copy, name, moved[parameter])


def move_part(part: nn.Module, device: str) -> None:
    """Moves a part's parameters and buffers to a device."""
    part._apply(lambda tensor: device_moves.move(tensor, device))


def move_activations(model: Decoder, device_map: DeviceMap) -> None:
    """Installs hooks that move hidden states from device to device in the forward pass.

    The model's tokens and positions are on the device of its head.
    """
    if len(device_map.devices) == 1:
        return
    model.device_map = device_map
    rotations = _RotationCopies()
    _before(model.embed_tokens, device_map.embed, moves_input=device_map.embed != device_map.head)
    device = device_map.embed
    for layer, own in zip(model.layers.values(), device_map.layers, strict=True):
        _before(layer, own, moves_input=own != device, rotations=None if own == device_map.head else rotations)
        device = own
    _before(model.norm, device_map.head, moves_input=device_map.head != device)


def _before(part: nn.Module, device: str, *, moves_input: bool, rotations: _RotationCopies | None = None) -> None:
    """Moves a part's input, and gives a layer the rotary tables on its device, where it has to be."""

    def hook(part: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        x = device_moves.move(x, device) if moves_input else x
        return (x, *rest) if rotations is None else (x, rotations.on(device, rest[0]), *rest[1:])

    if moves_input or rotations is not None:
        part.register_forward_pre_hook(hook)


class _RotationCopies:
    """The rotary tables of micro-batches in flight, copied to devices other than the one where they were made.

    A copy lives as long as its original.
    """

    def __init__(self) -> None:
        self._copies: MutableMapping[Tensor, dict[str, tuple[Rotation, ...]]] = WeakIdKeyDictionary()

    def on(self, device: str, rotations: Sequence[Rotation]) -> Sequence[Rotation]:
        """The tables on a device, moved when the first layer there asks."""
        if not rotations:
            return rotations
        copies = self._copies.setdefault(rotations[0].cos, {})
        if device not in copies:
            copies[device] = tuple(each.map(lambda x: device_moves.move(x, device)) for each in rotations)
        return copies[device]
