"""Tensor parallelism: a decoder's matrices cut among processes, each of which keeps plain, smaller tensors.

What may be cut how is declared by the modules: `tensor_roles` of attention, MLP and decoder, `tensor_axes` of adapters.
Here every parameter, packed weight and buffer is replaced by its box, in place and under its name, and the borders of
`regions` are put into the decoder's slots. The forward pass stays single-device code over fewer heads, features and
words.

The gradient of a parameter that is cut is whole where it is. One that is held whole by all processes gets:

- inside of what is cut, a part from each: the bias behind a cut sum, A or B of LoRA, norms of heads;
- outside, the same on all; under sequence parallelism a part from each, for each has some of the tokens.

A head of keys and values that several processes hold is cut, and gets a part from each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from danlu.adapters.adapter import TensorAxes
from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.slot import Slot
from danlu.errors import RecipeError
from danlu.models.decoder import Decoder, Layer
from danlu.models.modules import Embedding, Linear
from danlu.models.sublayer import Role
from danlu.parallel.comm import Group, within
from danlu.parallel.regions import Regions
from danlu.shard_box import ShardBox
from danlu.types import LinearShard, VocabShard

LINEAR_AXES: TensorAxes = {"weight": ("outputs", "inputs"), "bias": ("outputs",)}
TABLE_AXES: TensorAxes = {"weight": ("outputs", "inputs")}


class Narrowed(Protocol):
    """An adapter, as far as it is cut here."""

    @property
    def tensor_axes(self) -> TensorAxes: ...

    def narrow(self, share: LinearShard) -> None: ...


@dataclass(frozen=True)
class Cuts:
    """What tensor parallelism made of a model, by parameter name."""

    boxes: dict[str, ShardBox] = field(default_factory=dict)
    """Of every parameter; `copies` and `writes` are among the processes of the group alone."""
    partial: dict[str, Group] = field(default_factory=dict)
    """Parameters whose gradient is a part of a sum over a group, to be summed after the backward pass."""


def cut(model: Decoder, adapters: AdapterSet | None, group: Group, *, sequence: bool) -> Cuts:
    """Cuts a decoder among the processes of a group, in place; all processes of the world call it.

    Parameters may be shapes without values (on meta). Adapters and their base have their values, and packed weights are
    still whole; nothing can be added to `adapters` or merged afterwards. Raises RecipeError as `Cutter` does.
    """
    cutter = Cutter(model, adapters, group, sequence=sequence)
    for name in model.layers:
        cutter.layer(name)
    return cutter.rest()


@dataclass(frozen=True)
class _Part:
    """One process's part of a number of things in a row."""

    here: slice
    holders: Group  # the processes that have the same part


