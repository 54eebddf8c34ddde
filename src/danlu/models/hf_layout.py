"""The tensors of a Hugging Face folder, and the parameters of which each is made. Pure data; no torch.

Parameters lie in a tensor whole, as boxes of it, transposed, or interleaved. A tensor on disk is a list of parts, so
that a reader or writer of only a box of a parameter (some experts, some rows) knows its elements in each tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from danlu.core.layer_types import LANGUAGE_PART
from danlu.core.shard_box import ShardBox
from danlu.models.config import ModelConfig, is_stacked, parameter_shapes
from danlu.models.families import FAMILIES
from danlu.models.families.family import Stored
from danlu.models.multimodal import MULTIMODAL, language_name
from danlu.models.tensor_cut import OF_EACH_LAYER

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """A box of one parameter, and its place in a tensor on disk.

    With a stride, `stride` parts are interleaved along `axis`: every other column of gate_up is gate's.
    """

    parameter: str
    box: ShardBox  # of the parameter; leading dimensions of size 1 may be missing on disk
    offsets: tuple[int, ...]  # of its first element on disk; with a stride, of the first element of all that take turns
    transposed: bool = False  # whether the last two dimensions are the other way round on disk
    stride: int = 1  # along `axis`, from one of its indices to the next
    first: int = 0  # which of those that take turns it is
    axis: int = 0  # of the tensor on disk

    @property
    def is_plain(self) -> bool:
        """Whether the part's elements have the same order on disk as in the parameter."""
        return not self.transposed and self.stride == 1

    def on_disk(self, box: ShardBox, shape: tuple[int, ...]) -> ShardBox:
        """The least box of a tensor of that shape which has all of a box of the parameter, that lies in this part's.

        With a stride it begins and ends with a whole turn: it is the same for all parts that take turns.
        """
        inner = box.relative_to(self.box)
        offsets, sizes = list(inner.offsets), list(inner.sizes)
        for values in (offsets, sizes):
            if self.transposed:
                values[-2], values[-1] = values[-1], values[-2]
            del values[: len(values) - len(shape)]
            values[self.axis] *= self.stride
        return ShardBox(shape, tuple(map(sum, zip(self.offsets, offsets, strict=True))), tuple(sizes))

    def view_of(self, disk: Tensor) -> Tensor:
        """This part's elements of a box that `on_disk` tells: a view with the parameter's dimensions in their order."""
        view = disk
        if self.stride > 1:
            view = view[(slice(None),) * self.axis + (slice(self.first, None, self.stride),)]
        if self.transposed:
            view = view.transpose(-2, -1)
        return view[(None,) * (len(self.box.sizes) - view.ndim)]


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face folder, which its parts cover."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    """Those that take turns follow each other."""

    @staticmethod
    def whole(name: str, shape: Sequence[int]) -> HFTensor:
        """The tensor that is one parameter of the same name."""
        return HFTensor(name, tuple(shape), (Part(name, ShardBox.full(shape), (0,) * len(shape)),))

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that it has parts of, in the order in which they first occur."""
        return tuple(dict.fromkeys(part.parameter for part in self.parts))

    @cached_property
    def groups(self) -> tuple[tuple[Part, ...], ...]:
        """The parts that take turns together; each of the others alone."""
        groups, at = [], 0
        while at < len(self.parts):
            groups.append(self.parts[at : at + self.parts[at].stride])
            at += self.parts[at].stride
        return tuple(groups)

    @property
    def transposed(self) -> HFTensor:
        """The same tensor with its last two dimensions the other way round on disk."""
        last = len(self.shape) - 1
        parts = [
            replace(
                part,
                offsets=_swapped(part.offsets),
                transposed=not part.transposed,
                axis=2 * last - 1 - part.axis if part.stride > 1 and part.axis >= last - 1 else part.axis,
            )
            for part in self.parts
        ]
        return HFTensor(self.name, _swapped(self.shape), tuple(parts))

    def assembled(self, value: Callable[[str], Tensor]) -> Tensor:
        """The tensor, of whole parameters by name; a parameter itself where that is all there is to it."""
        first = self.parts[0]
        if len(self.parts) == 1 and first.is_plain and first.box.is_full:
            return value(first.parameter)
        whole: Tensor | None = None
        for part in self.parts:
            own = part.box.view_of(value(part.parameter))
            whole = own.new_empty(self.shape) if whole is None else whole
            part.view_of(part.on_disk(part.box, self.shape).view_of(whole)).copy_(own)
        assert whole is not None, f"{self.name}: has no parts"
        return whole


