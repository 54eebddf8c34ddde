"""Tensor parallelism: a decoder's matrices cut among processes, each of which keeps plain, smaller tensors.

Specs declare how sublayers may be cut (`models.tensor_cut`), adapters their `tensor_axes`. Here every
parameter and quantized weight is replaced by its shard, in place and under its name, and the communication of `regions`
is put into the decoder's slots. The forward pass stays single-device code over fewer heads, features and rows of the
vocabulary.

The gradient of a parameter that is cut is complete on its rank. The gradient of a parameter that every rank has whole
is:

- between `enter` and `leave`, a term of a sum over the ranks: biases and norms of single heads there, A or B of LoRA;
- outside, the same on all ranks; under sequence parallelism a term of a sum, for each rank has some of the tokens.

A key/value head that several ranks share is cut, and its gradient is a term of a sum over those ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from danlu.core.errors import RecipeError
from danlu.core.layer_types import Axis, LinearShard, NormShard, VocabShard
from danlu.core.shard_box import ShardBox
from danlu.models.decoder import Decoder, Layer
from danlu.models.modules import Embedding, GroupedLinear, Linear, RMSNorm
from danlu.models.tensor_cut import LinearCut, Role, TensorCut, share, vocabulary_bounds, vocabulary_rows
from danlu.parallel.comm import Group, subgroup_of
from danlu.parallel.regions import Regions

if TYPE_CHECKING:
    from danlu.adapters.adapter import TensorAxes
    from danlu.adapters.adapter_set import AdapterSet

LINEAR_AXES: TensorAxes = {"weight": ("outputs", "inputs"), "bias": ("outputs",)}
GROUPED_AXES: TensorAxes = {"weight": (None, "outputs", "inputs"), "bias": (None, "outputs")}


@dataclass(frozen=True)
class Cuts:
    """How tensor parallelism has cut a model, by parameter name."""

    boxes: dict[str, ShardBox] = field(default_factory=dict)
    """This rank's box of each parameter; `replicas` and `is_writer` are among the tensor ranks alone."""
    partial: dict[str, Group] = field(default_factory=dict)
    """Parameters with a gradient that is a term of a sum over a group; the sum is made after the backward pass."""


def cut(model: Decoder, adapters: AdapterSet | None, group: Group, *, sequence: bool) -> Cuts:
    """Cuts a decoder among the processes of a group, in place. All processes of the world call it.

    Parameters may be on the meta device. Adapters and their base have their values, and quantized weights are still
    whole; nothing can be added to `adapters` or merged afterwards. sequence and errors: see `Cutter`.
    """
    cutter = Cutter(model, adapters, group, sequence=sequence)
    for name in model.layers:
        cutter.layer(name)
    return cutter.rest()