class Cutter:
    """Cuts a decoder a layer at a time, so that a layer can be cut before the next one has its weights.

    sequence: outside of attention, MLP and head each process has its share of the tokens, whose number has to be a
    multiple of the group's size wherever there are gradients.

    Raises RecipeError for a model that cannot be cut so.
    """

    def __init__(self, model: Decoder, adapters: AdapterSet | None, group: Group, *, sequence: bool) -> None:
        self.model, self.adapters, self.group, self.sequence = model, adapters, group, sequence
        self.alone = Group(group.name, (group.ranks[group.index],))
        # Its box, and where gradients are summed. What layers share is cut once; what is replaced is forgotten.
        self._found: MutableMapping[Tensor, tuple[ShardBox, Group]] = WeakIdKeyDictionary()
        self._cuts = Cuts()
        self._copies: dict[tuple[int, str], list[Tensor]] = {}
        self._subgroups: dict[int, Group] = {}
        size, words = group.size, model.config.vocab_size
        if words < size:
            raise RecipeError(
                f"parallel.tensor: {size} is more than the {words} tokens of the vocabulary. Use at most {words}"
            )
        bounds = [words * index // size for index in range(size + 1)]
        self._words = slice(bounds[group.index], bounds[group.index + 1])
        self._regions = Regions(group, [end - start for start, end in itertools.pairwise(bounds)], sequence=sequence)

    def layer(self, name: str) -> None:
        """Cuts one layer; all processes cut the same one."""
        if self.group.alone:
            return
        layer = self.model.layers[name]
        assert isinstance(layer, Layer)
        self._copies = self._trained_in_full()
        self._layer(layer, f"layers.{name}", self._regions)
        self._tell(layer, f"layers.{name}.")

    def rest(self) -> Cuts:
        """Cuts what lies outside of layers; what became of all."""
        model, regions = self.model, self._regions
        if self.group.alone:
            return self._cuts
        self._copies = self._trained_in_full()
        self._embedding(model.embed_tokens, self._words, regions)
        self._uncut(model.norm)
        if model.lm_head is not None:
            share = self._share("outputs", self._words, slice(0, model.config.hidden_size))
            self._linear(model.lm_head, share, self.alone)
        model.enter_head = regions.enter
        model.vocab_shard = VocabShard(self._words.start, self.group, regions.gather_vocab)
        for name, module in model.named_children():
            if module is not model.layers:
                self._tell(module, f"{name}.")
        names = dict(model.named_parameters())  # of what layers share, that of the first
        return Cuts(
            {name: box for name, box in self._cuts.boxes.items() if name in names},
            {name: group for name, group in self._cuts.partial.items() if name in names},
        )

    def _trained_in_full(self) -> dict[tuple[int, str], list[Tensor]]:
        """A parameter that an adapter trains in full steps in for the original: both are cut."""
        found: dict[tuple[int, str], list[Tensor]] = {}
        for added in self.adapters.added.values() if self.adapters is not None else ():
            for copy in added.copies:
                found.setdefault((id(copy.owner), copy.attribute), []).extend((copy.original, copy.trained))
        return found

    def _tell(self, module: nn.Module, prefix: str) -> None:
        for name, parameter in module.named_parameters():
            assert parameter in self._found, f"{prefix}{name}: nothing says how it is cut"
            box, summed = self._found[parameter]
            self._cuts.boxes[prefix + name] = box
            if not summed.alone:
                self._cuts.partial[prefix + name] = summed

    # ── modules ──

    def _embedding(self, embedding: Embedding, words: slice, regions: Regions) -> None:
        share = self._share("outputs", words, slice(0, embedding.weight.shape[1]))
        self._parameters(embedding, TABLE_AXES, share, self.alone)
        self._adapters(embedding.adapter, share, self.alone)
        embedding.vocab_start = words.start
        embedding.leave = regions.leave_embedding

    def _layer(self, layer: Layer, name: str, regions: Regions) -> None:
        for sublayer_name, sublayer in layer.sublayers.items():
            self._sublayer(sublayer, f"{name}.{sublayer_name}")
        for child_name, child in layer.named_children():
            if child_name not in layer.sublayers:
                self._uncut(child)
        layer.enter, layer.leave = regions.enter, regions.leave

    def _sublayer(self, sublayer: Any, name: str) -> None:
        """Attention or feed-forward network, by what it declares: see `models.sublayer.Sublayer`."""
        unit = sublayer.tensor_unit
        for part, role in sublayer.tensor_roles.items():
            linear = sublayer.get_submodule(part)
            assert isinstance(linear, Linear)
            outputs, inputs = linear.shape
            if role == "row":
                mine = self._part(inputs // unit, role, f"{name}.{part}")
                self._linear(linear, self._share("inputs", slice(0, outputs), _times(mine.here, unit)), mine.holders)
                continue
            mine = self._part(outputs // unit, role, f"{name}.{part}")
            share = self._share("outputs", _times(mine.here, unit), slice(0, inputs))
            self._linear(linear, share, mine.holders)
            for slot in (slot for slot, source in sublayer.tensor_slots.items() if source == part):
                self._adapters(getattr(sublayer, slot), share, mine.holders)
        for child_name, child in sublayer.named_children():
            if child_name not in sublayer.tensor_roles and child_name not in sublayer.tensor_slots:
                self._whole(child, self.group)

    def _linear(self, linear: Linear, share: LinearShard, holders: Group) -> None:
        self._parameters(linear, LINEAR_AXES, share, holders)
        if linear.quantized is not None:
            linear.quantized = linear.quantized.shard(share.outputs, share.inputs)
        linear.shape = _length(share.outputs), _length(share.inputs)
        linear.adds_bias = share.axis == "outputs" or share.first
        self._adapters(linear.adapter, share, holders)

    def _adapters(self, slot: Any, share: LinearShard, holders: Group) -> None:
        """Everything in a slot within what is cut; None has nothing."""
        if slot is None:
            return
        assert isinstance(slot, Slot)
        for adapter in slot.values():
            narrowed = cast(Narrowed, adapter)
            self._parameters(adapter, narrowed.tensor_axes, share, holders)
            narrowed.narrow(share)

    def _uncut(self, module: nn.Module) -> None:
        """What works on whole features of all tokens, or of those that sequence parallelism leaves here."""
        self._whole(module, self.group if self.sequence else self.alone)

    # ── parameters ──

    def _parameters(self, module: nn.Module, axes: TensorAxes, share: LinearShard, holders: Group) -> None:
        for name, parameter in self._named(module, recurse=not isinstance(module, Linear | Embedding)):
            along = axes.get(name, ())
            if share.axis in along:
                self._box(parameter, [_range(share, axis) for axis in along], holders)
            else:
                self._keep(parameter, self.group)

    def _whole(self, module: nn.Module, summed: Group) -> None:
        for _, parameter in self._named(module, recurse=True):
            self._keep(parameter, summed)

    def _named(self, module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in module.named_parameters(recurse=recurse):
            yield name, parameter
            for other in self._copies.get((id(module), name), ()):
                yield name, other

    @torch.no_grad()
    def _box(self, parameter: Tensor, ranges: list[slice | None], holders: Group) -> None:
        """Leaves of a parameter what is in the ranges, in place: what is tied stays so."""
        if parameter in self._found:
            return
        whole = tuple(parameter.shape)
        slices = [slice(0, side) if one is None else one for one, side in zip(ranges, whole, strict=True)]
        starts, sizes = tuple(part.start for part in slices), tuple(map(_length, slices))
        box = ShardBox(whole, starts, sizes, replicas=holders.size, is_writer=holders.index == 0)
        parameter.data = box.view_of(parameter.data).clone(memory_format=torch.contiguous_format)
        self._found[parameter] = box, holders

    def _keep(self, parameter: Tensor, summed: Group) -> None:
        box = ShardBox.full(parameter.shape, replicas=self.group.size, is_writer=self.group.index == 0)
        self._found.setdefault(parameter, (box, summed))

    # ── parts ──

    def _share(self, axis: Any, outputs: slice, inputs: slice) -> LinearShard:
        return LinearShard(axis, outputs, inputs, self.group, self.group.index == 0)

    def _part(self, count: int, role: Role, name: str) -> _Part:
        """Which of `count` things in a row this process has."""
        size, index = self.group.size, self.group.index
        if count % size == 0:
            each = count // size
            return _Part(slice(each * index, each * (index + 1)), self.alone)
        if role == "grouped" and size % count == 0:
            mine = index * count // size
            return _Part(slice(mine, mine + 1), self._subgroup(size // count))
        multiple = ", nor is it a multiple" if role == "grouped" else ""
        raise RecipeError(
            f"parallel.tensor: {size} does not divide the {count} parts of {name}{multiple}. Use a divisor of {count}"
        )

    def _subgroup(self, size: int) -> Group:
        if size not in self._subgroups:
            self._subgroups[size] = within(self.group, size)
        return self._subgroups[size]


def _range(share: LinearShard, axis: str | None) -> slice | None:
    if axis is None:
        return None
    return share.outputs if axis == "outputs" else share.inputs


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _times(part: slice, unit: int) -> slice:
    return slice(part.start * unit, part.stop * unit)