def _swapped(sides: tuple[int, ...]) -> tuple[int, ...]:
    return (*sides[:-2], sides[-1], sides[-2])


IGNORED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attention\.(masked_)?bias)$|^model\.mtp_layers\.")
"""Tensors that are not read: tables that old checkpoints carry, which danlu computes from the config, and the layers of
MiMo that predict further tokens, for which no class of transformers has a place."""
HEAD = "lm_head.weight"
"""The parameter that is the head over the vocabulary, where it has one of its own."""
HEAD_BIAS = "lm_head.bias"
"""The bias of a head that has one."""
EMBEDDING = "embed_tokens.weight"
"""The parameter that a tied head is."""
SCORE, SCORE_BIAS = "score.weight", "score.bias"
"""The head [labels, D] of a model that classifies; transformers has the bias where each token is classified."""


def hf_tensors(config: ModelConfig, *, stacked: bool | None = None) -> list[HFTensor]:
    """The tensors of this model's folder, in the order of the forward pass; those of experts one expert after the
    other. A tied head is not stored.

    stacked: whether the experts of a layer share tensors, in families that have both forms; None: as in their published
    folders, the form that danlu writes.
    """
    stacked = _is_published_stacked(config) if stacked is None else stacked
    shapes = parameter_shapes(config)
    sharing: dict[str, list[str]] = {}
    for name in shapes:
        sharing.setdefault(hf_name(name, config, stacked=stacked), []).append(name)
    placed: list[tuple[tuple[int, int], HFTensor]] = []
    experts_at: dict[str, int] = {}  # by what stands before the expert's number
    for number, (name, parameters) in enumerate(sharing.items()):
        lies, turns = Stored(name), 1
        first, *path = parameters[0].split(".")
        if first == "layers" and not isinstance(
            entry := entry_of(path[1:], modules_of(config, path[0], stacked))[0], str
        ):
            lies, turns = entry, entry.turns(config.layers[int(path[0])])
        own = {parameter: shapes[parameter] for parameter in parameters}
        before, is_by_expert, _ = name.partition("*")
        if not is_by_expert:
            placed.append(((number, 0), _tensor(name, own, lies, turns)))
            continue
        at = experts_at.setdefault(before, number)
        for expert in range(own[parameters[0]][0]):
            tensor = _tensor(name.replace("*", str(expert)), own, lies, turns, expert)
            placed.append(((at, expert), tensor))
    return [tensor for _, tensor in sorted(placed, key=lambda pair: pair[0])]


def _tensor(
    name: str, shapes: Mapping[str, tuple[int, ...]], stored: Stored, turns: int, expert: int | None = None
) -> HFTensor:
    """The tensor that parameters of these shapes share; expert: the only one of stacked parameters that is in it."""
    parameter, whole = next(iter(shapes.items()))
    stacked = is_stacked(parameter)
    outputs = int(stacked)  # the axis of parameters along which they share the tensor
    transposed = stored.transposed and len(whole) == outputs + 2
    axis = outputs + transposed - (expert is not None)  # the same on disk
    on_disk = [*whole[:-2], whole[-1], whole[-2]] if transposed else list(whole)
    if expert is not None:
        del on_disk[0]
    on_disk[axis] = sum(shape[outputs] for shape in shapes.values())
    is_one_part = len(shapes) == 1 and not transposed
    experts = [expert] if not stacked or expert is not None or is_one_part else range(whole[0])
    parts: list[Part] = []
    for each in experts:
        row = 0
        for turn, (index, (parameter, shape)) in product(range(turns), enumerate(shapes.items())):
            assert shape[outputs] % turns == 0, f"{parameter}: {shape[outputs]} outputs in {turns} turns"
            rows = shape[outputs] // turns
            first, sizes, at = [0] * len(shape), list(shape), [0] * len(on_disk)
            first[outputs], sizes[outputs] = turn * rows, rows
            if each is not None:
                first[0], sizes[0] = each, 1
            if each is not None and expert is None:
                at[0] = each
            at[axis] = 0 if stored.alternates else row
            row += rows
            box = ShardBox(shape, tuple(first), tuple(sizes))
            in_turn = (len(shapes), index, axis) if stored.alternates else (1, 0, 0)
            parts.append(Part(parameter, box, tuple(at), transposed, *in_turn))
    return HFTensor(name, tuple(on_disk), tuple(parts))


_KEYS_OF_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.self_attn\.(?:[kv]_proj|[kv]_norm)\.")
_BEYOND = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.|mtp\.")


