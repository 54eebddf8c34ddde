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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from danlu.adapters.adapter import TensorAxes
from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.slot import Slot
from danlu.errors import RecipeError
from danlu.models.decoder import MLP, Attention, Decoder, Embedding, Layer, Linear, Role
from danlu.parallel.comm import Group, within
from danlu.parallel.regions import Regions
from danlu.types import Piece, Share, Words

LINEAR_AXES: TensorAxes = {"weight": ("outputs", "inputs"), "bias": ("outputs",)}
TABLE_AXES: TensorAxes = {"weight": ("outputs", "inputs")}


class Narrowed(Protocol):
    """An adapter, as far as it is cut here."""

    @property
    def tensor_axes(self) -> TensorAxes: ...

    def narrow(self, share: Share) -> None: ...


@dataclass(frozen=True)
class Cuts:
    """What tensor parallelism made of a model, by parameter name."""

    pieces: dict[str, Piece] = field(default_factory=dict)
    """Of every parameter; `copies` and `writes` are among the processes of the group alone."""
    partial: dict[str, Group] = field(default_factory=dict)
    """Parameters whose gradient is a part of a sum over a group, to be summed after the backward pass."""


def cut(model: Decoder, adapters: AdapterSet | None, group: Group, *, sequence: bool) -> Cuts:
    """Cuts a decoder among the processes of a group, in place; all processes of the world call it.

    Parameters may be shapes without values (on meta). Adapters and their base have their values, and packed weights are
    still whole; nothing can be added to `adapters` or merged afterwards.
    sequence: outside of attention, MLP and head each process has its share of the tokens, whose number has to be a
    multiple of the group's size wherever there are gradients.

    Raises RecipeError for a model that cannot be cut so.
    """
    if group.alone:
        return Cuts()
    cutter = _Cutter(model, adapters, group, sequence)
    cutter.run()
    return cutter.result()


@dataclass(frozen=True)
class _Part:
    """One process's part of a number of things in a row."""

    here: slice
    holders: Group  # the processes that have the same part