class Cutter:
    """Cuts a decoder a layer at a time, so that a layer can be cut before the next one has its weights.

    sequence: outside of attention, MLP and head each rank has its part of the tokens, and their number has to be a
    multiple of the group's size wherever there are gradients. boxes: the boxes of parameters of which a rank has only a
    part already, such as distributed experts (`parallel.expert`); read when they are cut.

    Raises RecipeError for a model that cannot be cut among the group's ranks.
    """

    def __init__(
        self,
        model: Decoder,
        adapters: AdapterSet | None,
        group: Group,
        *,
        sequence: bool,
        boxes: Mapping[Tensor, ShardBox] | None = None,
    ) -> None:
        self.model, self.adapters, self.group, self.sequence = model, adapters, group, sequence
        self._boxes: Mapping[Tensor, ShardBox] = {} if boxes is None else boxes
        self.alone = Group(group.name, (group.ranks[group.index],))
        # Parameter -> its box, and the group over which its gradient is to be summed. Layers may share a parameter,
        # which is cut once; one that loading replaces drops out.
        self._cut: MutableMapping[Tensor, tuple[ShardBox, Group]] = WeakIdKeyDictionary()
        self._cuts = Cuts()
        self._copies: dict[tuple[int, str], list[Tensor]] = {}  # see `trained_copies`
        self._subgroups: dict[int, Group] = {}  # by size
        self.linears: dict[Linear | GroupedLinear, LinearCut] = {}
        """How the linear layers that have been cut so far are divided."""
        size, vocab_size = group.size, model.config.vocab_size
        if vocab_size < size:
            raise RecipeError(
                f"parallel.tensor: {size} is more than the {vocab_size} tokens of the vocabulary. Use at most "
                f"{vocab_size}"
            )
        bounds = vocabulary_bounds(vocab_size, size)
        self._vocabulary = vocabulary_rows(model.config, size, group.index)
        self._regions = Regions(group, [end - start for start, end in itertools.pairwise(bounds)], sequence=sequence)

    def layer(self, name: str) -> None:
        """Cuts one layer; all processes cut the same one at a time, for this makes groups."""
        if self.group.alone:
            return
        layer = self.model.layers[name]
        assert isinstance(layer, Layer)
        self._copies = trained_copies(self.adapters)
        for sublayer_name, sublayer in layer.sublayers.items():
            self._sublayer(sublayer, f"layers.{name}.{sublayer_name}")
        for child_name, child in layer.named_children():
            if child_name not in layer.sublayers:
                self._uncut(child)
        layer.enter, layer.leave = self._regions.enter, self._regions.leave
        self._record(layer, f"layers.{name}.")

    def rest(self) -> Cuts:
        """Cuts the parameters outside of layers, and returns how everything has been cut."""
        model, regions = self.model, self._regions
        if self.group.alone:
            return self._cuts
        self._copies = trained_copies(self.adapters)
        if hasattr(model, "embed_tokens"):
            self._embedding(model.embed_tokens, self._vocabulary, regions)
        if model.config.per_layer_width:
            self._embedding(model.embed_tokens_per_layer, self._vocabulary, regions)
            self._uncut(model.per_layer_model_projection)
            self._uncut(model.per_layer_projection_norm)
        if model.chunks.has_last:
            self._uncut(model.norm)
        if model.lm_head is not None:
            shard = self._shard("outputs", self._vocabulary, slice(0, model.config.hidden_size))
            self._linear(model.lm_head, shard, self.alone)
        model.enter_chunk = regions.enter_chunk
        model.enter_head = regions.enter
        model.vocab_shard = VocabShard(self._vocabulary.start, self.group, regions.gather_vocab)
        for name, module in model.named_children():
            if module is not model.layers:
                self._record(module, f"{name}.")
        names = dict(model.named_parameters())  # a parameter that layers share goes by its first name
        return Cuts(
            {name: box for name, box in self._cuts.boxes.items() if name in names},
            {name: group for name, group in self._cuts.partial.items() if name in names},
        )

    def _record(self, module: nn.Module, prefix: str) -> None:
        """Notes by name how the parameters of a module have been cut."""
        for name, parameter in module.named_parameters():
            assert parameter in self._cut, f"{prefix}{name}: nothing says how it is cut"
            box, gradient_group = self._cut[parameter]
            self._cuts.boxes[prefix + name] = box
            if not gradient_group.alone:
                self._cuts.partial[prefix + name] = gradient_group

    # ── modules ──

    def _embedding(self, embedding: Embedding, vocabulary: slice, regions: Regions) -> None:
        shard = self._shard("outputs", vocabulary, slice(0, embedding.weight.shape[1]))
        self._parameters(embedding, LINEAR_AXES, shard, self.alone)
        self._adapters(embedding.adapter, shard, self.alone)
        embedding.vocab_start = vocabulary.start
        embedding.leave = regions.leave_embedding

    def _sublayer(self, sublayer: Any, name: str) -> None:
        """Cuts attention or a feed-forward network as it declares: see `models.modules.Sublayer`."""
        from danlu.models.gated_delta_net import CausalConv

        declared: TensorCut = sublayer.tensor_cut
        for part, role in declared.roles.items():
            linear = sublayer.get_submodule(part)
            assert isinstance(linear, Linear | GroupedLinear)
            outputs, inputs = linear.shape
            if role == "whole":
                self._whole(linear, self.group)
                self.linears[linear] = LinearCut(f"{name}.{part}", None, 0, 0, self.group.size)
                continue
            unit = declared.unit(part)
            if role == "row":
                features, replicas = self._features(inputs, unit, role, f"{name}.{part}")
                self._linear(linear, self._shard("inputs", slice(0, outputs), features), replicas)
                self.linears[linear] = LinearCut(f"{name}.{part}", "inputs", inputs, _length(features), 1)
                continue
            features, replicas = self._features(outputs, unit, role, f"{name}.{part}")
            shard = self._shard("outputs", features, slice(0, inputs))
            self._linear(linear, shard, replicas)
            self.linears[linear] = LinearCut(f"{name}.{part}", "outputs", outputs, _length(features), replicas.size)
            for slot in (slot for slot, source in declared.slots.items() if source == part):
                filling = getattr(sublayer, slot)
                if isinstance(filling, CausalConv):
                    self._parameters(filling, filling.tensor_axes, shard, replicas)
                elif isinstance(filling, nn.Parameter):
                    self._of_heads(sublayer, slot, slice(features.start // unit, features.stop // unit), replicas)
                else:
                    self._adapters(filling, shard, replicas)
            for norm in (norm for norm, source in declared.norms.items() if source == part):
                self._norm(sublayer.get_submodule(norm), shard, replicas)
        for child_name, child in sublayer.named_children():
            if child_name not in {*declared.roles, *declared.slots, *declared.norms}:
                self._whole(child, self.group)
        for own_name, own in self._named(sublayer, recurse=False):
            if own_name not in declared.slots:
                self._keep_whole(own, self.group)

    def _of_heads(self, sublayer: nn.Module, name: str, heads: slice, replicas: Group) -> None:
        """A parameter [H] of a sublayer itself, with a number for each head."""
        for own_name, parameter in self._named(sublayer, recurse=False):
            if own_name == name:
                self._cut_parameter(parameter, [heads], replicas)

    def _linear(self, linear: Linear | GroupedLinear, shard: LinearShard, replicas: Group) -> None:
        axes = LINEAR_AXES if isinstance(linear, Linear) else GROUPED_AXES
        self._parameters(linear, axes, shard, replicas)
        if linear.quantized is not None:
            linear.quantized = linear.quantized.shard(shard.outputs, shard.inputs)
        linear.shape = _length(shard.outputs), _length(shard.inputs)
        linear.adds_bias = shard.axis == "outputs" or shard.first
        self._adapters(linear.adapter, shard, replicas)

    def _norm(self, norm: RMSNorm, shard: LinearShard, replicas: Group) -> None:
        """Cuts a norm over all outputs of a layer that is cut to `shard`: each process has its features."""
        width = len(norm.weight)
        self._parameters(norm, {"weight": ("outputs",)}, shard, replicas)
        norm.shard = NormShard(self.group, width, replicas.size)

    def _adapters(self, slot: Any, shard: LinearShard, replicas: Group) -> None:
        """Cuts all adapters in a slot of a layer that is cut to `shard`; None is a slot without any."""
        from danlu.adapters.adapter import ShardableModule
        from danlu.adapters.slot import Slot

        if slot is None:
            return
        assert isinstance(slot, Slot)
        for module in slot.values():
            assert isinstance(module, ShardableModule)
            self._parameters(module, module.tensor_axes, shard, replicas)
            module.narrow(shard)

    def _uncut(self, module: nn.Module) -> None:
        """A module that works on whole features, of all tokens or of this rank's under sequence parallelism."""
        from danlu.adapters.dropout import Dropout

        self._whole(module, self.group if self.sequence else self.alone)
        for part in module.modules() if self.sequence else ():
            if isinstance(dropout := getattr(part, "dropout", None), Dropout):
                dropout.share = self.group.index, self.group.size

    # ── parameters ──

    def _parameters(self, module: nn.Module, axes: TensorAxes, shard: LinearShard, replicas: Group) -> None:
        """Cuts the parameters of a layer or adapter; `axes` says which of their dimensions are outputs or inputs."""
        for name, parameter in self._named(module, recurse=not isinstance(module, Linear | GroupedLinear | Embedding)):
            dimensions = axes.get(name, ())
            if shard.axis in dimensions:
                ranges = [None if axis is None else getattr(shard, axis) for axis in dimensions]
                self._cut_parameter(parameter, ranges, replicas)
            else:
                self._keep_whole(parameter, self.group)

    def _whole(self, module: nn.Module, gradient_group: Group) -> None:
        for _, parameter in self._named(module, recurse=True):
            self._keep_whole(parameter, gradient_group)

    def _named(self, module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, Tensor]]:
        """The parameters of a module by name, each followed by its original and trained copy where it has them."""
        for name, parameter in module.named_parameters(recurse=recurse):
            yield name, parameter
            for copy in self._copies.get((id(module), name), ()):
                yield name, copy

    @torch.no_grad()
    def _cut_parameter(self, parameter: Tensor, ranges: list[slice | None], replicas: Group) -> None:
        """Leaves the ranges of a parameter, in place, so that tied parameters stay tied; None is a whole dimension.

        replicas: the ranks that have the same shard, over which its gradient is to be summed.
        """
        if parameter in self._cut:
            return
        box = here = self._box_of(parameter)
        for dim, part in enumerate(ranges):
            box = box if part is None else box.narrow(dim, part.start, _length(part))
        parameter.data = box.relative_to(here).view_of(parameter.data).clone(memory_format=torch.contiguous_format)
        box = replace(box, replicas=replicas.size, is_writer=replicas.index == 0)
        self._cut[parameter] = box, replicas

    def _keep_whole(self, parameter: Tensor, gradient_group: Group) -> None:
        box = replace(self._box_of(parameter), replicas=self.group.size, is_writer=self.group.index == 0)
        self._cut.setdefault(parameter, (box, gradient_group))

    def _box_of(self, parameter: Tensor) -> ShardBox:
        """Returns this rank's box of a parameter before tensor parallelism."""
        return self._boxes.get(parameter) or ShardBox.full(parameter.shape)

    # ── shards ──

    def _shard(self, axis: Axis, outputs: slice, inputs: slice) -> LinearShard:
        return LinearShard(axis, outputs, inputs, self.group, self.group.index == 0)

    def _features(self, features: int, unit: int, role: Role, name: str) -> tuple[slice, Group]:
        """Returns the slice of a matrix's features that this rank has, in multiples of `unit`, and the ranks with the
        same slice.
        """
        size, count = self.group.size, features // unit
        part = share(features, unit, role, size, self.group.index)
        if part is not None:
            replicas = self.alone if part.replicas == 1 else self._subgroup(part.replicas)
            return slice(part.start, part.start + part.length), replicas
        multiple = ", nor is it a multiple" if role == "grouped" else ""
        raise RecipeError(
            f"parallel.tensor: {size} does not divide the {count} parts of {name}{multiple}. Use a divisor of {count}"
        )

    def _subgroup(self, size: int) -> Group:
        if size not in self._subgroups:
            self._subgroups[size] = subgroup_of(self.group, size)
        return self._subgroups[size]


def trained_copies(adapters: AdapterSet | None) -> dict[tuple[int, str], list[Tensor]]:
    """(id of a module, name of its parameter) -> the original and the copy that an adapter trains in its place."""
    copies: dict[tuple[int, str], list[Tensor]] = {}
    for added in adapters.added.values() if adapters is not None else ():
        for copy in added.copies:
            copies.setdefault((id(copy.owner), copy.attribute), []).extend((copy.original, copy.trained))
    return copies


def _length(part: slice) -> int:
    return int(part.stop - part.start)