def own_name(stored: str, config: ModelConfig) -> str | None:
    """Returns the name among `hf_tensors` of a tensor in a model's folder; None for one that danlu does not train.

    Those are a multimodal model's tensors outside of its language part, layers that predict further tokens, and keys
    and values of layers that read others' (Gemma 4 E2B is published with them, and transformers does not read them).
    """
    name = _with_prefix(stored, config) if config.multimodal is None else language_name(stored)
    if name is not None and config.shares_keys and (of_layer := _KEYS_OF_LAYER.match(name)) is not None:
        layers = config.layers[int(of_layer.group(1)) :]
        return None if layers and layers[0].mixer.sharing == "reads" else name
    if name is None or (match := _BEYOND.match(name)) is None:
        return name
    family, number = FAMILIES[config.family], match.group(1)
    if number is None:
        return None if family.has_mtp or family.has_mtp_module else name
    return None if family.has_mtp and int(number) >= len(config.layers) else name


def _with_prefix(stored: str, config: ModelConfig) -> str:
    """`layers.0.mlp.up_proj.weight` -> `model.layers.0.mlp.up_proj.weight`: the folder of a model without its head
    (LlamaModel) has names without the prefix."""
    family = FAMILIES[config.family]
    modules = {"layers", *(family.outer_modules.get(name, name) for name in ("embed_tokens", "norm"))}
    modules |= set(OF_EACH_LAYER) if config.per_layer_width else set()
    return f"{family.prefix}.{stored}" if stored.partition(".")[0] in modules else stored


def may_have_untouched(config: ModelConfig) -> bool:
    """Whether a folder of the model may hold tensors that have no `own_name`."""
    family = FAMILIES[config.family]
    return config.multimodal is not None or config.shares_keys or family.has_mtp or family.has_mtp_module


_STACKED = re.compile(r"\.experts\.(?:gate_up|down)_proj(?:_|$)")


def holds_stacked_experts(names: Iterable[str], config: ModelConfig) -> bool:
    """Whether the experts of a layer share tensors in a folder of a family that has both forms.

    names: the names of the folder's tensors.
    """
    return bool(FAMILIES[config.family].stacked_modules) and any(_STACKED.search(name) for name in names)


def _is_published_stacked(config: ModelConfig) -> bool:
    return config.multimodal is not None and MULTIMODAL[config.multimodal].stacked_experts


def prefix_of(config: ModelConfig) -> str:
    """The name of the module that holds the decoder in transformers' class."""
    return FAMILIES[config.family].prefix if config.multimodal is None else LANGUAGE_PART


def hf_name(parameter: str, config: ModelConfig, *, stacked: bool | None = None) -> str:
    """`layers.3.attention.q_proj.weight` -> `model.layers.3.self_attn.q_proj.weight`, as a model's folder has it.

    Of stacked experts with a tensor each, the number stays open: `model.layers.3.mlp.experts.*.gate_proj.weight`.
    stacked: as in `hf_tensors`.
    """
    stacked = _is_published_stacked(config) if stacked is None else stacked
    head, *rest = parameter.split(".")
    prefix = prefix_of(config)
    if head != "layers":
        stored = ".".join((FAMILIES[config.family].outer_modules.get(head, head), *rest))
        return stored if head == "lm_head" else f"{prefix}.{stored}"
    index, *path = rest
    entry, cut = entry_of(path, modules_of(config, index, stacked))
    return ".".join((prefix, "layers", index, entry if isinstance(entry, str) else entry.name, *path[cut:]))


def modules_of(config: ModelConfig, index: str, stacked: bool) -> Mapping[str, str | Stored]:
    """The family's entry for each part of a layer. index: the layer's number; stacked: as in `hf_tensors`."""
    family = FAMILIES[config.family]
    modules = family.modules_of(config.layers[int(index)], stacked=stacked)
    if not (stacked and config.multimodal is not None and MULTIMODAL[config.multimodal].transposed_experts):
        return modules
    tensors = {name: entry for name, entry in family.stacked_modules.items() if isinstance(entry, Stored)}
    return {**modules, **{name: replace(entry, transposed=True) for name, entry in tensors.items()}}


def entry_of(path: Sequence[str], modules: Mapping[str, str | Stored]) -> tuple[str | Stored, int]:
    """Returns the entry of a family for the longest beginning of a parameter's path within its layer, and that
    length.
    """
    cut = next(cut for cut in range(len(path), 0, -1) if ".".join(path[:cut]) in modules)
    return modules[".".join(path[:cut])], cut