class _Cutter:
    def __init__(self, model: Decoder, adapters: AdapterSet | None, group: Group, sequence: bool) -> None:
        self.model, self.group, self.sequence = model, group, sequence
        self.alone = Group(group.name, (group.ranks[group.index],))
        self._found: dict[
            int, tuple[Piece, Group]
        ] = {}  # by id of a parameter: its box, and where gradients are summed
        self._subgroups: dict[int, Group] = {}
        # A parameter that an adapter trains in full steps in for the original: both are cut.
        self._copies: dict[tuple[int, str], list[Tensor]] = {}
        for added in adapters.added.values() if adapters is not None else ():
            for copy in added.copies:
                self._copies.setdefault((id(copy.owner), copy.attribute), []).extend((copy.original, copy.trained))

    def run(self) -> None:
        model, size = self.model, self.group.size
        config = model.config
        if config.vocab_size < size:
            raise RecipeError(
                f"parallel.tensor: {size} is more than the {config.vocab_size} words of the vocabulary. "
                f"Use at most {config.vocab_size}"
            )
        bounds = [config.vocab_size * index // size for index in range(size + 1)]
        regions = Regions(
            self.group, [end - start for start, end in itertools.pairwise(bounds)], sequence=self.sequence
        )
        words = slice(bounds[self.group.index], bounds[self.group.index + 1])
        self._embedding(model.embed_tokens, words, regions)
        for index, layer in model.layers.items():
            assert isinstance(layer, Layer)
            self._layer(layer, f"layers.{index}", regions)
        self._uncut(model.norm)
        if model.lm_head is not None:
            share = self._share("outputs", words, slice(0, config.hidden_size))
            self._linear(model.lm_head, share, self.alone)
        model.enter_head = regions.enter
        model.words = Words(words.start, self.group, regions.gather_words)

    def result(self) -> Cuts:
        cuts = Cuts()
        for name, parameter in self.model.named_parameters():
            assert id(parameter) in self._found, f"{name}: nothing says how it is cut"
            piece, summed = self._found[id(parameter)]
            cuts.pieces[name] = piece
            if not summed.alone:
                cuts.partial[name] = summed
        return cuts

    # ── modules ──

    def _embedding(self, embedding: Embedding, words: slice, regions: Regions) -> None:
        share = self._share("outputs", words, slice(0, embedding.weight.shape[1]))
        self._parameters(embedding, TABLE_AXES, share, self.alone)
        self._adapters(embedding.adapter, share, self.alone)
        embedding.first_word = words.start
        embedding.leave = regions.leave_embedding

    def _layer(self, layer: Layer, name: str, regions: Regions) -> None:
        attention, mlp = layer.attention, layer.mlp
        self._half(attention, attention.head_dim, f"{name}.attention")
        self._half(mlp, 1, f"{name}.mlp")
        for norm in (attention.q_norm, attention.k_norm):
            if norm is not None:
                self._whole(norm, self.group)
        for norm in (layer.attention_norm, layer.post_attention_norm, layer.mlp_norm, layer.post_mlp_norm):
            if norm is not None:
                self._uncut(norm)
        for behind in (layer.after_attention, layer.after_mlp):
            if behind is not None:
                self._uncut(behind)
        layer.enter, layer.leave = regions.enter, regions.leave

    def _half(self, half: Attention | MLP, unit: int, name: str) -> None:
        """Attention or MLP, by `unit` features that stay together."""
        for part, role in half.tensor_roles.items():
            linear = half.get_submodule(part)
            assert isinstance(linear, Linear)
            outputs, inputs = linear.shape
            if role == "row":
                mine = self._part(inputs // unit, role, f"{name}.{part}")
                self._linear(linear, self._share("inputs", slice(0, outputs), _times(mine.here, unit)), mine.holders)
                continue
            mine = self._part(outputs // unit, role, f"{name}.{part}")
            share = self._share("outputs", _times(mine.here, unit), slice(0, inputs))
            self._linear(linear, share, mine.holders)
            if part == "k_proj" and isinstance(half, Attention):
                self._adapters(half.prefix, share, mine.holders)

    def _linear(self, linear: Linear, share: Share, holders: Group) -> None:
        self._parameters(linear, LINEAR_AXES, share, holders)
        if linear.packed is not None:
            linear.packed = linear.packed.box(share.outputs, share.inputs)
        linear.shape = _length(share.outputs), _length(share.inputs)
        linear.adds_bias = share.axis == "outputs" or share.first
        self._adapters(linear.adapter, share, holders)

    def _adapters(self, slot: Any, share: Share, holders: Group) -> None:
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

    def _parameters(self, module: nn.Module, axes: TensorAxes, share: Share, holders: Group) -> None:
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
        if id(parameter) in self._found:
            return
        whole = tuple(parameter.shape)
        box = [slice(0, side) if one is None else one for one, side in zip(ranges, whole, strict=True)]
        starts, sizes = tuple(one.start for one in box), tuple(_length(one) for one in box)
        piece = Piece(whole, starts, sizes, copies=holders.size, writes=holders.index == 0)
        parameter.data = piece.of(parameter.data).clone(memory_format=torch.contiguous_format)
        self._found[id(parameter)] = piece, holders

    def _keep(self, parameter: Tensor, summed: Group) -> None:
        piece = Piece.all_of(parameter.shape, copies=self.group.size, writes=self.group.index == 0)
        self._found.setdefault(id(parameter), (piece, summed))

    # ── parts ──

    def _share(self, axis: Any, outputs: slice, inputs: slice) -> Share:
        return Share(axis, outputs, inputs, self.group, self.group.index == 0)

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


def _range(share: Share, axis: str | None) -> slice | None:
    if axis is None:
        return None
    return share.outputs if axis == "outputs" else share.inputs


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _times(part: slice, unit: int) -> slice:
    return slice(part.start * unit, part.stop * unit)
